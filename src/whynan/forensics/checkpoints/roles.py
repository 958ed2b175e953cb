"""What a tensor of a checkpoint is for, as far as its name tells: it decides which values are wrong in it."""

from __future__ import annotations

import re
from collections.abc import Container
from enum import StrEnum
from functools import lru_cache

from whynan.records import TensorStats


class Role(StrEnum):
    """What a tensor is for."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    MOMENT = "optimizer state"
    COUNTER = "counter"
    ASIDE = "aside"  # random states, what callbacks and loops remember: not part of the model


_SQUARES = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "square_avg", "acc_delta", "row_var", "col_var", "second_moment"}
)
_MOMENTS = _SQUARES | {"exp_avg", "grad_avg", "momentum_buffer"}
_SQUARES_IN_OPTIMIZER = frozenset({"sum", "variance"})  # names too common to say anything elsewhere
_SQUARES_BESIDE = {"v": "m", "nu": "mu", "vt": "mt"}  # alone, `v` may as well be a velocity
STEP_NAMES = ("global_step", "global_steps", "step", "steps", "num_updates", "iteration", "iter", "it", "iter_num", "n_iter", "current_step", "step_num")
EPOCH_NAMES = ("epoch", "current_epoch", "epochs", "last_epoch")
_COUNTERS = frozenset({*STEP_NAMES, *EPOCH_NAMES, "num_batches_tracked", "n_averaged", "_step_count"})
_BUFFER = re.compile(
    r"running_(mean|var)|(^|_)mask|inv_freq|_cached$|position_ids|min_vals?$|max_vals?$|cluster_size|embed_avg|zero_point|^(pixel_)?(mean|std)$|^filt"
)
_OPTIMIZER = re.compile(r"optim(izer)?s?(_|\d|$)|optimizer|^opt(_states?)?$")
_ASIDE = re.compile(
    r"(callbacks|loops\.(fit|validate|test|predict)_loop|hyper_parameters|args|config|training_args|(\w+_)?rng_states?(_\d+)?|random_states?(_\d+)?)(\.|$)"
)

_END = r"(\.(weight|bias|data|default))*$"
_OFTEN_ZERO = re.compile(
    r"lora_?[be]\b|lora_?up|lora_embedding_a|hada_w2|lokr_w2|oft_r|zero_conv|bias_table|(cls|dist|mask|class|register|sep)_?tokens?|pos_?emb|position_?emb"
    rf"|(^|[._])(gates?|gating|alpha|gamma|beta|scale|shift|layer_?scale|re_?zero|bias|biases|mask){_END}"
)
_ZERO_AT_FIRST = re.compile(
    r"adapter|adaln|modulation|controlnet|bbox|final_layer|sampling_offsets|attention_weights|out_layers|prompt|prefix|time_maa|(^|[._])heads?\.\w+\.weight$"
    rf"|(^|[._])(proj_out|out_proj|residual|offsets?|reg|delta|heads?|classifier|fc_?out|logits|score|last_layer|conv_out|out|output){_END}"
    r"|(^|[._])(query|queries|pos|position|positional|memory|hidden|h0|c0)$"
)
_ONE_VALUE = re.compile(
    r"norm|(^|[._])(ln|bn|gn)[._\d]|(^|[._])(scale|scales|gamma|alpha|beta|gate|temperature|window|kernel|blur|filt|filter|fir|anchors?|mean|std|mask|prior|grid)([._]|$)"
    r"|layer_?scale|_scale$|_mask$|lambda|_decay$|decay_"
)


def parts_of(name: str) -> list[str]:
    """Split a dotted name."""
    return name.split(".")


@lru_cache(maxsize=1 << 16)  # the checkpoints of one run hold the same names
def role_of(name: str) -> Role:
    """Say what a tensor is for.

    >>> [str(role_of(n)) for n in ("fc.weight", "bn.running_var", "optimizer.state.0.exp_avg", "bn.num_batches_tracked")]
    ['weight', 'buffer', 'optimizer state', 'counter']
    """
    parts = parts_of(name)
    if _ASIDE.match(name.lower()):
        return Role.ASIDE
    if parts[-1] in _COUNTERS:
        return Role.COUNTER
    if in_optimizer(name):
        return Role.MOMENT
    return Role.BUFFER if _BUFFER.search(parts[-1].lower()) else Role.WEIGHT


def in_optimizer(name: str) -> bool:
    """Whether a name belongs to an optimizer's state."""
    parts = parts_of(name)
    if parts[-1] in _MOMENTS:
        return True
    return any(_OPTIMIZER.search(p.lower()) for p in parts[:-1]) or (len(parts) >= 3 and parts[0] == "state" and parts[1].isdigit())


def is_second_moment(name: str, beside: Container[str] = ()) -> bool:
    """Whether a tensor holds sums of squares, which are never below zero; `beside` are the names of the others.

    >>> is_second_moment("state.0.exp_avg_sq"), is_second_moment("opt.0.v"), is_second_moment("opt.0.v", {"opt.0.m"})
    (True, False, True)
    """
    head, _, last = name.rpartition(".")
    if last in _SQUARES:
        return True
    return in_optimizer(name) and (last in _SQUARES_IN_OPTIMIZER or (last in _SQUARES_BESIDE and f"{head}.{_SQUARES_BESIDE[last]}" in beside))


def is_first_moment(name: str) -> bool:
    """Whether a tensor is a running mean of gradients."""
    return parts_of(name)[-1] in ("exp_avg", "momentum_buffer")


def may_be_zero(name: str, trained: bool) -> bool:
    """Whether a weight with this name is often zero in a healthy model: by its start, and a head before it was trained."""
    low = name.lower()
    return bool(_OFTEN_ZERO.search(low)) or (not trained and bool(_ZERO_AT_FIRST.search(low)))


def may_be_constant(name: str) -> bool:
    """Whether a tensor with this name often holds one value: norms, scales, fixed kernels."""
    return bool(_ONE_VALUE.search(name.lower()))


def is_meant(tensor: TensorStats, role: Role) -> bool:
    """Whether the infinities of a tensor were put there on purpose, by its name and its statistics.

    A mask is `-inf` beside one other value, in a matrix or under a name for it. A bound that was never updated is infinite throughout.

    >>> is_meant(TensorStats("attn.mask", "float32", (4, 4), neginf=6, zeros=10, min=0.0, max=0.0), Role.BUFFER)
    True
    """
    last = parts_of(tensor.name)[-1].lower()
    if tensor.nan or role in (Role.MOMENT, Role.COUNTER) or last == "weight" or last.startswith("running_"):
        return False
    if last == "bias" and not (len(tensor.shape) > 1 or "logit" in tensor.name.lower()):
        return False
    named = role is Role.BUFFER or len(tensor.shape) > 1 or bool(re.search(r"mask|bias", tensor.name.lower()))
    mask = named and not tensor.posinf and tensor.min == tensor.max
    bound = tensor.min is None and not (tensor.posinf and tensor.neginf) and bool(re.search(r"min|max|best|bound|limit|low|high|threshold", last))
    return (mask and (tensor.min is not None or role is Role.BUFFER)) or bound
