"""Notebooks: cells that train are watched, the place is a cell and its line, results show as HTML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ENVIRONMENT, Shown, torch_doors
from doc_blocks import compare

import whynan
from whynan.records import Span
from whynan.report import cells

interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed here")

MAKE = "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(3, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
TRAIN = """def train(bad, steps=4):
    for i in range(steps):
        x = torch.randn(4, 3) * (i not in bad)
        optimizer.zero_grad()
        ä = 1;  loss = torch.sqrt((model(x) - model.bias).pow(2).sum(-1)).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An IPython shell in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    interactive.InteractiveShell.clear_instance()
    made = interactive.InteractiveShell.instance()
    yield made
    made.run_cell("%unload_ext whynan")
    made._atexit_once()  # its history lies in a folder that goes away
    interactive.InteractiveShell.clear_instance()


def cell(shell: Any, source: str) -> Any:
    return shell.run_cell(source, store_history=True)


def test_a_loop_in_a_cell_is_diagnosed_with_the_cell_and_its_line(shell: Any, capsys: Any) -> None:
    cell(shell, MAKE)  # before the extension is there
    cell(shell, "%load_ext whynan")
    cell(shell, TRAIN)
    cell(shell, "train((2,))")
    err = capsys.readouterr().err
    assert "error[WN501]: infinite slope" in err
    assert "--> In [3], line 5  train · backward" in err
    source, under = next((a, b) for a, b in zip(err.splitlines(), err.splitlines()[1:], strict=False) if "^^^" in b)
    marked = source[under.index("^") : under.rindex("^") + 1]
    assert marked == "torch.sqrt((model(x) - model.bias).pow(2).sum(-1))"


def test_the_cells_of_the_page_print_what_it_shows(shell: Any, capsys: Any, shown: Shown) -> None:
    load, output = shown("docs/notebooks.md")
    for source in (load, MAKE, TRAIN.replace("ä = 1;  ", ""), "train((2,))"):
        cell(shell, source)
    compare(output, capsys.readouterr().err)


def test_a_cell_that_is_run_again_is_diagnosed_again_and_guards_do_not_pile_up(shell: Any, capsys: Any) -> None:
    before = torch_doors()
    cell(shell, "%load_ext whynan")
    cell(shell, MAKE)
    cell(shell, TRAIN)
    for _ in range(3):
        cell(shell, "%load_ext whynan")
        cell(shell, "train((1,))")
        assert torch._C._len_torch_function_stack() == 1
    assert repr(cell(shell, "%whynan").result).startswith("whynan: watching, 12 steps, 3 incidents")
    cell(shell, "%whynan off")
    assert {k for k, v in torch_doors().items() if v is not before.get(k)} <= {"Module.__init__", "Module.__setstate__"}
    cell(shell, "train((1,))")
    assert repr(cell(shell, "%whynan status").result) == "whynan: not watching, 0 steps, no incident"
    assert capsys.readouterr().err.count("error[WN501]") == 1  # the same place is told once


def test_after_a_stop_the_cell_can_be_run_again(shell: Any, capsys: Any) -> None:
    cell(shell, "%load_ext whynan")
    cell(shell, "%whynan on stop")
    cell(shell, MAKE)
    cell(shell, TRAIN)
    assert isinstance(cell(shell, "train((2,))").error_in_exec, whynan.TrainingStopped)
    assert cell(shell, "train(())").error_in_exec is None
    assert repr(cell(shell, "%whynan").result) == "whynan: watching, 4 steps, no incident"


def test_what_the_magic_does_not_know_is_said(shell: Any) -> None:
    cell(shell, "%load_ext whynan")
    assert "takes no 'maybe'" in str(cell(shell, "%whynan maybe").error_in_exec)
    assert "policy" in str(cell(shell, "%whynan on sometimes").error_in_exec)
    assert repr(cell(shell, "%whynan").result) == "whynan: watching, 0 steps, no incident"


def test_a_guard_of_the_user_s_own_takes_over(shell: Any, capsys: Any) -> None:
    cell(shell, MAKE + "\nimport whynan\n")
    for _ in range(2):
        assert cell(shell, "guard = whynan.watch(model, optimizer, files=False)").error_in_exec is None
    cell(shell, TRAIN)
    cell(shell, "train((0,))")
    assert "step 0" in cell(shell, "guard").result._repr_html_()
    cell(shell, "guard.close()")
    assert "not watching" in cell(shell, "guard").result._repr_html_()


def test_html_is_escaped_whole_and_asks_for_nothing() -> None:
    html = cells.page("error[WN101]: <script>alert(1)</script>\n 3 |     x = a < b\n   |         ^^^^^ & more")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "&amp; more" in html
    assert not any(word in html for word in ("http", "url(", "src=", "@import", "<link"))
    assert html.count("<pre") == html.count("</pre>") == 1


def test_results_of_check_and_probe_have_html() -> None:
    report = whynan.check({"fc.weight": torch.tensor([1.0, float("nan")])})
    assert "fc.weight" in report._repr_html_()
    found = whynan.probe(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (torch.randn(4, 2), torch.rand(4, 1)), budget=0)
    assert "whynan probe" in found._repr_html_()


def test_a_place_in_a_file_reads_as_before() -> None:
    assert Span("a/In [x].py", 3).place == "a/In [x].py:3"


def test_a_notebook_that_is_executed_shows_the_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed here")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed here")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed here")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    new = nbformat.v4.new_code_cell
    book = nbformat.v4.new_notebook(cells=[new("%load_ext whynan"), new(MAKE), new(TRAIN), new("train((2,))"), new("%whynan")])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    err = "".join(out["text"] for out in book.cells[3].outputs if out.get("name") == "stderr")
    assert "--> In [3], line 5  train · backward · step 2" in err
    (shown,) = book.cells[4].outputs
    assert "whynan: watching, 4 steps, 1 incident" in shown["data"]["text/html"]
    assert "In [3], line 5" in shown["data"]["text/html"]
