"""What each torch operation makes of what is known of its operand."""

from __future__ import annotations

from collections.abc import Callable
from math import e, inf, log, pi, tanh

from whynan.lint.facts import OTHER, TORCH, Fact, root, square

Rule = Callable[[Fact], Fact]


_CONSTANTS = frozenset({"arange", "uniform", "randint", "normal", "zeros", "ones", "eye", "mask", "count", "one-hot", "empty"})


def _made(kind: str, low: float = -inf, high: float = inf, positive: bool = False) -> Rule:
    def make(a: Fact) -> Fact:
        return Fact(kind, low, high, TORCH, dtype=a.dtype, graph=a.graph and kind not in _CONSTANTS, positive=positive)

    return make


def _sum(a: Fact) -> Fact:
    kinds = {
        "square": "sum-squares",
        "mask": "mask-sum",
        "count": "total-count",
        "exp": "sum-exp",
        "softmax": "sum-softmax",
        "abs": "sum-abs",
        "masked-product": "masked-sum",
    }
    low = 0.0 if a.low >= 0 else -inf
    return Fact(
        kinds.get(a.kind, "sum"), low, inf if a.high > 0 else 0.0, a.owner, dtype=a.dtype, eased=a.eased, graph=a.graph, positive=a.positive, inner=a.inner
    )


def _mean(a: Fact) -> Fact:
    kinds = {"square": "mean-squares", "sum-squares": "mean-squares", "mask": "mask-sum"}
    return a.but(kind=kinds.get(a.kind, "mean"))


def _exp(a: Fact) -> Fact:
    low = e**a.low if -700 < a.low < 700 else 0.0
    high = e**a.high if a.high < 700 else inf
    return Fact("probability" if a.kind == "log-probability" else "exp", low, high, a.owner, dtype=a.dtype, graph=a.graph, positive=True)


def _log(a: Fact) -> Fact:
    return Fact("log", log(a.low) if 0 < a.low < inf else -inf, log(a.high) if 0 < a.high < inf else inf, a.owner, dtype=a.dtype, graph=a.graph)


def _abs(a: Fact) -> Fact:
    return Fact(
        "abs", max(a.low, -a.high, 0.0), max(abs(a.low), abs(a.high)), a.owner, dtype=a.dtype, eased=a.eased, graph=a.graph, positive=a.positive, inner=a.inner
    )


def _relu(a: Fact) -> Fact:
    return Fact("relu", max(a.low, 0.0), max(a.high, 0.0), TORCH, dtype=a.dtype, graph=a.graph)


def _sigmoid(a: Fact) -> Fact:
    low = 1 / (1 + e**-a.low) if -103 < a.low < 80 else 0.0 if a.low < 0 else 1.0
    high = 1 / (1 + e**-a.high) if -103 < a.high < 16 else 0.0 if a.high < 0 else 1.0
    return Fact("sigmoid", low, high, TORCH, dtype=a.dtype, graph=a.graph)


def _softmax(a: Fact) -> Fact:
    """Logits that lie within a narrow band leave every probability far above the smallest number, for up to a million classes."""
    spread = a.high - a.low
    return Fact("softmax", e**-spread / 1e6 if spread < 60 else 0.0, 1.0, TORCH, dtype=a.dtype, graph=a.graph)


def _kept(kind: str) -> Rule:
    return lambda a: a.but(kind=kind)


def _cast(dtype: str) -> Rule:
    return lambda a: a.but(dtype=dtype, owner=TORCH if a.owner != OTHER or a.kind == "number" else a.owner)


def _number(kind: str, low: float) -> Rule:
    return lambda a: Fact(kind, low, inf, OTHER, graph=False)


def _reduced_power(a: Fact) -> Fact:
    return root(a).but(kind="reciprocal-root", low=0.0, high=inf)


VIEWS = frozenset(
    {
        "view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "flatten", "expand", "contiguous", "clone", "gather", "index_select",
        "select", "repeat", "expand_as", "view_as", "narrow", "movedim", "swapaxes", "masked_select", "take_along_dim", "chunk", "split", "unbind",
        "flip", "roll", "t", "diag", "diagonal", "cpu", "cuda", "type_as", "requires_grad", "unfold", "cat", "stack", "concat", "hstack", "vstack",
        "repeat_interleave", "unflatten", "broadcast_to", "adjoint", "atleast_1d", "tile", "ravel", "take", "numpy", "resolve_conj", "values", "sort",
        "topk", "kthvalue", "cumsum", "triu", "tril", "nan_to_num", "zero_", "item",
    }
)  # fmt: skip

OPERATIONS: dict[str, Rule] = {
    "abs": _abs,
    "acos": _made("angle", 0.0, pi),
    "arange": _made("arange", -inf, inf),
    "linspace": _made("arange", -inf, inf),
    "asin": _made("angle", -pi / 2, pi / 2),
    "atan": _made("angle", -pi / 2, pi / 2),
    "atan2": _made("angle", -pi, pi),
    "bfloat16": _cast("bfloat16"),
    "bincount": _made("count", 0.0),
    "bool": _made("mask", 0.0, 1.0),
    "cdist": _made("distance", 0.0),
    "cos": _made("cos", -1.0, 1.0),
    "cosh": _made("cosh", 1.0, inf, True),
    "cosine_similarity": _made("cosine", -1.0, 1.0),
    "count_nonzero": _made("count", 0.0),
    "detach": lambda a: a.but(graph=False),
    "double": _cast("float64"),
    "elu": _made("elu", -1.0),
    "eq": _made("mask", 0.0, 1.0),
    "erf": _made("erf", -1.0, 1.0),
    "exp": _exp,
    "exp2": _exp,
    "eye": _made("eye", 0.0, 1.0),
    "float": _cast("float32"),
    "ge": _made("mask", 0.0, 1.0),
    "gt": _made("mask", 0.0, 1.0),
    "half": _cast("float16"),
    "hypot": _made("hypot", 0.0),
    "int": _kept("integer"),
    "isfinite": _made("mask", 0.0, 1.0),
    "isinf": _made("mask", 0.0, 1.0),
    "isnan": _made("mask", 0.0, 1.0),
    "le": _made("mask", 0.0, 1.0),
    "log": _log,
    "log10": _log,
    "log1p": lambda a: Fact("log", 0.0 if a.low >= 0 else -inf, inf, a.owner, dtype=a.dtype, graph=a.graph),
    "log2": _log,
    "log_softmax": _made("log-probability", -inf, 0.0),
    "logical_and": _made("mask", 0.0, 1.0),
    "logical_not": _made("mask", 0.0, 1.0),
    "logical_or": _made("mask", 0.0, 1.0),
    "logsigmoid": _made("log-probability", -inf, 0.0),
    "long": _kept("integer"),
    "lt": _made("mask", 0.0, 1.0),
    "amax": _kept("max"),
    "amin": _kept("min"),
    "max": _kept("max"),
    "mean": _mean,
    "median": _kept("median"),
    "min": _kept("min"),
    "nanmean": _mean,
    "ne": _made("mask", 0.0, 1.0),
    "neg": lambda a: a.but(kind="negated", low=-a.high, high=-a.low, positive=False),
    "norm": lambda a: Fact(
        "norm", 0.0, inf, TORCH, dtype=a.dtype, graph=a.graph, eased=a.eased or a.kind in ("softmax", "eye", "ones", "probability"), positive=a.positive
    ),
    "normalize": _made("unit", -1.0, 1.0),
    "numel": _number("size", 0.0),
    "one_hot": _made("one-hot", 0.0, 1.0),
    "ones": _made("ones", 1.0, 1.0),
    "ones_like": _made("ones", 1.0, 1.0),
    "new_ones": _made("ones", 1.0, 1.0),
    "rand": _made("uniform", 0.0, 1.0),
    "rand_like": _made("uniform", 0.0, 1.0),
    "randint": _made("randint"),
    "randn": _made("normal"),
    "randn_like": _made("normal"),
    "reciprocal": lambda a: Fact("reciprocal", 0.0 if a.low >= 0 else -inf, inf, a.owner, dtype=a.dtype, graph=a.graph),
    "relu": _relu,
    "relu6": _relu,
    "rsqrt": _reduced_power,
    "sigmoid": _sigmoid,
    "sin": _made("sin", -1.0, 1.0),
    "size": _number("size", 0.0),
    "softmax": _softmax,
    "softplus": _made("softplus", 0.0, inf, True),
    "softsign": _made("tanh", -1.0, 1.0),
    "sqrt": root,
    "square": square,
    "std": _made("std", 0.0),
    "sum": _sum,
    "tanh": lambda a: Fact("tanh", tanh(a.low), tanh(a.high), TORCH, dtype=a.dtype, graph=a.graph),
    "trace": _made("trace"),
    "var": _made("var", 0.0),
    "zeros": _made("zeros", 0.0, 0.0),
    "zeros_like": _made("zeros", 0.0, 0.0),
    "new_zeros": _made("zeros", 0.0, 0.0),
    "empty": _made("empty"),
    "xlogy": _made("xlogy"),
    "prod": _kept("product-of-all"),
    "matmul": _made("matmul"),
    "einsum": _made("matmul"),
    "cumprod": _kept("product-of-all"),
}
"""torch's operations by canonical name; those missing here give a tensor of which nothing is known."""

LAYERS = {
    "Sigmoid": "sigmoid", "Softmax": "softmax", "Softmax2d": "softmax", "LogSoftmax": "log_softmax", "ReLU": "relu", "ReLU6": "relu", "Softplus":
    "softplus", "Tanh": "tanh", "LogSigmoid": "logsigmoid", "ELU": "elu", "Softsign": "softsign",
}  # fmt: skip
"""Modules that do what a function does."""
