"""Take a few updates of a step with an optimizer, on copies: the weights, the optimizer and the random state stay as they are."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from whynan.capsule.snapshot import copy_of
from whynan.capsule.state.randomness import put_rng
from whynan.capsule.state.stasis import Stasis
from whynan.capsule.stepped import unwatched_step
from whynan.errors import UsageError, one_line
from whynan.probing.steps import SubjectStep, values_of
from whynan.records import number_of
from whynan.tripwire.values import damage_of

ASSUMED = "AdamW"  # where a rate is given without an optimizer
_PEAKS = ("lr", "initial_lr", "max_lr")  # a schedule keeps its highest rate beside the present one


@dataclass(frozen=True, slots=True)
class Training:
    """An optimizer for a step, the rates of its groups now and at the peak of a schedule, and the norm that gradients are clipped to.

    Without rates the optimizer finds its own.
    """

    optimizer: torch.optim.Optimizer
    rates: tuple[float, ...]
    peaks: tuple[float, ...]
    clip: float | None
    assumed: bool = False

    @property
    def rate(self) -> float:
        """The largest rate of all groups."""
        return max(self.rates)

    @property
    def peak(self) -> float:
        """The largest that a schedule leads to, as far as the optimizer knows."""
        return max(self.peaks)

    @property
    def who(self) -> str:
        """Say what updates the weights."""
        return f"{type(self.optimizer).__name__}{' assumed' if self.assumed else ''}"


@dataclass(frozen=True, slots=True)
class Course:
    """What some updates did: the loss before each and after the last, and what became of the weights."""

    losses: tuple[float, ...]  # ends with the first that is not finite
    bad: str = ""  # the loss, a gradient or a weight that is not finite; empty when all are
    growth: float = 1.0  # of the norm of all weights; weights that begin near 0 count as 0.1 each
    graded: int = 0  # weights that got a gradient other than 0 ...
    still: int = 0  # ... and have all their bits after the last update
    half: bool = False  # all of those that stayed are of a 16-bit type


def training_of(step: SubjectStep) -> Training | None:
    """Make the optimizer that the subject gives or asks for; None where it says nothing of one. Raises `UsageError`."""
    subject = step.subject
    if subject.optimizer is None and subject.lr is None:
        return None
    given = subject.optimizer if subject.optimizer is not None else ASSUMED
    with step.still():
        optimizer = given if isinstance(given, torch.optim.Optimizer) else _made(given, step)
    groups = optimizer.param_groups
    held = {id(p) for g in groups for p in g["params"]}
    if step.weights and not any(id(w) in held for _, w in step.weights):
        raise UsageError("the optimizer holds none of the model's parameters; make it from the model that the factory returns")
    known = [[rate for k in _PEAKS if (rate := number_of(g.get(k))) is not None] for g in groups]
    if any(number_of(g.get("lr")) is None for g in groups):
        return Training(optimizer, (), (), subject.clip)
    rates = tuple(found[0] for found in known)
    peaks = tuple(max(found) for found in known)
    if subject.lr is not None:
        rates = peaks = _scaled(peaks, subject.lr)
    return Training(optimizer, rates, peaks, subject.clip, subject.optimizer is None)


def _scaled(rates: tuple[float, ...], largest: float) -> tuple[float, ...]:
    """Bring the rates of all groups to another size, in the same proportion.

    >>> _scaled((0.5, 0.25), 1.0)
    (1.0, 0.5)
    """
    top = max(rates)
    return tuple(r / top * largest for r in rates) if top else tuple(largest for _ in rates)


def _made(given: Any, step: SubjectStep) -> torch.optim.Optimizer:
    """Call a class, its name, or a function of the parameters, of the model or of nothing."""
    weights = [w for _, w in step.weights]
    if not weights:
        raise UsageError("there is no model with weights to update: a learning rate cannot be judged")
    maker: Any = _named(given) if isinstance(given, str) else given
    made = _called(maker, *((weights, step.subject.model) if _takes_any(maker) else ()))
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"{getattr(maker, '__name__', 'optimizer')} gave a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def _called(maker: Callable[..., Any], *choices: Any) -> Any:
    """Call a maker with the first thing that it can take; what it says of the first of them is the answer where it takes none."""
    try:
        return maker(*choices[:1])
    except Exception as error:  # whatever the user's code raises
        for other in choices[1:]:
            with suppress(Exception):
                return maker(other)
        raise UsageError(f"{getattr(maker, '__name__', 'optimizer')} of the optimizer raised {one_line(error)}") from error


def _takes_any(maker: Callable[..., Any]) -> bool:
    try:
        return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in inspect.signature(maker).parameters.values())
    except (TypeError, ValueError):
        return True


def _named(name: str) -> type[torch.optim.Optimizer]:
    kinds = {k.lower(): v for k, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer) and k != "Optimizer"}
    if name.lower() not in kinds:
        raise UsageError(f"no optimizer {name!r} in torch.optim; it has {', '.join(sorted(kinds))}")
    return kinds[name.lower()]


# -- updates ----------------------------------------------------------------------------------------------------


def course(step: SubjectStep, training: Training, rates: tuple[float, ...], updates: int) -> Course:
    """Take some updates on the sample batch, all with the same random numbers, and say how the loss went.

    Cost: `updates` steps and one forward pass, a copy of the weights, of their optimizer state, and again of the weights.
    """
    params = _params(step, training)
    begin = [p.detach().clone() for p in params]
    with _own_weights(step, params), torch.autograd.set_multithreading_enabled(False), torch.enable_grad():
        optimizer = copy_of(training.optimizer, {id(p): p for g in training.optimizer.param_groups for p in g["params"]})
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
        losses, graded, bad = _updated(step, optimizer, params, training.clip, updates)
        now = [p.detach() for p in params]
        kept = [g & (n == b) for g, n, b in zip(graded, now, begin, strict=True)]
        small = 0.1 * math.sqrt(sum(p.numel() for p in params))
        return Course(
            tuple(losses), bad, _norm(now) / max(_norm(begin), small), sum(int(g.sum()) for g in graded), sum(int(k.sum()) for k in kept),
            all(p.element_size() == 2 for p, k in zip(params, kept, strict=True) if bool(k.any())),
        )  # fmt: skip


def _updated(
    step: SubjectStep, optimizer: torch.optim.Optimizer, params: list[torch.Tensor], clip: float | None, updates: int
) -> tuple[list[float], list[torch.Tensor], str]:
    """Run the updates; give the losses, where a gradient was ever other than 0, and what is not finite."""
    values = values_of(step)
    graded = [torch.zeros_like(p, dtype=torch.bool) for p in params]
    losses: list[float] = []
    seen: list[float] = []
    trained = [p for p in params if p.requires_grad]

    def forward() -> torch.Tensor:
        put_rng(step.rng)  # dropout and noise as before: what changes is the weights
        return step.loss(values)

    def closure() -> torch.Tensor:
        loss = forward()
        made = torch.autograd.grad(loss, trained, allow_unused=True)
        shrink = _shrink([g for g in made if g is not None], clip)
        for param, grad in zip(trained, made, strict=True):
            param.grad = grad * shrink if grad is not None and shrink != 1 else grad
        seen.append(float(loss.detach()))
        return loss.detach()

    update = _update_of(optimizer)
    for _ in range(updates):
        seen.clear()
        try:
            update(closure)
        except Exception as error:  # whatever the user's code raises: of weights gone astray it is an answer
            if not losses:
                raise
            return losses, graded, f"a step that raises {type(error).__name__}"
        losses.append(seen[0] if seen else math.nan)
        for mark, param in zip(graded, params, strict=True):
            if param.grad is not None:
                mark |= (param.grad.to_dense() if param.grad.is_sparse else param.grad) != 0
        if bad := _bad(losses[-1], params):
            return losses, graded, bad
    try:
        losses.append(float(forward().detach()))
    except Exception as error:
        return losses, graded, f"a step that raises {type(error).__name__}"
    return losses, graded, "" if math.isfinite(losses[-1]) else "the loss"


def _update_of(optimizer: torch.optim.Optimizer) -> Callable[[Callable[[], torch.Tensor]], object]:
    """Return a function that makes one update; a guard of the caller's does not see it."""
    method = unwatched_step(optimizer)
    if len(inspect.signature(method).parameters) > 1:
        return lambda closure: method(optimizer, closure)

    def update(closure: Callable[[], torch.Tensor]) -> object:
        closure()
        return method(optimizer)

    return update


def _shrink(grads: list[torch.Tensor], clip: float | None) -> float:
    norm = _norm([g.coalesce().values() if g.is_sparse else g for g in grads]) if clip is not None else 0.0
    return min(1.0, clip / (norm + 1e-6)) if clip is not None and math.isfinite(norm) else 1.0


def _bad(loss: float, params: list[torch.Tensor]) -> str:
    if not math.isfinite(loss):
        return "the loss"
    if any(p.grad is not None and damage_of(p.grad) for p in params):
        return "a gradient that is not finite"
    return "a weight that is not finite" if any(damage_of(p.detach()) for p in params) else ""


def _norm(values: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(v.detach().abs().double().square().sum()) for v in values))


def _params(step: SubjectStep, training: Training) -> list[torch.Tensor]:
    held = [p for g in training.optimizer.param_groups for p in g["params"]]
    return list({id(p): p for p in [*[w for _, w in step.weights], *held]}.values())


@contextmanager
def _own_weights(step: SubjectStep, params: list[torch.Tensor]) -> Iterator[None]:
    """Give the parameters values of their own for a while; hold gradients, buffers and random state, of a loss module too."""
    loss_fn = step.subject.loss_fn
    kept = [(p, p.data) for p in params]
    with step.still(), Stasis([loss_fn] if isinstance(loss_fn, torch.nn.Module) else [], params):
        try:
            for param, value in kept:
                param.data = value.clone()
            yield
        finally:
            for param, value in kept:
                param.data = value
