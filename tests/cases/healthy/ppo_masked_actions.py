"""PPO on a corridor with illegal moves masked by -inf; rollouts run under no_grad, then several epochs on the same data."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(109)
LENGTH = 8


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, position):
        h = self.body(F.one_hot(position, LENGTH).float())
        logits = self.actor(h)
        illegal = torch.stack([position == 0, torch.zeros_like(position, dtype=torch.bool), position == LENGTH - 1], -1)
        return logits.masked_fill(illegal, float("-inf")), self.critic(h).squeeze(-1)


@torch.no_grad()
def rollout(agent, walkers=12, horizon=10):
    position = torch.randint(0, LENGTH - 1, (walkers,))
    steps = []
    for _ in range(horizon):
        logits, value = agent(position)
        action = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        log_prob = logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        following = position + action - 1
        reward = (following == LENGTH - 1).float() - 0.05
        steps.append((position, action, log_prob, value, reward))
        position = following
    carry, returns = torch.zeros(walkers), []
    for *_, reward in reversed(steps):
        carry = reward + 0.9 * carry
        returns.append(carry)
    columns = [torch.cat(c) for c in zip(*steps)]
    return columns[0], columns[1], columns[2], columns[3], torch.cat(returns[::-1])


agent = ActorCritic()
optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
for iteration in range(10):
    position, action, old_log_prob, value, returns = rollout(agent)
    advantage = returns - value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(3):
        for rows in torch.randperm(len(position)).chunk(3):
            logits, v = agent(position[rows])
            log_all = logits.log_softmax(-1)
            ratio = (log_all.gather(1, action[rows, None]).squeeze(1) - old_log_prob[rows]).exp()
            surrogate = torch.minimum(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows])
            legal = log_all > -torch.inf
            entropy = -(log_all[legal].exp() * log_all[legal]).sum() / len(rows)
            loss = -surrogate.mean() + 0.5 * F.mse_loss(v, returns[rows]) - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    if iteration % 3 == 0:
        print(f"iteration {iteration} return {returns.mean().item():.3f} loss {loss.item():.4f}")

h = hashlib.sha256()
for p in agent.parameters():
    h.update(p.detach().numpy().tobytes())
    for key in ("exp_avg", "exp_avg_sq"):
        h.update(optimizer.state[p][key].numpy().tobytes())
print("digest", h.hexdigest())
