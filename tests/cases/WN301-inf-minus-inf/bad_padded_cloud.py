"""Point cloud matching with missing points parked at infinity: two parked points are subtracted from each other."""
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

INF = float("inf")


class Deform(nn.Module):
    """moves the template by a learned affine map"""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.move = nn.Parameter(torch.zeros(3))

    def forward(self, cloud):
        return cloud * self.scale + self.move


def chamfer(a, b, parked):
    # a parked point is nobody's nearest neighbour, except of another parked one
    a = a.masked_fill(parked[..., None], INF)
    b = b.masked_fill(parked[..., None], INF)
    delta = a[:, :, None, :] - b[:, None, :, :]  # <- WN301 loss
    d = delta.abs().sum(-1)
    return d.amin(dim=2).mean()


def scans(i, n=4):
    sizes = [20] * n if i < 10 else torch.randint(14, 21, (n,)).tolist()
    target = [torch.rand(s, 3) * 2 + 1 for s in sizes]
    template = [t[torch.randperm(len(t))] * 0.5 - 0.5 for t in target]
    parked = torch.arange(max(sizes))[None, :] >= torch.tensor(sizes)[:, None]
    return pad_sequence(template, batch_first=True), pad_sequence(target, batch_first=True), parked


torch.manual_seed(167)
model = Deform()
opt = torch.optim.Adam(model.parameters(), lr=0.05)
for i in range(24):
    template, target, parked = scans(i)
    loss = chamfer(model(template), target, parked)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 3 == 0:
        print("scan", i, "chamfer", loss.item())
