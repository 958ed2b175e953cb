"""What is probed: a model, a loss and a batch, and the way the three are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from whynan.errors import UsageError, one_line
from whynan.probing.inputs import tensors_in

_TARGETS = ("target", "targets", "label", "labels", "y", "y_true")
_SETTINGS = ("bounds", "vocabulary", "padding", "ignore_index", "optimizer", "lr", "clip")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model (or none), a loss function and a sample batch, with what is known of the inputs."""

    model: torch.nn.Module | None
    loss_fn: Callable[..., Any] | None
    batch: Any
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by name or by number, as text
    vocabulary: int | None = None
    padding: int | None = None
    ignore_index: int | None = None
    optimizer: Any = None  # an optimizer, the name of one in torch.optim, or a function that makes one
    lr: float | None = None
    clip: float | None = None  # the norm that gradients are clipped to

    @property
    def title(self) -> str:
        """A name for the report."""
        return type(self.model).__name__ if self.model is not None else getattr(self.loss_fn, "__name__", "loss")


def subject_of(made: Any, source: str = "the factory") -> Subject:
    """Take what a factory returned: `(model, loss_fn, batch)`, the same with an optimizer, a mapping or an object with these names.

    >>> subject_of((None, torch.sum, torch.ones(2))).title
    'sum'
    """
    known: dict[str, Any]
    if isinstance(made, Subject):
        return checked(made)
    if isinstance(made, tuple | list) and len(made) in (3, 4) and not hasattr(made, "_fields"):
        known = dict(zip(("model", "loss_fn", "batch", "optimizer"), made, strict=False))
    elif isinstance(made, Mapping):
        known = dict(made)
    elif is_dataclass(made) and not isinstance(made, type):
        known = {f.name: getattr(made, f.name) for f in fields(made)}
    elif hasattr(made, "_asdict"):
        known = made._asdict()
    else:
        raise UsageError(f"{source} returned {_kind(made)}; it must return (model, loss_fn, batch) or a mapping with these names")
    if "batch" not in known or not ("model" in known or "loss_fn" in known):
        raise UsageError(f"{source} returned {', '.join(map(str, known)) or 'nothing'}; it must give model, loss_fn and batch")
    names = ("model", "loss_fn", "batch", *_SETTINGS)
    unknown = [str(k) for k in known if k not in names]
    if unknown and isinstance(made, Mapping):
        raise UsageError(f"{source} gave {unknown[0]!r}, which probe does not know; it takes {', '.join(names)}")
    settings = {k: known[k] for k in _SETTINGS if known.get(k) is not None}
    return checked(Subject(known.get("model"), known.get("loss_fn"), known["batch"], **{**settings, "bounds": _bounds(settings.get("bounds"))}))


def _bounds(given: Any) -> dict[str, tuple[float, float]]:
    """Read bounds: one pair for all, a list in the order of the batch, or pairs by name."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        pairs = {str(k): v for k, v in given.items()}
    elif isinstance(given, Sequence) and len(given) == 2 and all(isinstance(v, int | float) for v in given):
        pairs = {"*": given}
    elif isinstance(given, Sequence):
        pairs = {str(i): v for i, v in enumerate(given) if v is not None}
    else:
        pairs = {"": given}
    try:
        return {k: (float(lo), float(hi)) for k, (lo, hi) in pairs.items() if _ordered(float(lo), float(hi))}
    except (TypeError, ValueError):
        raise UsageError(f"bounds are pairs (low, high) with low below high, not {given!r}"[:200]) from None


def _ordered(low: float, high: float) -> bool:
    if not low < high:
        raise ValueError
    return True


def checked(subject: Subject) -> Subject:
    """Refuse in one line what cannot be probed."""
    model, loss_fn = subject.model, subject.loss_fn
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model is {_kind(model)}; it must be a torch.nn.Module, or None for a loss alone")
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"loss_fn is {_kind(loss_fn)}; it must be callable: loss_fn(output, batch) or loss_fn(model, batch)")
    if model is None and loss_fn is None:
        raise UsageError("there is neither a model nor a loss function")
    found = [t for _, t in tensors_in(subject.batch, "batch")]
    if not found:
        raise UsageError(f"the batch is {_kind(subject.batch)} without a tensor in it; give tensors, in any nesting")
    owned = [*model.parameters(), *model.buffers()] if model is not None else []
    if any(t.device.type == "meta" for t in [*found, *owned]):
        raise UsageError("the model or the batch is on the meta device: there are no values to probe; materialise it first")
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in owned):
        raise UsageError("the model has lazy parameters that are not made yet; run it once on a batch in the factory")
    _check_training(subject)
    return subject


def _check_training(subject: Subject) -> None:
    given = subject.optimizer
    if given is not None and not isinstance(given, torch.optim.Optimizer | str) and not callable(given):
        raise UsageError(f"the optimizer is {_kind(given)}; give a torch.optim.Optimizer, its name, or a function of the parameters that makes one")
    if isinstance(given, str) and subject.lr is None:
        raise UsageError(f"the optimizer {given!r} needs a learning rate: give lr too")
    for name, value, floor in (("lr", subject.lr, -1.0), ("clip", subject.clip, 0.0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not floor < value < float("inf") or value < 0):
            raise UsageError(f"{name} is a number{' above 0' if name == 'clip' else ' of at least 0'}, not {value!r}"[:200])


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


# -- calling ----------------------------------------------------------------------------------------------------

Call = Callable[[Any], tuple[Any, Any]]  # batch -> (output of the model, loss)


def calling(subject: Subject) -> Call:
    """Find out how model and loss are called, by their signatures and by trying on the sample; raises `UsageError`."""
    ways = list(_ways(subject))
    trouble: Exception | None = None
    for way in ways:
        try:
            _, loss = way(subject.batch)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError, AssertionError) as error:
            trouble = trouble or error
            continue
        if isinstance(loss, torch.Tensor):
            return way
        trouble = trouble or TypeError(f"the loss is {_kind(loss)}, not a tensor")
    assert trouble is not None
    raise UsageError(f"the step cannot be run on the sample batch: {one_line(trouble)}") from trouble


def _ways(subject: Subject) -> list[Call]:
    """The ways to run a step, likeliest first."""
    model, loss_fn = subject.model, subject.loss_fn
    if model is None:
        assert loss_fn is not None
        return [lambda batch: (None, loss_fn(batch)), lambda batch: (None, loss_fn(*batch)), lambda batch: (None, loss_fn(None, batch))]
    if loss_fn is None:
        return [lambda batch: _own_loss(model_output(model, batch))]
    names = _parameters(loss_fn)
    whole: Call = lambda batch: (None, loss_fn(model, batch))  # noqa: E731 (one of a list of ways)

    def split(batch: Any) -> tuple[Any, Any]:
        output = model_output(model, batch)
        return output, loss_fn(output, batch)

    def target(batch: Any) -> tuple[Any, Any]:
        output = model_output(model, batch)
        return output, loss_fn(output, _target_of(batch))

    def alone(batch: Any) -> tuple[Any, Any]:
        output = model_output(model, batch)
        return output, loss_fn(output)

    if len(names) == 1:
        return [alone]
    if names and any(word in names[0].lower() for word in ("model", "net", "module")):
        return [whole]
    wants_target = isinstance(loss_fn, torch.nn.modules.loss._Loss) or (len(names) > 1 and names[1].lower() in _TARGETS)
    return [target, split, whole] if wants_target else [split, whole, target]


def _own_loss(output: Any) -> tuple[Any, Any]:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    return output, loss


def _parameters(function: Callable[..., Any]) -> list[str]:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and (p.default is p.empty or p.name in _TARGETS)]


def model_output(model: torch.nn.Module, batch: Any) -> Any:
    """Call the model with as much of the batch as its forward takes."""
    if isinstance(batch, Mapping):
        taken = inspect.signature(model.forward).parameters
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            return model(**batch)
        named = {k: v for k, v in batch.items() if k in taken}
        return model(**named) if named else model(batch)
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        wanted = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = sum(p.default is p.empty for p in wanted)
        most = len(wanted) if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values()) else max(required, 1)
        if required == 1 and len(wanted) == 1 and wanted[0].name in ("batch", "data", "inputs"):
            return model(batch)
        return model(*batch[: max(1, min(most, len(batch)))])
    return model(batch)


def _target_of(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return next((batch[k] for k in _TARGETS if k in batch), batch)
    return batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else batch
