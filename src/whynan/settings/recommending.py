"""`whynan doctor --settings`: gather files, code and runs, and answer with reasons and a diff."""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from whynan.errors import UsageError
from whynan.records import Json, jsonable
from whynan.settings.advice import Advice, Configured
from whynan.settings.fromrun import of_run, went_well
from whynan.settings.layout import FORMS, Layout, read_layout, written
from whynan.settings.meaning import Meaning, meaning_of
from whynan.settings.measured import Measured, is_log, measure
from whynan.settings.plain import of_file

WIDTH = 80
_GROWN = ("WN605", "WN201", "WN202", "WN203", "WN604", "WN606")  # a rate, a clip or an eps can be the whole reason of these


@dataclass(frozen=True, slots=True)
class Recommended:
    """The answer; its repr can be given to `patch -p0` or `git apply -p0`."""

    files: tuple[tuple[Layout, tuple[Advice, ...]], ...]
    run: Measured | None = None

    @property
    def status(self) -> int:
        """The exit status: 1 where something is recommended."""
        return int(any(advice for _, advice in self.files))

    @property
    def diff(self) -> str:
        """The changes of all files."""
        return "".join(_diff(layout, advice) for layout, advice in self.files)

    def to_json(self) -> dict[str, Json]:
        """Return the answer as JSON."""
        said: list[Json] = [{"file": _shown(layout), **_json(a, layout)} for layout, advice in self.files for a in advice]
        return {"schema": 1, "measured": list(self.run.sources) if self.run else [], "advice": said, "diff": self.diff}

    def __repr__(self) -> str:
        return "\n".join([*_words(self), *([self.diff.rstrip("\n")] if self.diff else [])])


def recommend(layouts: Iterable[Layout], read: frozenset[str] | None, keys: frozenset[str], runs: Iterable[Path]) -> Recommended:
    """Say what each file of settings should say instead."""
    paths = list(runs)
    run = measure(paths) if paths else None
    found = []
    for layout in layouts:
        configured = Configured(layout, read, keys)
        advice = tuple(of_run(configured, run)) if run is not None else ()
        told = {a.about for a in advice} | ({str(Meaning.WARMUP_STEPS)} if run is not None and went_well(run) else set())
        found.append((layout, (*advice, *of_file(configured, told))))
    return Recommended(tuple(found), run)


def layouts_of(files: Iterable[Path], named: bool) -> list[Layout]:
    """Return the files that hold settings of a training: a learning rate or a clip is among them."""
    found = [layout for layout in map(read_layout, files) if layout is not None and (named or not is_log(layout.file))]
    ours = [layout for layout in found if any(meaning_of(s) in (Meaning.RATE, Meaning.CLIP) for s in layout.settings)]
    if not ours:
        kinds = ", ".join(sorted(FORMS))
        raise UsageError("no learning rate and no clipping in it" if named and found else f"no file of settings with a learning rate there ({kinds})")
    return ours


# -- words ------------------------------------------------------------------------------------------------------


def _words(answer: Recommended) -> Iterator[str]:
    for layout, advice in answer.files:
        for item in advice:
            yield from _wrapped(f"{_place(layout, item)}: {_change(item)}{item.reason}{'' if item.measured else ' (recommended, not measured)'}")
        if not advice:
            yield f"# {_shown(layout)}: nothing to recommend"
    if answer.run is not None:
        yield from _wrapped(_about_run(answer.run))


def _about_run(run: Measured) -> str:
    end = f", healthy up to step {run.bad_at}" if run.bad_at is not None else ""
    told = f"measured: {', '.join(map(os.path.relpath, run.sources))}, {run.steps} steps{end}; no change here was replayed"
    first = run.incidents[0] if run.incidents else None
    if first is None or first.cause.code in _GROWN:
        return told
    where = f"{os.path.relpath(first.origin.span.file)}:{first.origin.span.line}" if first.origin.span.file else "see the report"
    return f"{told}. The incident at step {first.step} ({first.cause.code}, {where}) is a fault of the arithmetic there: settings can delay it, not prevent it"


def _place(layout: Layout, item: Advice) -> str:
    return f"{_shown(layout)}:{item.setting.line + 1}" if item.setting is not None else _shown(layout)


def _change(item: Advice) -> str:
    if item.setting is None or item.value is None:
        return f"{item.about}: "
    if item.key:
        return f"{item.key}: {written(item.value, '1.0')}, new: "
    return f"{item.setting.key}: {item.setting.word} -> {written(item.value, item.setting.word)}: "


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)


def _json(item: Advice, layout: Layout) -> dict[str, Json]:
    old = item.setting.word if item.setting is not None and not item.key else None
    key = item.key or (item.setting.key if item.setting is not None else "")
    new = None if item.value is None else written(item.value, old or "1.0")
    line = item.setting.line + 1 if item.setting is not None else 0
    return {"about": item.about, "key": key, "line": line, "old": old, "new": new, "measured": item.measured, "reason": jsonable(item.reason)}


# -- the diff ---------------------------------------------------------------------------------------------------


def _shown(layout: Layout) -> str:
    return os.path.relpath(layout.file)


def _diff(layout: Layout, advice: Iterable[Advice]) -> str:
    new = list(layout.lines)
    changes = [a for a in advice if a.setting is not None and a.value is not None]
    for item in sorted(changes, key=lambda a: (a.setting.line, a.setting.start) if a.setting else (0, 0), reverse=True):
        _apply(item, layout.form, new)
    name = _shown(layout)
    said = difflib.unified_diff(list(layout.lines), "".join(new).splitlines(keepends=True), name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in said)


def _apply(item: Advice, form: str, lines: list[str]) -> None:
    setting, value = item.setting, item.value
    if setting is None or value is None:
        return
    line = lines[setting.line]
    if not item.key:
        quote = setting.text[0] if setting.text[:1] in ("'", '"') else ""
        lines[setting.line] = f"{line[: setting.start]}{quote}{written(value, setting.word)}{quote}{line[setting.end :]}"
    elif setting.alone:
        lines[setting.line] = _with_new(line, item.key, written(value, "1.0"), form)


def _with_new(line: str, key: str, value: str, form: str) -> str:
    """Put a line for a new setting before another one, in the manner of that one: there its comma, if any, is right."""
    indent = line[: len(line) - len(line.lstrip())]
    end = "\r\n" if line.endswith("\r\n") else "\n"
    text = {"yaml": f"{key}: {value}", "toml": f"{key} = {value}", "json": f'"{key}": {value},'}[form]
    if form == "yaml" and line.lstrip().startswith("- "):
        return f"{indent}- {text}{end}{indent}  {line.lstrip()[2:]}"
    return f"{indent}{text}{end}{line}"
