"""The checkpoint keeper: looks before it writes, writes in one piece, never lets a bad state push out a good one.

    save   examine ──► temporary file, checksum on the way ──► read back ──► fsync ──► rename ──► remove surplus
    load   newest first: checksum ──► readable without running code ──► all parts there ──► finite; else the next older

What goes wrong with the state or the disk does not end the training: `save` says so on stderr and answers with a
record that is false. What the caller got wrong raises `UsageError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whynan.ends import aloud, off_standard_streams
from whynan.errors import UsageError
from whynan.recovery import atomic, marks, series
from whynan.recovery.health import Hurt, describe, examine, roles_of
from whynan.recovery.marks import HashingFile, Mark
from whynan.recovery.reading import Loaded, Passed, load_newest, readable_without_code
from whynan.recovery.series import Candidate

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save; true where it was written as a good one."""

    path: Path
    reason: str = ""  # why it was not written
    bad: tuple[Hurt, ...] = ()
    removed: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return not self.reason


class Keeper:
    """Saves and loads checkpoints; keeps the last `keep` good ones of each series, all of them with 0.

    `allow` names tensors (patterns as in `fnmatch`) whose NaN or infinities are meant. With `keep_bad` a state that is
    refused is written beside the good ones as `<name>.bad`, for a look at it.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> keeper = Keeper(keep=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (100, 200, 300):
    ...         saved = keeper.save(f"{folder}/step-{step}.pt", model=model, step=step)
    ...     loaded = keeper.load(folder, model=model)
    >>> bool(saved), [p.name for p in saved.removed], loaded.state["step"]
    (True, ['step-100.pt'], 300)

    Cost: of a save, one reduction per tensor and a checksum (about 1 s per GB beside what `torch.save` takes), one fsync,
    and room for one more checkpoint than is kept; of a load, the file is read once more than by `torch.load`.
    """

    def __init__(self, keep: int = 3, allow: Sequence[str] = (), keep_bad: bool = False, say: Callable[[str], None] | None = None) -> None:
        if not isinstance(keep, int) or keep < 0:
            raise UsageError(f"keep is a whole number from 0 (remove nothing) on, not {keep!r}")
        self.keep, self.allow, self.keep_bad = keep, tuple(allow), keep_bad
        self._say = say or _print
        self._quiet = False  # another rank speaks for all
        self._written: set[Path] = set()

    # -- save ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, state: Any = None, /, **parts: Any) -> Saved:
        """Save one object as `torch.save` would, or named parts: their `state_dict()` if they have one, else themselves.

        `save(path, state)` or `save(path, model=model, optimizer=optimizer, step=100)`. A path that is a directory gets
        a file `step-<step>.pt` in it. `torch.load(path, weights_only=True)` reads the file without whynan.
        """
        state, roles = _state_of(state, parts)
        step = parts.get("step") if isinstance(parts.get("step"), int) else None
        target, self._quiet = _writable(_target(path, step)), False
        try:
            bad = examine(state, roles, self.allow)
            if bad:
                return self._refuse(target, state, bad)
            mark = self._write(target, state, step)
        except OSError as error:
            return self._failed(target, _what_failed(error))
        except RecursionError:
            return self._failed(target, "the state is nested too deeply to be written")
        return Saved(target, removed=self._rotate(Candidate(target, mark)))

    def save_sharded(self, path: str | Path, state: Any = None, /, **parts: Any) -> Saved:
        """Save the same as a directory of `torch.distributed.checkpoint`; with a process group every rank calls this.

        If any rank's shard is not finite or cannot be written, no rank's is.
        """
        from whynan.recovery import sharded

        whole, roles = sharded.state_of(parts) if state is None and parts else _state_of(state, parts)
        step = parts.get("step") if isinstance(parts.get("step"), int) else None
        target = _writable(Path(path).absolute())
        self._quiet = sharded.place()[0] > 0
        bad = sharded.examine_all(whole, roles, self.allow)
        if bad:
            return self._refuse(target, None, bad)
        try:
            mark = sharded.write(target, whole, step)
        except OSError as error:
            return self._failed(target, _what_failed(error))
        self._written.add(target)
        return Saved(target, removed=sharded.decided(lambda: self._rotate(Candidate(target, mark))))

    @off_standard_streams()
    def _write(self, path: Path, state: Any, step: int | None, finite: bool = True) -> Mark:
        time = series.next_time(series.members(path))
        with atomic.replacing(path) as (file, temporary):
            out = HashingFile(file)
            try:
                torch.save(state, out)  # type: ignore[arg-type]
            except Exception:
                if out.error is not None:
                    raise out.error from None
                raise
            obstacle = readable_without_code(temporary)
            mark = Mark(out.sha256, out.size, path.name, time, temporary.stat().st_ino, step, finite, not obstacle)
            marks.append(file, mark)
            if self.keep > 1 and path.exists() and series.series_of(path) == path.name:
                series.keep_previous(path)
        self._written.add(path)
        if obstacle and finite:
            self._tell(f"whynan: {path.name} is saved, but can only be read by running code in it: {obstacle}; store plain values instead")
        return mark

    def _refuse(self, path: Path, state: Any, bad: tuple[Hurt, ...]) -> Saved:
        reason = describe(bad)
        self._tell(f"whynan: not saved: {path.name}: {reason}; {self._last_good(path)}; if these values are meant, name them in allow=")
        if self.keep_bad and state is not None:
            with contextlib.suppress(OSError):
                self._write(path.with_name(path.name + ".bad"), state, None, finite=False)
        return Saved(path, reason, bad)

    def _failed(self, path: Path, reason: str) -> Saved:
        self._tell(f"whynan: not saved: {path.name}: {reason}; {self._last_good(path)}; training goes on")
        return Saved(path, reason)

    def _last_good(self, path: Path) -> str:
        good = next((c for c in series.members(path) if c.whole), None)
        return f"the last good one is {good.path.name}" if good is not None else "there is no good one yet"

    def _rotate(self, newest: Candidate) -> tuple[Path, ...]:
        """Remove what is older than the good ones to keep; the one just written is never among them."""
        removed = []
        for old in series.surplus(newest, self.keep, frozenset(self._written)) if self.keep else ():
            with contextlib.suppress(OSError):
                _discard(old.path)
                removed.append(old.path)
                self._written.discard(old.path)
        return tuple(removed)

    def _tell(self, text: str) -> None:
        if not self._quiet:
            self._say(text)

    # -- load ---------------------------------------------------------------------------------------------------

    def load(self, path: str | Path, /, *, exact: bool = False, **parts: Any) -> Loaded:
        """Load the newest healthy checkpoint of a directory, a pattern (`run/step-*.pt`) or a series into named parts.

        A file given by name is tried first, then the older ones of its series; with `exact` only itself. What was
        passed over is said on stderr and in the answer. `UsageError` if none is healthy. If the newest is a directory
        of `torch.distributed.checkpoint`, every rank of the process group must call this.
        """
        for name, part in parts.items():
            if not hasattr(part, "load_state_dict"):
                raise UsageError(f"{name}= takes something with load_state_dict(), not {type(part).__name__}; plain values are in the answer's .state")
        choices = _choices(Path(path), exact)
        if choices and series.is_sharded(choices[0].path):
            from whynan.recovery import sharded

            self._quiet = sharded.place()[0] > 0
            loaded, passed = sharded.load(choices, parts, self.allow)
        else:
            self._quiet = False
            loaded, passed = load_newest(choices, parts, self.allow)
        self._tell_of(path, loaded, passed)
        assert loaded is not None
        return loaded

    def _tell_of(self, path: str | Path, loaded: Loaded | None, passed: Sequence[Passed]) -> None:
        for each in passed:
            self._tell(f"whynan: passed over {each}")
        if loaded is None and passed:
            raise UsageError(f"no healthy checkpoint in {path}: {passed[0]}")
        if loaded is None:
            raise UsageError(f"no checkpoint in {path}; give a file, a directory or a pattern")
        if passed:
            self._tell(f"whynan: loaded {loaded.path.name}, the newest healthy one")


def save(obj: Any, path: str | Path) -> Saved:
    """Save like `torch.save`, but in one piece, with a checksum, and only if every tensor is finite; remove nothing.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bool(save({"w": torch.ones(2)}, f"{folder}/w.pt"))
    True
    """
    if not isinstance(path, str | Path):
        raise UsageError(f"save() writes to a path, not to {type(path).__name__}; use torch.save for that")
    return Keeper(keep=0).save(path, obj)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        aloud(text)


def _state_of(state: Any, parts: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    if (state is None) == (not parts):
        raise UsageError("save() takes either one object or named parts: save(path, state) or save(path, model=model, step=step)")
    if not parts:
        return state, {}
    roles = {name: role for key, part in parts.items() for name, role in roles_of(key, part).items()}
    return {key: part.state_dict() if hasattr(part, "state_dict") else part for key, part in parts.items()}, roles


def _target(path: str | Path, step: int | None) -> Path:
    target = Path(path)
    if not os.path.isdir(target) and not str(path).endswith("/"):  # `Path.is_dir` raises for a name that is too long
        return target.absolute()
    if step is None:
        raise UsageError(f"{path} is a directory: give a file name, or step= for a name by the step")
    return (target / f"step-{step:08}.pt").absolute()


def _writable(path: Path) -> Path:
    """Return a path that a checkpoint may stand at: what is neither file nor directory (a device, a pipe) must not be replaced by one."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UsageError(f"{path} is no regular file: it would be replaced by one; give another path, or use torch.save to write to it")
    return path


def _what_failed(error: OSError) -> str:
    return f"{'the disk is full' if error.errno in _NO_ROOM else 'the file could not be written'} ({error.strerror or error})"


def _choices(path: Path, exact: bool) -> list[Candidate]:
    """Return what may be loaded, in the order it is tried."""
    if any(c in path.name for c in "*?["):
        return series.candidates(path.parent.glob(path.name))
    if os.path.isdir(path) and not series.is_sharded(path):
        return series.candidates(path.iterdir())
    named = series.describe_path(path)
    first = [named] if named is not None else []
    if exact:
        return first
    limit = named.mark.time if named is not None and named.mark is not None else None
    return first + [c for c in series.members(path) if c.path.name != path.name and (limit is None or c.time <= limit)]


def _discard(path: Path) -> None:
    """Remove a checkpoint so that a half-removed one is never seen."""
    hidden = atomic.temporary_beside(path)
    path.rename(hidden)
    atomic.remove(hidden)
