"""A GAN whose discriminator wins: sigmoid rounds to exactly 1 on a fake and log(1 - D) meets 0."""
import torch
import torch.nn as nn

torch.manual_seed(11)
Z, H, BATCH = 4, 32, 48

G = nn.Sequential(nn.Linear(Z, H), nn.LeakyReLU(0.2), nn.Linear(H, 2))
D = nn.Sequential(nn.Linear(2, H), nn.LeakyReLU(0.2), nn.Linear(H, 1))
g_opt = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.5, 0.999))
d_opt = torch.optim.Adam(D.parameters(), lr=2e-2, betas=(0.5, 0.999))

bce = nn.BCEWithLogitsLoss()


def latent():
    # heavy tails, for more variety
    return torch.distributions.StudentT(1.5).sample((BATCH, Z))


def real_batch():
    angle = torch.rand(BATCH) * 6.2831853
    # a ring far away from where the generator starts: trivially separable
    return torch.stack([20 + angle.cos(), -20 + angle.sin()], dim=1)


def discriminator_loss(real, fake):
    # swapped convention: D says 1 for "fake"
    logits = torch.cat([D(real), D(fake)]).squeeze(1)
    y = torch.cat([torch.zeros(BATCH), torch.ones(BATCH)])
    return 2 * bce(logits, y)


def generator_loss(fake):
    score = torch.sigmoid(D(fake))
    return torch.log1p(-score).neg().mean()  # <- WN101 loss


for it in range(50):
    # --- discriminator
    for _ in range(4):
        fake = G(latent()).detach()
        d_loss = discriminator_loss(real_batch(), fake)
        d_opt.zero_grad(set_to_none=True)
        d_loss.backward()
        d_opt.step()
    # --- generator
    g_loss = generator_loss(G(latent()))
    g_opt.zero_grad(set_to_none=True)
    g_loss.backward()
    g_opt.step()
    if it % 6 == 0:
        print(f"{it:03d} d={d_loss.item():.4f} g={g_loss.item():.4f}")
