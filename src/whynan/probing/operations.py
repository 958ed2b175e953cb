"""How each ATen operation maps ranges to a range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whynan.probing import intervals as iv
from whynan.probing.intervals import ANY, INF, Interval


@dataclass(slots=True)
class Seen:
    """One operation with the ranges of its arguments."""

    node: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Mapping[Any, torch.Tensor]  # the weights themselves, where an argument is one
    known: Mapping[Any, Interval]

    def at(self, place: int) -> Interval:
        """Return the range of an argument."""
        found = self.args[place]
        if not isinstance(found, Interval):
            raise TypeError(place)
        return found

    def or_none(self, place: int) -> Interval | None:
        """Return the range of an argument that may be missing."""
        found = self.args[place] if len(self.args) > place else None
        return found if isinstance(found, Interval) else None

    def number(self, place: int, name: str = "") -> float | None:
        """Return an argument that is a plain number."""
        found = self.node.args[place] if len(self.node.args) > place else self.kwargs.get(name)
        return float(found) if isinstance(found, int | float) else None

    def tensor(self, place: int) -> torch.Tensor | None:
        """Return an argument that is a weight."""
        found = self.node.args[place] if len(self.node.args) > place else None
        return self.tensors.get(found) if isinstance(found, torch.fx.Node) else None

    def shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of an argument."""
        return tuple(int(s) for s in self.node.args[place].meta["val"].shape)

    def reduced(self) -> int:
        """Return how many values a reduction joins."""
        shape = self.shape(0)
        dims = self.node.args[1] if len(self.node.args) > 1 else self.kwargs.get("dim")
        if dims is None or isinstance(dims, bool) or dims == []:
            return math.prod(shape)
        return math.prod(shape[d] for d in (dims if isinstance(dims, list | tuple) else [dims]))


Rule = Callable[[Seen], Interval]


def same(*_: object) -> str:
    """An operation that cannot leave its domain."""
    return ""


def _first(seen: Seen) -> Interval:
    return seen.at(0)


def _rising(function: Callable[[float], float]) -> Rule:
    return lambda seen: seen.at(0).through(function)


def _between(low: float, high: float) -> Rule:
    return lambda seen: Interval(low, high)


def _alpha(seen: Seen) -> Interval:
    factor = seen.kwargs.get("alpha", 1)
    return seen.at(1) * Interval(factor, factor)


def _sub(seen: Seen) -> Interval:
    made = seen.at(0) - _alpha(seen)
    left, right = seen.node.args[:2]
    if isinstance(right, torch.fx.Node) and "amax" in str(right.target) and right.args[0] is left:
        return Interval(made.low, 0.0)  # a maximum taken off: never above 0
    return made


def _mul(seen: Seen) -> Interval:
    return iv.square(seen.at(0)) if seen.node.args[0] is seen.node.args[1] else seen.at(0) * seen.at(1)


def _sum(seen: Seen) -> Interval:
    times = seen.reduced()
    x = seen.at(0)
    return Interval(x.low * times if x.low else 0.0, x.high * times if x.high else 0.0)


def _var(seen: Seen) -> Interval:
    x = seen.at(0)
    return Interval(0.0, ((x.high - x.low) / 2) ** 2 * 2) if math.isfinite(x.size) else Interval(0.0, INF)


def _std(seen: Seen) -> Interval:
    return _var(seen).through(math.sqrt)


def _norm(seen: Seen) -> Interval:
    return Interval(0.0, seen.at(0).size * math.sqrt(max(math.prod(seen.shape(0)), 1)))


def _clamp(seen: Seen) -> Interval:
    return iv.clamp(seen.at(0), seen.number(1, "min"), seen.number(2, "max"))


def _linear(seen: Seen) -> Interval:
    weight = seen.tensor(1)
    if weight is None:
        return iv.matmul(seen.at(0), seen.at(1), seen.shape(0)[-1]) + (seen.or_none(2) or Interval(0, 0))
    return iv.linear(seen.at(0), weight, seen.tensor(2))


def _addmm(seen: Seen) -> Interval:
    return iv.matmul(seen.at(1), seen.at(2), seen.shape(1)[-1]) + seen.at(0)


def _matmul(seen: Seen) -> Interval:
    return iv.matmul(seen.at(0), seen.at(1), seen.shape(0)[-1])


def _convolution(seen: Seen) -> Interval:
    weight = seen.tensor(1)
    if weight is None:
        return ANY
    with_padding = seen.at(0) | Interval(0.0, 0.0)
    return iv.linear(with_padding, weight, seen.tensor(2))


def _layer_norm(seen: Seen) -> Interval:
    size = math.prod(int(s) for s in seen.node.args[1])
    return iv.normalised(size, seen.or_none(2) or Interval(1, 1), seen.or_none(3) or Interval(0, 0))


def _group_norm(seen: Seen) -> Interval:
    size = math.prod(seen.shape(0)[1:]) // int(seen.node.args[1])
    return iv.normalised(size, seen.or_none(2) or Interval(1, 1), seen.or_none(3) or Interval(0, 0))


def _batch_norm(seen: Seen) -> Interval:
    """In training the batch's own statistics, in evaluation the running ones."""
    shape = seen.shape(0)
    weight, bias = seen.or_none(1) or Interval(1, 1), seen.or_none(2) or Interval(0, 0)
    training = next((a for a in seen.node.args[5:6] if isinstance(a, bool)), True)
    mean, var = seen.or_none(3), seen.or_none(4)
    if training or mean is None or var is None:
        return iv.normalised(math.prod(shape) // shape[1], weight, bias)
    return (seen.at(0) - mean) / (Interval(max(var.low, 0.0), var.high) + Interval(1e-5, 1e-5)).through(math.sqrt) * weight + bias


def _softmax(seen: Seen) -> Interval:
    return iv.softmax(seen.at(0), seen.shape(0)[int(seen.node.args[1])])


def _log_softmax(seen: Seen) -> Interval:
    x = seen.at(0)
    size = seen.shape(0)[int(seen.node.args[1])]
    return iv.made(-(x.high - x.low) - math.log(max(size, 1)), 0.0)


def _attention(seen: Seen) -> Interval:
    return seen.at(2)


def _cat(seen: Seen) -> Interval:
    found = seen.args[0]
    made: Interval = found[0]
    for one in found[1:]:
        made = made | one
    return made


def _where(seen: Seen) -> Interval:
    return seen.at(1) | seen.at(2)


def _masked_fill(seen: Seen) -> Interval:
    return seen.at(0) | seen.at(2)


def _cross_entropy(seen: Seen) -> Interval:
    x, size = seen.at(0), seen.shape(0)[1 if len(seen.shape(0)) > 1 else 0]
    return iv.made(0.0, (x.high - x.low) + math.log(max(size, 1)))


def _squared_difference(seen: Seen) -> Interval:
    return iv.square(seen.at(0) - seen.at(1))


def _full(seen: Seen) -> Interval:
    value = seen.number(1, "fill_value")
    return Interval(value, value) if value is not None else ANY


def _embedding(seen: Seen) -> Interval:
    return seen.at(0)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _softplus(value: float) -> float:
    return value if value > 30 else math.log1p(math.exp(value)) if value > -700 else 0.0


def _leaky(seen: Seen) -> Interval:
    x, slope = seen.at(0), seen.number(1) or 0.01
    return Interval(x.low * slope if x.low < 0 else x.low, x.high if x.high > 0 else x.high * slope)


def _elu(seen: Seen) -> Interval:
    alpha = seen.number(1)
    return seen.at(0).through(lambda v: v if v > 0 else (1.0 if alpha is None else alpha) * math.expm1(v))


KEEPING = (
    "view", "reshape", "_unsafe_view", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "clone", "detach", "alias",
    "contiguous", "flatten", "unflatten", "gather", "index_select", "index", "repeat", "flip", "roll", "narrow", "split", "chunk", "unbind", "to",
    "_to_copy", "type_as", "getitem", "max_pool2d", "max_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "mean", "amax", "amin", "max", "min", "median",
    "dropout", "diagonal", "as_strided", "sort", "topk", "movedim", "lift_fresh_copy", "unfold", "logical_not", "view_as", "expand_as", "float",
    "upsample_nearest2d", "scatter", "tril", "triu", "masked_select", "squeeze_", "repeat_interleave", "numpy_T", "rename",
)  # fmt: skip
_TRUTHS = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "isinf", "logical_and", "logical_or", "any", "all", "bitwise_not", "bitwise_and")

OPERATIONS: dict[str, Rule] = {
    **dict.fromkeys(KEEPING, _first),
    **dict.fromkeys(_TRUTHS, _between(0.0, 1.0)),
    **dict.fromkeys(("sigmoid", "rand", "rand_like"), _rising(_sigmoid)),
    **dict.fromkeys(("sin", "cos", "sign", "cosine_similarity", "erf"), _between(-1.0, 1.0)),
    **dict.fromkeys(("randn", "randn_like", "normal"), _between(-6.0, 6.0)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _between(0.0, 0.0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _between(1.0, 1.0)),
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    **dict.fromkeys(("add", "add_"), lambda seen: seen.at(0) + _alpha(seen)),
    **dict.fromkeys(("sub", "sub_"), _sub),
    "rsub": lambda seen: seen.at(1) - seen.at(0),
    **dict.fromkeys(("mul", "mul_"), _mul),
    **dict.fromkeys(("div", "div_"), lambda seen: seen.at(0) / seen.at(1)),
    "neg": lambda seen: -seen.at(0),
    "abs": lambda seen: iv.absolute(seen.at(0)),
    "square": lambda seen: iv.square(seen.at(0)),
    "pow": lambda seen: iv.power(seen.at(0), seen.number(1) if seen.number(1) is not None else math.nan),  # type: ignore[arg-type]
    "reciprocal": lambda seen: Interval(1, 1) / seen.at(0),
    "exp": _rising(math.exp),
    "expm1": _rising(math.expm1),
    "log": _rising(math.log),
    "log2": _rising(math.log2),
    "log10": _rising(math.log10),
    "log1p": _rising(math.log1p),
    "sqrt": _rising(math.sqrt),
    "rsqrt": lambda seen: Interval(1, 1) / iv.clamp(seen.at(0), 0.0, None).through(math.sqrt),
    "tanh": _rising(math.tanh),
    "atan": _rising(math.atan),
    "asinh": _rising(math.asinh),
    "acos": _between(0.0, math.pi),
    "asin": _between(-math.pi / 2, math.pi / 2),
    "relu": lambda seen: iv.clamp(seen.at(0), 0.0, None),
    "relu_": lambda seen: iv.clamp(seen.at(0), 0.0, None),
    **dict.fromkeys(("gelu", "silu", "mish", "silu_"), lambda seen: iv.gelu(seen.at(0))),
    **dict.fromkeys(("leaky_relu", "leaky_relu_"), _leaky),
    "elu": _elu,
    "softplus": _rising(_softplus),
    "hardtanh": lambda seen: iv.clamp(seen.at(0), seen.number(1) or -1.0, seen.number(2) or 1.0),
    "logsigmoid": lambda seen: -(-seen.at(0)).through(_softplus),
    "log_sigmoid": lambda seen: -(-seen.at(0)).through(_softplus),
    **dict.fromkeys(("clamp", "clamp_", "clip"), _clamp),
    "clamp_min": lambda seen: iv.clamp(seen.at(0), seen.number(1), None),
    "clamp_max": lambda seen: iv.clamp(seen.at(0), None, seen.number(1)),
    "maximum": lambda seen: Interval(max(seen.at(0).low, seen.at(1).low), max(seen.at(0).high, seen.at(1).high)),
    "minimum": lambda seen: Interval(min(seen.at(0).low, seen.at(1).low), min(seen.at(0).high, seen.at(1).high)),
    "where": _where,
    "masked_fill": _masked_fill,
    "masked_fill_": _masked_fill,
    "cat": _cat,
    "stack": _cat,
    "broadcast_tensors": _cat,
    "sum": _sum,
    "cumsum": _sum,
    "logsumexp": lambda seen: iv.made(seen.at(0).low, seen.at(0).high + math.log(max(seen.reduced(), 1))),
    "var": _var,
    "std": _std,
    **dict.fromkeys(("linalg_vector_norm", "norm", "frobenius_norm"), _norm),
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),  # of a transposed one several taps meet: not bounded by these sums
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "group_norm": _group_norm,
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"), _batch_norm),
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    **dict.fromkeys(("log_softmax", "_log_softmax"), _log_softmax),
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    **dict.fromkeys(("cross_entropy_loss",), _cross_entropy),
    **dict.fromkeys(("nll_loss", "nll_loss_nd"), lambda seen: -seen.at(0)),
    "mse_loss": _squared_difference,
    **dict.fromkeys(("l1_loss", "smooth_l1_loss", "huber_loss"), lambda seen: iv.absolute(seen.at(0) - seen.at(1))),
    "binary_cross_entropy_with_logits": lambda seen: Interval(0.0, seen.at(0).size + 1.0),
    "arange": lambda seen: Interval(0.0, max(seen.number(i) or 0.0 for i in range(len(seen.args)))),
    "one_hot": _between(0.0, 1.0),
    "argsort": lambda seen: Interval(0.0, float(max(seen.shape(0), default=1))),
    "argmax": lambda seen: Interval(0.0, float(math.prod(seen.shape(0)))),
}
