"""What a rule asks of the operation at the place of birth: its forward side, its argument, and where that came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Scene
from whynan.causes.facts import as_view, lineage, skip_views
from whynan.records import Phase, Span

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View


def forward_view(scene: Scene) -> View | None:
    """The operation of a forward birth, or the forward side of a backward one."""
    birth = scene.birth
    if birth is None or birth.op is None or (birth.phase is Phase.OPTIMIZER and any(e.kind == "optimizer" for e in scene.program.entries)):
        return None
    return birth.forward


def written_spans(birth: Birth, label: str) -> list[Span]:
    """Return where the deliberate infinities were written."""
    from whynan.capsule.sites import resolve

    spans: list[Span] = []
    for writer in birth.slice.written_by[:2]:
        site = getattr(writer, "site", None) or getattr(writer, "used_at", None)
        held = writer.name if hasattr(writer, "used_at") else ""
        span = resolve(site, f"`{held}`, which holds the infinity, is read here" if held else label)
        if span.known and all((span.file, span.line) != (s.file, s.line) for s in spans):
            spans.append(span)
    return spans


def computed_forward(scene: Scene) -> View | None:
    """Return the operation of a birth in the forward pass; nothing for a slope."""
    birth = scene.birth
    if birth is None or birth.derivative:
        return None
    return forward_view(scene)


def from_spans(view: View, index: int = 0) -> list[Span]:
    """Return the place where an argument was computed, if it is another line."""
    from whynan.capsule.sites import positions, resolve
    from whynan.trace.saying import called

    made = as_view(skip_views(view.maker(index)))
    if made is None or made.site is None or made.op.backward:
        return []
    here = view.site
    if here is not None and here.code is made.site.code and positions(here)[0] == positions(made.site)[0]:
        return []
    return [resolve(made.site, f"the argument was made here by {called(made.op)}")]


def rounded_from(view: View) -> str:
    """Say where an exact 0 came from: a softmax or sigmoid that rounded, a mask, the data."""
    argument = argument_of(view)[0]
    for made in lineage(view, depth=5):
        output = made.output()
        if output is None:
            continue
        if made.name in ("_softmax", "softmax") and bool((output == 0).any()):
            return "a softmax that rounded to 0"
        if made.name == "sigmoid":
            return f"a sigmoid that rounded to {_ends(view, made)}"
        if made.name == "tanh" and bool((output.abs() == 1).any()):
            return "a tanh that rounded to 1"
        if made.name in ("relu", "threshold") and bool((output == 0).any()) and _zero_together(output, argument):
            return "a relu"
    return ""


def _zero_together(output: Any, argument: Any) -> bool:
    """Whether an argument is 0 only where what it was made of is, as far as both have the same places."""
    return argument is None or output.shape != argument.shape or bool((output[argument == 0] == 0).all())


def _ends(view: View, made: View) -> str:
    """Say at which of its ends a sigmoid arrived where an operation is not finite."""
    output, bad = made.output(), view.output()
    if output is None or bad is None:
        return "0 or 1"
    there = output[~bad.isfinite()] if output.shape == bad.shape else output
    ends = [str(end) for end in (0, 1) if bool((there == end).any())]
    return ends[0] if len(ends) == 1 else "0 or 1"


def factorised(view: View) -> View | None:
    """Return the factorisation that an operation checks the success of (torch raises in the check), or that `logdet` selects the result of."""
    if view.name == "where" and view.call.endswith("logdet"):
        return next((m for m in lineage(view, depth=3) if m.name == "_linalg_slogdet" and m.inputs()), None)
    made = as_view(skip_views(view.maker("info"))) if view.name == "_linalg_check_errors" else None
    return made if made is not None and made.inputs() else None


def argument_of(view: View) -> tuple[Any, int]:
    """Return the argument that a logarithm is taken of, and which operand it is."""
    index = 1 if view.name in ("xlogy", "special_xlogy", "special_xlog1py") else 0
    return view.input(index), index
