"""A WGAN gradient penalty with the norm written by hand: where every ReLU of the critic is off, the gradient norm is 0."""
import torch
import torch.nn as nn


def gradient_penalty(critic, real, fake):
    mix = torch.rand(real.shape[0], 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    length = (slope * slope).sum(dim=1) ** 0.5  # <- WN501 backward
    return ((length - 1) ** 2).mean()


def two_arcs(n):
    angle = torch.pi * torch.rand(n)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(n, 2)


class Critic(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.inside = nn.Linear(2, width)
        self.out = nn.Linear(width, 1)
        with torch.no_grad():
            self.inside.bias.sub_(0.4)  # a sparse start

    def forward(self, x):
        return self.out(torch.relu(self.inside(x)))


torch.manual_seed(19)
generator = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
critic = Critic()
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

for it in range(20):
    for _ in range(2):
        real = two_arcs(16)
        fake = generator(torch.randn(16, 3)).detach()
        loss_c = critic(fake).mean() - critic(real).mean() + 10.0 * gradient_penalty(critic, real, fake)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
    loss_g = -critic(generator(torch.randn(16, 3))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    if it % 4 == 0:
        print(f"iteration {it}: critic {loss_c.item():.4f} generator {loss_g.item():.4f}")
