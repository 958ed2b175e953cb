"""Family 7: what came in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.arguments import forward_view
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import as_entries, as_view, rows, skip_views, where_bad
from whynan.causes.fixes import Fix
from whynan.causes.weighing import LOSSES, UNCOUNTED, bad_weight, is_loss, is_weight, source_text, used_at, weight_name
from whynan.records import Phase

if TYPE_CHECKING:
    from whynan.causes.source import Expression
    from whynan.trace.birth import Birth, View


def _bad_input(scene: Scene) -> bool:
    birth = scene.birth
    return birth is not None and birth.leaf is not None and birth.phase is Phase.INPUT and bool(where_bad(birth.handed_in()).any())


def _is_target(scene: Scene) -> bool:
    """A tensor met outside every module, as it is or prepared (`log(y)`), by an operation whose other argument was computed with gradients."""
    birth = scene.birth
    assert birth is not None and birth.leaf is not None
    if is_weight(birth):
        return False
    ops, last, index = birth.graph.ops, -1, birth.leaf.first_use
    while 0 <= index < len(ops):
        op = ops[index]
        if op.in_module and not any(name in op.call for name in LOSSES):
            return False
        if is_loss(op) or any(s.maker >= 0 and s.maker != last and _from_module(birth.graph, s.maker) for s in op.sources):
            return True
        if op.node >= 0:
            return False  # it is what a model without modules computes with
        following = (o.index for o in ops[index + 1 :] if o.damage and not o.backward and any(s.maker == index for s in o.sources))
        last, index = index, next(following, -1)
    return False


def _from_module(graph: object, index: int) -> bool:
    ops = graph.ops  # type: ignore[attr-defined]
    seen: set[int] = set()
    todo = [index]
    while todo and len(seen) < 200:
        current = todo.pop()
        if current < 0 or current in seen:
            continue
        seen.add(current)
        if ops[current].in_module or ops[current].node >= 0:
            return True
        todo += [s.maker for s in ops[current].sources]
    return False


def _finding(scene: Scene, what: str) -> Finding:
    birth = scene.birth
    assert birth is not None and birth.leaf is not None
    what = f"`{name}`" if birth.leaf.role == "constant" and (name := source_text(birth, _expression(birth))) else what
    tensor = birth.handed_in()
    bad = where_bad(tensor)
    total = int(bad.sum())
    place = rows(bad)
    label = f"{what} holds {total} non-finite value{'s' if total > 1 else ''}" + (f" ({place})" if place else "")
    hit = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    indices = [int(i) for i in hit.nonzero()[:64, 0]] if bad.dim() else []
    called = what if what.startswith("`") else f"the {what}"
    evidence = [f"{total} of {tensor.numel()} values of {called} are not finite" + (f": {place}" if place else "")]
    evidence += _cut_out_of(birth.leaf.dense(), tensor, int(hit.sum()) if bad.dim() else 0)
    if bad.dim() == 2 and 0 < int(bad.any(0).sum()) < bad.shape[1]:
        columns = [int(i) for i in bad.any(0).nonzero()[:, 0]]
        named = ", ".join(map(str, columns[:_COLUMNS])) + " …" * (len(columns) > _COLUMNS)
        evidence.append(f"column{'s' * (len(columns) > 1)} {named}")
    fixes = [Fix(f"leave the bad rows out, or repair {called} where it is made", leave_out=True)]
    return Finding(label, evidence, fixes, rows=indices, among=bad.shape[0] if bad.dim() else 0)


def _expression(birth: Birth) -> Expression | None:
    from whynan.capsule.sites import resolve
    from whynan.causes.source import expression_at

    return expression_at(birth.site, resolve(birth.site).file) if birth.site is not None else None


def _weight(scene: Scene) -> Finding:
    """A tensor that weighs classes or samples: told by its own name, and its rows are samples only where it is multiplied with them."""
    birth = scene.birth
    assert birth is not None
    used = used_at(birth)
    name = weight_name(birth, _expression(birth))
    found = _finding(scene, f"`{name}`")
    if used is not None and is_loss(used[0]):
        found.rows, found.among = [], 0
        found.label, *found.evidence = (as_entries(words) for words in (found.label, *found.evidence))
        found.fixes = [_finite_weight(name)]
    return found


def _weight_at_the_loss(scene: Scene) -> Finding | None:
    """A weight with an infinity that could be meant, since the step itself wrote it: the loss is where it shows."""
    found = bad_weight(scene.birth.view if scene.birth is not None else None)
    if found is None or found[0].role == "buffer":
        return None
    held, name = found[0].dense(), found[1]
    total, place = int((~held.isfinite()).sum()), as_entries(rows(where_bad(held)))
    words = f"{total} of {held.numel()} values of `{name}` are not finite" + (f": {place}" if place else "")
    return Finding(f"`{name}` holds {total} non-finite value{'s' if total > 1 else ''}" + (f" ({place})" if place else ""), [words], [_finite_weight(name)])


def _finite_weight(name: str) -> Fix:
    return Fix(f"make `{name}` finite where it is made: {UNCOUNTED}")


def _cut_out_of(own: Any, batch: Any, rows_here: int) -> list[str]:
    """Say which rows of the whole data set are bad, where the batch is a part of it."""
    if not own.dim() or tuple(own.shape[:1]) == tuple(batch.shape[:1]):
        return []
    bad = where_bad(own)
    count = int((bad.flatten(1).any(1) if bad.dim() > 1 else bad).sum())
    which = f"{rows(bad)} of that" if count == rows_here else f"{count} of them are not finite"
    return [f"it was cut out of a tensor of {own.shape[0]} rows: {which}"]


@rule("WN702", "target-not-finite", "target that is not finite", rank=11)
def target_not_finite(scene: Scene) -> Finding | None:
    """A value in the target was NaN or infinite before the loss saw it.

    What happened
    A label was missing, or made by a computation that failed: log of a price of 0, a ratio with
    an empty denominator, a padded part filled with NaN.

    Why the result is non-finite
    The prediction is finite; the loss compares it with NaN and is NaN. The gradient is NaN for
    that element and, through shared weights, everywhere.

    Example
        >>> y = torch.tensor([float("nan"), 2.0])
        >>> guess = torch.zeros(2, requires_grad=True)
        >>> F.mse_loss(guess, y).backward()
        >>> guess.grad
        tensor([nan, -2.])

    Instead
    Take the missing labels out before the loss.
        >>> guess.grad = None
        >>> known = y.isfinite()
        >>> loss = F.mse_loss(guess[known], y[known])
        >>> loss.backward()
        >>> loss.item(), guess.grad
        (4.0, tensor([ 0., -4.]))

    Masking the loss afterwards is too late, and nan_to_num trains towards 0:
        >>> guess.grad = None
        >>> ((guess - y).square() * known).sum().backward()
        >>> guess.grad
        tensor([nan, -4.])

    How sure
    whynan finds that the first bad tensor came from outside and met the loss without passing
    the model, names its rows, and replays the step without them. Proven when that step is
    finite; suspected when it could not be tried.

    Not this when
    The tensor goes through the model first (WN701), every target is missing (then also WN402),
    or a class index is out of range (WN703).
    """
    if not _bad_input(scene) or not _is_target(scene):
        return None
    return _finding(scene, "target")


@rule("WN701", "input-not-finite", "input that is not finite", rank=12)
def input_not_finite(scene: Scene) -> Finding | None:
    """A value in the batch was NaN or infinite before the model saw it.

    What happened
    The data held it: a missing measurement read as NaN, a division or logarithm in the
    preprocessing, a bad row in a cached feature file, a resize or augmentation of an empty
    image, a weight of a class or sample. Or the code writes NaN itself, where it has no value.

    Why the result is non-finite
    Every operation keeps a NaN. One value makes its row's output NaN, the mean over the batch
    makes the loss NaN, and the gradient of all shared weights with it.

    Example
        >>> x = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
        >>> w = torch.ones(2, requires_grad=True)
        >>> (x @ w).mean().backward()
        >>> w.grad
        tensor([2., nan])

    Instead
    Leave the bad rows out, and repair the data where it is made.
        >>> w.grad = None
        >>> keep = x.isfinite().all(1)
        >>> (x[keep] @ w).mean().backward()
        >>> w.grad
        tensor([3., 4.])

    nan_to_num trains the row as if the value were 0, which is right only if 0 means missing.
    Multiplying by a mask does not help: 0 * NaN is NaN. A row that also enters a moving average
    poisons it for good.

    How sure
    whynan finds that the first bad tensor of the step came from outside, names its rows and
    columns, and replays the step without these rows. Where a DataLoader drew them, it asks the
    data set for the first bad sample once more and names the line in which the value appears. Proven when that step is finite; suspected
    when it could not be tried, as when every row is bad.

    Not this when
    The tensor is first met in the loss (WN702), it is a weight or buffer (WN601, WN602), or it
    holds -inf as a mask, which is no damage.
    """
    if not _bad_input(scene):
        return _weight_at_the_loss(scene) or _number_at(scene)
    assert scene.birth is not None
    return _weight(scene) if is_weight(scene.birth) else _finding(scene, "input")


_COLUMNS = 6  # that are named
_ARITHMETIC = ("mul", "add", "sub", "rsub", "div", "pow", "lerp")
_FILLS = ("full", "full_like", "new_full", "fill", "masked_fill", "index_fill", "scalar_tensor", "constant_pad_nd", "lift_fresh")


def _number_at(scene: Scene) -> Finding | None:
    """A number of the program's own that is NaN: a weight of a loss or a scale computed outside torch, or what it writes where there is no value."""
    view = forward_view(scene)
    if view is None or scene.birth is None or scene.birth.derivative or view.name not in _ARITHMETIC + _FILLS:
        return None
    if not any(isinstance(value, float) and value != value for value in view.op.scalars.values()) and view.name != "lift_fresh":
        return None
    if view.name in _FILLS:
        advice, words = Fix("leave what has no value out of the loss, or write a finite number here"), "no tensor that goes in here is bad"
        return Finding("nan is written here", [f"it is a number of the code's own; {words}"], [advice], title="nan that the code itself writes")
    return Finding(
        "a number that goes in here is nan", ["it is no tensor: it was computed outside torch"], [Fix("make the number finite where it is computed")]
    )


@rule("WN703", "value-out-of-range", "index outside its table", rank=10)
def value_out_of_range(scene: Scene) -> Finding | None:
    """An id, label or index pointed outside its table.

    What happened
    A token id was not below the size of the embedding, a label not below the number of classes,
    or one was negative without being the ignored index: a tokenizer larger than the model,
    labels that begin at 1, a padding id of -1, a label of 255 for what has none.

    Why the result is non-finite
    There is no such row, so there is no result. On the CPU the call raises; on CUDA it is a
    device-side assert that appears later, at an unrelated line, and ends the process.

    Example
        >>> table = torch.zeros(3, 2, requires_grad=True)
        >>> F.embedding(torch.tensor([0, 3]), table)
        Traceback (most recent call last):
            ...
        IndexError: index out of range in self

    Instead
    Check the ids where the batch is made, and make the table as large as the vocabulary.
        >>> ids = torch.tensor([0, 3])
        >>> bad = (ids < 0) | (ids >= len(table))
        >>> bad.nonzero().flatten().tolist(), ids[bad].tolist()
        ([1], [3])
        >>> table = torch.zeros(4, 2, requires_grad=True)
        >>> F.embedding(ids, table).sum().backward()
        >>> table.grad.sum(1)
        tensor([2., 0., 0., 2.])

    Clamping the ids runs and trains the wrong row.

    How sure
    whynan compares each index with the size of its table and gives the first bad one with its
    position. The cause is proven: the operation raised with these values.

    Not this when
    The index is right and the row it points to holds NaN (WN601), or all targets are ignored
    (WN402).
    """
    from whynan.trace.saying import called

    birth = scene.birth
    view = birth.view if birth is not None else None
    if birth is None or view is None or birth.error is None:
        return None
    kept = view.inputs()
    integers = {n: t for n, t in kept.items() if not t.is_floating_point() and not t.is_complex() and t.numel() and str(t.dtype) != "torch.bool"}
    tables = [t for t in kept.values() if t.is_floating_point() and t.dim()]
    if not integers or not tables or not isinstance(birth.error, IndexError | RuntimeError):
        return None
    name, ids = next(iter(integers.items()))
    size = _table_size(view.name, tables[0])
    bad = (ids < 0) | (ids >= size)
    labels = view.name.startswith(("nll", "cross"))
    if labels:
        bad &= ids != _ignored(view)
    if not int(bad.sum()):
        return None
    place = [int(i) for i in bad.nonzero()[0]] if ids.dim() else []
    value = int(ids[bad].flatten()[0])
    evidence = [f"{int(bad.sum())} of {ids.numel()} indices are outside 0 … {size - 1}", f"the first is {value} at {place}"]
    hit = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    indices = [int(i) for i in hit.nonzero()[:64, 0]] if bad.dim() else []
    made = skip_views(view.maker(name))
    if hasattr(made, "name") and made is not None and made.name:
        computed = as_view(made)
        evidence.append(f"it came from {called(computed.op) if computed is not None else made.name}")
    table = Fix("leave these samples out, check the ids where the batch is made, or make the table larger", leave_out=True)
    return Finding(
        f"label {value} of {size} classes" if labels else f"index {value} in a table of {size}",
        evidence,
        _for_labels(view, ids, bad, size) if labels else [table],
        proven=True,
        rows=indices,
        among=bad.shape[0] if bad.dim() else 0,
    )


_MARKS = (255, 65535)  # the largest numbers that a mask on disk can hold


def _ignored(view: View) -> int:
    """Return the label that a loss leaves out."""
    given = view.scalar("ignore_index")
    return given if isinstance(given, int) else -100


def _for_labels(view: View, ids: Any, bad: Any, size: int) -> list[Fix]:
    """Say what labels outside the classes most likely are, by their numbers: a mark for what has no label, a count that begins at 1, or classes left out."""
    values = [int(v) for v in ids[bad].unique()]
    left_out = Fix("leave these samples out, or check the labels where the batch is made", leave_out=True)
    first, high = values[0], values[-1]
    if len(values) == 1 and (first < 0 or first in _MARKS or first > 10 * size):
        if bool((ids == _ignored(view)).any()):
            mark = f"{{x}}.masked_fill({{x}} == {first}, {_ignored(view)})"
            return [Fix(f"if {first} marks what has no label, give it the label that is ignored, {_ignored(view)}", mark, 1), left_out]
        return [Fix(f"if {first} marks what has no label, let it be ignored: ignore_index={first}", str(first), keyword="ignore_index"), left_out]
    if first < 0:
        return [left_out]
    begins = "no label here is 0: if they begin at 1, take 1 off; else " if values == [size] and not bool((ids == 0).any()) else f"labels go up to {high}: "
    return [Fix(f"{begins}give the model {high + 1} classes, or leave such samples out", leave_out=True)]


def _table_size(op: str, table: object) -> int:
    shape = table.shape  # type: ignore[attr-defined]
    if op.startswith(("nll", "cross", "multi")):
        return int(shape[1] if len(shape) > 1 else shape[0])
    return int(shape[0])
