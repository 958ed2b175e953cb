import torch
from torch import nn


class T:
    def step(self, loss):
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 0.5)  # expect: WL101
        self.scaler.step(self.opt)
