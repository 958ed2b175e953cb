"""The pages that nobody writes by hand: one for each code, made from its rule and its programs in tests/cases, and two lists."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from whynan.causes.catalogue import Rule, rules
from whynan.lint import Confidence, Settings, lint_paths
from whynan.lint.codes import CODES
from whynan.lint.pages import Page, pages
from whynan.lint.reporting import FORMATS

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "cases"
FAMILIES = {
    "WN1": "Outside the domain of a function", "WN2": "Outside the range of a number type", "WN3": "Indeterminate forms",
    "WN4": "Reductions and masks", "WN5": "Born in the backward pass", "WN6": "State", "WN7": "Data", "WN8": "Ranks, chance, the compiler",
    "WN9": "Not known", "WL1": "Practices that lint reports",
}  # fmt: skip
_SECTION = re.compile(r"^(What happen(s|ed)|Why .{5,40}|Example|Instead|How sure|Not this when)$")


def known() -> dict[str, Rule | Page]:
    """All codes, causes first."""
    return {**rules(), **pages()}


def generated(written: dict[str, str]) -> dict[str, str]:
    """Return Markdown by path: a page for each code, their list, and the list of the casebook if nobody wrote one.

    Cost: lint reads one snippet for each of its codes.
    """
    made = {f"codes/{code}.md": code_page(entry) for code, entry in known().items()}
    made["codes/index.md"] = index_of_codes()
    cases = {path: text for path, text in sorted(written.items()) if path.startswith("casebook/")}
    if cases and "casebook/index.md" not in cases:
        made["casebook/index.md"] = index_of_cases(cases)
    return made


def code_page(entry: Rule | Page) -> str:
    """Return the page of a code: what `whynan explain` prints, then its programs."""
    parts = [f"# {entry.code} {entry.slug}: {entry.title}", f"Also printed by `whynan explain {entry.code}`.", from_docstring(entry.page)]
    parts += _program(entry.code) + _snippet(entry.code)
    return "\n\n".join(parts) + "\n"


def from_docstring(text: str) -> str:
    """Return a rule's page as Markdown: its sections as headings, what is indented as code."""
    out: list[str] = []
    code: list[str] = []
    for line in [*text.splitlines(), "end"]:
        if line.startswith("    ") or (code and not line):
            code.append(line[4:])
            continue
        if code:
            body = "\n".join(code).strip("\n")
            out += ["", _fenced("pycon" if ">>>" in body else "python", body), ""]
            code = []
        out.append(f"\n## {line}\n" if _SECTION.match(line) else _escaped(line))
    return "\n".join(out[:-1])


def index_of_codes() -> str:
    """Return the list of all codes by family."""
    head = (
        "# All codes\n\nEach has a page, made from the rule that finds it and from programs that the tests run. `whynan explain CODE` prints the text of it; "
    )
    head += "so does `whynan explain` with an error message. WN609 was added last: it has the next free number of family 6.\n"
    parts = [head]
    for prefix, family in FAMILIES.items():
        rows = [f"| [{c}]({c}.md) | {e.slug} | {e.title} | {_seen_by(c)} |" for c, e in known().items() if c.startswith(prefix)]
        parts.append("\n".join([f"## {family}\n", "| code | slug | title | found by |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def index_of_cases(cases: dict[str, str]) -> str:
    """Return the list of the casebook: the title and the first paragraph of each case."""
    parts = ["# Casebook", "Failures of real projects, run again here: what happened, what whynan says, what put it right."]
    for path, text in cases.items():
        blocks = [b for b in text.split("\n\n") if b.strip() and not b.startswith("<!--")]
        first = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", next((b for b in blocks[1:] if not b.startswith(("#", "|", "```", "- "))), ""))
        parts.append(f"## [{blocks[0].lstrip('# ').splitlines()[0]}]({path.removeprefix('casebook/')})\n\n{first}")
    return "\n\n".join(parts) + "\n"


def _seen_by(code: str) -> str:
    ways = ["run"] if code in rules() else []
    return ", ".join(ways + (["lint"] if code in CODES else []))


def _program(code: str) -> list[str]:
    folder = next(CASES.glob(f"{code}-*"), None)
    if folder is None:
        return []
    bad, good = folder / "bad.py", folder / "good.py"
    return [
        "## A program that fails",
        f"`{bad.relative_to(ROOT)}`; {len(list(folder.glob('bad*.py')))} in that folder. The tests run them all.",
        _fenced("python", bad.read_text(encoding="utf-8")),
        "What whynan says:",
        _fenced("text", (folder / "expected.txt").read_text(encoding="utf-8")),
        "Put right (`good.py`, which gives no incident):",
        _change(bad, good),
    ]


def _snippet(code: str) -> list[str]:
    if code not in CODES:
        return []
    folder = next((CASES / "lint").glob(f"{code}-*"))
    bad, good = sorted(folder.glob("bad*.py"))[0], sorted(folder.glob("good*.py"))[0]
    report = lint_paths([bad], Settings(min_confidence=Confidence.LOW, select=(code,)))
    said = FORMATS["text"](report).replace(str(ROOT) + "/", "")
    return [
        "## Seen by lint",
        _fenced("python", bad.read_text(encoding="utf-8")),
        _fenced("text", said),
        "Not reported, because it is right:",
        _fenced("python", good.read_text(encoding="utf-8")),
    ]


def _change(bad: Path, good: Path) -> str:
    old, new = (p.read_text(encoding="utf-8").splitlines() for p in (bad, good))
    lines = list(difflib.unified_diff(old, new, bad.name, good.name, lineterm="", n=2))
    return _fenced("diff", "\n".join(lines)) if len(lines) < len(new) else _fenced("python", "\n".join(new))


def _fenced(language: str, body: str) -> str:
    return f"```{language}\n{body.rstrip()}\n```"


def _escaped(line: str) -> str:
    """Escape what Markdown would take for markup, outside of backticks."""
    return "".join(part if n % 2 else re.sub(r"([<*_\[\]])", r"\\\1", part) for n, part in enumerate(re.split(r"(`[^`]*`)", line)))
