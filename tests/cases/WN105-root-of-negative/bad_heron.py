"""Cloth relaxation with Heron's formula: a triangle is pulled past flat, and the product under the root is negative."""
import torch

torch.manual_seed(10)

SIDE = 5
rest = torch.tensor([[float(i), float(j)] for i in range(SIDE) for j in range(SIDE)])
tris = []
for i in range(SIDE - 1):
    for j in range(SIDE - 1):
        a = i * SIDE + j
        tris += [(a, a + 1, a + SIDE), (a + 1, a + SIDE, a + SIDE + 1)]
tris = torch.tensor(tris)


class EdgeModel(torch.nn.Module):
    """every triangle learns its three side lengths (log scale), the areas follow"""

    def __init__(self):
        super().__init__()
        p = rest[tris]
        ab = (p[:, 0] - p[:, 1]).norm(dim=1)
        bc = (p[:, 1] - p[:, 2]).norm(dim=1)
        ca = (p[:, 2] - p[:, 0]).norm(dim=1)
        self.log_sides = torch.nn.Parameter(torch.stack([ab, bc, ca], 1).log())

    def forward(self):
        a, b, c = self.log_sides.exp().unbind(1)
        s = (a + b + c) / 2
        inside = s * (s - a) * (s - b) * (s - c)
        return inside.sqrt()  # <- WN105 forward


model = EdgeModel()
goal = 0.5 * torch.ones(len(tris))
goal[::3] = 0.02  # some facets must nearly vanish
opt = torch.optim.SGD(model.parameters(), lr=0.25)
for it in range(40):
    area = model()
    energy = ((area - goal) / goal).square().sum() * 0.01
    opt.zero_grad()
    energy.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if it % 3 == 0:
        print("it", it, "energy", energy.item())
