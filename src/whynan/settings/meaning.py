"""What a setting means, told from its name and the sections around it."""

from __future__ import annotations

import re
from enum import StrEnum

from whynan.forensics.logs.names import Role, naming
from whynan.settings.layout import Setting


class Meaning(StrEnum):
    """The settings that decide whether a training stays finite."""

    RATE = "learning rate"
    CLIP = "clipping by norm"
    WARMUP_STEPS = "warm-up in steps"
    WARMUP_RATIO = "warm-up as a part of the steps"
    ACCUMULATION = "accumulation"
    BATCH = "batch size"
    STEPS = "steps"
    DTYPE = "number type"
    EPS = "eps of the optimizer"
    OPTIMIZER = "optimizer"
    WEIGHT = "loss weight"


_TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_NOT_THE_RATE = frozenset(
    ["min", "minimum", "final", "end", "warmup", "scheduler", "schedule", "policy", "type", "gamma", "start", "init", "critic", "disc", "d"]
)
_CLIPS = frozenset(["clip", "clipping", "gradclip", "clipnorm"])
_NOT_A_NORM = frozenset(["algorithm", "type", "mode", "value", "range", "eps", "epsilon", "ratio", "sample", "skip", "by"])
_PARTS = frozenset(["ratio", "fraction", "frac", "pct", "percent", "percentage", "proportion"])
_NOT_A_WARMUP = frozenset(["epoch", "epochs", "lr", "factor", "init", "type", "momentum", "bias", "method", "start", "mode"])
_TOTALS = frozenset(["max", "total", "num", "n", "train", "training"])
_WEIGHTS = frozenset(["weight", "lambda", "coef", "coeff", "coefficient"])


def words_of(name: str) -> tuple[str, ...]:
    """Split a name into words.

    >>> words_of("gradient_clip_val"), words_of("maxGradNorm")
    (('gradient', 'clip', 'val'), ('max', 'grad', 'norm'))
    """
    return tuple(t.lower() for t in _TOKEN.findall(name))


def meaning_of(setting: Setting) -> Meaning | None:
    """Say what a setting decides; None where it is none of ours.

    >>> [str(meaning_of(Setting((), k, "1", 0, 0, 1))) for k in ("max_lr", "max_grad_norm", "num_warmup_steps", "clip_range")]
    ['learning rate', 'clipping by norm', 'warm-up in steps', 'None']
    """
    inside = frozenset(w for s in setting.sections for w in words_of(s))
    return meaning_of_name(setting.key, inside)


def meaning_of_name(key: str, inside: frozenset[str] = frozenset()) -> Meaning | None:
    """Say what a name means, by itself and by the words of the sections it stands in."""
    words = frozenset(words_of(key))
    if naming(key).role is Role.RATE and not words & _NOT_THE_RATE:
        return Meaning.RATE
    if _is_clip(words, inside):
        return Meaning.CLIP
    if "warmup" in words or {"warm", "up"} <= words or ({"pct", "start"} <= words):
        return _warmup(words)
    if words & {"accum", "accumulate", "accumulation"} and not words & {"dtype", "type"}:
        return Meaning.ACCUMULATION
    return _of_the_rest(key.lower(), words, inside)


def _is_clip(words: frozenset[str], inside: frozenset[str]) -> bool:
    if words & _NOT_A_NORM or "weight" in words:
        return False
    about_gradients = bool((words | inside) & {"grad", "grads", "gradient", "gradients", "norm", "gradclip", "optimizer", "optim", "clipnorm"})
    return words >= {"max", "grad", "norm"} or bool(words & _CLIPS and about_gradients)


def _warmup(words: frozenset[str]) -> Meaning | None:
    if words & _PARTS:
        return Meaning.WARMUP_RATIO
    return None if words & _NOT_A_WARMUP else Meaning.WARMUP_STEPS


def _of_the_rest(key: str, words: frozenset[str], inside: frozenset[str]) -> Meaning | None:
    if "batch" in words and words <= {"batch", "size", "per", "device", "train", "micro", "mini", "gpu", "local"}:
        return Meaning.BATCH
    if key in ("steps", "iterations", "iters") or (words & {"steps", "iters", "iterations"} and words <= _TOTALS | {"steps", "iters", "iterations"}):
        return Meaning.STEPS
    if words & {"dtype", "precision", "fp", "bf", "half"}:
        return Meaning.DTYPE
    if words & {"eps", "epsilon"} and (words | inside) & {"adam", "adamw", "optim", "optimizer", "opt"}:
        return Meaning.EPS
    if words & {"optim", "optimizer", "opt"} or (words & {"name", "type", "target"} and inside & {"optim", "optimizer", "opt"}):
        return Meaning.OPTIMIZER
    is_weight = words & (_WEIGHTS | {"w"})
    return Meaning.WEIGHT if is_weight and "decay" not in words else None
