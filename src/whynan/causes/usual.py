"""What an operand usually is: its values in the rest of the batch and in the other micro-batches of the step."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from whynan.causes.fixes import plain_name

if TYPE_CHECKING:
    from whynan.capsule.sites import Site
    from whynan.causes.catalogue import Scene

OTHERS = 8  # micro-batches played again to learn from
LEAST = 3  # values needed before a median means anything


def usual(scene: Scene, name: str, operand: int, site: Site | None) -> tuple[float, int] | None:
    """Return the median of an operand's positive values, and of how many; nothing where there are too few.

    Cost: one forward pass of up to eight other micro-batches, where the step has any.
    """
    if site is None or scene.birth is None or scene.birth.forward is None:
        return None
    here = scene.birth.forward.input(operand)
    values = [] if here is None else _positive(here)
    if len(values) < LEAST:
        values += _elsewhere(scene, name, operand, site)
    return (statistics.median(values), len(values)) if len(values) >= LEAST else None


def _positive(tensor: Any) -> list[float]:
    found = [float(v) for v in tensor.detach().float().flatten()[:4096]]
    return [v for v in found if v > 0 and math.isfinite(v)]


def _elsewhere(scene: Scene, name: str, operand: int, site: Site) -> list[float]:
    import torch

    from whynan.capsule.replay import Program
    from whynan.causes.lab import Swapper

    program = scene.program
    tape, own = program.recorder.tape, {e.number for e in program.entries}
    ends = [e.number for e in tape if e.kind == "backward" and e.number not in own][-OTHERS:]
    seen: list[float] = []

    def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plain_name(func) == name and operand < len(args) and isinstance(args[operand], torch.Tensor):
            seen.extend(_positive(args[operand]))
        return NotImplemented

    if not ends:
        return []
    mode = Swapper(look, frozenset([site]))
    others = Program(program.recorder, tape.needed_for(set(ends)), program.leaves).until_loss()
    with others.still(), mode:
        others.play(mode)
    return seen
