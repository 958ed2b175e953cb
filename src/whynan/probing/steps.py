"""One step that can be run again and again with other values, leaving no trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from whynan.capsule.state.randomness import put_rng, take_rng
from whynan.capsule.state.stasis import Stasis
from whynan.probing.inputs import Input, Role, observed, rebuild, tensors_in
from whynan.probing.roles import Uses, informed
from whynan.probing.subject import Call, Subject, calling
from whynan.tripwire.values import damage_of

Values = Sequence[torch.Tensor]


class Step(Protocol):
    """What search and attacks need of a step."""

    inputs: list[Input]
    weights: list[tuple[str, torch.Tensor]]

    def still(self) -> AbstractContextManager[object]:
        """Hold random state and buffers: what happens inside leaves no trace."""

    def loss(self, values: Values) -> torch.Tensor:
        """Run the forward pass; call inside `still()`."""

    def damage(self) -> str:
        """Name a buffer that the last forward pass has made non-finite, or nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step went."""

    place: str = ""  # loss, gradient, buffer; empty when everything is finite
    loss: float = math.nan
    error: BaseException | None = None
    gradients: tuple[torch.Tensor | None, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether something is not finite."""
        return bool(self.place)

    @property
    def fine(self) -> bool:
        """Whether it ran and everything is finite."""
        return not self.place and self.error is None


def attempt(step: Step, values: Values) -> Outcome:
    """Run forward and backward and say what is not finite."""
    with step.still(), torch.autograd.set_multithreading_enabled(False):
        try:
            return judged(step, step.loss(values), values)
        except MemoryError:
            raise
        except Exception as error:  # whatever the user's code raises is an answer
            return Outcome(error=error)


def judged(step: Step, loss: torch.Tensor, values: Values) -> Outcome:
    """Go back from a loss and say what is not finite."""
    number = float(loss.detach().double().sum()) if loss.numel() and not loss.is_complex() else math.nan
    if damage_of(loss.detach()):
        return Outcome("loss", number)
    if step.damage():
        return Outcome("buffer", number)
    if not loss.requires_grad:
        return Outcome("", number)
    ends = [w for _, w in step.weights if w.requires_grad] or [v for v in values if v.requires_grad]
    made = torch.autograd.grad(loss.sum(), ends, allow_unused=True, retain_graph=True) if ends else ()
    bad = any(damage_of(g) for g in made if g is not None)
    return Outcome("gradient" if bad else "", number, gradients=tuple(made))


@dataclass(slots=True)
class SubjectStep:
    """A step of a model, a loss and a batch as the user gave them."""

    subject: Subject
    call: Call
    inputs: list[Input]
    weights: list[tuple[str, torch.Tensor]]
    autocast: torch.dtype | None = None
    output: Any = None  # what the model gave last
    rng: Any = None
    _bad_before: frozenset[str] = frozenset()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold random state, gradients, buffers and attributes; every run begins with the same random state."""
        model = self.subject.model
        with Stasis([model] if model is not None else [], [w for _, w in self.weights]):
            self._bad_before = frozenset(n for n, b in self._buffers() if damage_of(b))
            put_rng(self.rng)
            try:
                yield
            finally:
                self.output = None

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.subject.model.named_buffers()) if self.subject.model is not None else iter(())

    def batch(self, values: Values) -> Any:
        """Return the batch with other values."""
        return rebuild(self.subject.batch, iter(values))

    def loss(self, values: Values) -> torch.Tensor:
        """Run the forward pass."""
        device = next((v.device.type for v in values), "cpu")
        with torch.autocast(device, dtype=self.autocast) if self.autocast is not None else nullcontext():
            self.output, loss = self.call(self.batch(values))
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the loss is a {type(loss).__name__}, not a tensor")
        return loss if loss.dim() == 0 else loss.sum()

    def damage(self) -> str:
        """Name a buffer that was finite before the forward pass and is not now."""
        return next((n for n, b in self._buffers() if n not in self._bad_before and damage_of(b)), "")

    def under(self, dtype: torch.dtype) -> SubjectStep:
        """Return the same step under autocast."""
        return replace(self, autocast=dtype)


def step_of(subject: Subject) -> SubjectStep:
    """Make a step of a subject: find out how it is called and what its inputs are."""
    given = [(n, t.detach().clone()) for n, t in tensors_in(subject.batch)]
    if subject.model is None:
        given = [(n, t.requires_grad_() if t.is_floating_point() else t) for n, t in given]
    values = [t for _, t in given]
    subject = replace(subject, batch=rebuild(subject.batch, iter(values)))
    weights: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in subject.model.named_parameters() if p.requires_grad] if subject.model is not None else []
    step = SubjectStep(subject, lambda batch: (None, None), [], weights, rng=take_rng(others=True))
    uses = Uses(values)
    with step.still(), uses:
        step.call = calling(subject)
    step.inputs = [_settled(informed(_bounded(i, n, t, subject), uses.found.get(i)), subject) for i, (n, t) in enumerate(given)]
    return step


def _bounded(number: int, name: str, value: torch.Tensor, subject: Subject) -> Input:
    short = name.removeprefix("batch").strip("[].'\"")
    bounds = next((subject.bounds[k] for k in (name, short, str(number), "*") if k in subject.bounds), None)
    return replace(observed(name, value.detach(), bounds), value=value)


def _settled(given: Input, subject: Subject) -> Input:
    """Add what the factory says of ids and labels to what was found out."""
    if given.role is Role.IDS:
        padding = given.padding if subject.padding is None else subject.padding
        return replace(given, padding=padding, high=given.high if subject.vocabulary is None else subject.vocabulary - 1.0)
    if given.role in (Role.LABELS, Role.INTEGERS) and subject.ignore_index is not None:
        return replace(given, ignore=subject.ignore_index)
    return given


def values_of(step: Step) -> list[torch.Tensor]:
    """Return the sample batch's tensors."""
    return [i.value for i in step.inputs]


@contextmanager
def other_weights(step: Step, values: Values | None) -> Iterator[None]:
    """Put other values into the weights for a while."""
    if values is None:
        yield
        return
    kept = [(w, w.data, w.grad) for _, w in step.weights]
    try:
        for (weight, _, _), value in zip(kept, values, strict=True):
            weight.grad = None  # of another type, perhaps, than the weight for now
            weight.data = value
        yield
    finally:
        for weight, value, grad in kept:
            weight.data = value
            weight.grad = grad
