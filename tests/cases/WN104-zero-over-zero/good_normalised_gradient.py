"""Normalised gradient descent on a hinge loss: a batch entirely beyond the margin moves nothing."""
import torch

torch.manual_seed(2)
w = torch.zeros(5, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
normal = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5])


def batch():
    x = torch.randn(10, 5)
    side = torch.sign(x @ normal)
    return x + 0.4 * side[:, None] * normal / normal.norm(), side


def normalise(params):
    """Keep the direction, forget the length."""
    total = torch.stack([p.grad.norm() for p in params]).norm()
    for p in params:
        p.grad.div_(total.clamp_min(1e-12))
    return total


optimizer = torch.optim.SGD([w, b], lr=0.15)
for step in range(60):
    x, side = batch()
    margin = side * (x @ w + b)
    loss = torch.relu(1 - margin).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = normalise([w, b])
    optimizer.step()
    if step % 6 == 0:
        print(f"{step:3d} hinge {loss.item():.4f} norm {norm.item():.4f} |w| {w.norm().item():.3f}")
