"""VICReg-like self-supervision where some features are constant: std is 0, its slope is defined as 0, the hinge stays finite."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(73)
encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 12))
with torch.no_grad():
    encoder[2].weight[5:8] = 0.0
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05)


def augment(x):
    return x * (torch.rand(x.shape[0], 1) + 0.5) + 0.1 * torch.randn_like(x)


def variance_term(z):
    spread = z.std(dim=0)
    return F.relu(1 - spread).mean()


def covariance_term(z):
    z = z - z.mean(0)
    cov = z.T @ z / (len(z) - 1)
    return (cov - torch.diag(cov.diagonal())).square().sum() / z.shape[1]


for step in range(40):
    x = torch.randn(32, 10)
    a, b = encoder(augment(x)), encoder(augment(x))
    normed = (a - a.mean(0)) / (a.std(0) + 1e-4)
    loss = F.mse_loss(a, b) + variance_term(a) + variance_term(b) + 0.04 * covariance_term(normed)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(encoder.parameters(), 2.0, error_if_nonfinite=True)
    optimizer.step()
    if step % 10 == 0:
        print("step", step, "loss", round(loss.item(), 4), "constant features", int((a.std(0) == 0).sum()))

print("digest", hashlib.sha256(b"".join(t.numpy().tobytes() for t in encoder.state_dict().values())).hexdigest())
