"""Poisson regression with functional per-sample gradients: a large exposure drives exp(rate) past float32."""
import torch
from torch.func import grad_and_value, vmap

torch.manual_seed(97)
n, d = 512, 4
X = 0.5 * torch.randn(n, d)
true_w = torch.tensor([0.8, -0.4, 0.3, 0.0])
counts = torch.poisson(torch.exp(X @ true_w))
X[300, 1] = -2000.0  # dosage typed in micrograms


def neg_loglik(w, x, y):
    eta = torch.dot(w, x)
    rate = torch.exp(eta)  # <- WN201 loss
    return rate - y * eta


per_sample = vmap(grad_and_value(neg_loglik), in_dims=(None, 0, 0))

w = torch.zeros(d)
for step, rows in enumerate(torch.arange(n).split(16)):
    g, losses = per_sample(w, X[rows], counts[rows])
    # private-style training: every sample's gradient is clipped on its own
    norms = g.norm(dim=1, keepdim=True)
    g = g * (1.0 / norms.clamp(min=1.0))
    w = w - 0.2 * g.mean(0)
    if step % 3 == 0:
        print(f"step {step} nll {losses.mean().item():.4f} w {[round(v, 3) for v in w.tolist()]}")
