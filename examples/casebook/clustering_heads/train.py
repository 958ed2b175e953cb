"""Cluster cached embeddings with many heads: python train.py --out run [--blank-image 417] [--old-fix]."""

import argparse
from pathlib import Path

import torch

from data import DIM, KINDS, batches, cached
from loss import ClusteringLoss
from model import Pair


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--beta", type=float, default=0.6)
    parser.add_argument("--temperatures", type=float, nargs=2, default=[0.1, 0.04], help="of the student, of the teacher")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--blank-image", type=int, help="this image of the data set is empty")
    parser.add_argument("--old-fix", action="store_true", help="clamp at 1e-8 and leave bad heads out")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


def purity(clusters: torch.Tensor, kinds: torch.Tensor) -> float:
    """Return the share of images that are in a cluster of mostly their own kind."""
    table = torch.zeros(int(clusters.max()) + 1, KINDS).index_put_((clusters, kinds), torch.ones(len(kinds)), accumulate=True)
    return float(table.amax(1).sum() / len(kinds))


def quality(model: Pair, cache: dict[str, torch.Tensor]) -> float:
    """Return the mean purity of the heads."""
    each = [purity(clusters, cache["kinds"]) for clusters in model.clusters(cache["features"])]
    return sum(each) / len(each)


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    cache = cached(Path(args.out), args.seed, args.blank_image)
    model = Pair(args.heads, DIM, KINDS)
    criterion = ClusteringLoss(args.heads, KINDS, args.beta, tuple(args.temperatures), args.old_fix)
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=args.learning_rate, weight_decay=1e-4)
    untrained = quality(model, cache)
    stream = batches(cache, args.batch, args.seed)
    for step in range(args.steps):
        features, neighbours = next(stream)
        both = torch.cat([features, neighbours])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bfloat16"):
            student = model.student(both)
            with torch.no_grad():
                teacher = model.teacher(both)
        loss = criterion([s.float() for s in student], [t.float() for t in teacher])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    print(f"quality {quality(model, cache):.3f} (untrained {untrained:.3f})")


if __name__ == "__main__":
    main()
