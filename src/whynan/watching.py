"""`whynan.watch`: the way in for a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from whynan.engine.guard import Guard
from whynan.engine.options import Options
from whynan.errors import UsageError
from whynan.integrations.meeting import introduce
from whynan.recovery.keeper import Keeper, Saved
from whynan.recovery.reading import Loaded
from whynan.report import cells
from whynan.report.journal import Journal

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Watch:
    """What `watch` returns: `step`, `save`, `load`, `close`, and the incidents so far. Also a `with` block."""

    def __init__(self, guard: Guard, keep: int = 3, allow: Sequence[str] = ()) -> None:
        self._guard = guard
        self._keeper = Keeper(keep, allow, say=guard.journal.say)

    @property
    def incidents(self) -> list[Any]:
        """The incidents seen so far, as records: `incident.step`, `.cause.code`, `.origin.span.line`, `.action.taken`."""
        return list(self._guard.journal.incidents)

    @property
    def run_dir(self) -> Path | None:
        """Where the files are, once something was written."""
        return self._guard.journal.directory

    def _repr_html_(self) -> str:
        """What a notebook shows: where it stands, and the first diagnosis."""
        return cells.page(cells.standing(self._guard.session.step_count, self.incidents, self._guard.watches))

    def step(self, function: F) -> F:
        """Mark a step function: a bad step is replayed by calling it again, exactly.

        The function gets the batch, runs forward and backward, and may step the optimizer; during a replay the
        optimizer's step is left out. What it does besides (appending to lists, printing) happens again.
        """
        return self._guard.step_function(function)

    def save(self, path: str | Path, state: Any = None, /, **parts: Any) -> Saved:
        """Write a checkpoint that is checked, checksummed and renamed into place; a bad one never replaces a good one.

        Give one object, as to `torch.save`, or named parts: `guard.save("ckpt/", model=model, optimizer=optimizer, step=100)`.
        A path that is a directory or ends with `/` gets `step-<step>.pt`. The result is false, with a `reason`, if nothing
        was written: the state is not finite, or the disk refused.

        Cost: one reduction per tensor and a checksum, about 1 s per GB beside what `torch.save` takes.
        """
        return self._suspended(self._keeper.save, path, state, **parts)

    def save_sharded(self, path: str | Path, state: Any = None, /, **parts: Any) -> Saved:
        """Do the same as a `torch.distributed.checkpoint` directory; all ranks call it, and one bad shard keeps all from being written.

        An optimizer is given together with its model. `load` reads the directory.
        """
        return self._suspended(self._keeper.save_sharded, path, state, **parts)

    def load(self, path: str | Path, /, *, exact: bool = False, **parts: Any) -> Loaded:
        """Load the newest healthy checkpoint of a file, a directory or a pattern into the given parts; say what was passed over.

        `guard.load("ckpt/", model=model, optimizer=optimizer).state["step"]`: plain values are in the answer's `state`, what
        was not taken and why in `passed`. A file given by name is tried first, then the older ones of its series; with `exact`
        only itself. Raises if none is healthy. Nothing in a checkpoint is run.

        Cost: the file is read once more than by `torch.load`.
        """
        return self._suspended(self._keeper.load, path, exact=exact, **parts)

    def _suspended(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._guard.regular.keeping = True  # torch makes an optimizer's state by a step, to save it or to load into it
        try:
            result: T = self._guard.recorder.suspended(call, *args, **kwargs)  # nothing in it is a step
            return result
        finally:
            self._guard.regular.keeping = False

    def close(self) -> None:
        """End watching: settle what is pending, finish the files, leave torch as it was."""
        self._guard.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._guard.__exit__(kind, error, trace)


def watch(
    *objects: Any,
    run_dir: str | Path | None = None,
    files: bool = True,
    averages: Iterable[torch.nn.Module] = (),
    keep: int = 3,
    allow: Sequence[str] = (),
    **options: Any,
) -> Watch:
    """Watch training in this thread: models and optimizers given here, and any made later.

    >>> import torch, whynan
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with whynan.watch(model, optimizer, files=False) as guard:
    ...     loss = model(torch.ones(4, 2)).pow(2).mean()
    ...     loss.backward()
    ...     optimizer.step()
    >>> guard.incidents
    []

    Options, the same as those of `whynan run` (more on them in docs/recovery.md):

    policy               what to do with a bad step: observe, skip, rollback, stop, or a chain as skip:3,rollback,stop
    in_a_row             how often in a row a `skip` without a number may be used (3)
    in_total             bad steps that are lived with in the whole run; the next one stops it (10)
    wall_steps           schedulers go on over dropped steps (False: they count updates)
    drop_alone           drop a bad micro-batch alone, not its whole accumulation window (False)
    snapshots            where the last good state is kept for a rollback: host, device, off (host)
    snapshot_every       how often it is renewed, in updates (100)
    rewind_data          a rollback takes a StatefulDataLoader back to the snapshot's batch (True)
    lr_after_rollback    factor on every learning rate after a rollback (1.0)
    clip_after_rollback  largest gradient norm from then on (none)
    bad_terms            what to do with a loss of which some terms, or their gradients, are not finite: skip the step, or drop these terms (skip)
    spike                what to do with a finite loss or gradient norm far outside what it was: warn, skip, rollback, stop, off (warn)
    capsule_limit        bytes of the tensors in a capsule; 0 writes none (2 GB)
    rank_timeout         seconds to wait for the other ranks when a step is bad (600)
    track                named values with limits: {"*.alpha": {"below": 1.0}} warns when an alpha reaches 1.0;
                         {"out:blocks.*": {"grows": 10}} when what a module returns has grown tenfold
    save_every           write a checkpoint of everything below the run directory, every so many updates (0: none)
    validate             a function of the model, or file.py:function, that returns a number or numbers by name
    validate_every       how often it is asked, in updates (0: never)
    expect               stages of health that the run is held to: a TOML file, or a mapping such as the file holds

    A training that is stopped raises `whynan.TrainingStopped`. Files go to `run_dir`, or `whynan-runs/<time>`; with `files=False`
    nothing is written. `averages` are copies of the weights that your loop moves by hand (EMA): a dropped step leaves
    them alone. torch's own AveragedModel is known without it. `keep` is how many good checkpoints `guard.save` keeps of a
    series; 0 removes none. `allow` names tensors (patterns) whose infinities are meant and may be saved.

    Cost: 1-4 microseconds for each torch call outside modules, one pass over the gradients where they are not clipped.
    """
    for item in objects:
        if not isinstance(item, torch.nn.Module | torch.optim.Optimizer):
            raise UsageError(f"watch() takes models and optimizers, not {type(item).__name__}")
    copies = _modules_of(averages)
    known = [f.name for f in fields(Options)]
    for name in options:
        if name not in known:
            raise UsageError(f"watch() has no option {name!r}; its options are {', '.join(known)}")
    journal = Journal(Path(run_dir) if run_dir is not None else None, files=files)
    guard = introduce(Guard(Options(**options), journal))
    guard.recovering.averages = copies
    guard.open()
    guard.attach(*objects)
    return Watch(guard, keep, allow)


def _modules_of(averages: Any) -> list[torch.nn.Module]:
    copies = list(averages) if isinstance(averages, Iterable) and not isinstance(averages, torch.nn.Module) else [averages]
    for item in copies:
        if not isinstance(item, torch.nn.Module):
            raise UsageError(f"averages takes modules (a copy of the model), not {type(item).__name__}: keep the averages in a module, or leave them out")
    return copies
