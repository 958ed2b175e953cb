"""Where a mask was decided: the comparison behind an -inf, one step further back than the line that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whynan.causes.facts import as_view
from whynan.causes.fixes import Fix
from whynan.causes.source import expression_at
from whynan.records import Span, number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View
    from whynan.trace.graph import Leaf

_COMPARE = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "ne": "!=", "eq": "=="}
_NOT = ("bitwise_not", "logical_not")
_HAND_ON = ("view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "slice", "select", "transpose", "permute", "reshape", "clone", "alias", "detach",
            "_to_copy", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "__and__", "__or__", "rsub", "repeat", "cat")  # fmt: skip
DEPTH = 12


@dataclass(frozen=True, slots=True)
class Decision:
    """One comparison that decided which entries count, and the rows of it in which none did."""

    view: View
    rows: list[int]
    kept: bool  # a true entry is one that counts; otherwise one that is masked

    @property
    def sign(self) -> str:
        return _COMPARE[self.view.name]

    def best(self) -> float | None:
        """The value of the empty rows that came nearest to counting; none for a test of equality."""
        values, output = self.view.input("self"), self.view.output()
        if values is None or output is None or self.view.name in ("eq", "ne"):
            return None
        chosen = values.broadcast_to(output.shape)[self.rows].float()
        return float(chosen.max() if self.upwards else chosen.min())

    @property
    def upwards(self) -> bool:
        """Whether a larger value is more likely to count."""
        return (self.view.name in ("gt", "ge")) is self.kept

    def limit(self) -> str:
        """The number compared with, as text; nothing where it is a tensor of several."""
        other = self.view.scalar("other")
        if isinstance(other, int | float):
            return number(float(other))
        tensor = self.view.input("other")
        return number(float(tensor)) if tensor is not None and tensor.numel() == 1 else ""

    def span(self) -> Span:
        """The line of the comparison, with the numbers of the rows in which nothing counts."""
        from whynan.capsule.sites import resolve

        place = f"row {self.rows[0]}" if len(self.rows) == 1 else f"{len(self.rows)} rows"
        best, limit = self.best(), self.limit()
        label = f"decided here: in {place} no entry counts"
        if best is not None and limit:
            label += f": the {'largest' if self.upwards else 'smallest'} value is {number(best)}, the limit {limit}"
        return resolve(self.view.site, label)

    def fix(self) -> Fix | None:
        """Let the entry that came nearest count where none does; every other row stays as it is."""
        site = self.view.site
        place = self._varying() if self.best() is not None and site is not None and self._as_written() else None
        if place is None:
            return None
        most = self.upwards if place == 0 else not self.upwards
        nearest = f"{{{place}}} {'==' if self.kept else '!='} {{{place}}}.{'amax' if most else 'amin'}(-1, keepdim=True)"
        template = f"({{0}} {self.sign} {{1}}) {'|' if self.kept else '&'} ({nearest})"
        return Fix(f"where no entry passes the limit let the {'largest' if most else 'smallest'} of the row count", template, site=site)

    def _varying(self) -> int | None:
        """Which side of the comparison differs along a row, if the other is the same all along it: there the nearest entry can be named."""
        output = self.view.output()
        size = 0 if output is None else output.shape[-1]
        along = [tensor.shape[-1] if tensor is not None and tensor.dim() else 1 for tensor in (self.view.input("self"), self.view.input("other"))]
        return along.index(size) if size > 1 and sorted(along) == [1, size] else None

    def _as_written(self) -> bool:
        """Whether the source has the operands in this order: `0 < x` arrives as `x > 0`."""
        expression = expression_at(self.view.site, "")
        return expression is not None and expression.name in (self.view.name, f"{self.view.name}_")


def decision(birth: Birth, rows: list[int]) -> Decision | None:
    """Find the comparison that masked every entry of these rows of the batch."""
    for writer in _writers(birth):
        for made, masks in _behind(writer):
            found = _empty(made, rows, masks)
            if found is not None:
                return found
    return None


def handed_in(birth: Birth, rows: list[int]) -> str:
    """Say that the mask itself came from outside, with its empty rows."""
    for leaf in (leaf for writer in _writers(birth) for leaf in _leaves(writer)):
        tensor = leaf.tensor.detach()
        if tensor.dtype.is_floating_point or not tensor.dim() or not rows or max(rows) >= tensor.shape[0]:
            continue
        chosen = tensor[rows].flatten()
        if bool((chosen == chosen[0]).all()):
            which = f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows[:4]))}"
            return f"the mask came in with the batch: {list(tensor.shape)}, {which} all {chosen[0].item()}"
    return ""


def _writers(birth: Birth) -> list[View]:
    """Return the operations before the birth that write by a mask, the nearest first."""
    from whynan.trace.birth import View as Made

    assert birth.op is not None
    end = birth.forward.op.index if birth.forward is not None else birth.op.index
    found = [Made(birth.graph.ops[i], birth) for i in sorted(birth.inputs, reverse=True) if i < end]
    return [view for view in found if view.name in ("masked_fill", "where")]


def _behind(writer: View) -> list[tuple[View, bool]]:
    """Return the comparisons behind a mask, nearest first, and whether true means masked there."""
    found: list[tuple[View, bool]] = []
    chosen = writer.input("self")
    keeps = writer.name == "where" and chosen is not None and bool(chosen.isfinite().all())  # the -inf is on the other side
    todo = [(writer.maker(i), not keeps, 0) for i in _mask_arguments(writer)]
    while todo:
        maker, masks, level = todo.pop(0)
        made = as_view(maker)
        if made is None or level > DEPTH:
            continue
        if made.name in _COMPARE:
            found.append((made, masks))
        elif made.name in _NOT or made.name in _HAND_ON:
            masks = not masks if made.name in (*_NOT, "rsub") else masks
            todo += [(made.maker(i), masks, level + 1) for i in range(len(made.op.sources))]
    return found


def _leaves(writer: View) -> list[Leaf]:
    found: list[Any] = []
    todo = [(writer.maker(i), 0) for i in _mask_arguments(writer)]
    while todo:
        maker, level = todo.pop(0)
        made = as_view(maker)
        if made is None and maker is not None:
            found.append(maker)
        elif made is not None and level <= DEPTH and (made.name in _NOT or made.name in _HAND_ON or made.name in _COMPARE):
            todo += [(made.maker(i), level + 1) for i in range(len(made.op.sources))]
    return found


def _mask_arguments(writer: View) -> list[int]:
    """Which arguments say where to write: the mask of masked_fill, the condition of where."""
    names = [s.name for s in writer.op.sources]
    return [i for i, name in enumerate(names) if name in ("mask", "condition")] or list(range(len(names)))


def _empty(made: View, rows: list[int], masks: bool) -> Decision | None:
    """Whether in these rows of a comparison no entry counts."""
    output = made.output()
    if output is None or output.dim() < 2 or not rows or max(rows) >= output.shape[0]:
        return None
    chosen = output[rows].flatten(1)
    if not bool(chosen.all() if masks else (~chosen).all()) or bool(output.all() if masks else (~output).all()):
        return None
    return Decision(made, rows, kept=not masks)
