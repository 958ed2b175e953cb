"""The public corpus: every failing program is explained, every healthy one is left as it is, every remedy heals."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import corpus
from corpus import Program
from update_golden import ROOT, folders

from whynan.causes.catalogue import rules

FAILING = corpus.failing()
HEALTHY = corpus.healthy()
PINNED = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

# Programs whose first remedy, applied to the file, does not give a run without incident, and why.
NOT_HEALED: dict[str, str] = {}


def by_name(program: Program) -> str:
    """The name of a test."""
    return program.name.removesuffix(".py")


class Answers:
    """What whynan says of a program run in the repository; each is run once, also where several workers ask."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, path: Path) -> dict[str, Any]:
        """Run a program, or read what another test got."""
        kept = self._folder / f"{path.parent.name}-{path.stem}.json"
        if not kept.exists():
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(watched(path, ROOT)), encoding="utf-8")
            part.rename(kept)
        answer: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return answer

    def first_remedy(self, program: Program) -> dict[str, Any]:
        """The remedy offered first, or an empty one."""
        remedies = self(program.path)["incidents"][0]["remedies"]
        return remedies[0] if remedies else {"diff": "", "result": "not tried"}


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers of this run of the tests, shared by its workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "corpus"
    folder.mkdir(exist_ok=True)
    return Answers(folder)


def watched(path: Path, folder: Path) -> dict[str, Any]:
    """What whynan says of a program run in a folder."""

    def work() -> dict[str, Any]:
        os.chdir(folder)
        return corpus.watched(path)

    done = corpus.in_child(work)
    assert done["answer"] is not None, done["err"]
    return {**done["answer"], "out": done["out"], "err": done["err"]}


@pytest.mark.parametrize("program", FAILING, ids=by_name)
def test_names_line_cause_and_phase(program: Program, answers: Answers) -> None:
    """The first incident of a failing program is at the marked line, with the marked code and phase."""
    answer = answers(program.path)
    assert not answer["internal"], answer["err"]
    assert answer["incidents"], "no incident"
    first = answer["incidents"][0]
    place = (first["cause"]["code"], first["origin"]["line"], first["origin"]["phase"])
    assert place == (program.code, program.line, program.phase)
    assert Path(first["origin"]["file"]).name == program.path.name


@pytest.mark.parametrize("program", HEALTHY, ids=by_name)
def test_healthy_program_is_left_alone(program: Program) -> None:
    """A healthy program prints the same as unwatched, digest of its weights included, and raises no alarm."""
    plain = corpus.in_child(lambda: corpus.plain(program.path))
    answer = watched(program.path, ROOT)
    assert not answer["internal"], answer["err"]
    assert answer["incidents"] == []
    assert (answer["out"], answer["status"]) == (plain["out"], plain["status"])
    if program.path.parent.name == "healthy":
        assert "digest" in answer["out"]


def apply_diff(source: str, diff: str) -> str:
    """Apply a unified diff, strictly: every line of context must stand where the diff says."""
    old, new, at = source.splitlines(), [], 0
    for line in diff.splitlines():
        if line.startswith(("--- ", "+++ ")):
            continue
        if hunk := re.match(r"@@ -(\d+)", line):
            start = int(hunk[1]) - 1
            new += old[at:start]
            at = start
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            assert old[at] == line[1:], f"the diff expects {line[1:]!r} at line {at + 1}"
            new += [line[1:]] * line.startswith(" ")
            at += 1
    return "\n".join(new + old[at:]) + "\n"


@pytest.mark.parametrize("program", FAILING, ids=by_name)
def test_first_remedy_heals(program: Program, answers: Answers, tmp_path: Path) -> None:
    """A program with the diff of its first remedy applied has no incident, neither the old one nor another."""
    remedy = answers.first_remedy(program)
    if not remedy["diff"]:
        pytest.skip("the first remedy is advice without a diff")
    patched = tmp_path / program.path.name
    patched.write_text(apply_diff(program.path.read_text(encoding="utf-8"), remedy["diff"]), encoding="utf-8")
    compile(patched.read_text(encoding="utf-8"), str(patched), "exec")
    answer = watched(patched, tmp_path)
    assert not answer["internal"], answer["err"]
    again = [(i["cause"]["code"], i["origin"]["line"]) for i in answer["incidents"]]
    if program.name in NOT_HEALED:
        assert again, f"healed by now: take {program.name} out of NOT_HEALED"
        pytest.xfail(NOT_HEALED[program.name])
    assert (program.code, program.line) not in again
    assert again == []
    assert answer["status"] == 0, answer["err"]


def test_exceptions_are_programs() -> None:
    """Every exception listed is a program of the corpus, and they are few."""
    assert set(NOT_HEALED) <= {p.name for p in FAILING}
    assert len(NOT_HEALED) <= len(FAILING) // 20


def test_corpus_is_large_enough() -> None:
    """The corpus has enough programs of each kind, and at least one for every cause that a program can show."""
    assert len(FAILING) >= 80
    assert len(HEALTHY) >= 30
    assert sum(p.path.parent.name == "healthy" for p in HEALTHY) >= 30
    assert sum(p.phase == "backward" for p in FAILING) >= 25
    wanted = {code for code in rules() if code[2] in "1234567"}
    assert wanted - {p.code for p in FAILING} == set()


def test_most_remedies_are_proven(answers: Answers) -> None:
    """At least 80 % of the first remedies offered with a diff are proven by replaying the failing step."""
    firsts = [answers.first_remedy(p) for p in FAILING]
    offered = [r for r in firsts if r["diff"]]
    proven = [r for r in offered if r["result"] == "proven"]
    everywhere = sum(r["result"] == "proven" for r in firsts)
    print(f"proven: {len(proven)} of {len(offered)} first remedies with a diff; {everywhere} of {len(FAILING)} programs")
    assert len(proven) >= 0.8 * len(offered)


@pytest.mark.skipif(
    PINNED is None or not torch.__version__.startswith(PINNED[1]),
    reason=f"the texts hold numbers of torch {PINNED[1] if PINNED else '?'}; this is {torch.__version__}",
)
@pytest.mark.parametrize("folder", folders(), ids=lambda f: f.name)
def test_golden_text(folder: Path, answers: Answers) -> None:
    """The diagnosis of `bad.py` is word for word `expected.txt`; `python tests/update_golden.py` rewrites it."""
    expected = (folder / "expected.txt").read_text(encoding="utf-8")
    assert answers(folder / "bad.py")["told"] == expected
