"""A home-made RMSprop with an eps beside the root: a ReLU unit that never fires simply stays where it is."""
import torch
import torch.nn as nn
from torch.optim import Optimizer


class PlainRMSprop(Optimizer):
    def __init__(self, params, lr=1e-3, decay=0.9):
        super().__init__(params, dict(lr=lr, decay=decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                v = state.setdefault("v", torch.zeros_like(p))
                v.mul_(group["decay"]).addcmul_(p.grad, p.grad, value=1 - group["decay"])
                update = p.grad / (v.sqrt() + 1e-8)
                p.add_(update, alpha=-group["lr"])


torch.manual_seed(15)
policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
value = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
with torch.no_grad():
    value[0].bias[3] = -25.0
policy_optimizer = PlainRMSprop(policy.parameters(), lr=2e-3)
value_optimizer = PlainRMSprop(value.parameters(), lr=2e-3)

for iteration in range(24):
    obs = torch.randn(64, 4)
    with torch.no_grad():
        action = (torch.rand(64) < policy(obs).softmax(-1)[:, 1]).long()
        reward = torch.where(action == (obs[:, 0] > 0).long(), 1.0, -1.0)
    log_prob = torch.log_softmax(policy(obs), -1).gather(1, action[:, None]).squeeze(1)
    if iteration < 8:
        baseline = reward.mean()
    else:
        baseline = value(obs).squeeze(1)
        value_loss = (baseline - reward).square().mean()
        value_optimizer.zero_grad()
        value_loss.backward()
        value_optimizer.step()
    loss = -(log_prob * (reward - baseline.detach())).mean()
    policy_optimizer.zero_grad()
    loss.backward()
    policy_optimizer.step()
    if iteration % 3 == 0:
        print(iteration, "policy loss", round(loss.item(), 4), "mean reward", round(reward.mean().item(), 3))
