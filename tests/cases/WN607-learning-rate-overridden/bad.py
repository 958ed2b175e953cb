"""Fine-tuning at a low rate from a checkpoint of pre-training: the optimizer's state brings the high rate back."""
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)


def make_model():
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))


def pretrain(steps=15):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(32, 12)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


checkpoint = torch.load(pretrain(), weights_only=True)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])  # <- WN607 optimizer

for step in range(12):
    x = torch.randn(16, 12)
    loss = F.cross_entropy(model(x), x[:, 3:6].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print("step", step, "loss", f"{loss.item():.4f}")
