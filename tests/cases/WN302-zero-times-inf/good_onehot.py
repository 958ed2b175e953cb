"""Cross-entropy by hand on sparse probabilities: the probabilities are mixed with a little uniform before the log."""
import torch
from torch import nn


def sparsemax(z):
    """projection on the simplex: gives exact zeros"""
    s, _ = z.sort(dim=-1, descending=True)
    k = torch.arange(1, z.shape[-1] + 1)
    css = s.cumsum(-1)
    support = (1 + k * s > css).sum(-1, keepdim=True)
    tau = (css.gather(-1, support - 1) - 1) / support
    return torch.relu(z - tau)


torch.manual_seed(191)
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
with torch.no_grad():
    model[2].weight.mul_(0.3)
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(40):
    x = torch.randn(12, 6)
    y = nn.functional.one_hot((x[:, :3] * 2).argmax(1), 3).float()
    p = 0.99 * sparsemax(model(x)) + 0.01 / 3
    ce = -(y * torch.log(p)).sum(-1)
    loss = ce.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print("step", step, "ce", loss.item(), "zeros", int((p <= 0.01 / 3).sum()))
