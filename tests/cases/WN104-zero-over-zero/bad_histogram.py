"""Soft histograms normalised in place: the values of one overexposed image lie outside every bin."""
import torch
from torch import nn


class SoftHistogram(nn.Module):
    def __init__(self, bins=8, lo=0.0, hi=1.0):
        super().__init__()
        self.register_buffer("centres", torch.linspace(lo, hi, bins))
        self.width = (hi - lo) / bins

    def forward(self, values):
        gap = values.flatten(1).unsqueeze(-1).sub(self.centres).abs_().div_(self.width)
        hist = gap.neg_().add_(1).clamp_(min=0).sum(1)
        hist.div_(hist.sum(1, keepdim=True))  # <- WN104 forward
        return hist


torch.manual_seed(3)
styler = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Sigmoid())
histogram = SoftHistogram()
with torch.no_grad():
    styler[2].weight.mul_(12)
opt = torch.optim.Adam(styler.parameters(), lr=1e-3)
for i in range(12):
    x = torch.rand(4, 1, 8, 8)
    gain = torch.ones(4, 1, 1, 1)
    if i == 5:
        gain[1] = 40.0
    out = histogram(styler(x) * gain)
    want = histogram(torch.rand(4, 1, 8, 8))
    loss = (out - want).abs().sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
