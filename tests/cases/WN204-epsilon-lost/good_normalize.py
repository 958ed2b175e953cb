"""Half-precision contrastive learning: the norm is guarded with 1e-4, which float16 can represent."""
import torch
from torch import nn

torch.manual_seed(151)


def unit(v):
    return v / (v.norm(dim=-1, keepdim=True) + 1e-4)


def bag_of_words(n, empty=False):
    docs = (torch.rand(n, 30) < 0.2).half()
    docs[:, 0] = 1.0
    if empty:
        docs[2] = 0.0  # only stop words in this one
    return docs


encoder = nn.Linear(30, 16, bias=False).half()
params = [p for p in encoder.parameters()]
for it in range(25):
    view = bag_of_words(10, empty=(it == 15))
    drop = (torch.rand_like(view) > 0.1).half()
    a, b = unit(encoder(view)), unit(encoder(view * drop))
    logits = (a @ b.T).float() / 0.2
    loss = nn.functional.cross_entropy(logits, torch.arange(10))
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, g in zip(params, grads):
            p -= 0.05 * g
    if it % 3 == 0:
        print(f"it {it:2d} info-nce {loss.item():.4f}")
