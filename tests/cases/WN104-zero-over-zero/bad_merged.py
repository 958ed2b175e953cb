"""Two fine-tuned models are merged with Fisher weights before more training; where neither saw a gradient the weight is 0/0."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)


def make_task(sign, n=64):
    x = torch.randn(n, 10)
    x[:, 7] = 0.0
    return x, (sign * x[:, 0] + x[:, 1]).gt(0).float()


def finetune(base, task):
    model = copy.deepcopy(base)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    fisher = {k: torch.zeros_like(p) for k, p in model.named_parameters()}
    x, y = task
    for _ in range(5):
        opt.zero_grad()
        F.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
        for k, p in model.named_parameters():
            fisher[k] += p.grad.square()
        opt.step()
    return dict(model.named_parameters()), fisher


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 16)
        self.outer = nn.Linear(16, 1)

    def forward(self, x):
        h = self.inner(x)
        return self.outer(torch.tanh(h))


base = Net()
(w1, f1), (w2, f2) = (finetune(base, make_task(s)) for s in (+1, -1))
merged = Net()
with torch.no_grad():
    for name, p in merged.named_parameters():
        total = f1[name] + f2[name]
        p.copy_((f1[name] * w1[name] + f2[name] * w2[name]) / total)  # <- WN104 parameter

optimizer = torch.optim.Adam(merged.parameters(), lr=3e-3)
for epoch in range(12):
    x = torch.randn(32, 10)
    y = (x[:, 0] + x[:, 1] + x[:, 7]).gt(0).float()
    loss = F.binary_cross_entropy_with_logits(merged(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 3 == 0:
        print("epoch", epoch, "loss", loss.item())
