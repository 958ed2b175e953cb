"""A toy diffusion model: timesteps and noise are drawn in the loop, and the signal-to-noise ratio at t=0 is infinite but unused."""
import hashlib
import math

import torch
import torch.nn as nn

torch.manual_seed(121)
T = 50
alpha_bar = torch.cos(torch.linspace(0, 1, T + 1) * math.pi / 2).square()
alpha_bar[0] = 1.0
snr = alpha_bar / (1 - alpha_bar)
assert torch.isinf(snr[0])
log_snr = torch.log(snr)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T + 1, 16)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Dropout(0.05), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], -1))


def spiral(n):
    r = torch.rand(n, 1) * 2 + 0.3
    return torch.cat([r * torch.cos(4 * r), r * torch.sin(4 * r)], 1)


model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(50):
    x0, noise = spiral(64), torch.randn(64, 2)
    t = torch.randint(1, T, (64,))
    keep = alpha_bar[t, None]
    xt = keep.sqrt() * x0 + (1 - keep).sqrt() * noise
    weight = snr[t].clamp(max=5.0) / snr[t]
    error = (model(xt, t) - noise).square().mean(-1)
    loss = (weight * error).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} mean log snr {log_snr[t].mean().item():.3f}")

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
    h.update(optimizer.state[p]["exp_avg"].numpy().tobytes() + optimizer.state[p]["exp_avg_sq"].numpy().tobytes())
print("digest", h.hexdigest())
