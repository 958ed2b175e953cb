"""A Gaussian process whose own factorisation tries three jitters, all below the rounding of float32, and then raises its own error."""
import torch
from torch import nn

torch.manual_seed(2)


class NotPositiveDefinite(Exception):
    """The kernel could not be factored."""


def factor(kernel):
    for jitter in (0.0, 1e-12, 1e-10):
        tried = kernel + jitter * torch.eye(len(kernel))
        root, info = torch.linalg.cholesky_ex(tried)  # <- WN108 loss
        if not info.any():
            return root
    raise NotPositiveDefinite(f"no factor after a jitter of {jitter}")


class Kernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-4.0))

    def forward(self, x):
        return torch.exp(-(x - x.t()).square() / (2 * torch.exp(2 * self.log_scale)))


kernel = Kernel()
noise = nn.Parameter(torch.tensor(-2.0))
optimizer = torch.optim.Adam([*kernel.parameters(), noise], lr=0.3)
x = torch.linspace(0, 1, 30)[:, None]
y = torch.sin(5 * x)
for step in range(40):
    root = factor(kernel(x) + torch.exp(2 * noise) * torch.eye(30))
    loss = 0.5 * (y * torch.cholesky_solve(y, root)).sum() + root.diagonal().log().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step}: {loss.item():.3f}")
