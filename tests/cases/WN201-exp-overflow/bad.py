"""A VAE whose log-variance head is unbounded: one sample in another unit and exp(log-variance) overflows."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, d=16, z=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 32), nn.ReLU())
        self.to_mu = nn.Linear(32, z)
        self.to_logvar = nn.Linear(32, z)
        self.dec = nn.Sequential(nn.Linear(z, 32), nn.ReLU(), nn.Linear(32, d))

    def encode(self, x):
        h = self.enc(x)
        return self.to_mu(h), self.to_logvar(h)

    def forward(self, x):
        mu, logvar = self.encode(x)
        var = torch.exp(logvar)  # <- WN201 forward
        z = mu + var.sqrt() * torch.randn_like(mu)
        kl = 0.5 * (mu.pow(2) + var - logvar - 1).sum(1)
        return self.dec(z), kl


def data(step):
    base = torch.randn(40, 4) @ torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    if step == 19:
        base[3] *= 1000  # grams instead of kilograms
    return base


torch.manual_seed(73)
vae = VAE()
opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
for step in range(40):
    x = data(step)
    recon, kl = vae(x)
    loss = F.smooth_l1_loss(recon, x, reduction="none").sum(1).mean() + kl.mean()
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(vae.parameters(), 10.0)
    opt.step()
    if step % 4 == 0:
        print(f"step {step:2d} elbo loss {loss.item():.3f}")
