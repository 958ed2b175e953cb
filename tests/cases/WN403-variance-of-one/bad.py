"""REINFORCE with standardised returns: the first episode that ends after one move has a standard deviation of nothing."""
import torch
from torch import nn


class Corridor:
    """Walk along eight cells; falling off the left end is the end, the right end pays."""

    def reset(self, start):
        self.cell, self.clock = start, 0
        return self.observe()

    def observe(self):
        return nn.functional.one_hot(torch.tensor(self.cell), 8).float()

    def step(self, right):
        self.cell += 1 if right else -1
        self.clock += 1
        done = self.cell < 0 or self.cell > 7 or self.clock >= 30
        reward = 1.0 if self.cell > 7 else (-1.0 if self.cell < 0 else -0.01)
        self.cell = min(max(self.cell, 0), 7)
        return self.observe(), reward, done


def discounted(rewards, gamma=0.97):
    out, running = [], 0.0
    for r in reversed(rewards):
        running = r + gamma * running
        out.append(running)
    return torch.tensor(out[::-1])


def standardise(returns):
    spread = returns.std()  # <- WN403 loss
    return (returns - returns.mean()) / (spread + 1e-8)


def run(episodes=25):
    torch.manual_seed(6)
    gen = torch.Generator().manual_seed(38)
    env = Corridor()
    policy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimiser = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for episode in range(episodes):
        obs, done = env.reset(start=int(torch.randint(0, 6, (), generator=gen))), False
        log_probs, rewards = [], []
        while not done:
            drive = policy(obs).squeeze()
            right = bool(torch.rand((), generator=gen) < drive.sigmoid())
            log_probs.append(nn.functional.logsigmoid(drive if right else -drive))
            obs, reward, done = env.step(right)
            rewards.append(reward)
        advantage = standardise(discounted(rewards))
        loss = -(torch.stack(log_probs) * advantage).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"episode {episode:2d} length {len(rewards):2d} loss {loss.item():.3f}")


if __name__ == "__main__":
    run()
