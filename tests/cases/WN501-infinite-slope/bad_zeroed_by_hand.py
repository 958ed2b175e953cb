"""Point registration whose loop writes zeros over the gradients itself: a landmark already in place has a distance of 0."""
import torch
from torch import nn

torch.manual_seed(0)
warp = nn.Linear(3, 3)
optimizer = torch.optim.SGD(warp.parameters(), lr=0.05, momentum=0.8)
for step in range(24):
    moving = torch.randn(12, 3)
    fixed = moving + 0.3 * torch.randn(12, 3)
    for p in warp.parameters():
        if p.grad is not None:
            p.grad = torch.zeros_like(p.grad)
    moved = warp(moving)
    if step == 14:
        fixed[5] = moved.detach()[5]  # a marker that the operator has put on the point itself
    loss = (moved - fixed).square().sum(1).sqrt().mean()  # <- WN501 backward
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step}: {loss.item():.4f}")
