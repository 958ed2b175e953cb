"""PPO on a replay that contains a scripted action: its old log-probability is so low that the ratio exp overflows."""
import torch
from torch import nn


def gaussian_log_prob(x, mu, log_std):
    return -0.5 * ((x - mu) / log_std.exp()).square() - log_std - 0.9189385


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.tensor(-1.0))

    def log_prob(self, obs, act):
        mu = self.mean(obs).squeeze(-1)
        return gaussian_log_prob(act, mu, self.log_std)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return self.v(obs).squeeze(-1)


def rollout(actor, n, scripted):
    obs = torch.randn(n, 3)
    with torch.no_grad():
        act = actor.mean(obs).squeeze(-1) + actor.log_std.exp() * torch.randn(n)
        old = actor.log_prob(obs, act)
        if scripted:
            # logged by the safety controller, whose own policy is a very narrow one
            old[0] = gaussian_log_prob(act[0], act[0] + 1.0, torch.tensor(-3.0))
    ret = -(act - obs[:, 0]).square()
    if scripted:
        ret[0] = -20.0
    return obs, act, old, ret


def ppo_loss(logp, old, adv, clip=0.2):
    ratio = torch.exp(logp - old)  # <- WN201 loss
    return -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()


def main():
    torch.manual_seed(79)
    actor, critic = Actor(), Critic()
    a_opt = torch.optim.Adam(actor.parameters(), lr=3e-3)
    c_opt = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for update in range(20):
        obs, act, old, ret = rollout(actor, 64, scripted=(update == 12))
        for _ in range(2):
            value = critic(obs)
            v_loss = (value - ret).square().mean()
            c_opt.zero_grad()
            v_loss.backward()
            c_opt.step()
            adv = (ret - value.detach())
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            p_loss = ppo_loss(actor.log_prob(obs, act), old, adv)
            a_opt.zero_grad()
            p_loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            a_opt.step()
        print(f"update {update:2d} policy {p_loss.item():.4f} value {v_loss.item():.4f}")


if __name__ == "__main__":
    main()
