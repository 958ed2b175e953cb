"""Read the code blocks of a page, and run them: what a page shows is what happens.

How a block is understood, by its language and by the HTML comments right before it:

    ```python          runs, in one namespace for the whole page; a block that begins with `# name.py` is that file instead
    ```  ```sh         commands, if every line is one (or begins with `$ `, its output below it); run in an empty folder with the page's files.
                       Any other ```sh is one script
    ```  ```text       right after one of these: what it prints, on stdout and stderr together (after a file: what `python name.py` prints)
    ```pycon           a doctest, in the namespace of the page
    ```toml json yaml  must be readable
    ```text diff       anywhere else: shown only, for drawings and changes of code. A block without a language must be one of the above

    <!-- file: NAME -->          the block is that file
    <!-- copy: SOURCE NAME -->   a file of the repository, or all files of a folder of it, is put into the folder
    <!-- files: PAGE -->         the files of another page are put into the folder
    <!-- not run: REASON -->     the block is not run; every such reason is printed by the tests
    <!-- run by: TEST… -->       these tests (`tests/test_x.py::test_name[case]`) take the block by the fixture `shown`, run it and compare its output
    <!-- shown in: PAGE -->      the block's lines stand, in this order, in that page, which runs them
    <!-- part -->                the output shows some of the lines, in their order
    <!-- exit: N -->             the commands of the block end with this status (else 0 or 1, which says that something was found)
    <!-- python CODE -->         run and not shown
    <!-- sh COMMANDS -->         run and not shown

In an output a line `…` stands for any number of lines; times, sizes, run directories and the folder itself are not compared, and numbers are not on
a CPU whose half precision rounds otherwise than on the one that the pages were written on. In a command the name of a run directory stands for
the newest one.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("whynan", "python", "torchrun", "pip", "make", "git", "pytest", "pre-commit", "cp", "mkdir", "cd", "ls", "head", "accelerate")
SHOWN = ("text", "diff")
SOURCES = (".py", ".yaml", ".toml")
DATA = ("toml", "json", "yaml")
NOTES = ("file:", "copy:", "files:", "not run:", "run by:", "shown in:", "part", "exit:", "python", "sh")
RUN_DIR = re.compile(r"whynan-runs/\d{4}-\d{4,6}(-\d+)?")


class PageError(Exception):
    """A block that is not marked as the convention asks."""


@dataclass(slots=True)
class Step:
    """Something to do: one of file, python, doctest, sh, data, shown, run by, not run."""

    kind: str
    text: str
    line: int
    name: str = ""  # of a file; the tests of what is run by others; the reason of what is not run
    output: str | None = None
    part: bool = False
    status: tuple[int, ...] = (0, 1)


@dataclass(slots=True)
class _Reader:
    page: Path
    steps: list[Step] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    before: Step | None = None  # what a block of output would belong to

    def comment(self, text: str, line: int) -> None:
        body = text.strip()
        name = next((n for n in NOTES if body.startswith(n)), "")
        if not name:
            raise PageError(f"{self.page.name}:{line}: not a known comment: {body[:40]!r}; see tests/doc_blocks.py")
        rest = body.removeprefix(name)
        if name in ("python", "sh"):
            self.before = Step(name, rest.strip("\n ") + "\n", line)
            self.steps.append(self.before)
        elif name == "copy:":
            self.steps += _copied(*rest.split(), line)
        elif name == "files:":
            self.steps += [s for s in steps_of(ROOT / rest.strip()) if s.kind == "file" and (setattr(s, "output", None) is None)]
        else:
            self.notes[name] = rest.strip()

    def block(self, language: str, text: str, line: int) -> None:
        step = self._step(language, text, line)
        self.notes.clear()
        if step is None:
            return
        self.before = step if step.kind in ("file", "python", "sh") else None
        self.steps.append(step)

    def _step(self, language: str, text: str, line: int) -> Step | None:
        notes = self.notes
        named = re.match(r"# ([\w/.-]+\.py)\n", text) if language == "python" else None
        for elsewhere in ("not run", "run by"):
            if f"{elsewhere}:" in notes:
                return Step(elsewhere, text, line, notes[f"{elsewhere}:"])
        if "shown in:" in notes:
            return Step("shown", text, line, notes["shown in:"])
        if "file:" in notes or named:
            return Step("file", text, line, notes.get("file:") or (named[1] if named else ""))
        if language in ("", *SHOWN[:1]) and self.before is not None and not _is_commands(text):
            self.before.output, self.before.part, self.before = text, "part" in notes, None
            return None
        if language in ("", "sh", "bash", "console") and _is_commands(text):
            status = (int(notes["exit:"]),) if "exit:" in notes else (0, 1)
            self.steps += _commands(text, line, status, "part" in notes)
            return self.steps.pop()
        if language in ("sh", "bash"):
            return Step("sh", text, line, "script")
        if language in ("python", "pycon", *DATA):
            return Step({"pycon": "doctest", "python": "python"}.get(language, "data"), text, line, language)
        if language in SHOWN:
            return None
        raise PageError(f"{self.page.name}:{line}: nothing runs this block; see tests/doc_blocks.py for how to mark it")


def _copied(source: str, target: str, line: int) -> list[Step]:
    """Files of the repository, put where the page wants them; a file that is no source of it (a run, a cache) is left out."""
    place = ROOT / source
    names = {place: target} if place.is_file() else {p: f"{target}/{p.relative_to(place)}" for p in sorted(place.rglob("*")) if p.suffix in SOURCES}
    return [Step("file", path.read_text(encoding="utf-8"), line, name) for path, name in names.items()]


def _is_commands(text: str) -> bool:
    lines = [line for line in _joined(text).splitlines() if line.strip()]
    if any(line.startswith("$ ") for line in lines):
        return lines[0].startswith(("$ ", "#"))
    return all(line.startswith((" ", "#")) or _first_word(line) in COMMANDS for line in lines)


def _joined(text: str) -> str:
    """Return the text with lines that end in a backslash put together with the next."""
    return re.sub(r"\\\n\s*", "", text)


def _first_word(line: str) -> str:
    return re.sub(r"^(\w+=\S* )*", "", line).split()[0]


def _commands(text: str, line: int, status: tuple[int, ...], part: bool) -> Iterator[Step]:
    """One step for each command; with `$ ` the lines below it are its output."""
    prompt = "$ " in text
    current: Step | None = None
    for number, content in enumerate(_joined(text).splitlines(), line + 1):
        if content.startswith("$ ") or (not prompt and content.strip() and not content.startswith((" ", "#"))):
            if current:
                yield current
            current = Step("sh", content.removeprefix("$ "), number, status=status, part=part)
        elif current and prompt and content.strip():
            current.output = f"{current.output or ''}{content}\n"
        elif current and not prompt:
            current.text += f"\n{content}"
    if current:
        yield current


def steps_of(page: Path) -> list[Step]:
    """Return what a page shows, in order."""
    reader = _Reader(page)
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        line = (token.map or [0])[0] + 1
        if token.type == "html_block":
            for comment in re.findall(r"<!--(.*?)-->", token.content, re.DOTALL):
                reader.comment(comment, line)
        elif token.type in ("fence", "code_block"):
            reader.block(token.info.split(" ")[0] if token.type == "fence" else "", token.content, line)
        elif token.nesting >= 0 and token.type != "inline":
            reader.before = None
    return reader.steps


def same(shown: str, printed: str, part: bool = False) -> bool:
    """Whether a shown output fits what was printed.

    >>> same("a\\n…\\nd\\n", "a\\nb\\nc\\nd\\n"), same("a\\n", "a\\nb\\n"), same("a\\nc\\n", "a\\nb\\nc\\n", part=True)
    (True, False, True)
    """
    lines = [line for line in _plain(shown) if line]
    pattern = "" if not part else "(?:.*\n)*?"
    for line in lines:
        pattern += "(?:.*\n)*?" if line.strip() == "…" else re.escape(line) + "\n" + ("(?:.*\n)*?" if part else "")
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _plain(printed) if line)) is not None


def fits(shown: str, printed: str, part: bool = False) -> bool:
    """Whether a shown output is what was printed; on a CPU that computes otherwise, but for its numbers and line breaks."""
    return same(shown, printed, part) or (not _computes_as_shown() and roughly(shown, printed))


def roughly(shown: str, printed: str) -> bool:
    """Whether the words that are shown stand, in their order, among those that were printed, all numbers being alike.

    >>> roughly("loss 3.527, all\\ngradients finite", "step 4: loss 3.5, all gradients\\nfinite"), roughly("WN501 at step 4", "WN101 at step 5")
    (True, False)
    """
    wanted, found = (re.sub(r"(?<![A-Za-z])-?\d[\d.]*(e[+-]?\d+)?", "0", text.replace("…", " ")).split() for text in (shown, printed))
    rest = iter(found)
    return all(word in rest for word in wanted)


@functools.cache
def _computes_as_shown() -> bool:
    """Whether this CPU rounds as the one that the pages were written on: half precision differs from one to the next."""
    import torch

    half = [torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()]
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and half == [True, False]


def compare(shown: str, printed: str) -> None:
    """Fail where the lines of a shown output do not stand, in their order, in what was printed."""
    assert fits(shown, printed, part=True), f"this was printed\n{printed}\nand this is shown\n{shown}"


def in_the_table(table: str, name: str, *numbers: float) -> None:
    """Fail where the line of a case in the table of the casebook does not have these two numbers, to a tenth."""
    (words,) = [line.split() for line in table.splitlines() if line.startswith(f"{name} ")]
    at = words.index("->")
    for shown, measured in zip((float(words[at - 1]), float(words[at + 1])), numbers, strict=True):
        assert abs(shown - measured) <= 0.1 * abs(measured) + 0.005, f"{name}: {measured} was measured and {shown} is shown"


def run_by(page: str, test: str) -> list[str]:
    """Return the blocks of a page that name this test, in order."""
    return [step.text for step in steps_of(ROOT / page) if step.kind == "run by" and test in runners_of(step)]


def runners_of(step: Step) -> list[str]:
    """Return the tests that a block names.

    >>> runners_of(Step("run by", "", 1, "tests/test_a.py::test_b[with steps] tests/test_a.py::test_c"))
    ['tests/test_a.py::test_b[with steps]', 'tests/test_a.py::test_c']
    """
    return re.findall(r"\S+::\w+(?:\[[^\]]*\])?", step.name)


def _plain(text: str) -> list[str]:
    text = RUN_DIR.sub("whynan-runs/TIME", text)
    text = re.sub(r"\b\d+(\.\d+)? ?(ms|s|seconds)\b", "TIME", text)
    text = re.sub(r"\b\d+(\.\d+)? [kM]B\b", "SIZE", text)
    return [line.rstrip() for line in text.splitlines()]


def words_of(command: str) -> list[str] | None:
    """Return the words of a plain command, or nothing where a shell is needed."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)
    plain = (
        "\n" not in command
        and "=" not in words[0]
        and not any(set(word) <= set("|&;<>") for word in words)
        and not re.search(r"[*?$~{](?![^']*'(?:[^']*'[^']*')*[^']*$)", command)
    )
    return words if plain else None
