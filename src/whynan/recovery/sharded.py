"""Checkpoints of `torch.distributed.checkpoint`: a directory with a part from every rank, kept like a file.

No rank decides alone: every verdict (finite? written? intact?) is gathered from all of them with
`torch.distributed.all_gather_object` and read the same way everywhere. The directory must be one that all ranks see.

    examine, agree ──► temporary directory ──► dcp.save ──► checksums into .whynan.json ──► rename

The renaming makes directory, shards and checksums appear together.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from whynan.capsule.doors.collectives import several
from whynan.ends import off_standard_streams
from whynan.errors import UsageError, let_through
from whynan.recovery import atomic, series
from whynan.recovery.health import Hurt, Role, examine, roles_of
from whynan.recovery.marks import Mark, sum_of_file
from whynan.recovery.reading import Loaded, Passed
from whynan.recovery.series import MANIFEST, Candidate
from whynan.recovery.shards import misfit, nonfinite_in, read_into, read_metadata, rest_of, without_warning

T = TypeVar("T")


def place() -> tuple[int, int]:
    """Return this rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if several() else (0, 1)


def gather(value: T) -> list[T]:
    """Return every rank's value, in order, on every rank."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def decided(work: Callable[[], T]) -> T:
    """Let the first rank do something and give its answer to all; an `OSError` is raised everywhere."""
    answer: Any = None
    if place()[0] == 0:
        try:
            answer = work()
        except OSError as error:
            answer = error
    answer = gather(answer)[0]
    if isinstance(answer, OSError):
        raise answer
    return answer  # type: ignore[no-any-return]


# -- save -------------------------------------------------------------------------------------------------------


def state_of(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Role]]:
    """Return the state of named parts as `torch.distributed.checkpoint` wants it, and what is known of its tensors."""
    roles = {name: role for key, part in parts.items() for name, role in roles_of(key, part).items()}
    return {name: _state(part, parts) for name, part in parts.items()}, roles


def _state(part: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(part, torch.nn.Module):
        return get_model_state_dict(part)
    if isinstance(part, torch.optim.Optimizer):
        return get_optimizer_state_dict(_model_of(part, parts), part)
    return part.state_dict() if hasattr(part, "state_dict") else part


def _model_of(optimizer: torch.optim.Optimizer, parts: Mapping[str, Any]) -> torch.nn.Module:
    """The model whose weights an optimizer updates: it gives the names under which its state is stored."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for part in parts.values():
        if isinstance(part, torch.nn.Module) and held <= {id(p) for p in part.parameters()}:
            return part
    raise UsageError("an optimizer is saved and loaded in shards together with its model: give the model as a part too")


def examine_all(state: Any, roles: Mapping[str, Role], allow: Sequence[str]) -> tuple[Hurt, ...]:
    """Return what is wrong with the shards of all ranks."""
    found = gather(examine(state, roles, allow))
    return tuple(h if len(found) == 1 else Hurt(f"rank {rank}: {h.name}", h.nan, h.inf, h.note) for rank, hurts in enumerate(found) for h in hurts)


@off_standard_streams()
def write(path: Path, state: Any, step: int | None) -> Mark:
    """Write a directory in one piece. Raises the `OSError` of whichever rank had it, on every rank."""
    with contextlib.ExitStack() as undo:
        temporary = decided(lambda: _prepare(path, undo))
        _save(temporary, state)
        files = _checksums(temporary, decided(lambda: _files(temporary)))
        return decided(lambda: _publish(temporary, path, files, step))


def _prepare(path: Path, undo: contextlib.ExitStack) -> Path:
    """Make the temporary directory; it is locked until the end, and removed unless it was renamed by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.clean_leftovers(path.parent)
    temporary = atomic.temporary_beside(path)
    temporary.mkdir()
    undo.callback(os.close, atomic.lock_directory(temporary))
    undo.callback(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _save(directory: Path, state: Any) -> None:
    failure: OSError | None = None
    try:
        with without_warning():
            save_shards(state, checkpoint_id=directory, no_dist=not several())
    except CheckpointException as error:
        failure = _disk_failure(error)
        if failure is None:
            raise
    except OSError as error:
        failure = error
    for failed in gather(failure):
        if failed is not None:
            raise failed


def _disk_failure(error: CheckpointException) -> OSError | None:
    """Find the disk's own error; the archive writer hides it behind a RuntimeError, and other ranks see only that."""
    for failed in error.failures.values():
        cause: BaseException | None = failed[0]
        while cause is not None:
            if isinstance(cause, OSError):
                return OSError(cause.errno, cause.strerror)
            cause = cause.__cause__ or cause.__context__
        if "inline_container.cc" in str(failed[0]):
            return OSError(errno.EIO, "a shard could not be written")
    return None


def _files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name != MANIFEST)


def _share(names: Sequence[str]) -> Sequence[str]:
    rank, world = place()
    return names[rank::world]


def _checksums(directory: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Every rank adds up its share of the files."""
    failure, sums = None, {}
    try:
        sums = {name: [(directory / name).stat().st_size, sum_of_file(directory / name)] for name in _share(names)}
    except OSError as error:
        failure = error
    answers = gather((failure, sums))
    for failed, _ in answers:
        if failed is not None:
            raise failed
    return {name: held for _, part in answers for name, held in part.items()}


def _publish(temporary: Path, path: Path, files: dict[str, list[Any]], step: int | None) -> Mark:
    total = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
    size = sum(size for size, _ in files.values())
    mark = Mark(total, size, path.name, series.next_time(series.members(path)), temporary.stat().st_ino, step)
    manifest = temporary / MANIFEST
    manifest.write_bytes(mark.to_bytes(files=files))
    for name in [*files, MANIFEST]:
        atomic.sync_file(temporary / name)
    atomic.sync_directory(temporary)
    if path.exists():
        series.keep_previous(path)
    temporary.rename(path)
    atomic.sync_directory(path.parent)
    return mark


# -- load -------------------------------------------------------------------------------------------------------


def load(choices: Sequence[Candidate], parts: Mapping[str, Any], allow: Sequence[str] = ()) -> tuple[Loaded | None, tuple[Passed, ...]]:
    """Load the first directory that all ranks find healthy.

    Cost: every file is read once for its checksum, the ranks sharing the work; without checksums every tensor is.
    """
    passed: list[Passed] = []
    for candidate in decided(lambda: list(choices)):
        why = _verdict(candidate, parts, allow)
        if not why:
            return _load(candidate, parts, tuple(passed)), tuple(passed)
        passed.append(Passed(candidate.path, why))
    return None, tuple(passed)


def _verdict(candidate: Candidate, parts: Mapping[str, Any], allow: Sequence[str]) -> str:
    """Return why a directory cannot be taken, the same on every rank."""
    try:
        why = _examine(candidate, parts, allow)
    except UsageError:
        raise
    except Exception as error:
        let_through(error)
        why = f"cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0][:120]}"
    found = [(rank, text) for rank, text in enumerate(gather(why)) if text]
    return found[0][1] if found else ""


def _examine(candidate: Candidate, parts: Mapping[str, Any], allow: Sequence[str]) -> str:
    if not candidate.path.is_dir():
        return "not a directory of torch.distributed.checkpoint"
    if candidate.spoiled:
        return candidate.spoiled
    if candidate.mark is not None and (why := _damaged(candidate.path)):
        return why
    names = read_metadata(candidate.path).state_dict_metadata
    for part in parts:
        if not any(name == part or name.startswith(f"{part}.") for name in names):
            return f"has no part named {part!r}"
    if why := misfit(candidate.path, {name: _state(part, parts) for name, part in parts.items()}):
        return why
    if candidate.mark is not None:
        return ""  # examined before it was written, and unchanged since
    return nonfinite_in(candidate.path, _share(sorted(names)), allow)


def _damaged(directory: Path) -> str:
    """Return what this rank's share of the files has to say against a directory."""
    files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
    for name in _share(sorted(files)):
        size, total = files[name]
        try:
            if (directory / name).stat().st_size != size:
                return f"{name} is truncated"
            if sum_of_file(directory / name) != total:
                return f"checksum of {name} differs"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
    return ""


def _load(candidate: Candidate, parts: Mapping[str, Any], passed: tuple[Passed, ...]) -> Loaded:
    state = {name: _state(part, parts) for name, part in parts.items()}
    rest = rest_of(candidate.path, parts)
    whole = {**state, **rest}
    read_into(candidate.path, whole, alone=not several())
    for name, part in parts.items():
        _hand_out(part, whole[name], parts)
    held = whole.get("step")
    step = candidate.mark.step if candidate.mark is not None else held if isinstance(held, int) else None
    return Loaded(candidate.path, whole, step, passed)


def _hand_out(part: Any, state: Any, parts: Mapping[str, Any]) -> None:
    if isinstance(part, torch.nn.Module):
        set_model_state_dict(part, state)
    elif isinstance(part, torch.optim.Optimizer):
        set_optimizer_state_dict(_model_of(part, parts), part, state)
    else:
        part.load_state_dict(state)
