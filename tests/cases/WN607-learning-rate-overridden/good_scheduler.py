"""A second run halves the base rate in its settings and gives the resumed scheduler that base rate too."""
import copy

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(5)


class Regressor(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x).squeeze(-1)


class Trainer:
    def __init__(self, settings):
        self.model = Regressor()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings["lr"])
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 5))

    def state(self):
        return copy.deepcopy({"model": self.model.state_dict(), "scheduler": self.scheduler.state_dict()})

    def resume(self, state):
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scheduler.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]

    def run(self, steps):
        for _ in range(steps):
            x = torch.randn(24, 6)
            loss = (self.model(x) - x.sum(1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
        return loss.item()


first = Trainer({"lr": 0.01})
print("first run", round(first.run(10), 3))
second = Trainer({"lr": 0.005})
second.resume(first.state())
print("second run", round(second.run(10), 3))
