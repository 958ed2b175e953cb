"""What an operand usually is: its values in the rest of the batch and in the other micro-batches of the step."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from whynan.causes.fixes import Fix, plain_name
from whynan.records import number

if TYPE_CHECKING:
    from whynan.capsule.replay import Program
    from whynan.capsule.sites import Site
    from whynan.causes.catalogue import Scene

OTHERS = 8  # micro-batches played again to learn from
LEAST = 3  # values needed before a median means anything


def usual(scene: Scene, name: str, operand: int, site: Site | None) -> tuple[float, int] | None:
    """Return the median of an operand's positive values, and of how many; nothing where there are too few.

    Cost: one forward pass of up to eight other micro-batches, where the step has any.
    """
    values = values_of(scene, name, operand, site)
    return (statistics.median(values), len(values)) if len(values) >= LEAST else None


def values_of(scene: Scene, name: str, operand: int, site: Site | None) -> list[float]:
    """Return an operand's positive values: here, or elsewhere where these are too few or are themselves in question."""
    if site is None or scene.birth is None or scene.birth.forward is None:
        return []
    if scene.jump is not None:
        return _elsewhere(scene, name, operand, site)
    here = scene.birth.forward.input(operand)
    values = [] if here is None else _positive(here)
    return values if len(values) >= LEAST else values + _elsewhere(scene, name, operand, site)


def _positive(tensor: Any) -> list[float]:
    found = [float(v) for v in tensor.detach().float().flatten()[:4096]]
    return [v for v in found if v > 0 and math.isfinite(v)]


def _elsewhere(scene: Scene, name: str, operand: int, site: Site) -> list[float]:
    from whynan.capsule.replay import Program

    program = scene.program
    tape, own = program.recorder.tape, {e.number for e in program.entries}
    ends = [e.number for e in tape if e.kind == "backward" and e.number not in own][-OTHERS:]
    others = [Program(program.recorder, tape.needed_for(set(ends)), program.leaves)] if ends else []
    found = [value for other in others for value in _seen(other, name, operand, site)]
    return found + (before(scene, name, operand, site) if scene.jump is not None else [])  # its healthy steps are known to compute the same


def before(scene: Scene, name: str, operand: int, site: Site) -> list[float]:
    """Return an operand's positive values in the healthy steps that were kept; not of step functions, which do more than compute.

    Cost: a forward pass of each.
    """
    computing = [p for p in scene.healthy.values() if all(e.kind != "function" for e in p.entries)]
    return [value for other in computing for value in _seen(other, name, operand, site)]


def kept_above(seen: list[float], operand: int) -> list[Fix]:
    """Return the change that keeps an operand a little below the smallest that it was; nothing where that is not known."""
    limit = float(f"{min(seen) / 10:.1g}") if seen else 0.0
    title = f"keep it at or above {number(limit)}, a tenth of the smallest in the last healthy steps"
    return [Fix(title, f"{{x}}.clamp_min({limit!r})", operand)] if limit > 0 else []


def _seen(program: Program, name: str, operand: int, site: Site) -> list[float]:
    """Play a forward pass and return the values of an operand in it."""
    import torch

    from whynan.causes.swapping import Put, Swapper

    seen: list[float] = []

    def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plain_name(func) == name and operand < len(args) and isinstance(args[operand], torch.Tensor):
            seen.extend(_positive(args[operand]))
        return NotImplemented

    mode = Swapper(program, [Put(look, frozenset([site]), name)])
    short = program.until_loss()
    with short.still(), mode:
        short.play()
    return seen
