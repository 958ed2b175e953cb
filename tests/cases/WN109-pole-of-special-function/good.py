"""Evidential classification with softplus evidence plus a floor: the concentrations stay away from the pole at 0."""
import torch
import torch.nn as nn


class Evidence(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.hidden = nn.Linear(d, 24)
        self.out = nn.Linear(24, k)
        nn.init.constant_(self.out.bias, 3.0)

    def forward(self, x):
        return nn.functional.softplus(self.out(torch.tanh(self.hidden(x)))) + 1e-2


def dirichlet_kl_to_uniform(alpha):
    k = alpha.shape[-1]
    total = alpha.sum(-1)
    norm = torch.lgamma(total) - torch.lgamma(torch.tensor(float(k)))
    parts = torch.lgamma(alpha).sum(-1)
    spread = ((alpha - 1) * (torch.digamma(alpha + 1e-6) - torch.digamma(total)[..., None])).sum(-1)
    return norm - parts + spread


def expected_mse(alpha, onehot):
    s = alpha.sum(-1, keepdim=True)
    p = alpha / s
    return ((onehot - p).square() + p * (1 - p) / (s + 1)).sum(-1)


torch.manual_seed(67)
net = Evidence(5, 3)
opt = torch.optim.Adam(net.parameters(), lr=0.03)
for step in range(80):
    x = torch.randn(32, 5)
    onehot = nn.functional.one_hot(x[:, :3].argmax(1), 3).float()
    alpha = net(x)
    anneal = min(1.0, step / 200)
    loss = (expected_mse(alpha, onehot) + 0.05 * anneal * dirichlet_kl_to_uniform(alpha)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f} smallest concentration {alpha.min().item():.3f}")
