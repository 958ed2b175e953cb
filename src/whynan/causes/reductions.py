"""Family 4: a row of masks, a target that cannot be reached, a spread of identical values."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from whynan.causes import masks
from whynan.causes.arguments import forward_view, written_spans
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import ATTENTION, as_view, counted, divides, lineage, rows, share, skip_views
from whynan.causes.fixes import Fix
from whynan.causes.handed import batch_size, constant_ids
from whynan.causes.spreads import Spread, made_at, rounding_spread, spread_of, usual_spread
from whynan.causes.usual import usual
from whynan.causes.written import finite_instead
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View

_MAXIMA = ("max", "amax")
_SOFTMAXES = ("_softmax", "_log_softmax", "logsumexp", "_safe_softmax", "logcumsumexp")


@rule("WN401", "fully-masked-softmax", "softmax over a row that is entirely masked", rank=30)
def fully_masked_softmax(scene: Scene) -> Finding | None:
    """A softmax or attention got a row in which every entry is -inf and gave NaN.

    What happened
    A mask removed all entries of a row: a sample that is padding only, a query with no key to
    attend to, a state without a legal action. The softmax, log_softmax, logsumexp, logaddexp or attention
    over that row has nothing left to distribute; nor has an entmax or a softmax written by hand.

    Why the result is non-finite
    softmax subtracts the row's maximum first: -inf - -inf is NaN; without that it is 0 / 0. A
    row with one finite entry is fine: -inf in a mask is not the fault.

    Example
        >>> scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], requires_grad=True)
        >>> mask = torch.tensor([[True, True, True], [True, False, False]])
        >>> scores.masked_fill(mask, -torch.inf).softmax(-1).detach()
        tensor([[   nan,    nan,    nan],
                [0.0000, 0.2689, 0.7311]])

    Instead
    Leave such rows unmasked for the softmax and take their result out afterwards.
        >>> dead = mask.all(-1, keepdim=True)
        >>> p = scores.masked_fill(mask & ~dead, -torch.inf).softmax(-1).masked_fill(dead, 0.0)
        >>> p[:, 2].sum().backward()
        >>> p.detach(), scores.grad
        (tensor([[0.0000, 0.0000, 0.0000],
                [0.0000, 0.2689, 0.7311]]), tensor([[ 0.0000,  0.0000,  0.0000],
                [ 0.0000, -0.1966,  0.1966]]))

    The dead row learns nothing either way: its gradient is 0. If the sample should count, the
    fault is one step back, where the mask is made. nan_to_num trains the row as if it were 0,
    and a test `mask.all()` over the whole batch misses single rows.

    How sure
    whynan counts the rows that are entirely -inf, names them and the line that wrote the -inf,
    and replays the step without them where they are samples. Proven when the replay with the
    change is finite with a living gradient; otherwise suspected.

    Not this when
    The row holds NaN or +inf (look at what made the scores: WN201, WN202), or only the target's
    own class is masked (WN405).
    """
    view = forward_view(scene)
    if view is not None and view.name.startswith("logaddexp"):
        return _nothing_to_add(scene, view)
    by_hand = (_logsumexp_taken_off(view) or _maximum_taken_off(view)) if view is not None else None
    if view is None or not (by_hand is not None or view.name in _SOFTMAXES or view.name.startswith(ATTENTION)):
        return None
    maximum = by_hand if by_hand is not None and by_hand.name in _MAXIMA else None
    scores = (maximum or view).input("attn_bias" if view.name.startswith(ATTENTION) else "self")
    if scores is None or not scores.is_floating_point() or scores.dim() == 0:
        return None
    dim = (by_hand or view).scalar("dim")
    axis = dim[0] if isinstance(dim, list | tuple) and dim else dim if isinstance(dim, int) else -1
    dead = (scores == float("-inf")).all(axis)
    count = int(dead.sum())
    if not count:
        return None
    birth = scene.birth
    assert birth is not None
    place = axis % scores.dim()
    total = dead.numel()
    name = {"logsumexp": "logsumexp", "_log_softmax": "log_softmax", "sub": "log_softmax"}.get(view.name, "softmax")
    first = _first_rows(dead) if place else []  # along the first dimension no row of the tensor is named by an index
    samples = bool(first) and scores.shape[0] == batch_size(scene.program)
    kind = "columns" if scores.dim() == 2 and not place else "rows"
    evidence = [f"{count} of {total} {kind} are entirely -inf{_which(dead, first, samples)}", *_only_backward(birth)]
    fixes = [finite_instead(birth)] if maximum is not None else _in_place(view, name, axis)
    fixes.append(
        Fix(f"{'drop samples in which nothing may be attended to' if samples else f'leave something finite in each of the {kind}'}, where the mask is made")
    )
    gives = "its maximum taken off, -inf - -inf, gives nan" if maximum is not None else _result(name, birth)
    label = f"every entry of {'this row' if total == 1 else f'{count} of {total} {kind}'} is -inf: {gives}"
    spans = written_spans(birth, "the -inf came from here")
    decided = masks.decision(birth, first)
    if decided is not None:
        spans.append(decided.span())
        nearest = decided.fix() if place == scores.dim() - 1 else None  # it is looked for along the last dimension
        fixes = [fix for fix in (nearest,) if fix is not None] + fixes
    else:
        evidence.append(masks.handed_in(birth, first))
    wrong = _tempting(axis, f"{count} of {total} {kind}") if name == "softmax" and maximum is None else []
    title = "normalisation over a row that is entirely masked" if maximum is not None else ""
    return Finding(label, evidence, fixes, spans, rows=first if samples else [], wrong=wrong, title=title)


def _logsumexp_taken_off(view: View) -> View | None:
    """Return the logsumexp of a log_softmax written by hand: it is taken off what it was computed from."""
    taken = as_view(skip_views(view.maker("other"))) if view.name == "sub" else None
    scores, summed = view.source("self"), taken.source("self") if taken is not None else None
    same = scores is not None and summed is not None and scores.maker == summed.maker
    return taken if taken is not None and taken.name == "logsumexp" and same else None


def _maximum_taken_off(view: View) -> View | None:
    """Return the maximum of rows that an infinite difference was computed with: a softmax, entmax or sparsemax written by hand."""
    output = view.output()
    if view.name != "sub" or output is None or not bool(output.isnan().any()):
        return None
    return next((made for made in lineage(view) if made.name in _MAXIMA and made.scalar("dim") is not None), None)


def _which(dead: Any, first: list[int], samples: bool) -> str:
    """Name the rows, as samples where the first dimension is that of the batch."""
    place = rows(dead) if dead.dim() and first else ""
    return f" ({place}{' of the batch' * samples})" if place else ""


def _only_backward(birth: Birth) -> list[str]:
    """Say that the loss is finite, where it is and only the gradient is bad."""
    loss = birth.losses[-1] if birth.losses else math.nan
    return [f"the loss ({number(loss)}) is finite; the gradient is not"] if birth.derivative and math.isfinite(loss) else []


def _result(name: str, birth: Birth) -> str:
    if name != "logsumexp":
        return f"{name} is 0/0"
    return "logsumexp is -inf" + (" and its slope 0/0" if birth.derivative else "")


def _in_place(view: View, name: str, axis: int) -> list[Fix]:
    """Return the changes of what the softmax is taken of."""
    if view.name == "sub":
        filled = f"{{0}}.masked_fill(({{0}} == float('-inf')).all({axis}, keepdim=True), 0.0)"
        return [Fix("use log_softmax, with something finite in a row that is entirely masked", f"torch.log_softmax({filled}, {axis})")]
    low = "-1e4" if view.op.dtype == "float16" else "-1e30"
    fixes = [
        Fix(
            f"give the {name} something finite in a row that is entirely masked",
            f"{{x}}.masked_fill(({{x}} == float('-inf')).all({axis}, keepdim=True), 0.0)",
            0,
        )
    ]
    if name == "logsumexp":  # of which 0 would be one of the summands
        fixes.insert(0, Fix("use a large negative number instead of -inf", f"{{x}}.clamp_min({low})", 0))
    if "multi_head_attention" in view.call or "MultiheadAttention" in view.call or "multihead" in view.call:
        fixes.insert(0, Fix("let a sequence that is all padding attend to itself", "{x} & ~{x}.all(-1, keepdim=True)", keyword="key_padding_mask"))
    return fixes


def _tempting(axis: object, masked: str) -> list[Fix]:
    return [
        Fix("nan_to_num after the softmax, which lets the row count as 0", f"torch.nan_to_num({{0}}.softmax({axis}))"),
        Fix(f"an `if` that asks whether everything is masked (here {masked})", "({x} * 0 if bool(({x} == float('-inf')).all()) else {x})", 0),
    ]


def _nothing_to_add(scene: Scene, view: View) -> Finding | None:
    """Explain a logaddexp, a logsumexp over two: with both at -inf there is nothing to add, and its slope is 0/0."""
    left, right = view.input(0), view.input(1 if len(view.op.sources) > 1 else 0)
    if left is None or right is None or scene.birth is None:
        return None
    dead = (left == float("-inf")) & (right == float("-inf"))
    if not int(dead.sum()):
        return None
    fixes = [Fix("use a large finite number instead of -inf", "torch.logaddexp({0}.clamp_min(-1e30), {1}.clamp_min(-1e30))")]
    evidence = [f"{int(dead.sum())} of {dead.numel()} pairs are both -inf" + (f" ({rows(dead)})" if dead.dim() and rows(dead) else "")]
    label = "both sides are -inf: there is nothing to add, and the slope is 0/0"
    return Finding(label, evidence, fixes, written_spans(scene.birth, "the -inf came from here"), title=f"{view.name} of two that are both -inf")


def _first_rows(dead: Any) -> list[int]:
    if not dead.dim():
        return []
    hit = dead.flatten(1).any(1) if dead.dim() > 1 else dead
    return [int(i) for i in hit.nonzero()[:64, 0]]


@rule("WN405", "infeasible-target", "target that cannot be reached", rank=31)
def infeasible_target(scene: Scene) -> Finding | None:
    """The target had probability 0 whatever the model says, so its loss was infinite.

    What happened
    A CTC target needs more frames than its input has (its length, and one blank between equal
    neighbours), or the target class itself was masked with -inf. Label smoothing makes every
    class a target, also the masked ones: their log-probabilities are added up.

    Why the result is non-finite
    No alignment exists, or the only right answer is ruled out: the probability is exactly 0 and
    -log(0) is inf. The gradient of CTC is NaN there.

    Example
        >>> x = torch.zeros(3, 2, 4, requires_grad=True)  # 3 frames, 2 samples, 4 classes
        >>> target = torch.tensor([[1, 1, 2], [1, 2, 0]])
        >>> frames, length = torch.tensor([3, 3]), torch.tensor([3, 2])
        >>> F.ctc_loss(x.log_softmax(-1), target, frames, length, reduction="none").detach()
        tensor([   inf, 2.5494])

    Instead
    Leave out the samples that do not fit; zero_infinity=True lets them count 0 with the
    gradient 0.
        >>> args = x.log_softmax(-1), target, frames, length
        >>> loss = F.ctc_loss(*args, zero_infinity=True)
        >>> loss.backward()
        >>> loss.isfinite().item(), x.grad.abs().sum((0, 2)) > 0
        (True, tensor([False,  True]))

    It hides them, too: count them, for a constant share is a fault in the data or in the
    stride. For a masked class do not mask the target, or mask with a finite number such as -30.

    How sure
    whynan compares the frames each CTC target needs with those it has, or finds a -inf written
    as a mask at the target's place. Proven when the replay with the change is finite with a
    living gradient; otherwise suspected.

    Not this when
    The probability rounded to 0 without a mask (WN101), a whole row is masked (WN401), or the
    label lies outside the table (WN703).
    """
    view = forward_view(scene)
    birth = scene.birth
    if view is None or birth is None:
        return None
    if "ctc_loss" in view.name:
        return _ctc(view)
    if birth.derivative:
        return None
    added = view.name in ("sum", "mean")
    scores = view.input("self") if added or view.name.startswith(_PICK_TARGETS) else None
    if scores is None or not birth.slice.written_by or not bool((scores == float("-inf")).any()) or bool(scores.isnan().any()):
        return None
    if added and bool((scores == float("inf")).any()):
        return None  # no mask: infinities of both signs meet
    spans = written_spans(birth, "masked here")
    clamp = Fix("mask with a large finite number, so that a masked target costs much and not infinitely much", "{x}.clamp_min(-30.0)", 0)
    if added:
        what = share(int((scores == float("-inf")).sum()), scores, "values are -inf by a mask")
        smoothed = "cross_entropy" in view.call
        label = "label smoothing gives masked classes a share of the target" if smoothed else f"masked entries are added up: {what}"
        return Finding(label, [what, "the -inf was written on purpose, as a mask"], [clamp] if smoothed else [_COUNT_MASKED_AS_0, clamp], spans)
    output = view.output()
    hit = int((~output.isfinite()).sum()) if output is not None else 1
    return Finding(
        "the target's own logit is -inf: its probability is 0 and its loss infinite",
        [counted(hit, "selected log-probabilities are -inf"), "the -inf was written on purpose, as a mask"],
        [clamp, Fix("do not mask the target class, or leave such samples out")],
        spans,
    )


_PICK_TARGETS = ("nll_loss", "gather", "index", "cross_entropy", "take", "select", "slice")
_COUNT_MASKED_AS_0 = Fix("let masked entries count as 0", "{x}.masked_fill({x} == float('-inf'), 0.0)", 0)


def _ctc(view: View) -> Finding | None:
    kept = view.inputs()
    log_probs = kept.get("log_probs")
    lengths_in = kept.get("input_lengths")
    lengths_out = kept.get("target_lengths")
    targets = kept.get("targets")
    ins = lengths_in.flatten().tolist() if lengths_in is not None else view.scalar("input_lengths") or []
    outs = lengths_out.flatten().tolist() if lengths_out is not None else view.scalar("target_lengths") or []
    need = _ctc_needs(targets, list(outs))  # type: ignore[call-overload]
    bad = [i for i, (a, b) in enumerate(zip(ins, need, strict=False)) if b > a]  # type: ignore[call-overload]
    if not bad:
        return None
    first = bad[0]
    evidence = [f"sample {first}: {need[first]} frames are needed, {ins[first]} are there", f"{len(bad)} of {len(need)} samples do not fit"]  # type: ignore[index]
    if log_probs is not None:
        evidence.append(f"log-probabilities {list(log_probs.shape)}")
    return Finding(
        f"sample {first} needs {need[first]} frames and has {ins[first]}: no alignment exists",  # type: ignore[index]
        evidence,
        [
            Fix("let samples that cannot be aligned count as 0", "True", keyword="zero_infinity"),
            Fix("filter out samples whose target is longer than their input"),
        ],
        rows=bad,
    )


def _ctc_needs(targets: Any, lengths: list[int]) -> list[int]:
    """Frames a target needs: its length and one blank between equal neighbours."""
    needs, offset = [], 0
    for index, length in enumerate(lengths):
        if targets is None:
            needs.append(int(length))
            continue
        labels = targets[index][:length].tolist() if targets.dim() == 2 else targets[offset : offset + length].tolist()
        offset += int(length)
        needs.append(int(length) + sum(a == b for a, b in pairwise(labels)))
    return needs


@rule("WN404", "constant-batch", "spread of identical values used as a denominator", rank=32)
def constant_batch(scene: Scene) -> Finding | None:
    """The spread of identical values was 0 and stood below a fraction line.

    What happened
    A variance, standard deviation or range was used as a denominator, and in this batch all
    values were the same: a constant feature or image, equal rewards, a batch of mask tokens
    only, a layer norm with eps=0 on a constant row. A correlation divides by two of them.

    Why the result is non-finite
    Identical values have the spread 0. The error over it is x / 0, the centred value over it
    0 / 0.

    Example
        >>> y, guess = torch.full((4,), 2.0), torch.zeros(4, requires_grad=True)
        >>> error, spread = (guess - y).square().sum(), (y - y.mean()).square().sum()
        >>> (error / spread).item()
        inf

    Instead
    Divide by a spread that outlives the batch: a running mean of it.
        >>> running = 0.9 * 8.0 + 0.1 * spread.item()
        >>> loss = error / running
        >>> loss.backward()
        >>> round(loss.item(), 4), guess.grad
        (2.2222, tensor([-0.5556, -0.5556, -0.5556, -0.5556]))

    `error * 0` for such a batch is an acceptable skip: it keeps the graph and teaches nothing.
    A fresh zeros_like cuts the graph. An eps moves the blow-up into the optimizer:
        >>> (error / (spread + 1e-8)).item() > 1e9
        True

    How sure
    whynan follows the denominator back to the variance or range it is, or is a product, root or
    sum of, also where it is written out as mean(x^2) - mean(x)^2; checks that it is exactly 0,
    and counts the rows that are identical. Proven when the step, replayed with the
    change, is finite and of the usual size (it may train nothing, like a skipped one);
    otherwise suspected.

    Not this when
    There is one element only (WN403), or the denominator is a norm (WN104) or a count (WN402).
    Where rounding leaves 1e-14 instead of 0, the loss is finite and absurd, and nothing is NaN
    yet: a spike that is found by comparing the step with a healthy one, and told under this code too.
    """
    if scene.jump is not None:
        return rounding_spread(scene)
    view = forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.derivative:
        return None
    if (
        view.name in ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
        and view.scalar("eps") == 0.0
    ):
        return Finding("a constant row is normalised with eps=0", ["eps is 0 and the variance is 0"], [Fix("give the normalisation an eps above 0")])
    if view.name not in ("div", "reciprocal", "rsqrt", "pow"):
        return None
    below_index = 1 if view.name == "div" else 0
    below = view.input(below_index)
    if below is None or not int((below == 0).sum()):
        return None
    found = spread_of(view, below_index, gone=True)
    if found is None:
        return None
    what, zero = found.what, int((below == 0).sum())
    evidence = [
        f"{what} is exactly 0" + (f" in {zero} of {below.numel()} places" if below.numel() > 1 else ""),
        *_identical(found, scene, (zero, below.numel())),
    ]
    spans = made_at(view, below_index, found.label())
    if view.name != "div":
        floor = Fix("keep the spread away from 0", "{x}.clamp_min(1e-6)", int(divides(view)))  # `2 / spread` arrives as a reciprocal
        return Finding(f"{what} of identical values is 0", evidence, [floor], spans, empty=True)
    above = view.input(0)
    lost = above is not None and bool((above.broadcast_to(_joint(above, below))[(below == 0).broadcast_to(_joint(above, below))] != 0).any())
    fixes = [_USUAL_ZERO, Fix("keep the spread away from 0", "{x}.clamp_min(1e-6)", 1)]
    if not lost:
        return Finding(f"{what} of identical values is 0", evidence, fixes, spans, empty=True)
    known = usual(scene, "div", 1, birth.site)
    if known is not None:
        fixes = [usual_spread(*known), *fixes]
    return Finding(f"{what} of identical values is 0", evidence, fixes, spans, empty=True, wrong=[_EPS, _CUT])


def _identical(spread: Spread, scene: Scene, places: tuple[int, int]) -> list[str]:
    """Say which of the values are the same, along the dimension that the spread was taken over."""
    values = spread.values
    if values is None or not values.dim() or len(values) < 2:
        return []
    if spread.same_rows():
        return [f"{len(values)} rows, 1 unique", *constant_ids(scene.program)]
    constant, groups = spread.constant()
    if spread.axes != (0,) or spread.windows:
        return [spread.words()] if (constant, groups) != places else []  # else it was just said
    return [f"{constant} of {values[0].numel()} columns hold one value in all {len(values)} rows"] if constant else []


# x / inf is 0 with the gradient 0: the graph stays whole, and every other element stays as it is
_USUAL_ZERO = Fix("let what is divided by a spread of 0 count as 0", "{0} / {1}.where({1} != 0, float('inf'))")
_EPS = Fix("an eps in the denominator", "{x} + 1e-8", 1)
_CUT = Fix("a fresh zeros_like in its place", "torch.zeros_like({0})")


def _joint(left: Any, right: Any) -> Any:
    return (left + right).shape
