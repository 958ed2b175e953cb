"""A Poincare embedding of a tree, plain gradient steps: a negative sample that is the anchor itself has distance acosh(1)."""
import torch

torch.manual_seed(0)
NODES = 31
children = torch.arange(1, NODES)
parents = (children - 1) // 2
gen = torch.Generator().manual_seed(4)

points = torch.empty(NODES, 2).uniform_(-1e-1, 1e-1).requires_grad_()


def poincare_distance(u, v):
    shrink = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
    argument = 1 + 2 * (u - v).square().sum(-1) / shrink
    return torch.acosh(argument)  # <- WN501 backward


def riemannian_step(x, grad, lr):
    scale = (1 - x.square().sum(-1, keepdim=True)).square() / 4
    x -= lr * scale * grad
    norm = x.norm(dim=-1, keepdim=True)
    x *= torch.where(norm > 0.98, 0.98 / norm, torch.ones_like(norm))


for step in range(60):
    edge = torch.randint(0, NODES - 1, (2,), generator=gen)
    child, parent = children[edge], parents[edge]
    negative = torch.randint(0, NODES, (2, 2), generator=gen)
    u = points[child]
    near = poincare_distance(u, points[parent])
    far = poincare_distance(u.unsqueeze(1), points[negative])
    loss = (near + torch.logsumexp(torch.cat([-near.unsqueeze(1), -far], dim=1), dim=1)).mean()
    (grad,) = torch.autograd.grad(loss, points)
    with torch.no_grad():
        riemannian_step(points, grad, lr=0.3)
    if step % 6 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}  radius {points.detach().norm(dim=1).mean().item():.3f}")
