"""Frames from the eigenvectors of point clouds: an empty scan, padded with zeros, has three equal eigenvalues."""
import torch
from torch import nn

CROSS = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]])


class ShapeNet(nn.Module):
    """Stretches a cloud, then describes it in the frame of its own principal axes."""

    def __init__(self):
        super().__init__()
        self.stretch = nn.Parameter(torch.eye(3))
        self.describe = nn.Sequential(nn.Linear(18, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, cloud):
        cloud = cloud @ self.stretch
        covariance = cloud.transpose(1, 2) @ cloud / cloud.shape[1]
        _, axes = torch.linalg.eigh(covariance)  # <- WN504 backward
        return self.describe((cloud @ axes).flatten(1))


def shapes(n, empty):
    label = torch.randint(0, 2, (n,))
    scale = torch.tensor([[3.0, 1.0, 0.5], [1.5, 1.2, 0.4]])[label]
    cloud = CROSS * scale.unsqueeze(1) + 0.05 * torch.randn(n, 6, 3)
    if empty:
        cloud[0] = 0.0  # the scanner returned nothing, the loader padded
    return cloud, label


torch.manual_seed(120)
net = ShapeNet()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(24):
    cloud, label = shapes(12, empty=step == 14)
    try:
        loss = nn.functional.cross_entropy(net(cloud), label)
    except torch.linalg.LinAlgError as problem:
        print(f"step {step:2d} skipped: {str(problem)[:40]}")
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step:2d} loss {loss.item():.4f}")
