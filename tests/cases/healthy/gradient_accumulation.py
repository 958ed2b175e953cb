"""Gradient accumulation over unequal micro-batches with a leftover at the end, clipping and a warm-up schedule."""
import hashlib
from itertools import islice

import torch
from torch import nn

torch.manual_seed(85)
ACCUMULATE = 4
net = nn.Sequential(nn.Linear(8, 40), nn.SiLU(), nn.LayerNorm(40), nn.Linear(40, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.05)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[5])


def stream():
    while True:
        n = int(torch.randint(1, 13, ()))
        x = torch.randn(n, 8)
        yield x, x.sort(dim=1).values


micro, running, samples = 0, 0.0, 0
for x, y in islice(stream(), 50):
    loss = nn.functional.l1_loss(net(x), y, reduction="sum") / 8
    (loss / (ACCUMULATE * 6)).backward()
    running, samples, micro = running + loss.item(), samples + len(x), micro + 1
    if micro % ACCUMULATE == 0:
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if micro % (4 * ACCUMULATE) == 0:
            print(f"update {micro // ACCUMULATE} loss {running / samples:.4f} norm {norm:.3f} lr {scheduler.get_last_lr()[0]:.5f}")
            running, samples = 0.0, 0

sha = hashlib.sha256()
for p in net.parameters():
    sha.update(p.detach().numpy().tobytes())
    sha.update(p.grad.numpy().tobytes())
    for value in optimizer.state[p].values():
        sha.update(value.numpy().tobytes())
print("digest", sha.hexdigest())
