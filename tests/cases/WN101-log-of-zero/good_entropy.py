"""A REINFORCE agent with an entropy bonus: the entropy is taken from log_softmax, so a certain policy is fine."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, n_obs, n_act, sharpness):
        super().__init__()
        self.fc1 = nn.Linear(n_obs, 24)
        self.fc2 = nn.Linear(24, n_act)
        self.sharpness = sharpness

    def forward(self, obs):
        h = torch.tanh(self.fc1(obs))
        log_probs = F.log_softmax(self.fc2(h) * self.sharpness, dim=-1)
        probs = log_probs.exp()
        ent = self.entropy(probs, log_probs)
        return probs, ent

    def entropy(self, p, log_p):
        return -(p * log_p).sum(-1)


def run_episode(policy, length=20):
    obs = torch.randn(length, 5)
    probs, ent = policy(obs)
    draw = torch.rand(length, 1)
    act = (probs.detach().cumsum(-1) < draw).sum(-1).clamp(max=2)
    reward = (act == (obs[:, 0] > 0).long()).float() - 0.5
    logp = torch.log_softmax(policy.fc2(torch.tanh(policy.fc1(obs))) * policy.sharpness, -1)
    logp = logp.gather(1, act[:, None]).squeeze(1)
    return logp, ent, reward


def main():
    torch.manual_seed(3)
    policy = Policy(5, 3, sharpness=1.0)
    optim = torch.optim.RMSprop(policy.parameters(), lr=3e-3)
    for episode in range(45):
        # the sharpness is annealed upwards, towards a greedy policy
        policy.sharpness = 1.0 * 1.25 ** episode
        logp, ent, reward = run_episode(policy)
        pg = -(logp * (reward - reward.mean())).mean()
        loss = pg - 0.01 * ent.mean()
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optim.step()
        if episode % 5 == 0:
            print("episode", episode, "loss", round(loss.item(), 5), "entropy", round(ent.mean().item(), 5))


if __name__ == "__main__":
    main()
