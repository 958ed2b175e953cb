"""`whynan report`: from the files of a run to report.html and report.md, whatever the files are like."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, PYTHON, Sandbox, hears_ctrl_c
from run_folders import HOSTILE, incident, metrics, write_run

from whynan.errors import UsageError
from whynan.records import dumps
from whynan.report import html, markdown
from whynan.report.following import frame
from whynan.report.hiding import Contents
from whynan.report.listing import listing
from whynan.report.reading import Curves, incident_of, read_run
from whynan.report.thinning import thinned
from whynan.report.tree import branches
from whynan.report.writing import write_report

TRAIN = """
import torch

def distance(a, b):
    difference = a - b
    return torch.sqrt(difference.pow(2).sum(-1))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    x, y = torch.randn(16, 6), torch.randn(16, 6)
    if step == 5:
        y[3] = x[3]
    loss = distance(model(x), model(y)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def page_of(run_dir: Path) -> str:
    return (run_dir / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a real training with one incident."""
    box = Sandbox(tmp_path_factory.mktemp("made"))
    done = box.watched(TRAIN)
    assert done.status == 0, done.err
    assert "report.html" in done.err
    return box.run_dir


def test_the_engine_writes_what_the_page_tells(made: Path) -> None:
    """An incident of a real run has its way, its values, its modules and its source; the record survives being read back."""
    line = (made / "incidents.jsonl").read_text().splitlines()[0]
    found = json.loads(line)
    assert [s["role"] for s in found["path"]] == ["argument", "forward", "origin", *["carried"] * (len(found["path"]) - 4), "symptom"]
    assert found["path"][2]["value"]["posinf"] == 1
    assert found["path"][-1]["op"] == f"gradient {found['symptom']['name']}"
    assert [h["name"] for h in found["histograms"]] == ["difference.pow(2).sum(-1)", "result"]
    assert sum(found["histograms"][0]["counts"]) == 16
    assert found["histograms"][0]["zeros"] == 1
    assert {m["name"]: (m["bad_output"], m["bad_gradient"]) for m in found["modules"]} == {
        "0": (False, True),
        "1": (False, False),
        "2": (False, True),
        "": (False, False),
    }
    assert all(m["largest"] > 0 for m in found["modules"])
    assert found["source"][0]["lines"][3] == "    return torch.sqrt(difference.pow(2).sum(-1))"
    assert dumps(incident_of(found).to_json()) == line


def test_page_of_a_real_run(made: Path) -> None:
    """The page of a real run tells verdict, source, both labels, the change and what was watched."""
    page = page_of(made)
    for text in ("At step 5 the gradient of 0.weight became nan", "the slope of sqrt at 0 is infinite", "torch.linalg.vector_norm(difference, dim=-1)",
                 "This page contains source lines and values of the run.", "model Sequential: 248 weights, float32 on cpu", "optimizers: SGD"):  # fmt: skip
        assert text in page, text
    assert "not measured: no gradient scaler" in page


def test_report_md_has_the_same_sections(made: Path) -> None:
    """What the page shows is in report.md too: diagnosis, way, values, experiments, curves, modules, what was not watched."""
    text = (made / "report.md").read_text(encoding="utf-8")
    for part in ("At step 5", "error[WN501]", "The way from origin to symptom:", "Values at the origin:", "Tried on the replay:", "```diff", "## Curves",
                 "## Modules",                  "not watched: activations"):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("ending", ["raise RuntimeError('crash')", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"])
def test_page_is_written_when_the_script_ends_badly(box: Sandbox, ending: str) -> None:
    """A crash and Ctrl-C after an incident: the page is there, and its run has an end."""
    done = box.watched(TRAIN + ending + "\n", before=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert done.status != 0
    assert "At step 5" in page_of(box.run_dir)
    assert "ended" in json.loads((box.run_dir / "run.json").read_text())


def test_report_of_a_run_that_was_killed(box: Sandbox) -> None:
    """Killed without a word: the page is made afterwards from what was written."""
    done = box.watched(TRAIN + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    assert done.status == -signal.SIGKILL
    assert not (box.run_dir / "report.html").exists()
    assert box.forked("report", str(box.run_dir)).status == 0
    page = page_of(box.run_dir)
    assert "At step 5" in page
    assert "this run wrote no run.json at its end" in page


def test_a_second_run_in_the_same_directory(box: Sandbox) -> None:
    """Files are appended to; the report is about the newest run."""
    for _ in range(2):
        assert box.watched(TRAIN).status == 0
    run = read_run(box.run_dir)
    assert (len(run.incidents), len(run.curves)) == (1, 12)
    assert len((box.run_dir / "incidents.jsonl").read_text().splitlines()) == 2


def test_report_needs_no_torch(tmp_path: Path) -> None:
    """`whynan report` works in an interpreter in which importing torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    run = write_run(tmp_path / "run", [incident()], metrics(20, (3,)))
    done = subprocess.run(
        [PYTHON, "-m", "whynan", "report", str(run)], env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "infinite slope" in page_of(run)
    assert (run / "report.md").exists()


def test_ten_thousand_steps_stay_below_a_megabyte(tmp_path: Path) -> None:
    """10,000 steps and 500 incidents make a page below 1 MB that keeps extremes and gaps."""
    steps = tuple(range(0, 10_000, 20))
    rows = metrics(10_000, (777,))
    rows[4321]["loss"] = 999.5
    run = write_run(tmp_path / "run", [incident(step=n, line=11 + n % 7) for n in steps], rows)
    page = write_report(run).read_text(encoding="utf-8")
    assert len(page.encode()) < 1_000_000
    data = data_of(page)
    assert 999.5 in data["series"]["loss"]
    assert data["series"]["grad_norm"][data["steps"].index(777)] == "nan"
    assert len(data["incidents"]) == 500


def test_sixty_thousand_steps_stay_small(tmp_path: Path) -> None:
    """The page does not grow with the run."""
    curves = write_run(tmp_path / "run", [], metrics(60_000, (5,)))
    assert len(html.page_for([curves]).encode()) < 600_000


def data_of(page: str) -> dict[str, list[object]]:
    """The data that the charts are drawn from."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])[0]


def test_thinning_keeps_extremes_and_gaps() -> None:
    """Of each stretch the smallest, the largest and the first value that is not finite are kept."""
    curves = Curves()
    for step in range(20_000):
        curves.steps.append(step)
        for name in curves.values:
            curves.values[name].append(-5.0 if step == 7001 else 9.0 if step == 12345 else 1.0)
            curves.kinds[name].append(2 if step == 15000 else 1)
    kept = thinned(curves, frozenset([333]))
    assert {332, 333, 334, 7001, 12345, 15000, 0, 19_999} <= set(kept)
    assert len(kept) < 4000


# -- bad input --------------------------------------------------------------------------------------------------


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """A tag in a source line, a message or a name is shown, never run, in the page and in its data."""
    told = json.loads(json.dumps(incident()).replace("difference", json.dumps(HOSTILE)[1:-1]).replace("infinite slope", json.dumps(HOSTILE)[1:-1]))
    told["symptom"]["name"] = told["origin"]["module"] = told["action"]["taken"] = HOSTILE
    page = write_report(write_run(tmp_path / "run", [told], metrics(5))).read_text(encoding="utf-8")
    assert "<img" not in page
    assert "&lt;/script&gt;" in page
    assert "49" not in re.findall(r"<h1[^>]*>(.*?)</h1>", page, re.DOTALL)[0]
    assert page.count("</script>") == 4
    text = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert "<img" not in re.sub(r"(?s)(```+).*?\n\1", "", text)


@pytest.mark.parametrize("ending", ['{"step": 7, "lo', "\x00\x00", "[1, 2]", '"text"', '{"step": "seven"}', "{" * 5000])
def test_half_a_line_at_the_end(tmp_path: Path, ending: str) -> None:
    """A last line that was cut off costs that line, and the page says so."""
    run = write_run(tmp_path / "run", [incident()], metrics(5))
    for name in ("incidents.jsonl", "metrics.jsonl"):
        with (run / name).open("a", encoding="utf-8") as file:
            file.write(ending)
    found = read_run(run)
    assert (found.incidents[0].step, len(found.curves)) == (3, 5)
    page = write_report(run).read_text(encoding="utf-8")
    assert ("could not be read" in page) == (found.unreadable > 0)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are replaced, not fatal."""
    run = write_run(tmp_path / "run", [incident()], metrics(5))
    raw = (run / "incidents.jsonl").read_bytes().replace(b"difference", b"diff\xff\xfe\xe9nce")
    (run / "incidents.jsonl").write_bytes(raw)
    assert "\ufffd" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [{}, {"step": None}, {"origin": None, "cause": 3, "remedies": {"a": 1}}, {"step": 1e300, "origin": {"inputs": [None, 7], "samples": ["x"]}},
     {"path": [[]], "histograms": [{"counts": [1]}, {"counts": [-3], "edges": [1, 2]}]},
     {"schema": 99, "cause": {"confidence": "sure"}, "origin": {"phase": "dreaming", "line": -4, "file": "x.py", "code": "y", "column": 90}}],
)  # fmt: skip
def test_lines_that_are_not_what_they_should_be(tmp_path: Path, line: dict[str, object]) -> None:
    """Fields that are missing or of another kind are left at their defaults."""
    run = write_run(tmp_path / "run", [], metrics(3))
    (run / "incidents.jsonl").write_text(json.dumps(line) + "\n")
    assert len(read_run(run).incidents) == 1
    assert write_report(run).stat().st_size > 50_000


_ODD = [None, True, -1, 1e308, -1e-320, 10**30, "nan", "", "</script>", "\ud800", "\x00", [], {}, [[]], [None], {"a": 1}]


def _mutated(value: Any, draw: random.Random) -> Any:
    if draw.random() < 0.05:
        return draw.choice(_ODD)
    if isinstance(value, dict):
        return {k: _mutated(v, draw) for k, v in value.items() if draw.random() > 0.05}
    return [_mutated(v, draw) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(6))
def test_files_of_any_kind_make_a_page(tmp_path: Path, seed: int) -> None:
    """Whatever is in the fields of a line, page, text and live view are made of it."""
    draw = random.Random(seed)
    facts = {"steps": 5, "from": {"metrics.jsonl": 0}, "watched": {"models": [{"kind": "M", "parameters": 3}], "readings": {"w": [[1, 2.0]]}, "incidents": 7}}
    for number in range(8):
        told = [line for line in (_mutated(incident(n), draw) for n in range(3)) if isinstance(line, dict)]
        run = write_run(tmp_path / str(number), told, [_mutated(row, draw) for row in metrics(6, (2,))], {**facts, "watched": _mutated(facts["watched"], draw)})
        for contents in (Contents(), Contents(source=False, values=False)):
            assert write_report(run, contents).stat().st_size > 50_000
        assert frame(read_run(run)).plain


def test_incidents_of_an_older_version(tmp_path: Path) -> None:
    """Lines that hold only the fields of the contract make a page that says what was not measured."""
    old = {k: v for k, v in incident().items() if k not in ("path", "histograms", "modules", "source")}
    page = write_report(write_run(tmp_path / "run", [old], [])).read_text(encoding="utf-8")
    assert "torch.sqrt(difference.pow(2).sum(-1))" in page
    assert page.count("Not measured") >= 3


def test_only_metrics(tmp_path: Path) -> None:
    """A run without incidents has a page that says so."""
    run = write_run(tmp_path / "run", [], metrics(30))
    (run / "incidents.jsonl").unlink()
    page = write_report(run).read_text(encoding="utf-8")
    assert "No incident in 30 steps." in page


def test_folders_that_are_no_run(tmp_path: Path, box: Sandbox) -> None:
    """An empty folder, a file and nothing at all are misuse: one line, status 2."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("empty", "file", "nothing"):
        with pytest.raises(UsageError):
            read_run(tmp_path / name)
        done = box.forked("report", str(tmp_path / name))
        assert (done.status, len(done.err.splitlines())) == (2, 1)


def test_ranks(tmp_path: Path) -> None:
    """Several ranks: who it was born on and who received it; the curves are those of the first rank that wrote any."""
    run = write_run(tmp_path / "run", [incident(rank=1)], metrics(8))
    for rank in (1, 2):
        write_run(run / "ranks" / f"rank-{rank}", [incident(rank=rank)] if rank == 2 else [], metrics(8))
    page = write_report(run).read_text(encoding="utf-8")
    assert re.findall(r'<li class="(born-here|received|nothing-written)"><b>(\d)', page) == [("nothing-written", "0"), ("born-here", "1"), ("received", "2")]
    (run / "metrics.jsonl").unlink()
    assert len(read_run(run).curves) == 8


# -- what may not be told ---------------------------------------------------------------------------------------


def test_no_source(tmp_path: Path) -> None:
    """With --no-source no line of the program, no change to it and no expression is in page or text; the place is."""
    run = write_run(tmp_path / "run", [incident()], metrics(8))
    write_report(run, Contents(source=False))
    for name in ("report.html", "report.md"):
        text = (run / name).read_text(encoding="utf-8")
        for word in ("difference", "torch.sqrt", "vector_norm", "def distance"):
            assert word not in text, (name, word)
        assert "train.py:11" in text
        assert "0.0625" in text
    assert "This page contains values of the run, and no source lines." in page_of(run)


def test_no_values(tmp_path: Path) -> None:
    """With --no-values no number of the run is in page or text: no curve, statistic, sample or number in a sentence."""
    run = write_run(tmp_path / "run", [incident()], metrics(8, (3,)), {"watched": {"readings": {"w": [[0, 31.4159]]}}})
    write_report(run, Contents(values=False))
    for name in ("report.html", "report.md"):
        text = re.sub(r"<(script|style)>.*?</\1>", "", (run / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        for word in ("0.0625", "0.0253", "0.7902", "0.0311", "of 16", "row 3", "[3, 7]", "40000", "31.4159", "65536", "0.61"):
            assert word not in text, (name, word)
        assert "torch.sqrt(difference" in text
    assert data_of(page_of(run))["series"] == {}
    assert "This page contains source lines, and no values of the run." in page_of(run)


@pytest.mark.parametrize("case", ["WN101-log-of-zero", "WN401-fully-masked-softmax", "WN501-infinite-slope", "WN701-input-not-finite"])
def test_no_source_of_real_programs(box: Sandbox, case: str) -> None:
    """No line of a real program is in the page that was made without source."""
    program = Path(__file__).parent / "cases" / case / "bad.py"
    done = box.forked("run", "--run-dir", str(box.run_dir), str(program))
    assert (box.run_dir / "report.html").exists(), done.err
    assert box.forked("report", "--no-source", str(box.run_dir)).status == 0
    page = page_of(box.run_dir)
    for found in done.incidents:
        added = [line[1:].strip() for r in found["remedies"] for line in r["diff"].splitlines() if line[:1] == "+" and line[:3] != "+++"]
        for line in (found["origin"]["code"], *added, *(s["code"] for s in found["origin"]["from"])):
            assert not line or line not in page


# -- the parts --------------------------------------------------------------------------------------------------


def test_listing_marks_both_spans() -> None:
    """The origin and the place it came from are marked in one listing, each with its label under it."""
    rows = listing(incident_of(incident()))
    assert [(r.kind, r.number) for r in rows] == [("source", 9), ("source", 10), ("secondary", 0), ("source", 11), ("primary", 0)]
    assert rows[1].marked == "a - b"
    assert rows[3].marked == "torch.sqrt(difference.pow(2).sum(-1))"
    assert (rows[2].marked, rows[2].after) == ("-----", "0 in row 3")
    assert rows[4].marked == "^" * 37


def test_listing_with_tabs_and_several_lines() -> None:
    """A span over several lines is marked to its end; carets under a tab keep the tab."""
    told = incident()
    told["origin"] |= {"line": 10, "end_line": 11, "column": 1, "end_column": 2, "code": "f(", "from": []}
    told["source"] = [{"file": "train.py", "first": 10, "lines": ["\tf(", "\t)"]}]
    rows = listing(incident_of(told))
    assert [(r.marked, r.before) for r in rows] == [("f(", "\t"), (")", "\t"), ("^", "\t")]


def test_several_runs_on_one_page(tmp_path: Path, box: Sandbox) -> None:
    """Several run directories make one page with a table at its head."""
    runs = [write_run(tmp_path / name, [incident()] if name == "bad" else [], metrics(9)) for name in ("bad", "good")]
    done = box.forked("report", *map(str, runs), "--output", str(tmp_path / "all.html"))
    assert done.status == 0, done.err
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    assert page.count('<article class="run"') == 2
    assert 'href="#run-1">good</a>' in page
    assert box.forked("report", *map(str, runs)).status == 2


def test_policy_allows_only_what_is_in_the_page(tmp_path: Path) -> None:
    """The content security policy forbids everything but the scripts and styles of the page, by their hashes."""
    page = html.page_for([write_run(tmp_path / "run", [incident()], metrics(3))])
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert "unsafe" not in policy[1]
    assert re.findall(r'\s(?:src|href)="(?!#)', page) == []
    assert "style=" not in re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def test_markdown_blocks_cannot_be_ended_from_inside(tmp_path: Path) -> None:
    """Three backticks in a source line do not end the block it stands in."""
    told = json.loads(json.dumps(incident()).replace("difference", "```"))
    text = markdown.render(read_run(write_run(tmp_path / "run", [told], metrics(3))))
    assert "````text" in text


def test_open_starts_a_browser(tmp_path: Path) -> None:
    """--open hands the page to the browser of the system."""
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/asked\n')
    script.chmod(0o755)
    run = write_run(tmp_path / "run", [incident()], metrics(3))
    command = [PYTHON, "-m", "whynan", "report", "--open", str(run)]
    done = subprocess.run(command, env={**ENVIRONMENT, "BROWSER": f"{script} %s"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().strip() == (run / "report.html").as_uri()


def test_an_incident_after_the_last_metrics_is_on_the_axis(tmp_path: Path) -> None:
    """A crash has no line of metrics: its step is on the axis all the same."""
    page = html.page_for([write_run(tmp_path / "run", [incident(7)], metrics(5))])
    data = data_of(page)
    assert data["steps"] == [0, 1, 2, 3, 4, 7]
    assert data["series"]["loss"][-1] is None


def test_modules_are_told_by_what_their_name_adds(tmp_path: Path) -> None:
    """Containers that are not listed stay part of the name; numbers are in order."""
    names = ("", "blocks.2", "blocks.10", "blocks.2.fc", "head")
    told = incident(modules=[{"name": n, "kind": "M", "dtype": "float16", "largest": 32752.0} for n in names])
    rows, _ = branches(read_run(write_run(tmp_path / "run", [told], [])))
    assert [(r.shown, r.depth) for r in rows] == [("(model)", 0), ("blocks.2", 1), ("fc", 2), ("blocks.10", 1), ("head", 1)]
    assert {r.output_share for r in rows} == {"50 %"}


# -- following --------------------------------------------------------------------------------------------------


def test_follow_shows_curves_and_incidents(tmp_path: Path, box: Sandbox) -> None:
    """In a pipe, and with --once, one frame is printed, without colours and without touching the run."""
    run = write_run(tmp_path / "run", [incident()], metrics(300, (3,)), {"ended": "2026-11-15T07:00:00Z"})
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    done = box.forked("report", "--follow", "--once", str(run))
    assert done.status == 0, done.err
    assert "loss" in done.out
    assert "norm" in done.out
    assert "WN501 infinite slope  train.py:11  skipped" in done.out
    assert "ended" in done.out
    assert "\x1b" not in done.out
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_follow_shows_a_log_that_the_program_writes(tmp_path: Path, box: Sandbox) -> None:
    """Any training log is drawn, its losses first; the first value that is not finite is named; what is no log is one line."""
    log = tmp_path / "training_log.jsonl"
    rows = [{"step": n, "lr": 1e-3, "text_loss": 2.0, "grad_norm": 1.0 if n < 40 else float("inf")} for n in range(50)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = box.forked("report", "--follow", "--once", str(log))
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "training_log.jsonl  step 49"
    assert [line.split()[0] for line in lines[1:4]] == ["text_loss", "grad_norm", "lr"]
    assert lines[4] == "not finite: grad_norm inf at step 40 (whynan check training_log.jsonl)"
    log.write_text("import torch\n")
    assert box.forked("report", "--follow", "--once", str(log)).status == 2


def test_follow_in_a_terminal_ends_with_the_run(tmp_path: Path) -> None:
    """In a terminal it redraws until the run ends; Ctrl-C ends it as well, with status 0 and no traceback."""
    run = write_run(tmp_path / "run", [], metrics(5), {"pid": os.getpid(), "host": __import__("socket").gethostname()})
    for end in ("run", "ctrl-c"):
        out, status = _in_terminal([PYTHON, "-m", "whynan", "report", "--follow", str(run)], run, end)
        assert status == 0, out
        assert "runs" in out
        assert "Traceback" not in out
        (run / "run.json").write_text(json.dumps({"pid": os.getpid(), "host": __import__("socket").gethostname()}))


def _in_terminal(command: list[str], run: Path, end: str) -> tuple[str, int]:
    import pty

    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**ENVIRONMENT, "TERM": "xterm"}, preexec_fn=hears_ctrl_c)
    os.close(slave)
    seen = b""
    while b"no incident" not in seen:
        seen += os.read(master, 65536)
    if end == "run":
        (run / "run.json").write_text(json.dumps({"ended": "now"}))
    else:
        process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(master, 65536):
            seen += chunk
    except OSError:  # the terminal is closed when the last of it has gone
        pass
    os.close(master)
    return seen.decode(errors="replace"), process.wait(30)
