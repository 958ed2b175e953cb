"""Family 7: what came in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import rows, skip_views, where_bad
from whynan.causes.fixes import Fix
from whynan.records import Phase

if TYPE_CHECKING:
    from whynan.trace.graph import Op

_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss", "kl_div", "cross_entropy", "soft_margin_loss")


def _bad_input(scene: Scene) -> bool:
    birth = scene.birth
    return birth is not None and birth.leaf is not None and birth.phase is Phase.INPUT


def _is_target(scene: Scene) -> bool:
    """A tensor first met outside every module by an operation whose other argument was computed with gradients."""
    birth = scene.birth
    assert birth is not None and birth.leaf is not None
    index = _real_use(birth.graph.ops, birth.leaf.first_use)
    op = birth.graph.ops[index] if index < len(birth.graph.ops) else None
    if op is None or op.in_module and not any(name in op.call for name in _LOSSES):
        return False
    if any(name in op.call for name in _LOSSES):
        return True
    if any(name in op.call or name in op.name for name in _LOSSES):
        return True
    return any(s.maker >= 0 and _from_module(birth.graph, s.maker) for s in op.sources)


_CARRIES = ("slice", "select", "index", "view", "unsqueeze", "squeeze", "_to_copy", "detach", "alias", "t", "transpose", "expand", "clone", "reshape", "permute", "split", "unbind")


def _real_use(ops: list[Op], index: int) -> int:
    """Follow a tensor through slices, casts and views to the first operation that computes with it."""
    for _ in range(20):
        if index >= len(ops) or ops[index].name.split(".")[1] not in _CARRIES:
            return index
        following = next((op.index for op in ops[index + 1 :] if any(s.maker == index for s in op.sources)), None)
        if following is None:
            return index
        index = following
    return index


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
    tensor = birth.leaf.tensor.detach()
    bad = where_bad(tensor)
    total = int(bad.sum())
    place = rows(bad)
    label = f"{what} holds {total} non-finite value{'s' if total > 1 else ''}" + (f" ({place})" if place else "")
    hit = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    indices = [int(i) for i in hit.nonzero()[:64, 0]] if bad.dim() else []
    evidence = [f"{total} of {tensor.numel()} values of the {what} are not finite" + (f": {place}" if place else "")]
    if bad.dim() == 2 and 0 < int(bad.any(0).sum()) < bad.shape[1]:
        evidence.append("columns " + ", ".join(str(int(i)) for i in bad.any(0).nonzero()[:6, 0]))
    fixes = [Fix(f"leave the bad rows out, or repair the {what} where it is made", leave_out=True)]
    return Finding(label, evidence, fixes, rows=indices)


@rule("WN702", "target-not-finite", "target that is not finite", rank=11)
def target_not_finite(scene: Scene) -> Finding | None:
    """A value in the target was NaN or infinite before the loss saw it."""
    if not _bad_input(scene) or not _is_target(scene):
        return None
    return _finding(scene, "target")


@rule("WN701", "input-not-finite", "input that is not finite", rank=12)
def input_not_finite(scene: Scene) -> Finding | None:
    """A value in the batch was NaN or infinite before the model saw it."""
    return _finding(scene, "input") if _bad_input(scene) else None


@rule("WN703", "value-out-of-range", "index outside its table", rank=10)
def value_out_of_range(scene: Scene) -> Finding | None:
    """An id, label or index lies outside the table it points into."""
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
    if view.name.startswith("nll") or view.name.startswith("cross"):
        bad &= ids != -100
    if not int(bad.sum()):
        return None
    place = [int(i) for i in bad.nonzero()[0]] if ids.dim() else []
    value = int(ids[bad].flatten()[0])
    evidence = [f"{int(bad.sum())} of {ids.numel()} indices are outside 0 … {size - 1}", f"the first is {value} at {place}"]
    hit = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    indices = [int(i) for i in hit.nonzero()[:64, 0]] if bad.dim() else []
    made = skip_views(view.maker(name))
    if hasattr(made, "name") and made is not None and made.name:
        evidence.append(f"it came from {made.name}")
    return Finding(f"index {value} in a table of {size}", evidence, [Fix("check the ids where the batch is made, or make the table larger")], proven=True, rows=indices)


def _table_size(op: str, table: object) -> int:
    shape = table.shape  # type: ignore[attr-defined]
    if op.startswith(("nll", "cross", "multi")):
        return int(shape[1] if len(shape) > 1 else shape[0])
    return int(shape[0])
