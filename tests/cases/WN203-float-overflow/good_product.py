"""Trajectory importance sampling: the log-ratios are summed and the weights normalised by a softmax."""
import torch

torch.manual_seed(131)
N_STATES, N_ACTIONS = 6, 3
theta = torch.zeros(N_STATES, N_ACTIONS, requires_grad=True)
behaviour = torch.softmax(2.0 * torch.randn(N_STATES, N_ACTIONS), dim=1)


def episode(horizon, batch=8, rare=False):
    s = torch.randint(0, N_STATES, (batch, horizon))
    a = torch.multinomial(behaviour[s].reshape(-1, N_ACTIONS), 1).reshape(batch, horizon)
    if rare:
        a[0] = behaviour[s[0]].argmin(dim=1)  # an exploring tester pressed all the rare buttons
    reward = (a == s % N_ACTIONS).float().mean(dim=1)
    return s, a, reward


def objective(s, a, reward):
    log_pi = theta.log_softmax(dim=1)[s, a]
    log_ratio = (log_pi - behaviour[s, a].log()).sum(dim=1)
    weight = torch.softmax(log_ratio, dim=0)
    return -(weight * (reward - 0.3)).sum()


lr = 0.1
for k in range(24):
    s, a, reward = episode(horizon=5 if k < 16 else 90, rare=(k == 16))
    loss = objective(s, a, reward)
    loss.backward()
    with torch.no_grad():
        theta -= lr * theta.grad
    theta.grad = None
    if k % 2 == 0:
        print(k, "objective", loss.item())
