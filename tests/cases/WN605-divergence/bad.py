"""Linear regression with a learning rate above 2/L: the error doubles and flips sign every step until its square overflows."""
import torch

torch.manual_seed(0)
n, d = 128, 6
design = torch.randn(n, d) * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 3.0])
truth = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.3])
response = design @ truth + 0.1 * torch.randn(n)

w = torch.zeros(d, requires_grad=True)
LR = 0.17

for step in range(120):
    rows = torch.randint(0, n, (64,))
    predicted = design[rows] @ w
    residual = predicted - response[rows]
    loss = residual.square().mean()  # <- WN605 loss
    (grad,) = torch.autograd.grad(loss, w)
    with torch.no_grad():
        w -= LR * grad
    if step % 12 == 0:
        print(f"step {step:3d}  loss {loss.item():.3e}  |w| {w.norm().item():.3e}")
