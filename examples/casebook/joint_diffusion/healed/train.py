"""Train the joint diffusion model: python train.py --out run [--dtype float16] [--resume run/step-120.pt]."""

import argparse
import json
import math
from pathlib import Path

import torch
import yaml

from data import Pairs, noised
from loss import latent_loss, text_loss
from model import JointDiffusion


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(Path(__file__).with_name("config.yaml")))
    parser.add_argument("--out", default="run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--resume")
    return parser.parse_args()


def cosine(warmup: int, steps: int):
    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (steps - warmup))))

    return factor


def losses(model, text, latents, generator, weights):
    words, noisy, t, masked = noised(text, latents, generator)
    logits, prediction = model(words, noisy, t)
    of_text = text_loss(logits, text, masked)
    of_latents = latent_loss(prediction, latents)
    return weights["text_weight"] * of_text + weights["latent_weight"] * of_latents, of_text, of_latents


@torch.no_grad()
def validate(model, weights) -> float:
    text, latents = Pairs(seed=99).batch(256)
    return float(losses(model, text, latents, torch.Generator().manual_seed(99), weights)[0])


def main():
    args = arguments()
    config = yaml.safe_load(Path(args.config).read_text())
    settings, weights = config["training"], config["loss"]
    steps, dtype = args.steps or settings["steps"], args.dtype or settings["dtype"]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    pairs, generator = Pairs(args.seed), torch.Generator().manual_seed(args.seed)
    model = JointDiffusion(**config["model"]).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(settings["warmup_steps"], steps))
    untrained, start = validate(model, weights), 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        start = saved["step"]
    log = open(out / "training_log.jsonl", "a" if args.resume else "w")
    for step in range(start, steps):
        text, latents = pairs.batch(settings["batch_size"])
        loss, of_text, of_latents = losses(model, text, latents, generator, weights)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad_norm"])
        if torch.isnan(norm):
            print(f"warning: NaN gradient at step {step}, zeroing", flush=True)
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        model.project()
        scheduler.step()
        record = {"step": step, "loss": loss.item(), "text_loss": of_text.item(), "latent_loss": of_latents.item()}
        log.write(json.dumps(record | {"grad_norm": norm.item(), "lr": scheduler.get_last_lr()[0]}) + "\n")
        log.flush()
        if (step + 1) % config["log"]["validate_every"] == 0:
            print(f"step {step + 1} validation {validate(model, weights):.3f}", flush=True)
        if (step + 1) % config["log"]["checkpoint_every"] == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save(state | {"step": step + 1}, out / f"step-{step + 1:06d}.pt")
    print(f"quality {validate(model, weights):.3f} (untrained {untrained:.3f})")


if __name__ == "__main__":
    main()
