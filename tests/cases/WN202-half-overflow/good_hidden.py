"""Soft matching of two point sets in float16: the row sums of the kernel are taken in float32."""
import torch
from torch import nn


class Matcher(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.sharpness = nn.Parameter(torch.tensor(9.0))

    def forward(self, left, right):
        a, b = (nn.functional.normalize(self.embed(x), dim=-1) for x in (left, right))
        kernel = torch.exp((self.sharpness * (a @ b.transpose(-2, -1))).half())
        plan = kernel / kernel.float().sum(dim=-1, keepdim=True)
        plan = plan / plan.sum(dim=-2, keepdim=True)
        return plan.float()


torch.manual_seed(7)
model = Matcher()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(20):
    points = torch.randn(4, 12, 3)
    order = torch.stack([torch.randperm(12) for _ in range(4)])
    moved = torch.gather(points, 1, order[..., None].expand(-1, -1, 3))
    if step == 13:
        spot = torch.tensor([1.9, -1.6, 2.1])
        points[1], moved[1] = spot + 0.02 * torch.randn(12, 3), spot + 0.02 * torch.randn(12, 3)  # a crowd in one corner
    target = torch.nn.functional.one_hot(order, 12).transpose(-2, -1).float()
    loss = (model(points, moved) - target).square().sum(dim=(-2, -1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")
