"""A return normaliser restored from a run that had seen one episode: its variance M2/(n-1) was 0/0 and is used after warm-up."""
import torch
import torch.nn as nn


class ReturnScale(nn.Module):
    """Running mean and variance (Welford), frozen while the critic is fine-tuned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("m2", torch.zeros(()))
        self.register_buffer("var", torch.ones(()))

    @torch.no_grad()
    def observe(self, value):
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.m2 += delta * (value - self.mean)

    @torch.no_grad()
    def freeze(self):
        self.var.copy_(self.m2 / (self.count - 1))

    def forward(self, x):
        centred = x - self.mean
        return centred / (self.var + 1e-6).sqrt()  # <- WN602 parameter


def previous_run():
    scale = ReturnScale()
    for episode_return in [torch.tensor(17.5)]:
        scale.observe(episode_return)
    scale.freeze()
    return {"scale": scale.state_dict()}


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
        self.scale = ReturnScale()

    def forward(self, obs):
        return self.net(obs).squeeze(-1)


torch.manual_seed(23)
critic = Critic()
critic.scale.load_state_dict(previous_run()["scale"])
optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
WARMUP = 10
for update in range(30):
    obs = torch.randn(40, 3)
    returns = 15 + 4 * obs[:, 0] - obs[:, 1] ** 2 + 0.5 * torch.randn(40)
    target = critic.scale(returns) if update >= WARMUP else returns / 15
    loss = (critic(obs) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 6 == 0:
        print(f"update {update:2d} value loss {loss.item():.4f}")
