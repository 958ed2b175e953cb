"""Missing targets are NaN and left out before the loss; a scale is never below 0.1."""
import torch
from torch import nn

torch.manual_seed(90)
data = torch.rand(12, 16, 4)
target = data.sum(dim=2, keepdim=True)
target[:, 3] = float("nan")
scale = torch.rand(12, 16, 1) + 0.5
scale[7, 8] = 0.0
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(12):
    wanted = target[step]
    known = ~wanted.isnan()
    error = (net(data[step]) - wanted)[known] / scale[step].clamp_min(0.1)[known]
    loss = error.abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step:2d}: {loss.item():.4f}")
