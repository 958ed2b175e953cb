"""Small questions about values and lineage that several rules ask. No torch import: tensors bring their own methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from whynan.records import number

if TYPE_CHECKING:
    import torch

    from whynan.trace.birth import Birth, View
    from whynan.trace.graph import Leaf

LIMITS = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028e38, "float64": 1.797e308, "complex64": 3.4028e38, "complex128": 1.797e308}
ATTENTION = "_scaled_dot_product"  # how the names of its kernels begin
ELEMENTWISE = frozenset(
    {"add", "sub", "rsub", "mul", "div", "neg", "abs", "clamp", "clamp_min", "clamp_max", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze",
     "transpose", "permute", "t", "clone", "detach", "alias", "_to_copy", "slice", "select", "diagonal", "maximum", "minimum", "sqrt", "pow", "where",
     "masked_fill", "reshape", "repeat", "exp", "relu"}
)  # fmt: skip
VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "expand",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "t",
        "clone",
        "detach",
        "alias",
        "_to_copy",
        "reshape",
        "select",
        "slice",
        "diagonal",
        "neg",
    }
)
SELECTS = frozenset(
    {"where", "masked_fill", "nan_to_num", "index", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "masked_select", "mul", "gather", "index_select",
     "select", "min", "max", "amax", "amin", "take", "slice", "scatter", "index_put", "sort", "topk", "tril", "triu"}
)  # fmt: skip


def zeros(tensor: torch.Tensor | None) -> int:
    """Count exact zeros."""
    return 0 if tensor is None else int((tensor == 0).sum())


def lies_below(tensor: torch.Tensor, edge: float) -> torch.Tensor:
    """Say which values lie below an edge; complex numbers have no order and never do."""
    return tensor < edge if not tensor.is_complex() else (tensor == edge) & False


def at_or_below(tensor: torch.Tensor, edge: float) -> torch.Tensor:
    """Say which values lie on an edge or below it; complex ones can only be the edge itself."""
    return lies_below(tensor, edge) | (tensor == edge)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the widest dtype of its kind; what is no floating-point number stays as it is."""
    import torch

    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double() if tensor.is_floating_point() else tensor


def share(count: int, tensor: torch.Tensor, what: str) -> str:
    """Say `213 of 320 probabilities are 0`.

    >>> class T:
    ...     def numel(self): return 320
    >>> share(213, T(), "values are 0")
    '213 of 320 values are 0'
    """
    total = tensor.numel()
    if total == 1:
        return f"the only {_singular(what)}"
    return f"{count} of {total} {what}"


def counted(count: int, what: str) -> str:
    """Say `3 factors are 0`, and of one that it is.

    >>> counted(3, "factors are 0"), counted(1, "factors are 0"), counted(1, "arguments lie on a pole")
    ('3 factors are 0', '1 factor is 0', '1 argument lies on a pole')
    """
    return f"{count} {what if count != 1 else _singular(what)}"


def _singular(what: str) -> str:
    """Return words that begin with a noun in the plural for one thing; the verb is the first of those below."""
    noun, _, rest = f"{what} ".partition("s ")
    noun = noun.removesuffix("ie") + "y" if noun.endswith("ie") else noun
    verbs = {"are": "is", "lie": "lies", "hold": "holds"}
    words = rest.split()
    first = next((i for i, word in enumerate(words) if word in verbs), None)
    return " ".join([noun, *(verbs[word] if i == first else word for i, word in enumerate(words))])


def where_bad(tensor: torch.Tensor | None) -> Any:
    """Return a boolean tensor of the non-finite places."""
    return None if tensor is None else ~tensor.isfinite()


def rows(condition: Any, limit: int = 4) -> str:
    """Name the first rows at which a condition holds: `row 3`, `rows 0, 4, 7 …`."""
    if condition is None or condition.dim() == 0:
        return ""
    hit = condition.flatten(1).any(1) if condition.dim() > 1 else condition
    found = [int(i) for i in hit.nonzero()[:, 0]]
    if not found or (len(found) == hit.numel() and len(found) > limit):
        return "every row" if found else ""
    shown = ", ".join(map(str, found[:limit]))
    return f"row{'s' if len(found) > 1 else ''} {shown}{' …' if len(found) > limit else ''}"


def as_entries(words: str) -> str:
    """Call the places of a tensor entries: the rows of a weight are no samples.

    >>> as_entries("every row"), as_entries("rows 1, 4")
    ('every entry', 'entries 1, 4')
    """
    return words.replace("rows ", "entries ").replace("row ", "entry ") if not words.endswith("row") else words[:-3] + "entry"


def biggest(tensor: torch.Tensor | None) -> float:
    """Return the largest finite magnitude."""
    if tensor is None or not tensor.numel():
        return 0.0
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else float("inf")


def as_view(made: View | Leaf | None) -> View | None:
    """Return what made a value if an operation did, and nothing for a leaf."""
    return cast("View", made) if hasattr(made, "op") else None


def lineage(view: View, through: frozenset[str] = ELEMENTWISE, depth: int = 12, start: int | None = None) -> Iterator[View]:
    """Yield the operations that made an operation's arguments, following only the given kinds; views do not count as a step."""
    sources = range(len(view.op.sources)) if start is None else [start]
    todo = [(view.maker(i), 0) for i in sources]
    seen: set[int] = set()
    while todo:
        maker, level = todo.pop(0)
        made = as_view(maker)
        if made is None or made.op.index in seen or level > depth:
            continue
        seen.add(made.op.index)
        yield made
        if made.name in through:
            todo += [(made.maker(i), level + (made.name not in VIEWS)) for i in range(len(made.op.sources))]


def divides(view: View) -> bool:
    """Whether an operation is a division: `1 / x` arrives as a reciprocal."""
    return view.name == "div" or (view.name == "reciprocal" and "div" in view.call)


def skip_views(made: View | Leaf | None) -> View | Leaf | None:
    """Go through views and casts to what really computed a value."""
    while (view := as_view(made)) is not None and view.name in VIEWS and view.op.sources:
        made = view.maker(0)
    return made


def without_zeros(made: View | Leaf | None) -> View | Leaf | None:
    """Go through views and through additions of nothing but zeros to what really computed a value."""
    made = skip_views(made)
    while (view := as_view(made)) is not None and view.name == "add":
        places = [i for i in range(len(view.op.sources)) if not _is_all_zero(view.input(i))]
        constant = view.scalar("other") if len(view.op.sources) == 1 else 0
        if len(places) != 1 or constant != 0:
            break
        made = skip_views(view.maker(places[0]))
    return made


def _is_all_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and bool((tensor == 0).all())


def is_same(one: View | Leaf | None, other: View | Leaf | None) -> bool:
    """Whether two values are the same one, views and casts apart."""
    one, other = skip_views(one), skip_views(other)
    left, right = as_view(one), as_view(other)
    if left is not None and right is not None:
        return left.op.index == right.op.index
    return one is not None and one is other


def consumers(birth: Birth, view: View) -> Iterator[View]:
    """Yield the forward operations that use an operation's output, through views."""
    return _takers(birth, view.op.index)


def readers(birth: Birth, leaf: Leaf) -> Iterator[View]:
    """Yield the forward operations that use what a step was given, through views."""
    return _takers(birth, next((-1 - i for i, other in enumerate(birth.graph.leaves) if other is leaf), len(birth.graph.ops)))


def _takers(birth: Birth, maker: int) -> Iterator[View]:
    from whynan.trace.birth import View as Made

    wanted = {maker}
    for op in birth.graph.ops[max(maker + 1, 0) :]:
        if op.backward:
            continue
        if any(s.maker in wanted for s in op.sources):
            made = Made(op, birth)
            if made.name in VIEWS:
                wanted.add(op.index)
            yield made


def leads_to(birth: Birth, view: View, names: tuple[str, ...]) -> View | None:
    """Return the first operation of some names that an operation's output goes into, elementwise operations in between."""
    from whynan.trace.birth import View as Made

    reached = {view.op.index}
    for op in birth.graph.ops[view.op.index + 1 :]:
        if op.backward or not any(s.maker in reached for s in op.sources):
            continue
        made = Made(op, birth)
        if made.name in names:
            return made
        if made.name in ELEMENTWISE:
            reached.add(op.index)
    return None


_ADDED = {"index_add": "source", "scatter_add": "src", "scatter_reduce": "src", "index_put": "values"}
_COUNTS = ("sum", "count_nonzero", "numel", "bincount", "cumsum", *_ADDED)
_SUMS = frozenset({"sum", "nansum", "dot", "mv", "mm", "bmm"})


def fixed(view: View, index: int | str) -> bool:
    """Whether an argument carries no gradient: data, a mask, a count."""
    made = skip_views(view.maker(index))
    if (op := as_view(made)) is not None:
        return op.op.node < 0
    leaf = cast("Leaf | None", made)
    return leaf is None or not (leaf.tensor.requires_grad or leaf.role == "parameter")


def zeros_and_ones(tensor: torch.Tensor) -> bool:
    """Whether nothing else is in a tensor."""
    return bool(((tensor == 0) | (tensor == 1)).all())


def counting(view: View, name: str) -> View | None:
    """Return the sum that may have counted what an argument is, through elementwise operations; whether it did is another question."""
    made = as_view(skip_views(view.maker(name)))
    return next((m for m in [made, *lineage(made, depth=4)] if m.name in _COUNTS), None) if made is not None else None


def counts_members(step: View) -> bool:
    """Whether an operation counts the members of groups: it adds up ones, each at the place of its group."""
    if step.name == "bincount":
        return step.source("weights") is None
    if (step.name == "scatter_reduce" and step.scalar("reduce") != "sum") or (step.name == "index_put" and not step.scalar("accumulate")):
        return False
    name = _ADDED.get(step.name, "")
    added = step.input(name)
    return added is not None and zeros_and_ones(added) and fixed(step, name) and (bool(added.any()) or not added.numel())


def are_counts(view: View, index: int) -> bool:
    """Whether an argument counts something: whole numbers, none below 0 and some above it, that carry no gradient."""
    given = view.input(index)
    return given is not None and not given.is_complex() and fixed(view, index) and bool(given.any() & (given >= 0).all() & (given == given.round()).all())


def one_less(view: View) -> bool:
    """Whether a divisor is a count minus 1 and is 0 because the count is 1."""
    made = as_view(skip_views(view.maker("other")))
    held = frozenset({"clamp", "clamp_min", "maximum", "relu"})
    for step in [made, *lineage(made, held | VIEWS, depth=3)] if made is not None else []:
        count = step.input(0)
        if step.name not in ("sub", "add") or count is None:
            continue
        number_off, times = step.scalar("other"), step.scalar("alpha")
        if not isinstance(number_off, int | float) or not isinstance(times, int | float | None):
            return False
        off = number_off * (1 if times is None else times) * (1 if step.name == "sub" else -1)
        exact = step is made or not zeros(count)  # below a floor of 0 a count of 0 gives 0 as well
        return off == 1 and exact and bool((count == 1).any()) and bool((count == count.real.round()).all())
    return False


@dataclass(frozen=True, slots=True)
class Summed:
    """What a numerator adds up: how many elements, and how that is seen."""

    count: int
    words: str
    masked: bool = False


def summed(view: View) -> Summed | None:
    """Say how many elements the numerator of a quotient is a sum over, where it is 0; the fewest where it has several parts."""
    above = view.input("self")
    if above is None or bool(above.any()):
        return None
    parts = (_summed(step) for step in lineage(view, depth=4, start=0))
    return min((p for p in parts if p is not None), key=lambda p: (p.count, not p.masked), default=None)


def _summed(step: View) -> Summed | None:
    output = step.output()
    empty = next((t for t in step.inputs().values() if not t.numel()), None)
    if output is not None and output.numel() and empty is not None:
        return Summed(0, f"the numerator sums a tensor of shape {list(empty.shape)}: no elements")
    if step.name.startswith("nll_loss"):
        target, ignore = step.input("target"), step.scalar("ignore_index")
        used = None if target is None else int((target != (ignore if isinstance(ignore, int) else -100)).sum())
        return None if target is None or used else Summed(0, f"all {target.numel()} targets equal ignore_index {ignore}")
    values = step.input(0)
    if step.name not in _SUMS or values is None or output is None or not output.numel():
        return None
    products = (m for m in lineage(step, frozenset({"mul", "pow", *VIEWS}), depth=3) if m.name in ("mul", "where", "masked_fill"))
    masks = [mask for m in ([step] if "sum" not in step.name else [*products]) if (mask := _mask(m)) is not None and mask.numel()]
    chosen = [(int(m.sum()) * max(values.numel() // m.numel(), 1), m) for m in masks]
    count, mask = min(chosen, key=lambda c: c[0], default=(values.numel(), values))
    if count < values.numel():
        words = "is 0 everywhere" if not count else f"selects {count}"
        return Summed(count, f"the numerator is multiplied by a mask of shape {list(mask.shape)} that {words}", masked=True)
    return Summed(values.numel() // output.numel(), f"the numerator sums a tensor of shape {list(values.shape)}")


def _mask(product: View) -> Any:
    """Return which entries a product or a selection keeps, if one of its arguments decides that by 0 and 1."""
    if product.name in ("where", "masked_fill"):
        mask = product.input("condition" if product.name == "where" else "mask")
        zero = product.scalar("value") == 0 or any(not bool(t.any()) for n, t in product.inputs().items() if n in ("other", "value"))
        return None if mask is None or not zero else ~mask if product.name == "masked_fill" else mask
    given = ((i, product.input(i)) for i in range(len(product.op.sources)))
    return next((t for i, t in given if t is not None and t.dim() and zeros_and_ones(t) and fixed(product, i)), None)


def plus(value: float) -> str:
    """Print a number for a sentence."""
    return number(value)
