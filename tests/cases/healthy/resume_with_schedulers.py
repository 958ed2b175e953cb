"""Runs are stopped and resumed in all the usual orders, with decayed rates and rates set by hand: each goes on as it was."""
import copy
import hashlib

import torch
from torch import nn
from torch.optim import lr_scheduler as sched

torch.manual_seed(8)


def make(rate):
    model = nn.Linear(5, 1)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def train(model, optimizer, scheduler, steps, by_hand=None, first=0):
    for step in range(first, first + steps):
        if by_hand is not None:
            for group in optimizer.param_groups:
                group["lr"] = by_hand(step)
        x = torch.randn(16, 5)
        loss = (model(x).squeeze(-1) - x[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(loss.item()) if isinstance(scheduler, sched.ReduceLROnPlateau) else scheduler.step()


SCHEDULES = {
    "step": lambda o: sched.StepLR(o, 3, gamma=0.3),
    "cosine": lambda o: sched.CosineAnnealingLR(o, 20),
    "warm-up": lambda o: sched.SequentialLR(o, [sched.LinearLR(o, 0.1, total_iters=4), sched.CosineAnnealingLR(o, 16)], [4]),
    "one cycle": lambda o: sched.OneCycleLR(o, max_lr=0.1, total_steps=24),
    "plateau": lambda o: sched.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}
seen = hashlib.sha256()
for name, schedule in SCHEDULES.items():
    for scheduler_first in (True, False):
        model, optimizer = make(0.05)
        scheduler = schedule(optimizer)
        train(model, optimizer, scheduler, 8)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
        model, optimizer = make(0.05)
        scheduler = schedule(optimizer) if scheduler_first else None
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        scheduler = scheduler or schedule(optimizer)
        scheduler.load_state_dict(saved[2])
        train(model, optimizer, scheduler, 8)
        seen.update(str([round(v, 5) for v in model.weight.flatten().tolist()]).encode())
        print(name, scheduler_first, round(optimizer.param_groups[0]["lr"], 6))


def decayed(step):
    return 0.05 / (1 + step)


model, optimizer = make(0.01)
train(model, optimizer, None, 6, decayed)
saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
model, optimizer = make(0.001)
model.load_state_dict(saved[0])
optimizer.load_state_dict(saved[1])
train(model, optimizer, None, 6, decayed, first=5)
seen.update(str([round(v, 5) for v in model.weight.flatten().tolist()]).encode())
print("digest", seen.hexdigest()[:16])
