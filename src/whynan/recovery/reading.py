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
from whynan.recovery.fitting import Unhealthy, hand_out
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


def load_newest(choices: Iterable[Candidate], parts: Mapping[str, Any], allow: Sequence[str] = ()) -> tuple[Loaded | None, tuple[Passed, ...]]:
    """Load the first of some checkpoints that is intact, readable, complete, finite and fits; of the others no part is changed.

    Cost: each one that is tried is read twice, for its checksum and for its values.
    """
    passed: list[Passed] = []
    for candidate in choices:
        try:
            state = _healthy_state(candidate, parts, allow)
            hand_out(state, parts)
        except Unhealthy as why:
            passed.append(Passed(candidate.path, str(why)))
        else:
            return Loaded(candidate.path, state, _step_of(candidate, state), tuple(passed)), tuple(passed)
    return None, tuple(passed)


def _healthy_state(candidate: Candidate, parts: Mapping[str, Any], allow: Sequence[str]) -> Any:
    path, mark = candidate.path, candidate.mark
    if path.is_dir():
        raise Unhealthy("a directory of torch.distributed.checkpoint, not a file")
    if candidate.spoiled:
        raise Unhealthy(candidate.spoiled)
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


def _step_of(candidate: Candidate, state: Any) -> int | None:
    held = state.get("step") if isinstance(state, Mapping) else None
    return candidate.mark.step if candidate.mark is not None else held if isinstance(held, int) else None
