"""A Wasserstein critic without any Lipschitz constraint: its two layers feed each other and grow without end."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Critic(nn.Module):
    """Expected score of a cloud of points."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(2, 32)
        self.score = nn.Linear(32, 1)

    def forward(self, points):
        h = F.leaky_relu(self.features(points), 0.2)
        return self.score(h.mean(0))  # <- WN605 forward


def ring(n, centre):
    angle = torch.rand(n) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], 1) + torch.tensor(centre)


def estimate_distance(steps=140, lr=0.9):
    critic = Critic()
    opt = torch.optim.SGD(critic.parameters(), lr=lr)
    for step in range(steps):
        ours, theirs = ring(64, [1.0, 0.5]), ring(64, [0.0, 0.0])
        loss = (critic(theirs) - critic(ours)).squeeze()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            print(f"step {step} distance so far {-loss.item():.3e}")


if __name__ == "__main__":
    torch.manual_seed(18)
    estimate_distance()
