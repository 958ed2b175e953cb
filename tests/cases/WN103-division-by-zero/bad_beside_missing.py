"""Missing targets are NaN and masked as they should be; in one batch a scale of 0 in another row breaks the step."""
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
    error = (net(data[step]) - wanted) / scale[step]  # <- WN103 loss
    error = torch.where(wanted.isnan(), torch.zeros_like(error), error)
    loss = error.abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step:2d}: {loss.item():.4f}")
