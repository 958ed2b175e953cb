"""Train the plate reader: python train.py --out run [--epochs 10] [--learning-rate 1e-3] [--resume run/epoch-04.pt]."""

import argparse
import json
from pathlib import Path

import torch

from data import Plates
from loss import ctc, wrong
from model import PlateReader


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--until", type=int, help="stop after this epoch")
    parser.add_argument("--batches", type=int, default=24, help="in an epoch")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--resume")
    return parser.parse_args()


@torch.no_grad()
def validate(model: PlateReader) -> float:
    """Return the share of characters read wrongly; a model whose answers are not numbers has read nothing."""
    model.eval()
    pictures, targets, lengths = Plates(seed=99).batch(96)
    logits, _ = model(pictures)
    model.train()
    return wrong(logits, targets, lengths) if torch.isfinite(logits).all() else float("nan")


def main():
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    plates = Plates(args.seed)
    model = PlateReader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.learning_rate, total_steps=args.epochs * args.batches)
    scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "float16", init_scale=1024.0)
    untrained, first = validate(model), 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        scaler.load_state_dict(saved["scaler"])
        first = saved["epoch"] + 1
    log = open(out / "log.jsonl", "a" if args.resume else "w")
    for epoch in range(first, args.epochs if args.until is None else args.until + 1):
        for batch in range(args.batches):
            pictures, targets, lengths = plates.batch(16)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=getattr(torch, args.dtype), enabled=args.dtype != "float32"):
                logits, mixed = model(pictures)
            loss = ctc(logits, targets, lengths) + 0.01 * mixed
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            record = {"step": epoch * args.batches + batch, "loss": loss.item(), "grad_norm": norm.item(), "scale": scaler.get_scale()}
            log.write(json.dumps(record | {"lr": scheduler.get_last_lr()[0]}) + "\n")
        log.flush()
        error = validate(model)
        print(f"epoch {epoch} loss {loss.item():.3f} wrong {error:.3f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state | {"scaler": scaler.state_dict(), "epoch": epoch, "wrong": error}, out / f"epoch-{epoch:02d}.pt")
    print(f"quality {validate(model):.3f} (untrained {untrained:.3f})")


if __name__ == "__main__":
    main()
