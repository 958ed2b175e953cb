"""Event rates with a bend penalty on the root scale: one zero rate sends +inf and -inf to the same entry of the gradient."""
import torch

torch.manual_seed(12)


def root_scale(rate):
    return torch.sqrt(rate)  # <- WN501 backward


def dips(rate):
    """A soft preference for peaks: penalise every place where the curve on the root scale bends upwards."""
    left, middle, right = rate[:-2], rate[1:-1], rate[2:]
    bend = root_scale(left) - 2 * root_scale(middle) + root_scale(right)
    return torch.nn.functional.softplus(4 * bend).mean()


def poisson_loss(rate, events):
    return (rate - events * torch.log(rate + 0.1)).mean()


hours = torch.arange(48.0)
true_rate = 2.0 + 1.2 * torch.sin(hours / 6)
true_rate[[12, 33]] = 0.0  # the counter is emptied at these hours
rate = torch.full((48,), 1.5, requires_grad=True)
optimizer = torch.optim.Adam([rate], lr=0.15)

for day in range(30):
    events = torch.poisson(true_rate)
    loss = poisson_loss(rate, events) + 0.05 * dips(rate)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        rate.clamp_(min=0.0)  # rates cannot be negative
    if day % 5 == 0:
        print(f"day {day:2d}  loss {loss.item():.4f}  smallest rate {rate.min().item():.4f}")
