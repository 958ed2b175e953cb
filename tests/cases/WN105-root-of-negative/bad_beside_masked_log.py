"""Two unsafe lines: the logarithm of an empty bin is masked away as it should be, the root of a negative gap is not."""
import torch
from torch import nn


def penalty(amount, gap):
    weight = torch.log(amount)
    stretch = torch.sqrt(gap)  # <- WN105 loss
    return torch.where(amount > 0, weight * stretch, stretch)


torch.manual_seed(80)
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(16):
    x = torch.rand(16, 4) + 0.1
    amount = torch.rand(16, 4)
    amount[2] = 0.0  # an empty bin in every batch
    gap = torch.rand(16, 4) + 0.1
    if step == 9:
        gap[6, 1] = -0.5  # stamped before the order was made
    loss = (net(x) * penalty(amount, gap)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step:2d}: {loss.item():.4f}")
