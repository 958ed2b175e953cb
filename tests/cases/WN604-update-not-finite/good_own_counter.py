"""A Sophia-like optimizer restarts its curvature estimate by a counter of its own; the denominator has a floor."""
import torch
from torch import nn
from torch.optim import Optimizer


class SophiaLite(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), rho=0.04, every=2):
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho})
        self.t, self.every = 0, every

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["m"], st["h"] = torch.zeros_like(p), torch.ones_like(p)
                st["m"].lerp_(p.grad, 1 - b1)
                if self.t % self.every == 0:
                    st["h"].mul_(0 if self.t == 6 else b2).addcmul_(p.grad, p.grad, value=1 - b2)
                ratio = st["m"].div((group["rho"] * st["h"]).clamp(min=1e-12))
                p.add_(ratio.clamp(-1, 1), alpha=-group["lr"])


torch.manual_seed(41)
emb, out = nn.Embedding(20, 4), nn.Linear(4, 2)
opt = SophiaLite([*emb.parameters(), *out.parameters()])
for step in range(10):
    ids = torch.randint(0, 12, (16,))
    loss = nn.functional.cross_entropy(out(emb(ids)), ids % 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
