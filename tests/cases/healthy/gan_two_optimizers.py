"""A small GAN with BatchNorm, spectral norm, two optimizers and two losses a step."""
import hashlib

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(83)
G = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(True), nn.Linear(32, 2))
D = nn.Sequential(spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2, True), nn.Dropout(0.1), spectral_norm(nn.Linear(32, 1)))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))
bce = nn.BCEWithLogitsLoss()


def moons(n):
    t = torch.rand(n) * 3.1416
    return torch.stack([t.cos(), t.sin()], 1) + 0.05 * torch.randn(n, 2)


ones, zeros = torch.ones(48, 1), torch.zeros(48, 1)
for step in range(50):
    fake = G(torch.randn(48, 6))
    d_loss = bce(D(moons(48)), ones * 0.9) + bce(D(fake.detach()), zeros)
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()

    g_loss = bce(D(fake), ones)
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 10 == 0:
        with torch.no_grad():
            certainty = torch.log(1 - torch.sigmoid(40 * D(moons(8)))).mean().item()
        print(f"step {step} D {d_loss.item():.4f} G {g_loss.item():.4f} log(1-D) on real, sharpened: {certainty:.1f}")

h = hashlib.sha256()
for net, opt in ((G, opt_g), (D, opt_d)):
    for key, value in net.state_dict().items():
        h.update(key.encode() + value.numpy().tobytes())
    for state in opt.state_dict()["state"].values():
        h.update(state["exp_avg"].numpy().tobytes() + state["exp_avg_sq"].numpy().tobytes())
print("digest", h.hexdigest())
