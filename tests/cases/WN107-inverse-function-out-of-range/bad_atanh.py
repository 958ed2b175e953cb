"""Behaviour cloning of squashed actions: the expert's steering hit the stop, atanh(1.0) is infinite."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SquashedGaussian(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, 32), nn.ReLU())
        self.mu = nn.Linear(32, act_dim)
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def forward(self, obs):
        return self.mu(self.trunk(obs)), self.log_std.clamp(-4, 1)


def log_prob(mu, log_std, action):
    raw = torch.atanh(action)  # <- WN107 loss
    gauss = -0.5 * ((raw - mu) / log_std.exp()).square() - log_std
    squash = torch.log(1 - action.square() + 1e-6)
    return (gauss - squash).sum(-1)


def collect(n=512):
    obs = torch.randn(n, 6)
    steer = torch.tanh(1.2 * obs[:, :2] + 0.1 * torch.randn(n, 2))
    steer[350:] = (1.05 * steer[350:]).clamp(-1, 1)  # a new joystick with a worn-out end stop
    return TensorDataset(obs, steer)


def main():
    torch.manual_seed(43)
    policy = SquashedGaussian(6, 2)
    opt = torch.optim.Adam(policy.parameters(), lr=2e-3)
    step = 0
    for obs, act in DataLoader(collect(), batch_size=16):
        mu, log_std = policy(obs)
        loss = -log_prob(mu, log_std, act).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 3 == 0:
            print(f"step {step} nll {loss.item():.4f}")
        step += 1


main()
