"""Differentially private SGD: per-sample gradients by torch.func vmap and grad, clipped one by one, noise added by hand."""
import hashlib

import torch
import torch.nn as nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(95)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
params = {k: v.detach().clone() for k, v in model.named_parameters()}
noise_source = torch.Generator().manual_seed(1)
CLIP, NOISE, LR = 1.0, 0.05, 0.5


def sample_loss(p, x, y):
    logits = functional_call(model, p, (x[None],))
    return nn.functional.cross_entropy(logits, y[None])


per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0))
batch_loss = vmap(sample_loss, in_dims=(None, 0, 0))

for step in range(30):
    x = torch.randn(40, 6)
    y = x[:, :3].argmax(1)
    grads = per_sample(params, x, y)
    lengths = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (CLIP / (lengths + 1e-6)).clamp(max=1.0)
    for name, g in grads.items():
        clipped = torch.einsum("b,b...->...", factor, g)
        noise = NOISE * CLIP * torch.randn(clipped.shape, generator=noise_source)
        params[name] = params[name] - LR * (clipped + noise) / len(x)
    if step % 6 == 0:
        print("step", step, "loss", round(batch_loss(params, x, y).mean().item(), 4), "clipped", int((factor < 1).sum()))

print("digest", hashlib.sha256(b"".join(params[k].numpy().tobytes() for k in sorted(params))).hexdigest())
