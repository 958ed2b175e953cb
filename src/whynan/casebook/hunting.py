"""One hunt: run the failing program under whynan, read what was found, apply the remedy it printed, train to the end."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whynan.casebook.cases import Case
from whynan.casebook.patching import file_of, patched
from whynan.errors import UsageError
from whynan.records import Incident
from whynan.report.reading import read_run

_QUALITY = re.compile(r"^quality (\S+) \(untrained (\S+)\)", re.MULTILINE)
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of a case."""

    case: Case
    run: Path  # the run directory of the failing program
    incident: Incident | None
    as_expected: bool  # the true line and the cause
    remedy: str  # how the healed program came to be
    quality: float | None
    untrained: float | None
    trouble: str = ""

    @property
    def healed(self) -> bool:
        """Whether the changed program reached the quality that is stated."""
        return self.quality is not None and self.case.good(self.quality)

    @property
    def verdict(self) -> str:
        """Say it in three words, or what is missing."""
        words = [("found", self.incident is not None), ("explained", self.as_expected), ("healed", self.healed)]
        return ", ".join(word if holds else f"not {word}" for word, holds in words)


def need_torch() -> None:
    """Raise a usage error where no program could run."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the programs of the casebook need torch 2.9 or later: pip install 'whynan[torch]'")


def hunt(case: Case, folder: Path, progress: Progress) -> Hunt:
    """Work in a copy below `folder`; what is there afterwards can be run by hand."""
    own = folder / case.name
    shutil.copytree(case.folder, own, ignore=shutil.ignore_patterns("healed", "__pycache__", "case.toml"), dirs_exist_ok=True)
    run, out = own / "whynan-runs" / case.name, own / "out"
    shutil.rmtree(run, ignore_errors=True)
    try:
        _before(case, own, out, progress)
        progress("the failing program")
        _python(own, "-m", "whynan", "run", "--run-dir", str(run), *_filled(case.failing, out))
        incident = _incident_of(case, run)
        healed, how = _heal(case, own, incident)
        progress("the healed program")
        return _finished(case, run, incident, how, _run_healed(case, healed))
    except (OSError, UsageError) as error:
        return Hunt(case, run, None, False, "", None, None, str(error))


def _run_healed(case: Case, healed: Path) -> str:
    out = healed / "out"
    _before(case, healed, out, lambda text: None)
    return _python(healed, *_filled(case.healed, out))


def _before(case: Case, own: Path, out: Path, progress: Progress) -> None:
    out.mkdir(exist_ok=True)
    if case.before:
        progress("the run before it")
        _python(own, *_filled(case.before, out))


def _finished(case: Case, run: Path, incident: Incident | None, how: str, said: str) -> Hunt:
    found = _QUALITY.findall(said)
    quality, untrained = map(float, found[-1]) if found else (None, None)
    as_expected = incident is not None and incident.cause.code == case.code and _at_its_line(case, incident)
    trouble = "" if found else f"the healed program ended without a result: {said.strip().splitlines()[-1] if said.strip() else 'no output'}"
    return Hunt(case, run, incident, as_expected, how, quality, untrained, trouble)


def _incident_of(case: Case, run: Path) -> Incident | None:
    """Return the incident to heal: the first of the expected cause, else the first with a change, else the first."""
    incidents = read_run(run).incidents
    ranked = [i for i in incidents if i.cause.code == case.code] + [i for i in incidents if i.remedies and i.remedies[0].diff]
    return next(iter([*ranked, *incidents]), None)


def _at_its_line(case: Case, incident: Incident) -> bool:
    span = incident.origin.span
    lines = (case.folder / case.file).read_text(encoding="utf-8").splitlines()
    return Path(span.file).name == case.file and 0 < span.line <= len(lines) and case.text in lines[span.line - 1]


def _heal(case: Case, own: Path, incident: Incident | None) -> tuple[Path, str]:
    """Make `healed/` by applying the first remedy's diff to a copy; where that cannot be, by the one that is shipped."""
    healed = own / "healed"
    shutil.rmtree(healed, ignore_errors=True)
    diff = incident.remedies[0].diff if incident is not None and incident.remedies else ""
    try:
        text = patched((own / file_of(diff)).read_text(encoding="utf-8"), diff) if diff else ""
    except (OSError, ValueError):
        text = ""
    if not text:
        shutil.copytree(case.folder / "healed", healed)
        return healed, "the change that is shipped with the case; the printed one could not be applied"
    shutil.copytree(own, healed, ignore=shutil.ignore_patterns("whynan-runs", "out", "__pycache__", "healed"))
    (healed / file_of(diff)).write_text(text, encoding="utf-8")
    return healed, "the printed change, applied"


def _filled(arguments: tuple[str, ...], out: Path) -> list[str]:
    return [a.replace("{out}", str(out)) for a in arguments]


def _python(folder: Path, *arguments: str) -> str:
    """Run python there; return what it printed."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(  # noqa: S603 (our own programs)
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.stdout
