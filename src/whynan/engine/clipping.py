"""Clipping: its norm is the tripwire's for nothing, and tensors are named before it spreads the damage."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from whynan.capsule.snapshot import local
from whynan.capsule.state.prints import marks_of_gradients
from whynan.capsule.tape.entries import Entry
from whynan.capsule.unseen import unseen
from whynan.engine.session import Session
from whynan.records import Symptom
from whynan.tripwire.checks import nonfinite
from whynan.tripwire.values import Damage

_signature = functools.cache(inspect.signature)
_DEFAULTS = {"norm_type": 2.0, "error_if_nonfinite": False, "foreach": None}  # what most loops leave; binding by name is slow
Names = list[tuple[str, Damage]]


@unseen
class Clipping:
    """Stands at `clip_grad_norm_`."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def clip(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Clip as asked, keeping the norm."""
        session = self.session
        parameters = args[0] if args else kwargs.get("parameters")
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters or [])
        rest = args[1:]
        named = {k: v for k, v in kwargs.items() if k != "parameters"} if kwargs else kwargs
        entry: Entry | None = None
        try:
            entry = session.recorder.note("clip", functools.partial(call, parameters), rest, named, ours=5)
        except Exception as error:
            session.broken(error)
        to = rest[0] if rest else named.get("max_norm")
        session.clip = float(to) if isinstance(to, int | float) and math.isfinite(to) else None
        names: Names = []
        norm, size = _clip_in_two(call, parameters, rest, named, lambda: session.guarded(lambda: self._name_bad_ones(parameters, names)))
        try:
            self._note(entry, norm, size, parameters, names, _keeps_finite(to))
        except Exception as error:
            session.broken(error)
        return norm

    def _name_bad_ones(self, parameters: list[torch.Tensor], names: Names) -> None:
        bad = nonfinite((n, p.grad) for n, p in self.session.names_of(parameters) if p.grad is not None)
        names += [(name, damage) for name, _, damage in bad]

    def _note(self, entry: Entry | None, norm: Any, size: float | None, parameters: list[torch.Tensor], names: Names, keeps: bool) -> None:
        window = self.session.window
        if entry is not None:
            self.session.recorder.tape.add(entry, norm)
        weights = frozenset(map(id, parameters))
        if isinstance(norm, torch.Tensor) and (window.norm is None or not window.clipped):
            window.norm = size if size is not None else local(norm.detach())
            window.clipped = weights
        elif size is None or not math.isfinite(size) or weights != window.clipped:
            keeps = False  # clipped before, by another norm
        window.clipping, window.marks, window.marked = parameters, marks_of_gradients(parameters) if keeps else None, self.session.recorder.tape.number()
        if names and window.symptom is None and not window.scaled:
            more = f"{len(names)} tensors" if len(names) > 1 else ""
            self.session.see(Symptom("gradient", names[0][1].kind, names[0][0], more))


def _keeps_finite(to: Any) -> bool:
    """Whether finite gradients are finite when clipped to this; one on a device is not waited for."""
    if isinstance(to, torch.Tensor) and not to.is_cpu:
        return False
    try:
        return float(to) > -math.inf
    except (TypeError, ValueError, RuntimeError):
        return False


@unseen
def _clip_in_two(
    call: Callable[..., Any], parameters: list[torch.Tensor], rest: Any, named: dict[str, Any], before: Callable[[], None]
) -> tuple[Any, float | None]:
    """Clip, with a look between norm and scaling where the norm is on the CPU and not finite; return the norm, and what it is where that is known."""
    grads = [grad for p in parameters if (grad := p.grad) is not None]
    options = None
    if grads and grads[0].is_cpu:
        options = {"max_norm": rest[0], **_DEFAULTS} if len(rest) == 1 and not named else _bound(call, parameters, rest, named)
    if options is None:
        return call(parameters, *rest, **named), None
    norm = torch.nn.utils.get_total_norm(grads, options["norm_type"], options["error_if_nonfinite"], options["foreach"])
    size = float(norm) if type(norm) is torch.Tensor and norm.is_cpu else None
    if not math.isfinite(float(norm) if size is None else size):
        before()
    torch.nn.utils.clip_grads_with_norm_(parameters, options["max_norm"], norm, options["foreach"])
    return norm, size


def _bound(call: Callable[..., Any], parameters: list[torch.Tensor], rest: Any, named: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call by their names, or None where they do not fit: torch says so itself."""
    try:
        bound = _signature(call).bind(parameters, *rest, **named)
    except TypeError:
        return None
    bound.apply_defaults()
    return bound.arguments
