"""The documentation: every code block of every page runs and prints what is shown; the site builds, and every link in it leads somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ENVIRONMENT, PYTHON, Sandbox, _status_of
from doc_blocks import ROOT, RUN_DIR, PageError, Step, fits, runners_of, same, steps_of, words_of

import whynan.forensics.checking  # loaded here for all forked children
import whynan.lint.linting
import whynan.report.checks  # noqa: F401
from whynan.commands.main import main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PINNED = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
SECONDS = 280


def named(page: Path) -> str:
    """The name of a test."""
    return page.relative_to(ROOT).as_posix()


def marked(kind: str) -> list[Any]:
    """Every block that is not run by its page, as parameters of a test."""
    found = [(page, step) for page in PAGES for step in _steps(page) if step.kind == kind]
    return [pytest.param(named(page), step, id=f"{named(page)}:{step.line}") for page, step in found]


def _steps(page: Path) -> list[Step]:
    try:
        return steps_of(page)
    except PageError:
        return []  # the page's own test says so


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_of_a_page_runs_and_prints_what_is_shown(page: Path, box: Sandbox) -> None:
    """The blocks of a page, in order, in an empty folder."""
    steps = [s for s in steps_of(page) if s.kind not in ("not run", "run by")]
    if not steps:
        return
    if PINNED and torch.__version__.partition("+")[0] != PINNED[1]:
        pytest.skip(f"the outputs shown are those of torch {PINNED[1]}")
    folder = box.folder / "page"
    folder.mkdir()
    done = box.in_child(lambda: Runner(page, folder).run(steps), SECONDS)
    assert done.status == 0, done.out + done.err


@pytest.mark.parametrize(("page", "step"), marked("not run"))
def test_block_that_is_not_run_says_why(page: str, step: Step) -> None:
    """Its reason is printed with the skipped tests."""
    assert step.name, f"{page}:{step.line}: no reason"
    pytest.skip(f"{page}:{step.line} is not run: {step.name}")


@pytest.mark.parametrize(("page", "step"), marked("run by"))
def test_block_that_other_tests_run_names_tests_that_take_it(page: str, step: Step) -> None:
    """Each is there, and asks the page for its blocks by the fixture `shown`."""
    assert runners_of(step), f"{page}:{step.line}: names no test"
    for test in runners_of(step):
        file, name = test.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        function = next((f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name.partition("[")[0]), None)
        assert function is not None, f"{page}:{step.line}: there is no {test}"
        assert "shown" in [argument.arg for argument in function.args.args], f"{test} does not take the blocks of a page"
        assert page in ast.unparse(tree) or "{name}.md" in ast.unparse(function), f"{test} does not ask for {page}"


class Runner:
    """Runs the steps of one page; lives in a child process, with torch already there."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.space: dict[str, Any] = {"__name__": "__main__"}
        self.files: list[str] = []
        self.said = folder.parent / "said"

    def run(self, steps: list[Step]) -> int:
        """Run all; print what was not as shown, and return how much that was."""
        os.chdir(self.folder)
        os.environ.update(PATH=f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}", PYTHONUNBUFFERED="1", PET_MASTER_PORT=str(_free_port()))
        sys.path.insert(0, str(self.folder))
        wrong = [text for step in steps if (text := self._one(step))]
        print("\n".join(wrong))
        return min(len(wrong), 99)

    def _one(self, step: Step) -> str:
        status, printed = self._captured(lambda: getattr(self, f"_{step.kind}")(step))
        printed = printed.replace(f"{self.folder}/", "").replace(str(self.folder), ".")
        head = f"{self.page.name}:{step.line}: `{(step.name or step.text).splitlines()[0]}`"
        if status not in step.status or ("Traceback (most recent call last)" in printed and "Traceback" not in (step.output or "")):
            return f"{head} ended with status {status}:\n{printed}"
        if step.output is not None and not fits(step.output, printed, step.part):
            return f"{head} printed\n{printed}\nand this is shown\n{step.output}"
        return ""

    def _captured(self, work: Callable[[], int]) -> tuple[int, str]:
        """Run something with stdout and stderr going into one file, line by line."""
        kept = os.dup(1), os.dup(2), sys.stdout, sys.stderr
        with open(self.said, "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(1, 2)
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115 (stay open)
        try:
            status = _status_of(work)
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            sys.stdout, sys.stderr = kept[2:]
        return status, self.said.read_text(encoding="utf-8", errors="replace")

    def _file(self, step: Step) -> int:
        path = self.folder / step.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step.text, encoding="utf-8")
        return self._sh(Step("sh", f"python {step.name}", step.line)) if step.output is not None else 0

    def _python(self, step: Step) -> int:
        name = f"<{self.page.name}:{step.line}>"
        import linecache

        linecache.cache[name] = (len(step.text), None, step.text.splitlines(keepends=True), name)
        exec(compile(step.text, name, "exec"), self.space)
        return 0

    def _doctest(self, step: Step) -> int:
        test = doctest.DocTestParser().get_doctest(step.text, self.space, self.page.name, None, step.line)
        return 2 * min(1, doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False).failed)

    def _data(self, step: Step) -> int:
        if step.name == "yaml":
            import yaml

            yaml.safe_load(step.text)
        else:
            {"toml": tomllib.loads, "json": json.loads}[step.name](step.text)
        return 0

    def _shown(self, step: Step) -> int:
        return 0 if same(step.text, (ROOT / step.name).read_text(encoding="utf-8"), part=True) else 2

    def _sh(self, step: Step) -> int:
        lines = step.text.strip().splitlines()
        whole = step.name == "script" or any(line.startswith(" ") for line in lines)  # one command over several lines, for a shell
        return max(self._command(line) for line in (["\n".join(lines)] if whole else lines))

    def _command(self, command: str) -> int:
        runs = sorted((self.folder / "whynan-runs").glob("*"), key=lambda p: p.stat().st_mtime)
        command = RUN_DIR.sub(f"whynan-runs/{runs[-1].name}", command) if runs else command
        words = words_of(command)
        if words and words[0] == "cd":
            os.chdir(words[1])
            return 0
        if words and words[0] == "whynan":
            return _forked(lambda: main(words[1:]))
        if words and words[0] == "python" and words[1].endswith(".py"):
            return _forked(lambda: _as_script(words[1:]))
        if words and words[0] == "pytest":
            return _forked(lambda: int(pytest.main([*words[1:], "--rootdir", "."])))
        environment = {**ENVIRONMENT, **{k: os.environ[k] for k in ("PATH", "PYTHONUNBUFFERED", "PET_MASTER_PORT")}}
        return subprocess.run(["bash", "-c", command], env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def _as_script(argv: list[str]) -> int:
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")
    return 0


def _forked(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = _status_of(work)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """`docs/build.py` as a module."""
    folder = ROOT / "docs"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("docs_build", folder / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["docs_build"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_site_builds_and_every_page_is_listed(builder: ModuleType, tmp_path: Path) -> None:
    """Every page of docs/ is in the left column, every link and anchor leads somewhere, and every code has its page."""
    site = builder.build(tmp_path)
    from whynan.causes.catalogue import rules
    from whynan.lint.pages import pages

    assert {f"codes/{code}.md" for code in {**rules(), **pages()}} <= set(site.pages)
    written = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert {p.removesuffix(".md") for p in written} <= {p.relative_to(tmp_path).as_posix().removesuffix(".html") for p in tmp_path.rglob("*.html")}


def test_links_of_the_built_site_lead_somewhere_and_nothing_is_fetched(builder: ModuleType, tmp_path: Path) -> None:
    """In the HTML itself: each href is a file below the site, with the id it names; no src or stylesheet comes from elsewhere."""
    builder.build(tmp_path)
    texts = {p: p.read_text(encoding="utf-8") for p in tmp_path.rglob("*.html")}
    ids = {p: set(re.findall(r'id="([^"]+)"', text)) for p, text in texts.items()}
    for page, text in texts.items():
        for kind, link in re.findall(r'(href|src)="([^"]+)"', text):
            if link.startswith(("http:", "https:", "mailto:")):
                assert kind == "href" and f'<link rel="stylesheet" href="{link}' not in text, f"{page.name} fetches {link}"
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.is_file() and target.is_relative_to(tmp_path), f"{page.name}: {link}"
            assert not anchor or anchor in ids[target], f"{page.name}: {link}"


def test_page_of_a_code_shows_its_rule_its_programs_and_their_output(builder: ModuleType, tmp_path: Path) -> None:
    """The page of WN501 has the sections of `whynan explain`, the failing program, its diagnosis, the change, and what lint says."""
    builder.build(tmp_path)
    text = re.sub(r"<[^>]+>", "", (tmp_path / "codes" / "WN501.html").read_text(encoding="utf-8"))
    for part in ("What happened", "Not this when", "random_shift", "the slope of sqrt at 0 is infinite", "+++ good.py", "Seen by lint"):
        assert part in text, part


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[there](nowhere.md)", "no such page"),
        ("[there](start.md#nowhere)", "no such heading"),
        ("[here](#nowhere)", "no such heading"),
        ("see WN999", "there is no code WN999"),
        ("a <b>bold</b> word", "raw HTML"),
        ("<div>\n\ntext\n</div>", "raw HTML"),
    ],
)
def test_build_refuses_what_leads_nowhere(builder: ModuleType, tmp_path: Path, text: str, said: str) -> None:
    """A link, an anchor or a code that does not exist, and raw HTML, each named with its page."""
    docs = small_docs(tmp_path, {"index.md": f"# Index\n\n{text}\n", "start.md": "# Start\n"})
    with pytest.raises(builder.BuildError, match=f"docs/index.md: .*{said}"):
        builder.build(tmp_path / "out", docs)
    assert not (tmp_path / "out").exists()


def test_page_that_is_not_listed_fails_the_build_with_what_to_do(builder: ModuleType, tmp_path: Path) -> None:
    """A new page that nobody put into nav.toml is named; so is one that is listed twice."""
    docs = small_docs(tmp_path, {"index.md": "# Index\n", "new.md": "# New\n"})
    with pytest.raises(builder.BuildError, match=r"docs/new.md: not listed in docs/nav.toml: add it"):
        builder.build(tmp_path / "out", docs)
    with open(docs / "nav.toml", "a", encoding="utf-8") as nav:
        nav.write('[[section]]\ntitle = "More"\npages = ["new.md", "index.md"]\n')
    with pytest.raises(builder.BuildError, match=r"docs/index.md: listed twice"):
        builder.build(tmp_path / "out", docs)


def small_docs(folder: Path, pages: dict[str, str]) -> Path:
    """A docs folder with these pages, a nav that lists index, start and the codes, and what the README links to."""
    docs = folder / "docs"
    docs.mkdir()
    for name, text in pages.items():
        (docs / name).write_text(text, encoding="utf-8")
    (docs / "nav.toml").write_text('[[section]]\ntitle = "All"\npages = ["index.md", "start.md", "codes/*.md"]\n', encoding="utf-8")
    return docs


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```\nwhynan explain WN999\n```\n", "ended with status 2"),
        ("```\n$ whynan explain WN501\nsomething else\n```\n", "and this is shown"),
        ("```python\nprint('a' + 'b')\n```\n```\naa\n```\n", "and this is shown"),
        ("```python\nprint(missing)\n```\n", "NameError"),
        ("```python\n# a.py\nraise ValueError('no')\n```\n```\npython a.py\n```\n", "ValueError: no"),
        ("```pycon\n>>> 1 + 1\n3\n```\n", "Expected"),
        ("```toml\nno toml\n```\n", "TOMLDecodeError"),
        ("<!-- shown in: README.md -->\n```\nwhynan fly\n```\n", "ended with status 2"),
    ],
)
def test_page_that_is_not_true_fails(box: Sandbox, page: str, said: str) -> None:
    """Each kind of block can fail: a command, its output, Python, a file, a doctest, data, a part of another page."""
    path = box.folder / "page.md"
    path.write_text(page, encoding="utf-8")
    steps = steps_of(path)
    (box.folder / "page").mkdir()
    done = box.in_child(lambda: Runner(path, box.folder / "page").run(steps), SECONDS)
    assert done.status == 1
    assert said in done.out


@pytest.mark.parametrize("page", ["```\nwhat is this\n```\n", "text\n\n```\nno output of anything\n```\n", "<!-- prat -->\n", "```fortran\nx\n```\n"])
def test_block_that_nothing_runs_is_an_error(tmp_path: Path, page: str) -> None:
    """A block without a meaning, and a comment with a misspelled word, are named with their line."""
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    with pytest.raises(PageError, match=r"page.md:\d+: "):
        steps_of(tmp_path / "page.md")
