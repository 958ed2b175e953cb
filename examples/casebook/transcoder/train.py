"""Train a sparse transcoder on the activations of one block of a masked diffusion language model.

python train.py [--steps 60]           torchrun --nproc-per-node 4 train.py
TRACKER=offline writes tracker/rank-N.jsonl as well.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import add_noise, batches
from model import DiffusionLM, SparseTranscoder

CONTEXT, BATCH, VOCABULARY, WIDTH = 64, 1, 128, 64


class SignSGD(torch.optim.Optimizer):
    """Step by the sign of the gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


class Tracker:
    """Prints, and keeps an offline record if the environment asks for one."""

    def __init__(self, rank):
        self.rank, self.file = rank, None
        if os.environ.get("TRACKER") == "offline":
            Path("tracker").mkdir(exist_ok=True)
            self.file = open(f"tracker/rank-{rank}.jsonl", "w")

    def log(self, step, values):
        print(f"rank {self.rank} step {step} " + " ".join(f"{k} {v:.4f}" for k, v in values.items()), flush=True)
        if self.file:
            print(json.dumps({"step": step, **values}), file=self.file, flush=True)


class Trainer:
    def __init__(self, args, rank, world):
        self.args, self.rank, self.world = args, rank, world
        torch.manual_seed(args.seed)
        self.lm = DiffusionLM(VOCABULARY, WIDTH, context=CONTEXT).to(getattr(torch, args.dtype)).requires_grad_(False)
        self.coders = {name: SparseTranscoder(WIDTH) for name in args.hookpoints}
        self.wrapped = {name: DistributedDataParallel(c) if world > 1 else c for name, c in self.coders.items()}
        weights = [p for coder in self.coders.values() for p in coder.parameters()]
        kinds = {"adam": torch.optim.Adam, "sign": SignSGD}
        self.optimizer = kinds[args.optimizer](weights, lr=args.lr)
        self.fvu = dict.fromkeys(args.hookpoints, 0.0)
        self.training = True

    def hook(self, name):
        """Train the coder of a block while the block runs."""

        def on_forward(block, inputs, output):
            x, y = inputs[0].flatten(0, 1), output.flatten(0, 1)
            if not self.training:
                self.fvu[name] += self.coders[name](x, y).item()
                return
            with torch.enable_grad():
                fvu = self.wrapped[name](x, y)
                fvu.div(self.args.accumulate).backward()
            self.fvu[name] += fvu.item() / self.args.accumulate

        return on_forward

    def attach(self):
        for name in self.args.hookpoints:
            self.lm.get_submodule(name).register_forward_hook(self.hook(name))

    @torch.no_grad()
    def evaluate(self, texts=24):
        """Mean error over texts with half of the tokens masked."""
        self.training, before = False, dict(self.fvu)
        self.fvu = dict.fromkeys(self.fvu, 0.0)
        random = torch.Generator().manual_seed(10_000)
        for _, tokens in zip(range(texts), batches(VOCABULARY, CONTEXT, BATCH, seed=10_000), strict=False):
            self.lm(torch.where(torch.rand(tokens.shape, generator=random) < 0.5, VOCABULARY, tokens))
        errors = [total / texts for total in self.fvu.values()]
        self.training, self.fvu = True, before
        return sum(errors) / len(errors)

    def train(self, tracker):
        source = batches(VOCABULARY, CONTEXT, BATCH, self.args.seed, self.rank, self.world)
        random = torch.Generator().manual_seed(self.args.seed * 100 + self.rank)
        for step in range(self.args.steps):
            for _ in range(self.args.accumulate):
                with torch.no_grad():
                    self.lm(add_noise(next(source), VOCABULARY, random))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % self.args.log_every == 0:
                tracker.log(step, {f"fvu/{name}": value for name, value in self.fvu.items()})
            self.fvu = dict.fromkeys(self.fvu, 0.0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=16)
    parser.add_argument("--hookpoints", nargs="+", default=["transformer.blocks.0"])
    parser.add_argument("--dtype", default="bfloat16", help="of the language model")
    parser.add_argument("--optimizer", choices=["adam", "sign"], default="adam")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    trainer = Trainer(args, rank, world)
    trainer.attach()
    untrained = trainer.evaluate()
    trainer.train(Tracker(rank))
    if rank == 0:
        print(f"quality {trainer.evaluate():.4f} (untrained {untrained:.4f})")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
