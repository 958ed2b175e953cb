"""What a series is, told from its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Role(StrEnum):
    """What the numbers of a series mean, as far as judging them goes."""

    LOSS = "loss"
    NORM = "gradient norm"
    RATE = "learning rate"
    SCALE = "loss scale"
    TALLY = "count of nan"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Naming:
    """What a name says of its series."""

    role: Role
    validation: bool = False  # computed now and then: not a number until the first time
    summary: bool = False  # a mean over a window or the best so far: not a number while there is nothing to summarise
    main: bool = False  # the loss itself, not one of its terms
    power: bool = False  # e to the power of a loss: infinite where that is merely large

    @property
    def trained_on(self) -> bool:
        """Whether a non-finite value here reaches the weights."""
        return self.role in (Role.LOSS, Role.NORM) and not self.validation and not self.summary


_TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_LOSSES = frozenset(["losses", "nll", "ppl", "perplexity", "fvu", "elbo", "mse", "rmse", "mae", "bce", "kl", "ce", "bpb", "bpc", "objective"])
_NOT_LOSSES = frozenset({"weight", "weights", "coef", "coeff", "coefficient", "lambda", "ratio", "time"}) | {
    "threshold",
    "patience",
    "change",
    "count",
    "num",
    "scale",
    "scaler",
    "tokens",
}
_POWERS = frozenset(["ppl", "perplexity"])
_VALIDATION = frozenset(["val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout"])
_SUMMARIES = frozenset(["best", "min", "lowest", "average", "avg", "mean", "std", "median", "max", "ema", "smoothed", "smooth", "running"])
_PLAIN = frozenset(["loss", "train", "training", "step", "epoch", "lm", "total", "iter", "batch", "mini"])
_NOT_RATES = frozenset(["mult", "multiplier", "scale", "ratio", "factor", "decay", "loss"])
_COUNTS = frozenset(["iterations", "iteration", "count", "steps", "num", "number", "batches", "skipped"])


@lru_cache(maxsize=8192)
def naming(name: str) -> Naming:
    """Say what a series is.

    >>> [str(naming(n).role) for n in ("train/loss", "lossAverage", "loss_scale", "grad_2.0_norm_total", "lr-AdamW/pg1", "number of nan iterations", "acc")]
    ['loss', 'loss', 'loss scale', 'gradient norm', 'learning rate', 'count of nan', 'other']
    """
    words = [t.lower() for t in _TOKEN.findall(name)]
    known = frozenset(words)
    role = _role(known, name.lower())
    return Naming(
        role, bool(known & _VALIDATION), bool(known & _SUMMARIES) and not known >= {"max", "norm"}, role is Role.LOSS and known <= _PLAIN, bool(known & _POWERS)
    )


def _role(words: frozenset[str], name: str) -> Role:
    if "nan" in words and words & _COUNTS:
        return Role.TALLY
    if words & {"scale", "scaler", "lossscale"} and (words & {"loss", "grad", "amp", "scaler", "lossscale"} or words == {"scale"}):
        return Role.SCALE
    if words & {"norm", "gnorm", "gradnorm"} and (words & {"grad", "grads", "gradient", "gradients", "gnorm", "gradnorm", "total"} or name == "norm"):
        return Role.NORM
    if (words & {"lr", "lrs", "learningrate"} or words >= {"learning", "rate"}) and not words & _NOT_RATES:
        return Role.RATE
    if (words & _LOSSES or any(w.startswith("loss") or w.endswith("loss") for w in words)) and not words & _NOT_LOSSES:
        return Role.LOSS
    return Role.OTHER
