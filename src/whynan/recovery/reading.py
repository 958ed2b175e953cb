"""Find the newest healthy checkpoint and hand its parts out. Nothing in a checkpoint is ever executed."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whynan.errors import let_through
from whynan.recovery import marks
from whynan.recovery.health import describe, examine, roles_of
from whynan.recovery.series import Candidate


@dataclass(frozen=True, slots=True)
class Passed:
    """A checkpoint that was not taken, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded. The tensors of `state` are read from the file as they are used."""

    path: Path
    state: Any
    step: int | None
    passed: tuple[Passed, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search."""

    chosen: Candidate | None
    state: Any
    passed: tuple[Passed, ...]


class Unhealthy(Exception):
    """Why a checkpoint cannot be taken."""


def newest_healthy(choices: Iterable[Candidate], parts: Mapping[str, Any], allow: Sequence[str] = ()) -> Found:
    """Return the first of some checkpoints that is intact, readable, complete and finite.

    Cost: each one that is tried is read twice, for its checksum and for its values.
    """
    passed: list[Passed] = []
    for candidate in choices:
        try:
            return Found(candidate, _healthy_state(candidate, parts, allow), tuple(passed))
        except Unhealthy as why:
            passed.append(Passed(candidate.path, str(why)))
    return Found(None, None, tuple(passed))


def _healthy_state(candidate: Candidate, parts: Mapping[str, Any], allow: Sequence[str]) -> Any:
    path, mark = candidate.path, candidate.mark
    if path.is_dir():
        raise Unhealthy("a directory of torch.distributed.checkpoint, not a file")
    if mark is not None and (why := marks.intact(path, mark)):
        raise Unhealthy(why)
    if mark is not None and not mark.finite:
        raise Unhealthy("was not finite when it was saved")
    state = _in_parts(read(path), parts)
    roles = {name: role for key, part in parts.items() for name, role in roles_of(key, part).items()}
    bad = examine(state, roles, allow)
    if bad:
        raise Unhealthy(describe(bad))
    return state


def _in_parts(state: Any, parts: Mapping[str, Any]) -> Any:
    """A bare state dict whose keys are those of the only part asked for is that part."""
    missing = [name for name in parts if not isinstance(state, Mapping) or name not in state]
    if not missing:
        return state
    if len(parts) == 1 and isinstance(state, Mapping):
        [(name, part)] = parts.items()
        if set(state) == set(part.state_dict()):
            return {name: state}
    raise Unhealthy(f"has no part named {missing[0]!r}")


def read(path: Path) -> Any:
    """Read a checkpoint without running code in it, mapped into memory where its format allows."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        let_through(error)
        raise Unhealthy(_shortly(error)) from None


def readable_without_code(path: Path) -> str:
    """Return why a file cannot be read without running code in it, or an empty text. Cost: tensors are not read."""
    try:
        read(path)
    except Unhealthy as why:
        return str(why)
    return ""


def _shortly(error: Exception) -> str:
    """The one line that matters of torch's long advice."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"(?:GLOBAL|[Uu]nsupported class) ([\w.]*\w)", text)):
        return f"holds {found[1]}, which cannot be read without running code"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return f"cannot be read: {first[:120]}"


def hand_out(found: Found, parts: Mapping[str, Any]) -> Loaded:
    """Give each part its state."""
    assert found.chosen is not None
    for name, part in parts.items():
        state = found.state[name]
        part.load_state_dict(state if isinstance(part, torch.nn.Module) else _own_copy(state))
    held = found.state.get("step") if isinstance(found.state, Mapping) else None
    step = found.chosen.mark.step if found.chosen.mark is not None else held if isinstance(held, int) else None
    return Loaded(found.chosen.path, found.state, step, found.passed)


def _own_copy(state: Any) -> Any:
    """Copy tensors out of the file: an optimizer keeps those it is given, and the file may go."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return type(state)((k, _own_copy(v)) for k, v in state.items())
    if isinstance(state, list):
        return [_own_copy(v) for v in state]
    if isinstance(state, tuple) and type(state) is tuple:
        return tuple(_own_copy(v) for v in state)
    return state
