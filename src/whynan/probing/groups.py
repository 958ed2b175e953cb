"""The groups of attacks, each ending in one line of verdict; `precision` holds that of numerical stability."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from whynan.capsule.tape.nested import tensors_of
from whynan.probing.attacking import ABSURD, Attacks, norm_of
from whynan.probing.inputs import Role
from whynan.probing.moves import moves, rows_of
from whynan.probing.results import Group, Level, Verdict
from whynan.probing.steps import attempt, values_of
from whynan.records import number
from whynan.tripwire.values import damage_of


def verdict(attacks: Attacks, group: Group, text: str) -> Verdict:
    """Sum up a group."""
    found, notes, refused = (len(attacks.of(group, level)) for level in (Level.FINDING, Level.NOTE, Level.REFUSED))
    state = f"{found} found" if found else f"{notes} note{'s' if notes > 1 else ''}" if notes else "ok"
    more = f", {refused} refused" if refused else ""
    return Verdict(group, state, text + more)


def forward(attacks: Attacks) -> Verdict:
    """The sample as it is, in training and in evaluation."""
    step = attacks.step
    outcome = attacks.run(Group.FORWARD, "the sample batch", values_of(step))
    model = step.subject.model
    if model is None:
        return verdict(attacks, Group.FORWARD, "no model: the loss alone")
    for word, mode in (("train", True), ("eval", False)):
        with _mode(model, mode):
            attacks.run(Group.FORWARD, f"the sample batch in {word} mode", values_of(step))
    peak = peak_of(attacks)
    rows = rows_of(step.inputs)
    largest = f", largest value {number(peak)}" if math.isfinite(peak) else ""
    return verdict(attacks, Group.FORWARD, f"train and eval, {rows} rows{largest}" if not outcome.error else "the sample batch cannot be run")


@contextmanager
def _mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    before = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def peak_of(attacks: Attacks) -> float:
    """Return the largest finite value any module gives on the sample."""
    peaks: list[float] = []

    def look(module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.is_floating_point() and tensor.numel():
                finite = tensor.detach()[torch.isfinite(tensor)]
                peaks.append(float(finite.abs().max()) if finite.numel() else 0.0)

    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        attempt(attacks.step, values_of(attacks.step))
    finally:
        handle.remove()
    return max(peaks, default=math.nan)


def loss(attacks: Attacks) -> Verdict:
    """The loss of the sample, and of outputs that are extreme."""
    step = attacks.step
    with step.still():
        try:
            value = step.loss(values_of(step))
        except Exception as error:
            return Verdict(Group.LOSS, "not run", f"{type(error).__name__} on the sample")
    if not value.requires_grad:
        attacks.note(Group.LOSS, "the sample batch", "the loss does not depend on any weight: backward() would raise", Level.FINDING)
    tried = _extreme_outputs(attacks) if step.subject.model is not None else 0
    words = f"{number(float(value.detach()))} on the sample" + (f", {tried} extreme outputs tried" if tried else "")
    return verdict(attacks, Group.LOSS, words)


class _Replaced:
    """A forward hook on the model that hands on plus and minus a size in place of its output, with the gradient of the output."""

    def __init__(self, model: torch.nn.Module, size: float) -> None:
        self.model, self.size = model, size

    def __enter__(self) -> None:
        self.handle = self.model.register_forward_hook(self._replace)

    def _replace(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        return output + (self.size * torch.sign(output) - output).detach()

    def __exit__(self, *reason: object) -> None:
        self.handle.remove()


def _extreme_outputs(attacks: Attacks) -> int:
    model = attacks.step.subject.model
    assert model is not None
    sizes = (0.0, 20.0, 200.0)
    for size in sizes:
        name = f"outputs of plus and minus {size:g}" if size else "outputs of zero"
        attacks.run(Group.LOSS, name, values_of(attacks.step), inside=False, state=_Replaced(model, size))
    return len(sizes)


def gradient_flow(attacks: Attacks) -> Verdict:
    """Parameters without a gradient, with one that is exactly zero, or with one that is absurdly large."""
    step = attacks.step
    if not step.weights:
        return Verdict(Group.GRADIENT, "ok", "no weights")
    outcome = attempt(step, values_of(step))
    if not outcome.fine or not outcome.gradients:
        return verdict(attacks, Group.GRADIENT, "the sample step gives no usable gradients")
    named = list(zip([n for n, _ in step.weights], [w for _, w in step.weights], outcome.gradients, strict=True))
    missing = [n for n, _, g in named if g is None]
    zero = [n for n, _, g in named if g is not None and not bool(g.any())]
    _tell(attacks, missing, len(named), "get no gradient")
    _tell(attacks, zero, len(named), "get a gradient of exactly zero")
    for name, size, times in _absurd(named):
        attacks.note(Group.GRADIENT, name, f"its gradient has norm {number(size)}, {number(times)} times the weight", Level.FINDING)
    return verdict(attacks, Group.GRADIENT, f"{len(named) - len(missing) - len(zero)} of {len(named)} parameters get one, norm {number(norm_of(outcome))}")


def _tell(attacks: Attacks, names: list[str], total: int, what: str) -> None:
    if names:
        level = Level.FINDING if len(names) == total else Level.NOTE
        attacks.note(Group.GRADIENT, f"{len(names)} of {total} parameters", f"{what}: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}", level)


def _absurd(named: list[tuple[str, torch.Tensor, torch.Tensor | None]]) -> Iterator[tuple[str, float, float]]:
    for name, weight, grad in named:
        size = float(grad.double().norm()) if grad is not None else 0.0
        times = size / max(float(weight.detach().double().norm()), 1e-3)
        if size > ABSURD and times > ABSURD:  # not a step but an explosion
            yield name, size, times


def edges(attacks: Attacks) -> Verdict:
    """Zeros, constants, equal rows, one row, everything masked or ignored, extreme ids, lengths; NaN in one sample."""
    step = attacks.step
    model = step.subject.model
    for move in moves(step.inputs):
        attacks.run(Group.EDGES, move.name, move.values, move.inside)
        if model is not None and move.reshapes:
            with _mode(model, False):
                attacks.run(Group.EDGES, f"{move.name} in eval mode", move.values, move.inside)
    _poison(attacks)
    return verdict(attacks, Group.EDGES, f"{attacks.tried.get(Group.EDGES, 0)} batches tried")


def _poison(attacks: Attacks) -> None:
    """NaN in the first sample: whether it reaches the others, or the running statistics."""
    step = attacks.step
    rows = rows_of(step.inputs)
    for number_, given in enumerate(step.inputs):
        if given.role is not Role.FLOATS or not given.value.dim() or given.value.shape[0] != rows or rows < 2:
            continue
        values = values_of(step)
        bad = given.value.detach().clone()
        bad[0] = math.nan
        values[number_] = bad.requires_grad_(given.value.requires_grad)
        text = _spread(attacks, values, rows)
        if text:
            attacks.note(Group.EDGES, f"NaN in the first row of {given.name}", text)


def _spread(attacks: Attacks, values: list[torch.Tensor], rows: int) -> str:
    step = attacks.step
    with step.still():
        try:
            step.loss(values)
        except Exception:
            return ""
        output, buffer = step.output, step.damage()
    if buffer:
        return f"it stays in the buffer {buffer}: every later step is bad"
    first = next((t for t in tensors_of(output) if t.dim() and t.shape[0] == rows), None)
    others = first is not None and bool(damage_of(first.detach()[1:]))
    return "it reaches the outputs of the other rows" if others else ""
