"""A copy of weights and optimizer state from before an update, to undo it bit for bit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from whynan.capsule.stepped import Evaluation

MOST = 256 << 20  # bytes of gradients that are kept of one step with a closure
# kept above, or lent for one call by a gradient scaler
_NOT_OWN = frozenset({"state", "param_groups", "defaults", "params", "found_inf", "grad_scale"})


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor of an optimizer's state, kept on the host, and the device it goes back to where nothing lives in its place any more."""

    tensor: torch.Tensor
    home: torch.device


class Snapshot:
    """Weights and state of one optimizer. Memory: one copy of both, beside the originals or on the host.

    State is also what the optimizer keeps in attributes of its own and in its groups: step counters, distances,
    a phase of the schedule. Without them the same update is not the same.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, on_host: bool = False, gradients: bool = False) -> None:
        self.optimizer = optimizer
        found = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p.grad.layout is torch.strided]
        self._versions = [(grad, grad._version) for grad in found]
        self._gradients = [(grad, copied(grad)) for grad in found] if gradients else []  # an update may scale them in place
        self.parameters = [(p, copied(p, on_host)) for g in optimizer.param_groups for p in g["params"]]
        self.state = {p: _kept(s, on_host) for p, s in optimizer.state.items()}
        self.own = [(held, _own(held, on_host)) for held in (vars(optimizer), *optimizer.param_groups)]
        self.given: list[Evaluation | None] = []  # of an update with a closure, see `stepped.py`

    def evaluated(self, loss: Any = None) -> None:
        """Keep what a closure gave, its loss and the gradients it left, where there is room; the first time what there is before it."""
        if not self.broke and nbytes(self.given) < MOST:
            grads = [None if p.grad is None else copied(p.grad) for p, _ in self.parameters]
            self.given.append([copied(loss) if isinstance(loss, torch.Tensor) else loss, *grads])

    @property
    def broke(self) -> bool:
        """Whether the update has broken weights before an evaluation."""
        return self.given[-1:] == [None]

    @property
    def wrote_gradients(self) -> bool:
        """Whether the update has written to its gradients."""
        return any(grad._version != version for grad, version in self._versions)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return nbytes([c for _, c in self.parameters]) + nbytes(list(self.state.values()))

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Write everything back in place."""
        with torch.no_grad(), torch._C.DisableTorchFunction():  # no write of the program's, which could be left out
            for parameter, saved in self.parameters:
                local(parameter).copy_(saved)
            for grad, saved in self._gradients:
                local(grad).copy_(saved)
        live = self.optimizer.state
        for key in [k for k in live if k not in self.state]:
            del live[key]
        for key, saved in self.state.items():
            live[key] = _merge(live.get(key), saved)
        for held, own in self.own:
            for name, value in own.items():
                held[name] = _merge(held.get(name), value)


def copy_of(optimizer: torch.optim.Optimizer, weights: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Copy an optimizer with state, groups and attributes of its own, for the weights that stand for its own by their ids.

    Not by its constructor, which would announce a new one; without hooks, the `step` that a schedule hangs on the object, and what a scaler lends it.
    """
    attributes = {k: OrderedDict() if k.endswith("_hooks") else v for k, v in vars(optimizer).items() if k not in ("step", "found_inf", "grad_scale")}
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(made).update(copy.deepcopy(attributes, dict(weights)))
    return made


def _own(held: dict[str, Any], on_host: bool) -> dict[str, Any]:
    """Copy the values of an optimizer or a group that an update may move: numbers, texts, tensors that are no weights."""
    return {k: _kept(v, on_host) for k, v in held.items() if k not in _NOT_OWN and (_is_plain(v) or _is_tensor(v))}


def _is_tensor(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(v) or _is_tensor(v) for v in value.values())
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _is_plain(value: Any) -> bool:
    """Whether a value holds no tensor: a list of weights must stay the list that it is."""
    if type(value) is list or type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this rank holds; other tensors as they are."""
    inner = getattr(tensor, "_local_tensor", None)
    return inner if isinstance(inner, torch.Tensor) else tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host; from a GPU into pinned memory, without waiting for it."""
    if not tensor.is_cuda:
        return tensor.clone() if tensor.is_cpu else tensor.to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def nbytes(tree: Any) -> int:
    """Return the memory of the tensors in nested lists and dicts."""
    if isinstance(tree, OnHost):
        return nbytes(tree.tensor)
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(nbytes(item) for item in items)


def copied(tensor: torch.Tensor, on_host: bool = False) -> torch.Tensor:
    """Copy a tensor, beside the original or on the host."""
    own = local(tensor).detach()
    return to_host(own) if on_host else own.clone()


def _kept(value: Any, on_host: bool = False) -> Any:
    """Copy the tensors in nested lists and dicts."""
    if isinstance(value, torch.Tensor):
        return OnHost(copied(value, True), value.device) if on_host else copied(value)
    if isinstance(value, dict):
        return {k: _kept(v, on_host) for k, v in value.items()}
    if isinstance(value, list):
        return [_kept(v, on_host) for v in value]
    return value


def _merge(live: Any, saved: Any) -> Any:
    """Write saved tensors into the live ones, so that whoever holds a reference sees the old value again."""
    if isinstance(saved, OnHost):
        put = _merge(live, saved.tensor)
        return live if put is live else put.to(saved.home)
    if isinstance(saved, torch.Tensor):
        if not isinstance(live, torch.Tensor) or local(live).shape != saved.shape or live.dtype != saved.dtype:
            return saved.clone()
        with torch.no_grad():
            local(live).copy_(saved)
        return live
    if isinstance(saved, list):
        return [_merge(None, item) for item in saved]
    if isinstance(saved, dict):
        live = live if isinstance(live, dict) else {}
        for key in [k for k in live if k not in saved]:
            del live[key]
        for key, value in saved.items():
            live[key] = _merge(live.get(key), value)
        return live
    return saved
