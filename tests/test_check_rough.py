"""`whynan check` on what nobody wishes to meet: damaged files of every kind, faults of our own, terminals that close."""

from __future__ import annotations

import collections
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import fuzz_check

import whynan
from whynan.forensics import checking, logs
from whynan.forensics.checkpoints import opening
from whynan.forensics.data import recognising


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One whole file or folder of every format. Of the module: Lightning replaces `torch.compile` when it is imported."""
    for package in ("pyarrow", "PIL", "datasets", "tensorboard", "lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return fuzz_check.write_originals(tmp_path_factory.mktemp("whole"))


def test_whole_files_of_every_format_are_read(originals: list[Path]) -> None:
    """What the fuzz run damages can be read before it is damaged: otherwise it would prove nothing."""
    assert {p.name: fuzz_check.look(p) for p in originals} == dict.fromkeys((p.name for p in originals), "read")


def test_damaged_files_of_every_format_are_read_or_refused(originals: list[Path], tmp_path: Path) -> None:
    """A slice of `benchmarks/fuzz_check.py`, which tries twenty thousand."""
    answers = collections.Counter(fuzz_check.look(fuzz_check.one(number, originals, tmp_path / "work")) for number in range(100_000, 100_600))
    assert set(answers) == {"read", "refused"}


def raise_it(*args: object) -> None:
    raise KeyError("shape\nand more")


TOLD = "internal error: KeyError: 'shape\\nand more'; please report it"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save({"fc.weight": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({"fc.weight": torch.tensor([1.0, float("nan")])}, tmp_path / "b.pt")
    np.save(tmp_path / "c.npy", np.arange(40.0).reshape(20, 2))
    (tmp_path / "d.log").write_text("".join(f"step {i}: loss {5 - i / 100}\n" for i in range(100)))
    return tmp_path


@pytest.mark.parametrize(("room", "name", "file"), [(opening, "open_checkpoint", "a.pt"), (recognising, "_file_form", "c.npy"), (logs, "_read", "d.log")])
def test_a_fault_of_our_own_is_one_line_and_the_others_are_checked(folder: Path, monkeypatch: pytest.MonkeyPatch, room: object, name: str, file: str) -> None:
    monkeypatch.setattr(room, name, raise_it)
    report = whynan.check([folder / file, folder / "d.log", folder / "c.npy"])
    assert report.checked[0].unreadable == TOLD and report.status == 2
    assert [c.unreadable for c in report.checked[1:] if not c.path.endswith(file)] in ([""], ["", ""])


def test_a_fault_of_our_own_in_one_file_of_a_folder_leaves_the_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the question is what kind of file it is."""
    kind_of = checking.kind_of
    monkeypatch.setattr(checking, "kind_of", lambda place: raise_it() if place.name == "c.npy" else kind_of(place))
    report = whynan.check(folder)
    assert {Path(c.path).name: c.unreadable for c in report.checked} == {"c.npy": TOLD, "d.log": ""}
    assert Path(report.histories[0].last_healthy).name == "a.pt" and report.status == 1


def test_a_fault_of_our_own_in_one_checkpoint_of_a_history_leaves_the_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_checkpoint = opening.open_checkpoint
    monkeypatch.setattr(opening, "open_checkpoint", lambda place: raise_it() if place.name == "b.pt" else open_checkpoint(place))
    (history,) = whynan.check(folder).histories
    assert [m.unreadable for m in history.members] == ["", TOLD] and Path(history.last_healthy).name == "a.pt"


def test_a_scripted_model_is_read_without_a_word_from_torch(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """What a file is, is decided by our own reader: torch's would warn, and would have to be there."""
    torch.jit.save(torch.jit.trace(torch.nn.Linear(3, 3), torch.zeros(1, 3)), tmp_path / "scripted.pt")
    recwarn.clear()
    assert whynan.check(tmp_path / "scripted.pt").ok and not recwarn.list


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ('{"_data_files": [{"file": "a"}]}', "state.json: no _data_files that name files"),
        ('{"_data_files": "abc"}', "state.json: no _data_files that name files"),
        ('{"_data_files": []}', "a saved data set without rows"),
        ('{"_data_files": [{"filename": "../secret"}]}', "names a file outside the folder: ../secret"),
    ],
)
def test_a_saved_data_set_whose_list_of_files_is_damaged(tmp_path: Path, state: str, reason: str) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(state)
    assert [c.unreadable for c in whynan.check(tmp_path).checked] == [reason]


def test_a_saved_data_set_whose_splits_lead_back_to_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    (tmp_path / "a").symlink_to(".")
    (tmp_path / "b").symlink_to(".")
    assert "no such file" in whynan.check(tmp_path).checked[0].unreadable
    (tmp_path / "dataset_dict.json").write_text('{"splits": 7}')
    assert whynan.check(tmp_path).checked[0].unreadable == "dataset_dict.json: no splits that are named"


def test_a_table_whose_first_cell_never_ends_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x" * 200_000)
    assert whynan.check(tmp_path / "a.csv").checked[0].unreadable == "no rows"
