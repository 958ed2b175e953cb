"""Sparse regression with a bridge penalty |w|^0.5: small weights are cut to exactly 0, where the penalty is vertical."""
import torch


def make_problem(n=120, d=20):
    x = torch.randn(n, d)
    true_w = torch.zeros(d)
    true_w[:4] = torch.tensor([2.0, -1.5, 1.0, 0.7])
    return x, x @ true_w + 0.1 * torch.randn(n)


def objective(w, x, y, lam):
    fit = (x @ w - y).square().mean()
    bridge = w.abs().pow(0.5).sum()  # <- WN501 backward
    return fit + lam * bridge


def main(steps=40, lr=0.05, lam=0.02, cut=1e-2):
    torch.manual_seed(5)
    x, y = make_problem()
    w = (0.3 * torch.randn(20)).requires_grad_()
    velocity = torch.zeros_like(w)
    for step in range(steps):
        loss = objective(w, x, y, lam)
        loss.backward()
        with torch.no_grad():
            velocity.mul_(0.5).add_(w.grad)
            w.sub_(lr * velocity)
            if step >= 10:
                w[w.abs() < cut] = 0.0  # hard thresholding
            w.grad = None
        if step % 4 == 0:
            print(f"step {step:3d} objective {loss.item():.4f} zeros {(w == 0).sum().item()}")


main()
