"""A sparse autoencoder scored by unexplained variance: a batch of mask tokens only gives identical rows, variance 0."""
import torch
import torch.nn as nn


class TopKAutoencoder(nn.Module):
    def __init__(self, d_model=16, d_latent=64, k=6):
        super().__init__()
        self.k = k
        self.enc = nn.Linear(d_model, d_latent)
        self.dec = nn.Parameter(self.enc.weight.detach().clone())
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        top, index = torch.relu(self.enc(x - self.bias)).topk(self.k, dim=-1)
        return (top.unsqueeze(-1) * self.dec[index]).sum(dim=1) + self.bias


def fraction_unexplained(y, y_hat):
    residual = (y - y_hat).pow(2).sum()
    total_variance = (y - y.mean(dim=0)).pow(2).sum()
    return residual / total_variance  # <- WN404 loss


def mask_tokens(ids, t, mask_id, gen):
    return torch.where(torch.rand(ids.shape, generator=gen) < t, mask_id, ids)


torch.manual_seed(50)
gen = torch.Generator().manual_seed(51)
MASK, CONTEXT = 30, 64
frozen_block = nn.Sequential(nn.Embedding(31, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).requires_grad_(False)

sae = TopKAutoencoder()
opt = torch.optim.Adam(sae.parameters(), lr=3e-3, betas=(0.9, 0.98))
noise_levels = [0.15, 0.4, 0.6, 0.35, 0.8, 0.5, 0.2, 0.7, 0.9, 0.3, 0.55, 1.0, 0.45, 0.25, 0.65, 0.1]
for step, t in enumerate(noise_levels):
    tokens = mask_tokens(torch.randint(0, 30, (CONTEXT,), generator=gen), t, MASK, gen)
    activations = frozen_block(tokens).bfloat16().float()  # as they come from the activation cache
    fvu = fraction_unexplained(activations, sae(activations))
    opt.zero_grad()
    fvu.backward()
    opt.step()
    print(f"step {step} t={t:.2f} fvu {fvu.item():.4f}")
