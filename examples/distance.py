import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def distance(a, b):
    return torch.sqrt((a - b).pow(2).sum(-1)).mean()


for step in range(100):
    x = torch.randn(8, 8)
    other = x + 0.1 * torch.randn(8, 8)
    if step == 88:
        other[3] = x[3]
    loss = distance(model(x), model(other))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
