"""The group of numerical stability: other precisions, sizes of the inputs, and weights."""

from __future__ import annotations

import math

import torch

from whynan.probing import temperatures
from whynan.probing.attacking import Attacks
from whynan.probing.groups import peak_of, verdict
from whynan.probing.inputs import Role
from whynan.probing.results import Group, Verdict
from whynan.probing.steps import Outcome, values_of
from whynan.records import number, short_dtype

HALF_LIMIT = 65504.0


def stability(attacks: Attacks) -> Verdict:
    """Other precisions, other sizes of the inputs, other weights."""
    step, sample = attacks.step, values_of(attacks.step)
    ran: dict[str, list[str]] = {"autocast": [], "all": []}
    for dtype in (torch.bfloat16, torch.float16):
        word = short_dtype(str(dtype))
        mixed = attacks.run(Group.STABILITY, f"autocast to {_short(dtype)}", sample, step=step.under(dtype))
        whole = _converted(attacks, dtype)
        ran["autocast"] += [word] if mixed.error is None else []
        ran["all"] += [word] if whole is not None and whole.error is None else []
    _sizes(attacks)
    _weights(attacks)
    temperatures.verdict_notes(attacks)
    peak = peak_of(attacks)
    words = [f"{kind} {' '.join(types)}" for kind, types in ran.items() if types]
    if peak and math.isfinite(peak):
        words.append(f"{HALF_LIMIT / peak:.0e}x f16 room")
        if peak > HALF_LIMIT / 8:
            attacks.note(Group.STABILITY, "head-room", f"the largest value is {number(peak)}; float16 ends at 65504")
    return verdict(attacks, Group.STABILITY, ", ".join(words))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _converted(attacks: Attacks, dtype: torch.dtype) -> Outcome | None:
    """The whole step in a smaller type: a note, since nobody said it would be trained so."""
    step = attacks.step
    if any(w.dtype is not torch.float32 for _, w in step.weights) or not step.weights:
        return None
    values = [_cast(v, dtype) for v in values_of(step)]
    weights = [w.detach().to(dtype) for _, w in step.weights]
    return attacks.run(Group.STABILITY, f"everything in {_short(dtype)}", values, inside=False, weights=weights, state=_Buffers(step.subject.model, dtype))


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.detach().to(dtype).requires_grad_(value.requires_grad) if value.dtype is torch.float32 else value


class _Buffers:
    """Holds a model's float buffers in another type for a while."""

    def __init__(self, model: torch.nn.Module | None, dtype: torch.dtype) -> None:
        self.homes = [(m, n, b) for m in model.modules() for n, b in m._buffers.items() if b is not None] if model is not None else []
        self.dtype = dtype

    def __enter__(self) -> None:
        for module, name, buffer in self.homes:
            if buffer.dtype is torch.float32:
                module._buffers[name] = buffer.to(self.dtype)

    def __exit__(self, *reason: object) -> None:
        for module, name, buffer in self.homes:
            module._buffers[name] = buffer


def _sizes(attacks: Attacks) -> None:
    inputs = attacks.step.inputs
    for factor in (1e-30, 1e3, 1e10, 1e30):
        values = [(i.value.detach() * factor).requires_grad_(i.value.requires_grad) if i.role is Role.FLOATS else i.value for i in inputs]
        if any(i.role is Role.FLOATS for i in inputs):
            inside = all(i.holds(v) for i, v in zip(inputs, values, strict=True))
            attacks.run(Group.STABILITY, f"inputs times {factor:g}", values, inside=inside)


def _weights(attacks: Attacks) -> None:
    step = attacks.step
    if not step.weights:
        return
    here = [w.detach() for _, w in step.weights]
    sample = values_of(step)
    attacks.run(Group.STABILITY, "weights of zero", sample, inside=False, weights=[torch.zeros_like(w) for w in here])
    for factor in (10.0, 100.0):
        attacks.run(Group.STABILITY, f"weights times {factor:g}", sample, inside=False, weights=[w * factor for w in here])
    fresh = _fresh(step.subject.model, here)
    if fresh is not None:
        attacks.run(Group.STABILITY, "fresh weights", sample, weights=fresh)


def _fresh(model: torch.nn.Module | None, here: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Draw the weights anew where modules know how to; the model keeps its own."""
    assert model is not None
    owned = [p for p in model.parameters() if p.requires_grad]
    kept = [p.data for p in owned]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        for parameter in owned:
            parameter.data = parameter.data.clone()
        with torch.random.fork_rng():
            for module in model.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        made = [p.data for p in owned]
    except Exception:  # a reset of the user's own that needs more than we give
        return None
    finally:
        for parameter, value in zip(owned, kept, strict=True):
            parameter.data = value
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return made if any(not torch.equal(a, b) for a, b in zip(made, here, strict=True)) else None
