"""A planar normalizing flow without the invertibility constraint: 1 + u.psi drops below zero and its log is taken."""
import math
import torch
from torch import nn


class Planar(nn.Module):
    """z -> z + u * tanh(w.z + b)"""

    def __init__(self, dim):
        super().__init__()
        self.u = nn.Parameter(torch.randn(dim) * 0.1)
        self.w = nn.Parameter(torch.randn(dim) * 0.1)
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, z):
        pre = z @ self.w + self.b
        h = torch.tanh(pre)
        psi = (1 - h.square()).unsqueeze(-1) * self.w
        det = 1 + psi @ self.u
        log_det = det.log()  # <- WN102 forward
        return z + self.u * h.unsqueeze(-1), log_det


class Flow(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.layers = nn.ModuleList(Planar(dim) for _ in range(depth))

    def forward(self, z):
        total = z.new_zeros(z.shape[0])
        for layer in self.layers:
            z, ld = layer(z)
            total = total + ld
        return z, total


def target_energy(z):
    # a flat ellipse: the flow has to squeeze the second axis hard
    return 0.5 * (z[:, 0] / 1.5).square() + 0.5 * (z[:, 1] / 0.1).square()


def main():
    torch.manual_seed(21)
    flow = Flow(2, 4)
    opt = torch.optim.Adam(flow.parameters(), lr=0.25)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.99)
    for it in range(60):
        z0 = torch.randn(128, 2)
        log_q0 = -0.5 * (z0.square().sum(1) + 2 * math.log(2 * math.pi))
        z, log_det = flow(z0)
        loss = (log_q0 - log_det + target_energy(z)).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(flow.parameters(), 5.0)
        opt.step()
        sched.step()
        if it % 5 == 0:
            print(f"it {it} free energy {loss.item():.3f} lr {sched.get_last_lr()[0]:.4f}")


main()
