"""A trainer class in the style of torchtitan: a config, loaders that repeat, a summed loss over the tokens that count.

`--fault` gives a step in which no token counts: 0 / 0.

whynan run titan.py --fault
"""

import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.stateful import Stateful

IGNORE_INDEX = -100


@dataclass
class JobConfig:
    steps: int = 10
    batch_size: int = 4
    seq_len: int = 16
    dim: int = 32
    vocab_size: int = 64
    max_norm: float = 1.0
    bad_step: int = 6 if "--fault" in sys.argv else -1


class Loader:
    def __init__(self, config):
        self.config, self.generator = config, torch.Generator().manual_seed(0)

    def __iter__(self):
        for step in range(1, 1 << 30):
            tokens = torch.randint(self.config.vocab_size, (self.config.batch_size, self.config.seq_len + 1), generator=self.generator)
            labels = tokens[:, 1:].clone()
            if step == self.config.bad_step:
                labels[:] = IGNORE_INDEX
            yield {"input": tokens[:, :-1]}, labels


def cross_entropy_loss(pred, labels):
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORE_INDEX)


class Trainer(Stateful):
    def __init__(self, config):
        torch.manual_seed(0)
        self.config, self.step = config, 0
        self.model_parts = [nn.Sequential(nn.Embedding(config.vocab_size, config.dim), nn.RMSNorm(config.dim), nn.Linear(config.dim, config.vocab_size))]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in self.model_parts]
        self.lr_schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 - s / config.steps) for o in self.optimizers]
        self.dataloader = Loader(config)

    def forward_backward_step(self, inputs, labels):
        pred = self.model_parts[0](inputs["input"])
        loss = cross_entropy_loss(pred, labels)
        valid_tokens = (labels != IGNORE_INDEX).sum()
        loss = loss / valid_tokens
        del pred
        loss.backward()
        return loss

    def train_step(self, iterator):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        inputs, labels = next(iterator)
        loss = self.forward_backward_step(inputs, labels)
        torch.nn.utils.clip_grad_norm_([p for m in self.model_parts for p in m.parameters()], self.config.max_norm, foreach=True)
        for optimizer, scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        return loss.detach()

    def train(self):
        iterator = iter(self.dataloader)
        while self.step < self.config.steps:
            self.step += 1
            loss = self.train_step(iterator)
        print(f"loss {loss.item()!r}")

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


if __name__ == "__main__":
    Trainer(JobConfig()).train()
