"""Family 4, means and variances: of nothing, of one thing."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from whynan.causes.arguments import forward_view
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import as_view, counted, counting, counts_members, fixed, is_same, lineage, one_less, skip_views, summed, zeros, zeros_and_ones
from whynan.causes.fixes import Fix
from whynan.causes.scopes import arguments_of
from whynan.causes.selecting import selects, weighs, weighs_on
from whynan.causes.spreads import spread_of

if TYPE_CHECKING:
    from whynan.trace.birth import View


_MEANS = ("mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "nll_loss_forward", "nll_loss2d_forward",
          "binary_cross_entropy_with_logits", "soft_margin_loss", "median", "nanmedian", "nanmean")  # fmt: skip


@rule("WN402", "mean-of-nothing", "mean of nothing", rank=33)
def mean_of_nothing(scene: Scene) -> Finding | None:
    """A mean was taken over nothing and gave NaN.

    What happened
    The tensor was empty, every target had the ignored index, the weights of all classes in the
    batch were 0, or a count below a fraction line was 0: the sum of a mask, the members of a
    group, a number from len(), numel() or item().

    Why the result is non-finite
    A mean is a sum over a count. Here both are 0, and 0 / 0 is NaN.

    Example
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        >>> mask = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
        >>> ((x * mask).sum(1) / mask.sum(1)).detach()
        tensor([   nan, 3.5000])
        >>> F.cross_entropy(x, torch.tensor([-100, -100])).item()
        nan

    Instead
    Count at least 1: a group without members then counts 0, all others are unchanged.
        >>> mean = (x * mask).sum(1) / mask.sum(1).clamp_min(1)
        >>> mean.sum().backward()
        >>> mean.detach(), x.grad
        (tensor([0.0000, 3.5000]), tensor([[0.0000, 0.0000],
                [0.5000, 0.5000]]))
        >>> target = torch.tensor([-100, -100])
        >>> total = F.cross_entropy(x, target, reduction="sum")
        >>> (total / (target != -100).sum().clamp_min(1)).item()
        0.0

    A batch without targets has the gradient 0, as it should: there is nothing to learn from it.
    Replacing the loss by a fresh 0 cuts the graph instead, and backward raises.

    How sure
    whynan looks at the number of elements, the targets against ignore_index, the class weights,
    and whether the divisor is a sum over a mask or counts members; of a divisor that is a plain
    number, whether the numerator sums nothing. Proven when the replay with the change is
    finite; a gradient of 0 is accepted here and said, since the batch has nothing to teach.
    Otherwise suspected.

    Not this when
    The divisor is no count (WN103, WN104), it is a spread (WN404), or n - 1 is 0 (WN403).
    """
    view = forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.derivative:
        return None
    if view.name in _MEANS or view.name.startswith("nll_loss"):
        return _empty_mean(view)
    if view.name == "div":
        return _empty_count(scene, view)
    return None


def _empty_mean(view: View) -> Finding | None:
    values = view.input("self")
    if view.name.startswith("nll_loss"):
        target, weight = view.input("target"), view.input("weight")
        ignore = view.scalar("ignore_index")
        ignore = -100 if not isinstance(ignore, int) else ignore
        if target is None:
            return None
        used = target != ignore
        if not target.numel():
            return Finding("there are no targets here: the mean is 0/0", ["the batch is empty"], [_sum_over_count(view, ignore)], empty=True)
        if int(used.sum()) == 0:
            fix = Fix("let a batch without targets count as 0", "'sum'", keyword="reduction")
            return Finding(
                f"all {target.numel()} targets are ignored: the mean is 0/0",
                [f"all {target.numel()} targets equal ignore_index {ignore}"],
                [_sum_over_count(view, ignore), fix],
                empty=True,
            )
        if weight is not None and float(weight[target[used]].sum()) == 0:
            return Finding(
                "every class in this batch has weight 0: the weighted mean is 0/0",
                [f"the weights of the {counted(int(used.sum()), 'targets')} sum to 0"],
                [Fix("give every class a weight above 0", "{x}.clamp_min(1e-6)", keyword="weight")],
            )
        return None
    if values is None or values.numel():
        return None
    if "mean" in view.name:
        dims = view.scalar("dim")
        over = dims if isinstance(dims, list | tuple) else [dims] if isinstance(dims, int) else []
        count = " * ".join(f"{{0}}.shape[{d}]" for d in over)
        template = f"torch.sum({{0}}{{rest}}) / max({count}, 1)" if over else "{0}.sum() / max({0}.numel(), 1)"
        fix = Fix("sum and divide by the count, at least 1", template)
    else:
        fix = Fix("sum and divide by the count, at least 1", f"torch.nn.functional.{view.name}({{0}}{{rest}}, reduction='sum') / max({{0}}.numel(), 1)")
    return Finding("there is nothing here to average: 0/0", [f"the tensor has shape {list(values.shape)}: no elements"], [fix], empty=True)


def _sum_over_count(view: View, ignore: int) -> Fix:
    name = "cross_entropy" if "cross_entropy" in view.call else "nll_loss"
    return Fix(
        "divide the sum by the number of targets that count, at least 1",
        f"torch.nn.functional.{name}({{0}}{{rest}}, reduction='sum') / ({{1}} != {ignore}).sum().clamp_min(1)",
    )


def _empty_count(scene: Scene, view: View) -> Finding | None:
    """A quotient whose divisor counts what the numerator sums, and that is nothing."""
    below = view.input("other")
    if below is None:
        return _summed_nothing(view, [Fix("count at least 1", "max({x}, 1)", 1)]) if view.scalar("other") == 0 else None
    if not zeros(below):
        return None
    step = counting(view, "other")
    if step is None:
        made = as_view(skip_views(view.maker("other")))
        given = below.numel() == 1 and fixed(view, 1) and (made is None or made.name in ("lift_fresh", "scalar_tensor", "full"))
        return _summed_nothing(view, _at_least_one(view)) if given else None
    if one_less(view):
        return _count_of_one(view)
    count = step.output()
    if count is not None and not zeros(count):
        return None  # the count is not 0: something was taken off it
    if counts_members(step):
        if _lost(view):
            return None  # the members are counted, but not averaged: a share of the whole
        empty = "the only group is" if below.numel() == 1 else f"{zeros(below)} of {below.numel()} groups are"
        return Finding(f"{empty} empty: the count is 0", [f"{empty} empty", "the divisor counts the members of each group"], _at_least_one(view), empty=True)
    counted = step.input(0) if step.name in ("sum", "count_nonzero", "cumsum") else step.output()
    if step.name == "sum" and is_same(view.maker("self"), step.maker(0)) and not weighs_on(scene, view):
        return None  # rows of data that are made to add up to 1
    if counted is not None and not _learned_beside(view, step) and selects(scene, step, 0, counted, view):
        what = "the mask selects nothing" if below.numel() == 1 else f"{zeros(below)} of {below.numel()} groups select nothing"
        if view.call.endswith("nanmean"):
            what = "every value is missing" if below.numel() == 1 else f"in {zeros(below)} of {below.numel()} means every value is missing"
            return Finding(
                f"{what}: the count is 0", [what, f"nanmean leaves NaN out of a tensor of shape {list(counted.shape)}"], [_OF_THOSE_THERE], empty=True
            )
        words = "is a sum" if count is None or _holds(below, count) else "is made of sums"
        evidence = [f"{what}", f"the divisor {words} over a mask of shape {list(counted.shape)}"]
        return Finding(f"{what}: the count is 0", evidence, _at_least_one(view), empty=True)
    if counted is not None and step.name == "sum" and fixed(step, 0) and not _learned_beside(view, step) and weighs(view, step):
        what = "the weights of the mean" if below.numel() == 1 else f"the weights of {zeros(below)} of {below.numel()} means"
        return Finding(f"{what} sum to 0", [f"{what} sum to 0: there is nothing to average"], [_SOME_WEIGHT], empty=True)
    return _masked_weights(scene, step, below) if step.name == "sum" else None


def _learned_beside(view: View, count: View) -> bool:
    """Whether a divisor also has a sum in it that carries a gradient: a union of what is predicted and what is true is no count."""
    made = as_view(skip_views(view.maker("other")))
    sums = [m for m in [made, *lineage(made)] if m.name in ("sum", "linalg_vector_norm") and m.op.index != count.op.index] if made is not None else []
    return any(not fixed(m, 0) for m in sums)


def _at_least_one(view: View) -> list[Fix]:
    """Return the changes for a count of 0. An argument of its function may be a number of Python's in other calls: one is written that takes both."""
    below, name = view.input("other"), "count at least 1"
    if below is not None and bool((below != below.round()).any()):  # an average of counts: 1 is no bound for it
        return [Fix("divide by 1 where nothing is counted", "{x}.where({x} != 0, 1.0)", 1)]
    both = [Fix(name, "max({x}, 1)", 1)] if below is not None and below.numel() == 1 and _is_handed_in(view) else []
    return [*both, Fix(name, "{x}.clamp_min(1)", 1)]


def _holds(below: Any, count: Any) -> bool:
    """Whether a divisor holds nothing but the values of a count."""
    import torch

    return bool(torch.isin(below, count.to(below.dtype)).all())


def _is_handed_in(view: View) -> bool:
    """Whether the divisor is written as an argument of the function that the quotient is in."""
    from whynan.capsule.sites import resolve
    from whynan.causes.source import expression_at

    expression = expression_at(view.site, resolve(view.site).file) if view.site is not None else None
    divisor = expression.nodes[1] if expression is not None and len(expression.nodes) > 1 else None
    return isinstance(divisor, ast.Name) and expression is not None and divisor.id in arguments_of(expression.function)


_OF_THOSE_THERE = Fix("sum what is there and divide by its count, at least 1", "torch.nansum({0}{rest}) / torch.sum(~torch.isnan({0}){rest}).clamp_min(1)")
_SOME_WEIGHT = Fix("keep the sum of the weights away from 0", "{x}.clamp_min(1e-6)", 1)


def _summed_nothing(view: View, fixes: list[Fix]) -> Finding | None:
    """The divisor is a number that was counted outside of torch: what the numerator sums shows that it is a count."""
    found = summed(view)
    if found is None or found.count:
        return None
    label = "the mask selects nothing: the count is 0" if found.masked else "there is nothing here to average: 0/0"
    return Finding(label, [found.words, "the divisor is the number 0"], fixes, empty=True)


def _count_of_one(view: View) -> Finding | None:
    """A sum over a count minus 1 that is no variance: of differences between neighbours, of pairs."""
    if view.input("self") is None or spread_of(view, 0) is not None or _lost(view):
        return None
    return Finding("there is nothing here to average: 0/0", ["the count is 1, minus 1 is 0", "the numerator is 0 there"], _at_least_one(view), empty=True)


def _lost(view: View) -> bool:
    """Whether a numerator is not 0 where its divisor is."""
    above, below = view.input("self"), view.input("other")
    return above is not None and below is not None and bool(((above != 0) & (below == 0)).any())


def _masked_weights(scene: Scene, total: View, below: Any) -> Finding | None:
    """Weights that are multiplied by a mask and then divided by their sum: where the mask is empty the sum is 0."""
    product = as_view(skip_views(total.maker(0)))
    if product is None or product.name != "mul" or below.dim() == 0:
        return None
    given = [(i, t) for i in range(len(product.op.sources)) if (t := product.input(i)) is not None]
    masks = [t for i, t in given if t.dim() and zeros_and_ones(t) and bool((t == 0).any()) and selects(scene, product, i, t)]
    empty = [m for m in masks if bool((m == 0).flatten(1).all(1).any())] if masks and masks[0].dim() > 1 else []
    if not empty:
        return None
    what = f"{int((below == 0).sum())} of {below.numel()} groups select nothing"
    words = [what, f"the weights were multiplied by a mask of shape {list(empty[0].shape)}"]
    return Finding(f"{what}: the weights sum to 0", words, [_SOME_WEIGHT], empty=True)


@rule("WN403", "variance-of-one", "variance of a single element", rank=34)
def variance_of_one(scene: Scene) -> Finding | None:
    """The unbiased variance or standard deviation of a single element was taken and gave NaN.

    What happened
    var, std, var_mean or std_mean with its default correction ran over one element: the last,
    smaller batch of an epoch, a group with one member, a dimension of size 1; or the sum of
    squared deviations was divided by a count minus 1. BatchNorm raises
    "Expected more than 1 value per channel" for the same reason.

    Why the result is non-finite
    The unbiased variance divides by n - 1. With n = 1 that is 0 / 0.

    Example
        >>> x = torch.tensor([[3.0, 1.0, 2.0]], requires_grad=True)
        >>> x.std(0).detach()
        tensor([nan, nan, nan])

    Instead
    With correction=0 the spread of one element is 0: finite, but without any gradient.
        >>> spread = x.std(0, correction=0)
        >>> spread.sum().backward()
        >>> spread.detach(), x.grad
        (tensor([0., 0., 0.]), tensor([[0., 0., 0.]]))

    To normalise, use statistics that do not need a batch (layer, group or RMS norm), or leave
    the last batch out with DataLoader(..., drop_last=True).
        >>> x.grad = None
        >>> out = F.layer_norm(x, (3,))
        >>> out[0, 0].backward()
        >>> out.detach(), x.grad.abs().sum() > 0
        (tensor([[ 1.2247, -1.2247,  0.0000]]), tensor(True))

    How sure
    whynan counts the elements along the reduced dimensions and compares them with the
    correction. It is proven when BatchNorm raised, or when the step, replayed with
    correction=0, is finite; a gradient of 0 is accepted here and said. Otherwise suspected.

    Not this when
    There are several elements and they are all equal (WN404), or none (WN402).
    """
    view = forward_view(scene)
    birth = scene.birth
    if birth is not None and birth.error is not None and "more than 1 value per channel" in str(birth.error):
        return Finding(
            "batch normalisation of a single value per channel",
            ["one value per channel has no variance"],
            [Fix("use drop_last=True, or a normalisation that needs no batch")],
            proven=True,
        )
    if view is not None and view.name == "div" and birth is not None and not birth.derivative:
        return _by_hand(view)
    if view is None or view.name not in ("var", "std", "var_mean", "std_mean"):
        return None
    values, output = view.input("self"), view.output()
    if values is None:
        return None
    dim = view.scalar("dim")
    axes = list(dim) if isinstance(dim, list | tuple) else [dim] if isinstance(dim, int) else []
    size = 1
    for axis in axes or range(values.dim()):
        size *= int(values.shape[axis])
    correction = view.scalar("correction")
    taken = 1 if correction is None else correction
    if not isinstance(taken, int | float) or size > taken or output is None:
        return None
    title = "divide by n instead of n - 1 where there is one element"
    several = f"{{0}}.shape[{axes[0]}] > 1" if len(axes) == 1 else "{0}.numel() > 1"
    keyword = "unbiased" if view.scalar("unbiased") is not None else "correction"
    return Finding(
        f"one element has no unbiased spread: n - 1 is {size - 1}",
        [f"{view.name} over {size} element{'s' if size != 1 else ''} of a tensor of shape {list(values.shape)}"],
        [
            *([Fix(title, f"int({several})", keyword="correction")] if keyword == "correction" else []),
            Fix(title, several, keyword="unbiased"),
            Fix("take it over more than one element: a larger batch, or a larger first one where it sets initial values"),
        ],
        empty=True,
    )


def _by_hand(view: View) -> Finding | None:
    """A sum of squared deviations over a count minus 1, and the count is 1."""
    below = view.input("other")
    if below is None:
        found = summed(view) if view.scalar("other") == 0 else None
        one, groups = found is not None and found.count == 1, 1
    else:
        one, groups = bool(zeros(below)) and one_less(view), below.numel()
    if not one or spread_of(view, 0) is None:
        return None
    where = "" if groups == 1 or below is None else f" in {zeros(below)} of {groups} groups"
    return Finding(
        "one element has no unbiased spread: the count is 1, minus 1 is 0",
        [f"the count is 1{where}, minus 1 is 0", "the numerator is a sum of squared deviations from the mean"],
        [Fix("divide by at least 1: the spread of one element is then 0", "max({x}, 1)" if below is None else "{x}.clamp_min(1)", 1)],
        empty=True,
    )
