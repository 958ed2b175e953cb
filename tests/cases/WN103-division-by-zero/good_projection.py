"""Camera pose fitting: depth is kept in front of a near plane before the perspective division."""
import torch
from torch import nn

torch.manual_seed(4)


class PinholeCamera(nn.Module):
    def __init__(self):
        super().__init__()
        self.focal = nn.Parameter(torch.tensor(1.4))
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, points):
        xy, depth = points[..., :2], points[..., 2:]
        ndc = xy / depth.clamp_min(0.5)
        return self.focal * ndc + self.shift


def scan(n_frames=24, n_points=30):
    """landmarks in camera coordinates, the camera flies through them"""
    for k in range(n_frames):
        pts = torch.rand(n_points, 3) * 2 - 1
        pts[:, 2] = pts[:, 2] + 3.0
        if k == 13:
            pts[5, 2] = 0.0
        visible = pts.clone()
        visible[:, 2] = visible[:, 2].clamp(min=0.5)
        seen = 2.0 * visible[:, :2] / visible[:, 2:] + 0.1
        yield pts, seen


cam = PinholeCamera()
optimizer = torch.optim.SGD(cam.parameters(), lr=0.3)
huber = nn.HuberLoss(delta=0.5)
for frame, (pts, seen) in enumerate(scan()):
    optimizer.zero_grad()
    loss = huber(cam(pts), seen)
    loss.backward()
    optimizer.step()
    print(f"frame {frame:2d} reprojection {loss.item():.5f} f={cam.focal.item():.3f}")
