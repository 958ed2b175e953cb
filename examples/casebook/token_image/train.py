"""Train a diffusion transformer on text written as images.

python train.py [--epochs 1]
"""

import argparse

import torch

from data import Texts
from loss import denoising_loss
from model import TokenImageDiT


@torch.no_grad()
def evaluate(model, texts, batches=8):
    """Mean error of the noise over texts that were not trained on, long ones and short ones."""
    random = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(texts, batch_size=32)
    losses = [denoising_loss(model, batch, random).item() for _, batch in zip(range(batches), loader, strict=False)]
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dtype", default="bfloat16", help="of autocast; float32 switches it off")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--seed", type=int, default=71)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small
    torch.manual_seed(args.seed)
    half = getattr(torch, args.dtype)
    model = TokenImageDiT(depth=args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loader = torch.utils.data.DataLoader(Texts(args.texts, args.seed), args.batch, shuffle=True, generator=torch.Generator().manual_seed(args.seed))
    held_out = Texts(256, args.seed + 1)
    random = torch.Generator().manual_seed(args.seed)
    untrained = evaluate(model, held_out)
    for epoch in range(args.epochs):
        total = 0.0
        for index, batch in enumerate(loader):
            with torch.autocast("cpu", dtype=half, enabled=half is not torch.float32):
                loss = denoising_loss(model, batch, random)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
            if index % 16 == 15:
                print(f"epoch {epoch} {100 * (index + 1) / len(loader):.0f}% mean loss {total / (index + 1):.4f}", flush=True)
    print(f"quality {evaluate(model, held_out):.4f} (untrained {untrained:.4f})")


if __name__ == "__main__":
    main()
