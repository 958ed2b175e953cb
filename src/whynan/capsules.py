"""Capsules: a diagnosed step on disk, and the same diagnosis from it, elsewhere and without the data set."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from whynan.capsule import pack, unpack
from whynan.capsule.names import CapsuleError
from whynan.capsule.read import Capsule
from whynan.capsule.rebuild import NeedsTrust
from whynan.capsule.sites import show_as
from whynan.capsule.trusted import TrustedCode
from whynan.diagnosis import Case, diagnose
from whynan.errors import let_through, one_line
from whynan.records import Incident, Symptom
from whynan.trace.lines import Line

if TYPE_CHECKING:
    from whynan.capsule.recorder import Recorder
    from whynan.report.journal import Journal

LIMIT = pack.LIMIT


def write_capsule(case: Case, incident: Incident, directory: Path, limit: int = LIMIT) -> Path | str:
    """Write the capsule of a case into `directory`; return it, or in one line why there is none.

    Call it right after `diagnose`, while weights, buffers and batch are still those of the failing step.

    Cost: one copy of the step's weights and batch to the disk, at most `limit` bytes; the state of training is left as it is.
    """
    line = case.in_data
    places = {"site": case.site, "made_at": case.made_at, "in_data": line.site if line is not None else None}
    contents = pack.Contents(case.step, case.program, incident.to_json(), case.optimizer, case.optimizers, case.scaler, case.history, places, case.clip)
    contents.values_in_data = line.values if line is not None else []
    return pack.write(contents, directory, limit)


class Shelf:
    """Keeps the capsules of one run: one for each different incident, each within `limit` bytes; 0 keeps none."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.written: list[Path] = []
        self._failed = False

    def keep(self, case: Case, incident: Incident, journal: Journal) -> None:
        """Write the capsule of a new kind of incident below the run directory; say once if that fails."""
        seen = (incident.cause.code, incident.origin.span.file, incident.origin.span.line) in journal.counts
        home = journal.home() if self.limit and not seen and not self._failed else None
        if home is None:
            return
        try:
            made = write_capsule(case, incident, home / "capsules" / f"step-{case.step:06d}", self.limit)
        except Exception as error:  # the diagnosis is worth more than its capsule
            let_through(error)
            made = f"{type(error).__name__}: {error}"
        if isinstance(made, Path):
            self.written.append(made)
            if reasons := _why_not(made):
                journal.say(f"whynan: the capsule of step {case.step} can be looked into, but not replayed ({reasons[0]}); the diagnosis is not affected")
        else:
            self._failed = True
            journal.say(f"whynan: no capsule was written ({made}); the diagnosis is not affected")


def _why_not(folder: Path) -> list[str]:
    """Return why a capsule that was written cannot be replayed, as far as that is known; nothing where it can."""
    reasons = json.loads((folder / "capsule.json").read_text(encoding="utf-8"))["why_not"]
    return [str(reason)[:200] for reason in reasons]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A diagnosis made again, and what was not as in the original run."""

    incident: Incident
    notes: list[str]


def find(path: Path) -> Path:
    """Return the capsule at a path: the directory itself, or the newest one of a run directory."""
    if (path / "capsule.json").is_file():
        return path
    for folder in (path / "capsules", path, *path.glob("ranks/*/capsules")):
        found = [p.parent for p in folder.glob("*/capsule.json")] if folder.is_dir() else []
        if found:
            return max(found, key=lambda p: (p / "capsule.json").stat().st_mtime_ns)
    raise CapsuleError(f"{path} holds no capsule; give a directory like whynan-runs/<time>/capsules/step-000035")


def replay(capsule: Capsule, trust: bool = False) -> Replayed:
    """Diagnose the step of a capsule again. Raises `NeedsTrust` where that takes code from the capsule."""
    from whynan.engine.guard import Guard
    from whynan.engine.options import Options
    from whynan.report.journal import Journal

    if not capsule.head.get("replayable"):
        reasons = capsule.head.get("why_not")
        raise CapsuleError("this capsule cannot be replayed: " + "; ".join(str(r)[:200] for r in reasons[:3]) if isinstance(reasons, list) else "")
    guard = Guard(Options(policy="observe"), Journal(None, quiet=True))
    with contextlib.ExitStack() as stack:
        stack.enter_context(unpack.settings(capsule.program["settings"]))
        code = stack.enter_context(TrustedCode(capsule.sources, capsule.program["globals"], lambda v: v)) if trust else None
        loaded = _loaded(capsule, guard.recorder, code)
        stack.enter_context(guard)
        guard.attach(*loaded.optimizers)  # a step function's own optimizer step is left out on replay
        guard.recorder.suspended(_rehearse, loaded.program, capsule)
        incident = guard.recorder.suspended(diagnose, _case(capsule, loaded))
    return Replayed(incident, [*loaded.notes, *(code.notes if code is not None else [])])


def _loaded(capsule: Capsule, recorder: Recorder, code: TrustedCode | None) -> unpack.Loaded:
    try:
        return unpack.load(capsule, recorder, code)
    except NeedsTrust:
        raise
    except CapsuleError as error:
        raise CapsuleError(f"{error}{capsule.lacks()}") from None


def _rehearse(program: unpack.LoadedProgram, capsule: Capsule) -> None:
    """Play once: a call that fails because the capsule lacks something is said to be that, not diagnosed."""
    with program.still():
        run = program.play()
    if run.error is None or capsule.head["incident"].get("symptom", {}).get("place") == "exception":
        return
    raise CapsuleError(f"call {run.failed_at.number if run.failed_at else '?'} failed on replay: {one_line(run.error, 200)}{capsule.lacks()}")


def _case(capsule: Capsule, loaded: unpack.Loaded) -> Case:
    told = capsule.head["incident"]
    try:
        for span in (told["origin"], *told["origin"]["from"]):
            show_as(str(span["file"]))
        symptom = Symptom(**{k: str(v) for k, v in told["symptom"].items()})
        step, rank = int(told["step"]), int(told["rank"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CapsuleError(f"{capsule.folder / 'capsule.json'} holds no proper incident") from None
    return Case(
        step=step,
        symptom=symptom,
        program=loaded.program,
        optimizers=loaded.optimizers,
        optimizer=loaded.optimizer,
        scaler=loaded.scaler,
        clip=loaded.clip,
        history=loaded.history,
        site=loaded.places.get("site"),
        made_at=loaded.places.get("made_at"),
        rank=rank,
        in_data=Line(site, loaded.values_in_data) if (site := loaded.places.get("in_data")) is not None else None,
    )
