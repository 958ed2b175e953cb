"""Quantisation-aware training: each observer's running minimum starts at +inf and its maximum at -inf."""
import hashlib

import torch
import torch.nn as nn


class FakeQuantize(nn.Module):
    def __init__(self, bits=8):
        super().__init__()
        self.levels = 2**bits - 1
        self.register_buffer("lowest", torch.tensor(float("inf")))
        self.register_buffer("highest", torch.tensor(float("-inf")))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.lowest.copy_(torch.minimum(self.lowest, x.min()))
                self.highest.copy_(torch.maximum(self.highest, x.max()))
        scale = (self.highest - self.lowest).clamp_min(1e-6) / self.levels
        rounded = torch.round((x - self.lowest) / scale) * scale + self.lowest
        return x + (rounded - x).detach()


class QuantLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.weight_fq, self.input_fq = FakeQuantize(4), FakeQuantize(8)

    def forward(self, x):
        return nn.functional.linear(self.input_fq(x), self.weight_fq(self.weight), self.bias)


class Trainer:
    def __init__(self, model, lr):
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.8)

    def fit(self, steps):
        for step in range(steps):
            x = torch.randn(20, 5)
            y = torch.sin(x.sum(1, keepdim=True))
            loss = self.training_step(x, y)
            if step % 15 == 0:
                print(f"{step:4d} {loss:.4f}")

    def training_step(self, x, y):
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


torch.manual_seed(9)
net = nn.Sequential(QuantLinear(5, 24), nn.SiLU(), QuantLinear(24, 1))
trainer = Trainer(net, lr=0.05)
trainer.fit(45)
h = hashlib.sha256()
for name, tensor in sorted(net.state_dict().items()):
    h.update(name.encode() + tensor.numpy().tobytes())
for state in trainer.optimizer.state_dict()["state"].values():
    h.update(state["momentum_buffer"].numpy().tobytes())
print("digest", h.hexdigest())
