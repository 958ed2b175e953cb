"""WGAN-GP: the penalty differentiates the norm of an input gradient, safely, by the two-norm of torch."""
import hashlib

import torch
import torch.nn as nn

torch.manual_seed(101)
critic = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))
generator = nn.Sequential(nn.Linear(3, 32), nn.ELU(), nn.Linear(32, 2))
critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
generator_opt = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))


def real_points(n):
    corner = torch.randint(0, 4, (n,))
    return torch.stack([corner % 2 * 2.0 - 1, corner // 2 * 2.0 - 1], 1) + 0.1 * torch.randn(n, 2)


def penalty(real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(2, dim=1) - 1).square().mean()


for step in range(30):
    for _ in range(2):
        real = real_points(32)
        with torch.no_grad():
            fake = generator(torch.randn(32, 3))
        critic_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()
    generator_loss = -critic(generator(torch.randn(32, 3))).mean()
    generator_opt.zero_grad()
    generator_loss.backward()
    generator_opt.step()
    if step % 8 == 0:
        print(f"step {step} critic {critic_loss.item():.4f} generator {generator_loss.item():.4f}")

h = hashlib.sha256()
for opt in (critic_opt, generator_opt):
    for p in opt.param_groups[0]["params"]:
        h.update(p.detach().numpy().tobytes())
        for v in opt.state[p].values():
            h.update(v.numpy().tobytes())
print("digest", h.hexdigest())
