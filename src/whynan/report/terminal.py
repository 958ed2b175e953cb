"""The diagnosis in a terminal, 80 columns wide, with carets under the source."""

from __future__ import annotations

import random
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from whynan.ends import aloud
from whynan.records import DAMAGED, FAR_OFF, LEFT_OUT, Incident, Origin, Phase, Remedy, Span, TensorStats
from whynan.recovery.policy import Budget
from whynan.report.telling import changing

if TYPE_CHECKING:
    from rich.text import Text

WIDTH = 80
_NO_TEXT = "(the text of this line is not at hand)"
_MET = ("WN601", "WN602", "WN603", "WN701", "WN702", "WN801", "WN802", "WN901")  # codes whose place is not the birth: the value came from elsewhere


def show(incident: Incident) -> None:
    """Print a diagnosis on stderr."""
    state = random.getstate()  # rich draws from the global generator on import: the user's numbers must not move
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False, force_jupyter=False)  # one text, not an output for each line
    for line in diagnosis(incident).splitlines():
        console.print(_painted(line), soft_wrap=True)
    random.setstate(state)


def diagnosis(incident: Incident) -> str:
    """Return the diagnosis as plain text."""
    origin, cause = incident.origin, incident.cause
    lines = [f"error[{cause.code}]: {cause.title}"]
    lines.append(_where(incident))
    gutter = max(len(str(s.line)) for s in [origin.span, *origin.from_]) if origin.span.known else 2
    if origin.span.known:
        lines += _spans(origin, cause.label, gutter)
    else:
        lines.append(f"{' ' * gutter} = {cause.label}")
    pad = " " * gutter
    lines += _values(origin, pad)
    for text in _notes(incident):
        lines += _wrapped(f"{pad} = note: ", text)
    lines += _help(incident, pad)
    lines.append(f"{pad} = more: whynan explain {cause.code}")
    return "\n".join(lines)


def _where(incident: Incident) -> str:
    origin, span = incident.origin, incident.origin.span
    column = f":{span.column + 1}" if span.place.endswith(f":{span.line}") else ""
    place = f"{span.place}{column}" if span.known else "place not known"
    module = f"module {origin.module}" if origin.module.replace(".", "").isdigit() else origin.module  # of an nn.Sequential
    words = [module or span.function, str(origin.phase), f"step {incident.step}", f"rank {incident.rank}"]
    return f"  --> {place}  {' · '.join(w for w in words if w)}"


def _spans(origin: Origin, label: str, gutter: int) -> list[str]:
    """Source lines with carets, secondary spans in the same file first in line order."""
    pad = " " * gutter
    lines = [f"{pad} |"]
    same = [s for s in origin.from_ if s.file == origin.span.file and s.line != origin.span.line]
    shown = sorted([(origin.span, "^", label), *((s, "-", s.label) for s in same)], key=lambda item: item[0].line)
    last = 0
    for span, mark, text in shown:
        if last and span.line > last + 1:
            lines.append("...")
        marked = _marked(span, mark, text, gutter)
        lines += marked[1:] if span.line == last and marked[0] in lines else marked  # two places of one line stand under it once
        last = span.line
    lines.append(f"{pad} |")
    for span in origin.from_:
        if span.file != origin.span.file:
            lines.append(f"{pad} ::: {span.place}  {span.label}")
            lines.append(f"{span.line:>{gutter}} | {span.code or _NO_TEXT}")
    return lines


def _marked(span: Span, mark: str, label: str, gutter: int) -> list[str]:
    pad = " " * gutter
    source = span.code
    if not source:
        return [f"{span.line:>{gutter}} | {_NO_TEXT}", *(f"{pad} | {w}" for w in textwrap.wrap(label, WIDTH - gutter - 4))]
    indent = min(span.column, 4)
    offset = span.column - _leading(span)
    start = indent + max(offset, 0)
    width = span.end_column - span.column if span.end_line == span.line else len(source) - max(offset, 0)
    width = max(1, min(width, len(source) - max(offset, 0)))
    first = f"{span.line:>{gutter}} | {' ' * indent}{source}"
    under = f"{pad} | {' ' * start}{mark * width}"
    if len(under) + 1 + len(label) <= WIDTH:
        return [first, f"{under} {label}"]
    wrapped = textwrap.wrap(label, WIDTH - gutter - 4 - indent) or [""]
    return [first, under, *(f"{pad} | {' ' * indent}{w}" for w in wrapped)]


def _leading(span: Span) -> int:
    """Columns of white space before the source text."""
    if span.indent >= 0:
        return span.indent
    import linecache

    line = linecache.getline(span.file, span.line)
    return len(line) - len(line.lstrip()) if line.strip() == span.code else min(span.column, 4)


def _values(origin: Origin, pad: str) -> list[str]:
    rows: list[TensorStats] = [*origin.inputs, *([origin.output] if origin.output is not None else [])]
    if not rows:
        return []
    width = min(max(len(r.name) for r in rows), 32)
    lines = []
    for number, row in enumerate(rows):
        head = f"{pad} = values: " if number == 0 else f"{pad}           "
        name = row.name if len(row.name) <= 32 else row.name[:31] + "…"
        lines.append(f"{head}{name:<{width}}  {row.line()}")
    return lines


def _notes(incident: Incident) -> list[str]:
    origin, cause = incident.origin, incident.cause
    notes = [e for e in cause.evidence if e and e not in cause.label]
    if origin.samples and len(origin.samples) <= 16:
        notes.append("samples of the batch: " + ", ".join(map(str, origin.samples)))
    elif origin.samples:
        notes.append(f"{len(origin.samples)} samples of the batch, the first {', '.join(map(str, origin.samples[:8]))}")
    if not origin.exact and origin.note and not any(origin.note in e for e in notes):
        notes.append(origin.doubt)
    return notes


def _help(incident: Incident, pad: str) -> list[str]:
    lines: list[str] = []
    certain = "; the cause itself is proven, by direct evidence" if incident.cause.confidence == "proven" else ""
    if not incident.remedies:
        return _wrapped(f"{pad} = not proven: ", f"no change was tried{certain}")
    first = incident.remedies[0]
    lines += _wrapped(f"{pad} = help: ", first.title + _kind(first, incident.origin.span.file))
    lines += [f"{pad}           {line}" for line in changed_lines(first)]
    if first.result in ("proven", "not proven"):
        return (
            lines
            + _wrapped(f"{pad} = {first.result}: ", _proof(incident.step, first) + (certain if first.result == "not proven" else ""))
            + _beside(incident, pad)
        )
    gave = f"with this change the replay gave: {first.effect}" if first.result == "failed" else first.effect
    return lines + _wrapped(f"{pad} = not proven: ", (gave or _untried(incident)) + certain)


def _beside(incident: Incident, pad: str) -> list[str]:
    """Show the same mathematics without the fault, where it is right and this step alone far off with it: it belongs beside an advice that has no diff."""
    exact = next((r for r in incident.remedies[1:] if r.safe and r.diff and r.result == "failed" and r.effect.startswith(FAR_OFF)), None)
    if exact is None or incident.remedies[0].diff:
        return []
    lines = _wrapped(f"{pad} = beside: ", f"{exact.title}{_kind(exact, incident.origin.span.file)}; alone it leaves this step {exact.effect}")
    return lines + [f"{pad}           {line}" for line in changed_lines(exact)]


def _kind(remedy: Remedy, file: str = "") -> str:
    """Say what sort of change a remedy is, where it is one that the next update of a library takes back, and how a diff outside of the program is applied."""
    if not remedy.diff:
        return ""
    library = "; in an installed library: override it, or report it there" if "-packages/" in remedy.diff.partition("\n")[0] else ""
    below = "; its diff applies with patch -p1 -d /" if file.startswith("/") and f"--- a{file}" == remedy.diff.partition("\n")[0] else ""
    return f" ({'same mathematics' if remedy.safe else changing(remedy)}{library}{below})"


def _untried(incident: Incident) -> str:
    """Say why nothing is proven of an advice: it was not replayed, and what was replayed instead did not help."""
    failed = next((r for r in incident.remedies if r.result == "failed"), None)
    told = failed is not None and f"does not help: {failed.title}: {failed.effect}" in incident.cause.evidence
    if failed is not None and not told:
        return f"this advice was not replayed; `{failed.title}` was, and does not help: {failed.effect}"
    return "this advice was not replayed" if told or incident.cause.confidence == "proven" else "no change at this line could be replayed"


def _proof(step: int, remedy: Remedy) -> str:
    """Say what was replayed: the change itself, or what it comes to."""
    if remedy.diff:
        numbers, _, rest = remedy.effect.partition("; ")
        gradients = ", all gradients finite" * ("gradient norm" in numbers)
        return f"step {step} replayed with this change: {numbers}{gradients}{'; ' * bool(rest)}{rest}"
    return f"step {step} replayed {remedy.effect}"


def changed_lines(remedy: Remedy) -> list[str]:
    r"""Return the changed lines of a diff, those of each stretch without the indentation that they share.

    >>> changed_lines(Remedy("", "--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,1 @@\n-    f(\n-        x)\n+    g(x)\n"))
    ['- f(', '-     x)', '+ g(x)']
    """
    found: list[str] = []
    for stretch in re.split(r"^@@.*$", remedy.diff, flags=re.MULTILINE)[1:]:
        lines = [line.rstrip() for line in stretch.splitlines() if line[:1] in ("+", "-") and not line.startswith(("--- a/", "+++ b/"))]
        texts = textwrap.dedent("\n".join(line[1:] for line in lines)).split("\n")
        found += [f"{line[0]} {text}".rstrip() for line, text in zip(lines, texts, strict=False)]
    return found


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False) or [head]


def _painted(line: str) -> Text:
    from rich.text import Text

    text = Text(line)
    if line.startswith("error["):
        text.stylize("bold red", 0, line.index(":"))
        text.stylize("bold", line.index(":"))
    elif "| " in line and "^" in line:
        text.stylize("red", line.index("^"))
    elif " = proven:" in line or line.lstrip().startswith("+ "):
        text.stylize("green")
    elif line.lstrip().startswith("- "):
        text.stylize("red")
    return text


_OF_DATA = ("WN4", "WN7")  # families of causes that the weights have no part in
_OBSERVED = "whynan: observed only; nothing was changed"
_AS_BEFORE = "weights, moments and buffers are as before it"


def farewell(incidents: list[Incident], counts: dict[tuple[str, str, int], int], budget: Budget, report: Path | None, of: int) -> None:
    """Say what, where, why, what was done, what next, each in a line."""
    first, last = incidents[0], next((i for i in reversed(incidents) if i.action.taken != "observed"), incidents[-1])
    span = first.origin.span
    place = (f"{span.place} `{_short(span.code)}`" if span.code else span.place) if span.known else "a place not known"
    how = "born" if first.cause.code not in _MET else "met"
    say(f"whynan: step {first.step}, {how} at {place} ({first.cause.code}, {first.cause.title})")
    total = sum(counts.values())
    if total > 1:
        steps = ", ".join(str(i.step) for i in incidents[:8]) + (" …" if total > min(len(incidents), 8) else "")
        kinds = "all of one kind" if len(counts) == 1 else f"of {len(counts)} kinds"
        say(f"whynan: {total} incidents in {of} steps, at {steps}, {kinds}")
    taken = last.action.taken
    if last.action.policy == "spike":
        say("whynan: finite and absurd: " + ("the step was left out" if taken == "skipped" else "nothing was changed; --spike skip leaves such steps out"))
    elif taken == "skipped":
        moved, unsure = "moments and buffers are as before it; the program itself wrote to the weights after it", "putting back what it had changed has failed"
        state = unsure if budget.unsure else moved if budget.moved else _AS_BEFORE
        say(f"whynan: batch skipped ({budget.total} of {budget.in_total} allowed); {state}")
    elif taken == "terms dropped":
        say(f"whynan: the bad terms of the loss were left out ({budget.total} of {budget.in_total} allowed); what only they reach is as before the step")
    elif taken == "rolled back":
        say(f"whynan: rolled back to the last good state ({budget.total} of {budget.in_total} bad steps allowed)")
    elif taken == "stopped":
        damaged = last.cause.code in DAMAGED or (last.symptom.place == "parameter" and last.origin.phase is Phase.PARAMETER)
        state = "what a step begins with is damaged" if damaged else "weights are as before the last bad step"
        row = f"{budget.streak} in a row, {budget.total} in total"
        over = f"{budget.total} bad steps in total, where {budget.in_total} are allowed"
        say(f"whynan: training stopped after {over if budget.total > budget.in_total else row}; {state}")
        if not damaged and _met_the_same(incidents, budget):
            say(f"whynan: they met the same values: {_of_the_same(last, budget)}")
    else:
        by_itself = all(LEFT_OUT in incident.cause.evidence for incident in incidents)
        say(f"whynan: the program itself left {'this step' if total == 1 else 'these steps'} out; nothing was to be done" if by_itself else _OBSERVED)
    if report is not None:
        say(f"whynan: wrote {report}")
    replay = f"      whynan replay {report.parent}" if report is not None and _can_replay(report.parent) else ""
    say(f"        whynan explain {first.cause.code}{replay}")


def _met_the_same(incidents: list[Incident], budget: Budget) -> bool:
    """Whether the bad steps in a row had the same cause with the same values; where it is one of data, behind a healthy step."""
    row = incidents[-budget.streak :]
    whole = len(row) == budget.streak > 1 and budget.total <= budget.in_total
    known = whole and any(0 not in value.shape for value in row[0].origin.inputs) and (row[0].step > 0 or not row[0].cause.code.startswith(_OF_DATA))
    return known and len({(i.cause.code, i.origin.span, i.origin.inputs) for i in row}) == 1


def _of_the_same(last: Incident, budget: Budget) -> str:
    """Say what follows for skipping: a batch that is gone over again comes to its end, what a step is put back to does not."""
    if last.cause.code.startswith(_OF_DATA):
        return f"if that is one batch gone over several times (the epochs of PPO), --in-a-row {budget.streak + 1} or more gets past it"
    return "where they come from the state that a dropped step is put back to, the next step meets them again, and skipping cannot help"


def _can_replay(run: Path) -> bool:
    """Whether the capsule that `whynan replay` takes of a run, the newest, can be replayed."""
    heads = sorted(run.glob("**/capsules/*/capsule.json"), key=lambda path: path.stat().st_mtime_ns)
    return bool(heads) and '"replayable": true' in heads[-1].read_text(encoding="utf-8")


def warnings_line(notices: dict[tuple[str, str], int], file: Path | None, mild: int = 0) -> str:
    """Count the early warnings of a run in one line; the mild ones are only in the file.

    >>> warnings_line({("spike", "loss"): 3, ("limit", "alpha"): 1}, None)
    'whynan: 4 early warnings: spike of loss 3, limit of alpha 1'
    >>> warnings_line({("spike", "loss"): 1}, Path("warnings.jsonl"), 2)
    'whynan: 1 early warning: spike of loss 1; with 2 mild ones in warnings.jsonl'
    """
    total = sum(notices.values())
    most = sorted(notices.items(), key=lambda item: -item[1])
    place = "" if file is None else f"; with {mild} mild one{'s' * (mild > 1)} in {file}" if mild else f"; {file}"
    words = [f"{kind} of {name} {times}" for (kind, name), times in most[:4]] + (["…"] if len(most) > 4 else [])
    return f"whynan: {total} early warning{'s' if total > 1 else ''}: {', '.join(words)}{place}"


def say(text: str) -> None:
    """Print one line on stderr."""
    aloud(text)


def _short(code: str) -> str:
    return code if len(code) <= 44 else code[:43] + "…"
