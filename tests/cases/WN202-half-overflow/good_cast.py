"""Sensor values stored in bfloat16 to save memory: the range is that of float32, 101325 Pa fits."""
import torch
from torch import nn

torch.manual_seed(107)


class ReplayMemory:
    """keeps old samples in bfloat16"""

    def __init__(self):
        self.x, self.y = [], []

    def push(self, x, y):
        stored = x.to(torch.bfloat16)
        self.x.append(stored)
        self.y.append(y)

    def sample(self, k):
        idx = torch.randint(0, len(self.x), (k,)).tolist()
        return torch.stack([self.x[i] for i in idx]).float(), torch.stack([self.y[i] for i in idx])


def measure(t):
    altitude = 8000.0 - 200.0 * t  # descending
    pressure = 101325.0 * 2.718281828 ** (-altitude / 8400.0)
    x = torch.tensor([pressure, 15 - 0.0065 * altitude, float(t)]) + torch.randn(3)
    return x, torch.tensor([altitude / 1000])


memory = ReplayMemory()
net = nn.Sequential(nn.Linear(3, 16), nn.Softsign(), nn.Linear(16, 1))
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
for t in range(40):
    memory.push(*measure(t))
    x, y = memory.sample(16)
    loss = nn.functional.mse_loss(net(x / torch.tensor([5e4, 20.0, 20.0])), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if t % 3 == 0:
        print(f"t={t} loss={loss.item():.4f}")
