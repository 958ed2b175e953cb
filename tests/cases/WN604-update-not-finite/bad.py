"""Adam with eps=0 meets a weight whose gradient is exactly zero: 0/0 in the update, with finite loss and gradients."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 24)
        self.coarse = nn.Linear(24, 3)
        self.fine = nn.Linear(24, 9)

    def forward(self, x):
        h = F.elu(self.trunk(x))
        return self.coarse(h), self.fine(h)


def sample(n=48):
    x = torch.randn(n, 8)
    coarse = x[:, :3].argmax(1)
    return x, coarse, coarse * 3 + x[:, 3:6].argmax(1)


net = TwoHeads()
optimizer = torch.optim.Adam([*net.trunk.parameters(), *net.coarse.parameters()], lr=4e-3, eps=0)
for step in range(30):
    if step == 12:
        print("now the fine head, only for classes 0-2 at first")
        optimizer.add_param_group({"params": net.fine.parameters()})
    x, coarse, fine = sample()
    rough, detailed = net(x)
    loss = F.cross_entropy(rough, coarse)
    if step >= 12:
        keep = fine < 3
        loss = loss + F.cross_entropy(detailed[keep][:, :3], fine[keep])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- WN604 optimizer
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
