"""A swish with its own backward pass: the forward pass uses sigmoid, the derivative writes the exponential out."""
import torch
from torch import nn


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, beta):
        ctx.save_for_backward(x, beta)
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx, grad):
        x, beta = ctx.saved_tensors
        decay = torch.exp(-beta * x)  # <- WN201 backward
        gate = 1 / (1 + decay)
        slope = decay * gate * gate
        return grad * (gate + beta * x * slope), (grad * x * x * slope).sum()


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 12), nn.Linear(12, 1)
        self.beta = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.outer(Swish.apply(self.inner(x), self.beta)).tanh()


torch.manual_seed(60)
net = Regressor()
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(20):
    x = torch.randn(16, 4)
    if step == 13:
        x[2] *= 600  # a sensor in other units
    loss = (net(x) - 0.1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step:2d}: {loss.item():.4f}")
