"""Resuming from a checkpoint that stored the momentum in bfloat16, whose range is that of float32."""
import os
import tempfile

import torch
from torch import nn

torch.manual_seed(19)
x_all = torch.rand(200, 3) * torch.tensor([1.0, 50.0, 900.0])
y_all = (x_all @ torch.tensor([[3.0], [0.2], [0.05]])) * 40 + torch.randn(200, 1)


def build():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9)


def train(model, optimizer, steps, tag):
    for step in range(steps):
        rows = torch.randint(0, 200, (25,))
        loss = nn.functional.mse_loss(model(x_all[rows]), y_all[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(tag, step, loss.item())


def shrink(tree):
    if torch.is_tensor(tree):
        return tree.bfloat16()
    if isinstance(tree, dict):
        return {k: shrink(v) for k, v in tree.items()}
    return tree


model, optimizer = build()
train(model, optimizer, 15, "first run")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "last.pt")
    state = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": {**state, "state": shrink(state["state"])}}, path)
    checkpoint = torch.load(path, weights_only=True)

model, optimizer = build()
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
train(model, optimizer, 15, "resumed")
