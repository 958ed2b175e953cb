"""Learning from odds: the sigmoid of a certain match has rounded to 1, so the odds p / (1 - p) divide by zero."""
import torch

torch.manual_seed(1)
n_players = 12
skill_true = torch.linspace(-3.0, 3.0, n_players)
skill = torch.zeros(n_players, requires_grad=True)
opt = torch.optim.SGD([skill], lr=3.0, momentum=0.5)


def predicted_odds(a, b):
    p = torch.sigmoid(skill[a] - skill[b])
    return p / (1 - p)  # <- WN103 loss


def play(n):
    a = torch.randint(0, n_players, (n,))
    b = (a + torch.randint(1, n_players, (n,))) % n_players
    # bookmakers quote odds, from 1:1000000000 to 1000000000:1
    quoted = torch.exp(4 * (skill_true[a] - skill_true[b])).clamp(1e-9, 1e9)
    return a, b, quoted


for day in range(50):
    a, b, quoted = play(40)
    odds = predicted_odds(a, b)
    err = (odds.log1p() - quoted.log1p()).abs()
    loss = err.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if day % 4 == 0:
        print(f"day {day} loss {loss.item():.4f} best {skill.max().item():.3f}")
