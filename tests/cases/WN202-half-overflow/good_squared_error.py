"""Bounding-box regression in half precision: the error is squared in float32."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(109)


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.box = nn.Linear(32, 4)
        with torch.no_grad():
            self.box.bias.copy_(torch.tensor([100.0, 100.0, 150.0, 150.0]))

    def forward(self, feat):
        h = checkpoint(self.stem, feat, use_reentrant=False)
        return self.box(h)


def box_loss(pred, gt, weight):
    err = (pred.float() - gt.float()).square()
    return (err * weight).mean()


def annotated(it):
    feat = torch.randn(8, 12)
    gt = torch.tensor([100.0, 100.0, 150.0, 150.0]) + 10 * feat[:, :4]
    if it == 21:
        gt[3] += 400.0  # an image at full resolution
    return feat.half(), gt.half()


head = BoxHead().half()
opt = torch.optim.SGD(head.parameters(), lr=1e-3)
for it in range(32):
    feat, gt = annotated(it)
    loss = box_loss(head(feat), gt, weight=0.01)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    opt.step()
    if it % 3 == 0:
        print("iter", it, "loss", loss.item())
print("finite weights:", all(bool(p.isfinite().all()) for p in head.parameters()))
