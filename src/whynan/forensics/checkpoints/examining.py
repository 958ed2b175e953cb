"""One checkpoint: opened, read once, judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.checkpoints.contents import Contents, Scalar
from whynan.forensics.checkpoints.counters import as_number
from whynan.forensics.checkpoints.judging import judge, single_numbers
from whynan.forensics.checkpoints.steps import epoch_inside, step_in_name, step_inside
from whynan.forensics.findings import Checked, Finding, Kind, Severity, last_part, worst_first
from whynan.forensics.nets import net
from whynan.forensics.wishes import Wishes
from whynan.records import Json

_FACTS = ("lr", "initial_lr", "epoch", "global_step", "step", "scale", "loss", "weight_decay")
_MOST_FACTS = 64


@dataclass(frozen=True, slots=True)
class Examined:
    """One file of a checkpoint, and the counters in it."""

    checked: Checked
    inside: int | None = None  # the step it says it was saved at
    epoch: int | None = None


def examine(place: Place, wishes: Wishes) -> Examined:
    """Open a checkpoint, read every tensor once, and judge it; what cannot be read is said in the answer.

    Cost: the file is read once; memory does not grow with it.
    """
    from whynan.forensics.checkpoints.opening import open_checkpoint

    try:
        with net():
            contents = open_checkpoint(place)
    except Unreadable as why:
        return Examined(Checked(str(place), Kind.CHECKPOINT, size=_size(place), step=step_in_name(place.name), unreadable=str(why), damaged=why.damaged))
    try:
        with net():
            return examine_contents(str(place), contents, wishes)
    except Unreadable as why:
        checked = Checked(str(place), Kind.CHECKPOINT, contents.form, contents.size, step_in_name(place.name), unreadable=str(why), damaged=why.damaged)
        return _with_step(checked, contents.values)


def examine_contents(path: str, contents: Contents, wishes: Wishes) -> Examined:
    """Read and judge a checkpoint that was opened."""
    from whynan.forensics.checkpoints.scan import scan

    tensors = scan(contents, wishes)
    findings = judge(contents.values, tensors, contents.notes, wishes)
    if not tensors and not contents.values:
        findings = (*findings, Finding(Severity.SUSPECT, "empty", "holds no tensor and no value"))
    numbers = {**contents.values, **single_numbers(tensors)}
    checked = Checked(path, Kind.CHECKPOINT, contents.form, contents.size, step_in_name(last_part(path)), findings, tensors, _facts(numbers))
    return _with_step(checked, numbers)


def _with_step(checked: Checked, numbers: Mapping[str, Scalar]) -> Examined:
    """The step by what is in the file, else by its name, else the epoch."""
    inside, epoch = step_inside(numbers), epoch_inside(numbers)
    step = next((s for s in (inside, checked.step, epoch) if s is not None), None)
    return Examined(replace(checked, step=step), inside, epoch)


def joined(path: str, pieces: Sequence[Checked], step: int | None = None) -> Checked:
    """Make one answer of the files of one checkpoint; findings keep the name of their file where there are several.

    >>> joined("a", [Checked("a/model.pt", size=2), Checked("a/optim.pt", size=1)]).size
    3
    """
    if len(pieces) == 1:
        return pieces[0].at(path)
    named = [tuple(replace(f, place=f"{p.name}: {f.place}".rstrip(": ")) for f in p.findings) for p in pieces]
    unreadable = "; ".join(f"{p.name}: {p.unreadable}" for p in pieces if p.unreadable)
    named_step = step_in_name(last_part(path))
    return Checked(
        path,
        Kind.CHECKPOINT,
        f"{pieces[0].form}, {len(pieces)} files",
        sum(p.size for p in pieces),
        step if step is not None else named_step if named_step is not None else pieces[0].step,
        worst_first(f for found in named for f in found),
        tuple(t for p in pieces for t in p.tensors),
        {**{k: v for p in reversed(pieces) for k, v in p.facts.items()}, "files": [p.path for p in pieces]},
        unreadable,
        damaged=any(p.damaged for p in pieces),
    )


def _size(place: Place) -> int:
    try:
        return 0 if place.is_dir() else place.size()
    except Unreadable:
        return 0


def _facts(numbers: Mapping[str, Scalar]) -> dict[str, Json]:
    """The counters and rates worth seeing, without those of every single optimizer state."""
    wanted = {k: v for k, v in numbers.items() if k.rsplit(".", 1)[-1] in _FACTS and ".state." not in f".{k}" and as_number(v) is not None}
    return dict(list(wanted.items())[:_MOST_FACTS])
