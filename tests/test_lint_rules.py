"""`whynan lint`: every rule on its own snippets, the corpus of failing programs, and the healthy ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import corpus
import lint_recall

from whynan.causes.catalogue import rules
from whynan.lint import Confidence, Settings, lint_paths
from whynan.lint.codes import CODES
from whynan.lint.pages import pages

CASES = Path(__file__).parent / "cases" / "lint"
SNIPPETS = sorted(CASES.glob("*/*.py"))
ALL = Settings(min_confidence=Confidence.LOW)
_EXPECT = re.compile(r"# expect: (\w+)")


def named(path: Path) -> str:
    """The name of a test."""
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", SNIPPETS, ids=named)
def test_rule_finds_what_is_marked_and_nothing_else(path: Path) -> None:
    """The code of a folder is found on exactly the marked lines of its snippets; good snippets have none, and nothing of high confidence."""
    code = path.parent.name.partition("-")[0]
    report = lint_paths([path], ALL)
    marked = {number for number, line in enumerate(path.read_text().splitlines(), 1) if _EXPECT.search(line)}
    assert bool(marked) == path.stem.startswith("bad")
    assert {f.place.line for f in report.findings if f.code == code} == marked
    assert not report.trouble
    if path.stem.startswith("good"):
        assert [f for f in report.findings if f.confidence is Confidence.HIGH] == []


@pytest.mark.parametrize("code", CODES)
def test_every_rule_has_snippets_and_a_page(code: str) -> None:
    """Each code has at least three bad and three good snippets in a folder with its slug, and a page."""
    slug = CODES[code][0]
    folder = CASES / f"{code}-{slug}"
    assert len(list(folder.glob("bad*.py"))) >= 3
    assert len(list(folder.glob("good*.py"))) >= 3
    page = rules().get(code) or pages()[code]
    assert page.slug == slug


@pytest.mark.parametrize("code", pages())
def test_pages_of_practices_have_all_sections(code: str) -> None:
    """A page says what happens, why it does harm, an example, what to do instead, how sure it is and when it is not this."""
    text = pages()[code].page
    sections = ["What happens", "Why it does harm", "Example", "Instead", "How sure", "Not this when"]
    places = [text.index(f"\n{s}\n") for s in sections]
    assert places == sorted(places)


def test_most_origins_of_the_corpus_are_seen_before_running() -> None:
    """At least 70% of the origins of the failing programs are found, with a cause code, on the line where the damage is born."""
    programs = corpus.failing()
    seen = [p for p in programs if lint_recall.seen(p) is not None]
    assert len(seen) >= 0.7 * len(programs)


@pytest.mark.parametrize("program", corpus.healthy(), ids=lambda p: p.name)
def test_healthy_programs_get_nothing_of_high_confidence(program: corpus.Program) -> None:
    """Programs that train, and those that were healed, are not accused with high confidence."""
    assert [f for f in lint_paths([program.path], ALL).findings if f.confidence is Confidence.HIGH] == []
