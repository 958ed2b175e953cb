"""Item response theory with the library's sigmoid: an extreme ability is just a probability of 1."""
import torch

torch.manual_seed(197)

N_PUPILS, N_ITEMS = 60, 20
ability = 1.5 * torch.randn(N_PUPILS)
difficulty = torch.linspace(-2, 2, N_ITEMS)
answers = (torch.rand(N_PUPILS, N_ITEMS) < torch.sigmoid(ability[:, None] - difficulty)).float()

# start from last year's standardised scores; one school sent raw points
start = ability + torch.randn(N_PUPILS)
start[46] = 97.0
theta = start.clone().requires_grad_()
b = torch.zeros(N_ITEMS, requires_grad=True)
opt = torch.optim.ASGD([theta, b], lr=0.5)


def p_correct(x):
    return torch.sigmoid(x)


for r, pupils in enumerate(torch.arange(N_PUPILS).split(4)):
    for sweep in range(2):
        p = p_correct(theta[pupils, None] - b)
        loss = (answers[pupils] - p).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"class {r:2d} brier {loss.item():.4f}")
