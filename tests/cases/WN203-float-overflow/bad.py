"""Learning a conserved energy in SI units: the kinetic energy of a star does not fit into float32."""
import torch
from torch import nn


class EnergyNet(nn.Module):
    """E = kinetic + learned potential; everything in kg, m, s"""

    def __init__(self):
        super().__init__()
        self.potential = nn.Sequential(nn.Linear(3, 24), nn.Softplus(), nn.Linear(24, 1))
        self.unit = 1e33

    def forward(self, mass, pos, vel):
        speed2 = vel.pow(2).sum(-1)
        kinetic = 0.5 * mass * speed2  # <- WN203 forward
        return kinetic / self.unit + self.potential(pos / 1e11).squeeze(-1)


class Catalogue(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(240):
            mass = torch.tensor(6e24) * (0.5 + torch.rand(()))
            vel = 3e4 * torch.randn(3)
            pos = 1.5e11 * torch.randn(3)
            if i == 131:  # not a planet
                mass, vel = torch.tensor(4e30), torch.tensor([2.2e5, -1e4, 3e3])
            yield mass, pos, vel


torch.manual_seed(113)
net = EnergyNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step, (mass, pos, vel) in enumerate(torch.utils.data.DataLoader(Catalogue(), batch_size=8)):
    energy = net(mass, pos, vel)
    loss = (energy - 5.0).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step:2d} loss {loss.item():.4f}")
