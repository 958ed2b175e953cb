"""An argument outside of a domain that is made of a trained value itself: which one, what it is, and that an update carried it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from whynan.causes.catalogue import Finding, Scene
from whynan.causes.facts import ELEMENTWISE, as_view, lies_below, skip_views
from whynan.causes.fixes import Fix
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import View
    from whynan.trace.graph import Leaf

_DEPTH = 8
_FREE = "write {} so that it cannot leave the domain, as a tanh, sigmoid or softplus of a free value, or take smaller steps"
_SEARCH = _FREE + ": a lower lr, or line_search_fn='strong_wolfe'"


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained value that an argument is made of by elementwise arithmetic alone."""

    name: str
    values: Any

    def words(self) -> str:
        """Say what it is."""
        if self.values.numel() == 1:
            return f"{self.name} is {number(float(self.values))}"
        return f"{self.name} lies between {number(float(self.values.min()))} and {number(float(self.values.max()))}"


def told_of_trained(scene: Scene, view: View, finding: Finding, index: int = 0) -> Finding:
    """Add to a finding which trained values an argument below 0 is made of, and what keeps them inside; a bound would only hold them where they are."""
    found = _trained_below(view, index)
    if not found:
        return finding
    names = " and ".join(t.name for t in found)
    each = "a trained value" if len(found) == 1 else "trained values"
    moved = f": an update carried {'it' if len(found) == 1 else 'them'} out of the domain" if scene.lab is not None and scene.lab.losses else ""
    finding.evidence.append(f"it is made of {each}: {', '.join(t.words() for t in found)}{moved}")
    searches = scene.optimizer is not None and scene.optimizer.param_groups[0].get("line_search_fn", "") is None
    finding.wrong = [fix for fix in finding.fixes if "clamp" in fix.template]
    finding.fixes = [*(fix for fix in finding.fixes if fix not in finding.wrong), Fix((_SEARCH if searches else _FREE).format(names))]
    return finding


def _trained_below(view: View, index: int) -> list[Trained]:
    """Return the trained values in the part of an argument that is below 0; nothing where other operations than elementwise ones stand between."""
    step, at = view, index
    while (made := as_view(skip_views(step.maker(at)))) is not None and made.name in ("mul", "div"):
        below = [i for i in range(len(made.op.sources)) if (t := made.input(i)) is not None and bool(lies_below(t, 0).any())]
        if len(below) != 1:
            break
        step, at = made, below[0]
    return _leaves(step, at)


def _leaves(view: View, index: int) -> list[Trained]:
    found: dict[int, Trained] = {}
    todo = [(view, index, 0)]
    while todo:
        taker, at, depth = todo.pop()
        made = taker.maker(at)
        step = as_view(made)
        if step is not None:
            if step.name not in ELEMENTWISE or depth > _DEPTH:
                return []
            todo += [(step, i, depth + 1) for i in range(len(step.op.sources))]
            continue
        leaf = cast("Leaf", made)
        if leaf.tensor.requires_grad or leaf.role == "parameter":
            found.setdefault(id(leaf), Trained(_called(leaf, taker, at), leaf.dense()))
        elif leaf.tensor.numel() > 1:
            return []  # data: for other data the same values may be inside
    return [t for t in found.values() if t.name]


def _called(leaf: Leaf, taker: View, at: int) -> str:
    """Return what the model calls a trained value, or the line that takes it."""
    from whynan.causes.naming import named_by_source

    name = leaf.name or named_by_source(taker, None).get(taker.op.sources[at].name, "")
    return f"`{name}`" if name else ""
