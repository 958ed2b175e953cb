"""Logs of trainings, written line by line as the usual libraries and loops write them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

NAN, INF = math.nan, math.inf


def falling(step: int, chance: random.Random, low: float = 2.0, high: float = 10.0, slow: float = 300.0, noise: float = 0.05) -> float:
    """A loss that falls with the usual noise."""
    return (low + (high - low) * math.exp(-step / slow)) * math.exp(chance.gauss(0, noise))


def cosine(step: int, peak: float = 3e-4, warm: int = 100, end: int = 1000) -> float:
    """Warm-up, then half a cosine."""
    return peak * step / warm if step < warm else peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (end - warm)))


def json_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def _transformer(folder: Path, chance: random.Random) -> Path:
    rows = [
        {"step": s, "loss": falling(s, chance), "grad_norm": math.exp(chance.gauss(0, 0.5)), "lr": cosine(s), "scale": 65536.0 * 2 ** (s // 2000)}
        for s in range(1000)
    ]
    return json_lines(folder / "metrics.jsonl", rows)


def _cyclical(folder: Path, chance: random.Random) -> Path:
    """Triangular rates, and a loss that waves with them."""
    wave = [abs((s % 200) - 100) / 100 for s in range(1200)]
    return json_lines(
        folder / "clr.jsonl", [{"step": s, "loss": falling(s, chance) * (1 + 0.2 * (1 - w)), "lr": 1e-4 + 9e-4 * (1 - w)} for s, w in enumerate(wave)]
    )


def _restarts(folder: Path, chance: random.Random) -> Path:
    """A cosine that starts again at its peak."""
    rows = [{"step": s, "train/loss": falling(s, chance), "train/lr": cosine(s % 250, warm=1, end=250)} for s in range(1000)]
    return json_lines(folder / "sgdr.jsonl", rows)


def _lightning(folder: Path, chance: random.Random) -> Path:
    """Sparse columns: validation in rows of its own."""
    rows = ["epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_acc,val_loss"]
    for s in range(49, 3000, 50):
        rows.append(f"{s // 300},{cosine(s, end=3000)},{s},,{falling(s, chance)},,")
        if s % 300 == 299:
            rows.append(f"{s // 300},,{s},,,{1 - math.exp(-s / 500)},{falling(s, chance)}")
            rows.append(f"{s // 300},,{s},{falling(s, chance, noise=0.01)},,,")
    return text(folder / "metrics.csv", rows)


def _saturated(folder: Path, chance: random.Random) -> Path:
    """An easy task: accuracy 1.0, a loss that fades to what four digits can show."""
    lines = [f"Epoch {e}/300 - loss: {2 * math.exp(-e / 12) * math.exp(chance.gauss(0, 0.1)):.4f} - acc: {min(1.0, 0.5 + e / 40):.4f}" for e in range(1, 301)]
    return text(folder / "easy.log", lines)


def _gan(folder: Path, chance: random.Random) -> Path:
    """A discriminator that wins for a while: its loss spans many powers of ten."""
    rows = []
    for s in range(2000):
        winning = 400 < s % 900 < 600
        d = 10 ** chance.uniform(-6, -2) if winning else math.exp(chance.gauss(-0.4, 0.5))
        rows.append({"iter": s, "d_loss": d, "g_loss": math.exp(chance.gauss(2.5 if winning else 0.5, 0.5))})
    return json_lines(folder / "gan.jsonl", rows)


def _reinforced(folder: Path, chance: random.Random) -> Path:
    """Returns that are negative and noisy, policy losses around zero, nan until the first episode ends."""
    rows: list[dict[str, object]] = []
    for s in range(800):
        mean: object = NAN if s < 12 else -200 + s / 5 + chance.gauss(0, 60)
        rows.append(
            {
                "global_step": 2048 * s,
                "ep_rew_mean": mean,
                "policy_loss": chance.gauss(0, 0.02),
                "value_loss": math.exp(chance.gauss(3, 1.2)),
                "approx_kl": abs(chance.gauss(0, 0.01)),
            }
        )
    return json_lines(folder / "ppo.jsonl", rows)


def _policy_zero(folder: Path, chance: random.Random) -> Path:
    """A policy loss that is 0.0 by construction while the gradient is not."""
    return text(
        folder / "grpo.log",
        [
            str(
                {
                    "loss": 0.0,
                    "grad_norm": round(chance.uniform(0.1, 0.4), 6),
                    "learning_rate": 1e-6,
                    "reward": round(chance.gauss(0, 1), 4),
                    "epoch": round(s / 400, 2),
                }
            )
            for s in range(400)
        ],
    )


def _scaler(folder: Path, chance: random.Random) -> Path:
    """A gradient scaler: it settles in the first steps, and skips one now and then."""
    rows, scale = [], 2.0**20
    for s in range(3000):
        skipped = s < 5 or s in (700, 1900, 2611)
        scale = scale / 2 if skipped else scale * 2 if s % 500 == 499 else scale
        rows.append(
            {"step": s, "loss": falling(s, chance), "grad_norm": (INF if s % 2 else NAN) if skipped else math.exp(chance.gauss(0, 0.4)), "loss_scale": scale}
        )
    return json_lines(folder / "amp.jsonl", rows)


def _not_yet(folder: Path, chance: random.Random) -> Path:
    """Validation that has not happened, a best value that starts at infinity, perplexity that overflows only as a summary."""
    rows: list[dict[str, object]] = []
    val, best = NAN, INF
    for s in range(500):
        if s % 100 == 99:
            val = falling(s, chance)
            best = min(best, val)
        rows.append({"step": s, "loss": falling(s, chance), "val_loss": val, "best_loss": best})
    return json_lines(folder / "best.jsonl", rows)


def _missing(folder: Path, chance: random.Random) -> Path:
    """A table in which nan stands for no value."""
    rows = ["step;train_loss;val_loss"] + [f"{s};{falling(s, chance):.5f};{falling(s, chance) if s % 50 == 0 else 'nan'}" for s in range(600)]
    return text(folder / "frame.csv", rows)


def _bars(folder: Path, chance: random.Random) -> Path:
    """tqdm, drawn over itself, three epochs, with the loss of the step before shown first."""
    out, shown = "", 5.0
    for epoch in range(3):
        for n in range(1, 201):
            for _ in range(2):
                out += f"\rEpoch {epoch}: {n // 2:3d}%|{'#' * (n // 20):<10}| {n}/200 [00:{n % 60:02d}<01:40,  4.97it/s, v_num=7, loss={shown:.3g}]"
                shown = falling(200 * epoch + n, chance)
        out += "\n"
    path = folder / "bars.log"
    path.write_text(out)
    return path


def _megatron(folder: Path, chance: random.Random) -> Path:
    form = (
        " iteration {s:>8}/    5000 | consumed samples: {c:>12} | elapsed time per iteration (ms): 512.1 | learning rate: {lr:.3E} | global batch size:   512"
        " | lm loss: {loss:.6E} | loss scale: 4096.0 | grad norm: {norm:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    return text(
        folder / "megatron.log",
        [form.format(s=s, c=512 * s, lr=cosine(s, end=5000), loss=falling(s, chance), norm=math.exp(chance.gauss(0, 0.3))) for s in range(1, 600)],
    )


def _timm(folder: Path, chance: random.Random) -> Path:
    lines = []
    for epoch in range(4):
        for n in range(0, 1251, 50):
            loss = falling(1251 * epoch + n, chance, low=4, high=7, slow=3000)
            rate = 1e-3 * (epoch + 1) / 4
            share = f"[{n:>4d}/1251 ({100 * n // 1251:>3}%)]"
            lines.append(f"Train: {epoch} {share}  Loss: {loss:.3g} ({loss:.4g})  Time: 0.541s, 1890.12/s  LR: {rate:.3e}  Data: 0.010 (0.011)")
        lines += [
            f"Test: [{n:>4d}/97]  Time: 0.112 (0.211)  Loss: {falling(epoch, chance):>7.4f} (6.1)  Acc@1: {chance.uniform(0, 80):>7.4f}" for n in (0, 50, 97)
        ]
    return text(folder / "timm.log", lines)


def _nano(folder: Path, chance: random.Random) -> Path:
    lines = ["found vocab_size = 50304 (inside data/meta.pkl)", "number of parameters: 124.44M", "using fused AdamW: True"]
    for s in range(0, 3000, 10):
        if s % 500 == 0:
            lines.append(f"step {s}: train loss {falling(s, chance):.4f}, val loss {falling(s, chance):.4f}")
        lines.append(f"iter {s}: loss {falling(s, chance):.4f}, time {chance.uniform(400, 600):.2f}ms, mfu {chance.uniform(-100, 40):.2f}%")
    return text(folder / "nano.log", lines)


def _steps_down(folder: Path, chance: random.Random) -> Path:
    """A rate that falls by ten, and a loss that falls with it."""
    return json_lines(
        folder / "resnet.jsonl",
        [{"epoch": e, "train": {"loss": falling(e, chance, slow=20) / (1 + e // 30), "top1": min(76.0, e)}, "lr": 0.1 ** (1 + e // 30)} for e in range(90)],
    )


def _spiky(folder: Path, chance: random.Random) -> Path:
    """A large language model with a few spikes that it survives."""
    rows = [
        {
            "step": s,
            "loss": falling(s, chance, noise=0.01) * (1.8 if s in (400, 401, 777) else 1.0),
            "grad_norm": math.exp(chance.gauss(-1, 0.3)) * (20 if s in (400, 777) else 1),
        }
        for s in range(1500)
    ]
    return json_lines(folder / "spiky.jsonl", rows)


def _converged(folder: Path, chance: random.Random) -> Path:
    """Full-batch training that comes to rest: the last losses are equal to the last bit of float32."""
    loss, rows = 1.0, []
    for s in range(600):
        loss = 0.25 + 0.75 * 0.9**s
        rows.append({"step": s, "loss": float(f"{loss:.8g}")})
    return json_lines(folder / "rest.jsonl", rows)


def _classes(folder: Path, chance: random.Random) -> Path:
    """Segmentation: a class that no picture shows has no score."""
    rows = [
        {
            "epoch": e,
            "loss": falling(e, chance, slow=10),
            "mIoU": min(0.7, e / 50),
            "IoU/road": 0.9,
            "IoU/train": NAN,
            "IoU/bus": NAN if chance.random() < 0.3 else 0.2,
        }
        for e in range(60)
    ]
    return json_lines(folder / "classes.jsonl", rows)


def _ranks(folder: Path, chance: random.Random) -> Path:
    """Four ranks write the same line."""
    lines = []
    for s in range(300):
        loss = falling(s, chance)
        lines += [f"[rank{r}]: 2024-05-01 10:00:{s % 60:02d},123 INFO step: {s} loss: {loss:.4f} lr: {cosine(s):.2e}" for r in range(4)]
    return text(folder / "ranks.log", lines)


MAKERS = (_transformer, _cyclical, _restarts, _lightning, _saturated, _gan, _reinforced, _policy_zero, _scaler, _not_yet)
MORE_MAKERS = (_missing, _bars, _megatron, _timm, _nano, _steps_down, _spiky, _converged, _classes, _ranks)
HEALTHY: dict[str, Callable[[Path, random.Random], Path]] = {maker.__name__.strip("_"): maker for maker in (*MAKERS, *MORE_MAKERS)}
