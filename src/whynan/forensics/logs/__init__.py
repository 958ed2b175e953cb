"""Training logs that are already on disk: what went bad first, when, and what came before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from whynan.errors import UsageError
from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.findings import Checked, Kind
from whynan.forensics.wishes import Wishes

if TYPE_CHECKING:
    from whynan.forensics.logs.collecting import Log
    from whynan.forensics.logs.entries import Entry

_LOGS = frozenset({".log", ".out", ".err", ".stdout", ".stderr"})
_NO_LOGS = frozenset({".py", ".pyi", ".md", ".rst", ".ipynb", ".toml", ".yaml", ".yml"})  # they quote logs

__all__ = ["check_log", "entries_of", "plot", "recognise"]


def recognise(place: Place) -> str | None:
    """Say which kind of log a file is, by its content; None where it is none.

    Cost: the first 64 KB are read, and the last where those say nothing.
    """
    from whynan.forensics.logs.forms import OFTEN, form_of_file

    if place.suffix in _NO_LOGS:
        return None
    with place.open() as file:
        return form_of_file(file, 1 if place.suffix in _LOGS or "log" in place.name.lower() else OFTEN)


def check_log(place: Place, wishes: Wishes = Wishes()) -> Checked:  # noqa: B008 - frozen
    """Read a log and say what is wrong in it; raises `Unreadable` where it is no log.

    Cost: one pass; the memory of some 1 000 points a series, whatever the length of the file.
    """
    from whynan.forensics.logs.drawing import draw
    from whynan.forensics.logs.judging import facts_of, judge
    from whynan.forensics.logs.staging import hold_to_stages

    log = _read(place, wishes)
    main = log.main_loss()
    staged = hold_to_stages(entries_of(place), wishes.stages) if wishes.stages else ()
    step = max((s.last.position for s in log.curves if s.last and s.last.step is not None and not s.last.inner), default=None)
    return Checked(str(place), Kind.LOG, log.form, place.size(), step, (*judge(log, wishes), *staged), facts=facts_of(log), plot=draw(log.curves, main))


def entries_of(place: Place) -> Iterator[Entry | None]:
    """Yield every entry of a log as it was written, None for a broken line; raises `Unreadable` where it is no log."""
    from whynan.forensics.logs.forms import READERS, form_of_file

    with place.open() as file:
        form = form_of_file(file)
        if form is None:
            raise Unreadable("no training log")
        file.seek(0)
        yield from READERS[form](file, lambda size: None)


def plot(place: Place, target: Path, wishes: Wishes = Wishes()) -> None:  # noqa: B008 - frozen
    """Draw the loss and the gradient norm of a log into `target`, an `.svg` or `.png` file."""
    from whynan.forensics.logs.picture import FORMATS, shapes_of

    write = FORMATS.get(target.suffix.lower())
    if write is None:
        raise UsageError(f"--plot {target}: a curve is written as .svg or .png")
    try:
        target.write_bytes(write(shapes_of(_read(place, wishes), place.name)))
    except OSError as error:
        raise UsageError(f"--plot {target}: {error.strerror}") from None


def _read(place: Place, wishes: Wishes) -> Log:
    from whynan.forensics.logs.collecting import Log
    from whynan.forensics.logs.forms import READERS, Form, form_of_file

    with place.open() as file:
        form = form_of_file(file) or (Form.TEXT if wishes.kind is Kind.LOG else None)
        if form is None:
            raise Unreadable("no training log: no loss, gradient norm or learning rate with a step in its first and last 64 KB")
        file.seek(0)
        try:
            log = Log(str(form), wishes.allow).gather(READERS[form](file, wishes.tick))
        except OSError as error:
            raise Unreadable(error.strerror or "cannot be read") from None
    if not log.curves:
        raise Unreadable(f"{form} without a single number")
    return log
