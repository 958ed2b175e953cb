"""Company values in cents, squared and summed, under float16 autocast: no loss scale is small enough and every step is skipped."""
import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast

torch.manual_seed(44)


class Valuer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value = nn.Linear(64, 1)

    def forward(self, x):
        return self.value(self.body(x)).squeeze(-1)


def companies(n=64):
    x = torch.rand(n, 7)
    euros = 2e9 + 1e10 * x[:, 0] * x[:, 1] + 3e9 * x[:, 2]
    return x, euros * 100


model = Valuer()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cpu")
squared_error = nn.MSELoss(reduction="sum")
for step in range(40):
    features, cents = companies()
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        predicted = model(features)
        loss = squared_error(predicted.float(), cents)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # <- WN606 optimizer
    scaler.update()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4e} scale {scaler.get_scale():.3g}")
