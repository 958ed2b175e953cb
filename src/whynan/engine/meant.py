"""Infinities that an optimizer keeps on purpose: a bound, the least loss so far. A NaN is never meant."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.doors.collectives import several
from whynan.capsule.snapshot import Snapshot, copy_of, local
from whynan.capsule.state.randomness import put_rng, take_rng
from whynan.capsule.stepped import step_again
from whynan.capsule.tape.facts import memory_of
from whynan.capsule.tape.nested import tensors_of
from whynan.engine.session import Session, parameters_of
from whynan.errors import let_through
from whynan.tripwire.checks import nonfinite, optimizer_state
from whynan.tripwire.values import Damage, damage_of

FILLS = frozenset({"full", "full_like", "new_full", "fill_", "masked_fill_", "__setitem__", "tensor", "new_tensor", "as_tensor", "scalar_tensor"})
MOST = 256 << 20  # bytes of weights that are copied to see how state is made
Found = tuple[str, torch.Tensor, Damage]
Place = tuple[int, str]  # the weight it belongs to, by id, and its name


class Meant:
    """Tells damage from infinities that are meant."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[str]] = weakref.WeakKeyDictionary()  # names of state that is infinite on purpose

    def bad_state(self, optimizer: torch.optim.Optimizer) -> list[Found]:
        """Return the state that is damaged before an update. Infinite throughout is what a foreign optimizer was made or loaded with."""
        found = nonfinite(optimizer_state(optimizer))
        if not found or _is_of_torch(optimizer):
            return found
        known = self._known.get(optimizer, set())
        meant = {id(value) for _, name, value in _named(optimizer) if name in known}
        return [f for f in found if f[2].nan or not (id(f[1]) in meant or _is_infinite_throughout(f[1], f[2]))]

    def broken(self, optimizer: torch.optim.Optimizer, before: Snapshot) -> list[Found]:
        """Return what an update damaged: weights, else state.

        Cost: one reduction per tensor; where a foreign optimizer makes state that is infinite, its update once more on a copy.
        """
        bad = self.broken_weights(optimizer, before)
        if bad or not (state := nonfinite(optimizer_state(optimizer))):
            return bad
        return state if _is_of_torch(optimizer) else self._broken_state(optimizer, before, state)

    def broken_weights(self, optimizer: torch.optim.Optimizer, before: Snapshot) -> list[Found]:
        """Return the weights that hold bad values which they did not hold before an update."""
        saved = {id(weight): value for weight, value in before.parameters}
        weights = nonfinite(self.session.names_of(parameters_of(optimizer)))
        return [f for f in weights if _is_newly_bad(f[1], saved.get(id(f[1])))]

    def _broken_state(self, optimizer: torch.optim.Optimizer, before: Snapshot, state: list[Found]) -> list[Found]:
        places = {id(value): (key, name) for key, name, value in _named(optimizer)}
        bad, new = [], []
        for found in state:
            key, name = places.get(id(found[1]), (None, ""))
            old = _in(before.state, key, name)
            if found[2].nan or (old is not None and _is_newly_bad(found[1], old)):
                bad.append(found)
            elif old is None and not (found[1].numel() == 1 and isinstance(key, torch.Tensor) and key.numel() > 1):
                new.append((found, (id(key), name)))
        if new and not bad:
            filled = self.session.recorder.suspended(_filled, optimizer, before)
            bad = [found for found, place in new if place not in filled]
        if not bad:
            self._known.setdefault(optimizer, set()).update(places[id(tensor)][1] for _, tensor, _ in state)
        return bad


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's own: none of them keeps infinities on purpose."""
    return type(optimizer).__module__.startswith("torch.optim")


def _is_infinite_throughout(tensor: torch.Tensor, damage: Damage) -> bool:
    return damage.posinf != damage.neginf and bool(local(tensor).detach().isinf().all())


def _is_newly_bad(tensor: torch.Tensor, old: Any) -> bool:
    """Whether a value is not finite that was before."""
    live = local(tensor).detach()
    if not isinstance(old, torch.Tensor) or old.shape != live.shape or live.layout is not torch.strided:
        return True
    return bool((~live.isfinite() & old.isfinite()).any())


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str, Any]]:
    for key, held in optimizer.state.items():
        if isinstance(held, dict):
            yield from ((key, str(name), value) for name, value in held.items())


def _in(state: dict[Any, Any], key: Any, name: str) -> Any:
    held = state.get(key) if key is not None else None
    return held.get(name) if isinstance(held, dict) else None


def _filled(optimizer: torch.optim.Optimizer, before: Snapshot) -> set[Place]:
    """Make an update once more on a copy; return the state in which the optimizer itself writes an infinity as a constant."""
    if several() or before.nbytes > MOST:  # a step may hold collectives, which the other ranks do not make
        return set()
    try:
        return _fills_of(optimizer, before)
    except Exception as error:  # an optimizer that cannot be copied keeps its secret
        let_through(error)
        return set()


def _fills_of(optimizer: torch.optim.Optimizer, before: Snapshot) -> set[Place]:
    stand_ins: dict[int, torch.Tensor] = {}
    for weight, value in before.parameters:
        fresh = stand_ins[id(weight)] = value.clone().requires_grad_(weight.requires_grad)
        fresh.grad = None if weight.grad is None else weight.grad.detach().clone()
    trial = _as_before(optimizer, before, stand_ins)
    listener = _Listener()
    with _same_random_numbers(), listener:
        step_again(trial, *before.given)
    weights = {id(fresh): number for number, fresh in stand_ins.items()}
    made = ((weights.get(id(key), 0), name, value) for key, name, value in _named(trial))
    return {(number, name) for number, name, value in made if isinstance(value, torch.Tensor) and memory_of(value) in listener.filled}


def _as_before(optimizer: torch.optim.Optimizer, before: Snapshot, weights: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Copy an optimizer as it was before its update, for other weights."""
    made = copy_of(optimizer, weights)
    made.state.clear()
    made.state.update({weights.get(id(key), key): copy.deepcopy(held) for key, held in before.state.items()})
    for held, (_, own) in zip((vars(made), *made.param_groups), before.own, strict=True):
        held.update(copy.deepcopy(own))
    return made


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    rng = take_rng(others=True)
    try:
        yield
    finally:
        put_rng(rng)


class _Listener(TorchFunctionMode):
    """Hears which memory is filled with an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets their memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (name := getattr(func, "__name__", "")) in FILLS:
            filled = [t for t in tensors_of(args[:1] if name == "__setitem__" else made) if damage_of(t.detach())]
            self._kept += filled
            self.filled.update(map(memory_of, filled))
        return made
