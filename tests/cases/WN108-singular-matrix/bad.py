"""Gaussian process regression without jitter: a measurement repeated at the same place makes the kernel matrix singular."""
import math
import torch

torch.manual_seed(53)


class ExactGP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.log_ell = torch.nn.Parameter(torch.tensor(-1.0))
        self.log_amp = torch.nn.Parameter(torch.tensor(0.0))

    def kernel(self, a, b):
        r2 = (a[:, None] - b[None, :]).square()
        return torch.exp(2 * self.log_amp - 0.5 * r2 / torch.exp(2 * self.log_ell))

    def forward(self, x, y):
        """negative log marginal likelihood"""
        K = self.kernel(x, x)
        L = torch.linalg.cholesky(K)  # <- WN108 forward
        alpha = torch.cholesky_solve(y[:, None], L)[:, 0]
        return 0.5 * y @ alpha + L.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)


gp = ExactGP()
opt = torch.optim.Adam(gp.parameters(), lr=0.02)
for day in range(20):
    x = torch.arange(8.0) + 0.3 * torch.rand(8)
    if day == 11:
        x[4:] = x[4]  # the boat lay at anchor for the second half
    y = torch.sin(x) + 0.05 * torch.randn(8)
    nll = gp(x, y)
    opt.zero_grad()
    nll.backward()
    opt.step()
    print(f"day {day:2d} nll {nll.item():.4f} length {gp.log_ell.exp().item():.3f}", flush=True)
