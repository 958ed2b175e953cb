"""Off-policy learning from logged bandit data: the logging policy's probability underflowed to 0 and is divided by."""
import torch
from torch import nn


class Bandit:
    def __init__(self, n_ctx=6, n_arms=5):
        self.logger = nn.Linear(n_ctx, n_arms)
        with torch.no_grad():
            self.logger.weight.mul_(2.0)
        self.n_ctx = n_ctx

    @torch.no_grad()
    def log(self, n, temperature):
        ctx = torch.randn(n, self.n_ctx)
        propensity = torch.softmax(self.logger(ctx) / temperature, dim=1)
        # epsilon-greedy on top, but the written-down propensity forgets the epsilon
        explore = torch.rand(n) < 0.3
        arm = torch.where(explore, torch.randint(0, 5, (n,)), propensity.argmax(1))
        reward = (arm == (ctx[:, 0] > 0).long()).float()
        return ctx, arm, reward, propensity.gather(1, arm[:, None])[:, 0]


class IPSTrainer:
    def __init__(self, bandit):
        self.bandit = bandit
        self.policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
        self.opt = torch.optim.Adagrad(self.policy.parameters(), lr=0.05)
        self.history = []

    def objective(self, ctx, arm, reward, prop):
        pi = self.policy(ctx).softmax(1).gather(1, arm[:, None])[:, 0]
        ratio = pi / prop  # <- WN103 loss
        return -(ratio.clamp(max=1e6) * (reward - 0.5)).mean() + 1e-3 * ratio.mean()

    def fit(self, rounds=30):
        for r in range(rounds):
            # in week 14 somebody turned the logging policy almost greedy
            batch = self.bandit.log(32, temperature=1.0 if r < 14 else 0.002)
            loss = self.objective(*batch)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.history.append(loss.item())
            if r % 3 == 0:
                print("round", r, "objective", self.history[-1])


torch.manual_seed(9)
IPSTrainer(Bandit()).fit()
