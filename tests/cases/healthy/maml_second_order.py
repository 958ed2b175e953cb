"""MAML on sine waves: the outer gradient runs through the inner gradient (create_graph=True)."""
import hashlib

import torch
import torch.nn.functional as F

torch.manual_seed(99)


def initial(width=20):
    shapes = [(width, 1), (width,), (width, width), (width,), (1, width), (1,)]
    return [(torch.randn(s) * (0.5 if len(s) == 1 else (1 / s[1]) ** 0.5)).requires_grad_() for s in shapes]


def net(x, p):
    h = torch.tanh(F.linear(x, p[0], p[1]))
    h = torch.tanh(F.linear(h, p[2], p[3]))
    return F.linear(h, p[4], p[5])


def task():
    amplitude, phase = 0.5 + 1.5 * torch.rand(()), 3.1 * torch.rand(())

    def draw(n):
        x = torch.rand(n, 1) * 8 - 4
        return x, amplitude * torch.sin(x + phase)

    return draw


meta = initial()
outer = torch.optim.Adam(meta, lr=3e-3)
for iteration in range(20):
    outer.zero_grad()
    total = 0.0
    for _ in range(4):
        draw = task()
        x, y = draw(10)
        fast = meta
        for _ in range(2):
            inner_loss = F.mse_loss(net(x, fast), y)
            grads = torch.autograd.grad(inner_loss, fast, create_graph=True)
            fast = [w - 0.05 * g for w, g in zip(fast, grads)]
        x, y = draw(10)
        total = total + F.mse_loss(net(x, fast), y)
    (total / 4).backward()
    outer.step()
    if iteration % 5 == 0:
        print(f"iteration {iteration} after adaptation {total.item() / 4:.4f}")

sha = hashlib.sha256()
for w in meta:
    sha.update(w.detach().numpy().tobytes() + outer.state[w]["exp_avg"].numpy().tobytes() + outer.state[w]["exp_avg_sq"].numpy().tobytes())
print("digest", sha.hexdigest())
