"""Trajectory importance sampling: the product of many likelihood ratios along a long episode leaves float32."""
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
    pi = theta.softmax(dim=1)[s, a]
    step_ratio = pi / behaviour[s, a]
    weight = step_ratio.prod(dim=1)  # <- WN203 loss
    weight = weight / (1 + weight.detach().mean())
    return -(weight * (reward - 0.3)).mean()


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
