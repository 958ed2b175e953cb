"""Data sets of the user's own code, named `module:dataset`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets_on_disk import counted, only

from whynan.errors import UsageError
from whynan.forensics.addresses import Unreadable
from whynan.forensics.data import check_object
from whynan.forensics.findings import Checked, Severity
from whynan.forensics.wishes import Wishes

torch = pytest.importorskip("torch", reason="torch is not installed")

MODULE = """
import torch
from collections import namedtuple
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

x = torch.randn(200, 3, 4, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(200) % 5
spoiled = x.clone()
spoiled[17, 0, 0, 0] = float("nan")

healthy = TensorDataset(x, y)
bad = TensorDataset(spoiled, y)
loader = DataLoader(bad, batch_size=16)
shuffled = DataLoader(bad, batch_size=16, shuffle=True)

def make():
    return bad

class Words(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, i):
        if i in (8, 31):
            raise KeyError(f"no file {i}")
        return {"input_ids": torch.arange(1, 2 + i % 7) if i != 20 else torch.zeros(0, dtype=torch.long), "text": f"text {i}", "weight": 0.5 * i}

class Stream(IterableDataset):
    def __iter__(self):
        for i in range(50):
            yield torch.full((4,), float("inf") if i == 9 else float(i)), i % 2

class Endless:
    def __iter__(self):
        i = 0
        while True:
            yield {"v": float(i)}
            i += 1

Sample = namedtuple("Sample", "image target")
tuples = [Sample(x[i], 1.0 if i != 3 else float("nan")) for i in range(40)]
batches = [(x[i : i + 8].bfloat16(), y[i : i + 8]) for i in range(0, 40, 8)]
numbers = [1.0, 2.0, float("nan"), 4.0] * 10
nothing = []
class Breaks:
    def __iter__(self):
        yield 1.0
        raise OSError("disk gone")
five = 5
holes = [{"a": 1.5, "b": 2} if i % 10 else {"a": None, "b": 2 + i} for i in range(50)]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "users_own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "users_own_data"
    sys.modules.pop("users_own_data", None)


def check(module: str, name: str, **wishes: Any) -> Checked:
    return check_object(f"{module}:{name}", Wishes(**wishes))


def test_a_healthy_data_set_is_silent(module: str) -> None:
    checked = check(module, "healthy")
    assert counted(checked) == []
    assert checked.facts["rows"] == 200
    assert checked.form == "TensorDataset"


@pytest.mark.parametrize("name", ["bad", "make", "loader"])
def test_a_data_set_a_function_that_makes_one_and_a_loader(module: str, name: str) -> None:
    found = only(check(module, name), "not-finite")
    assert (found.place, found.rows, found.code) == ("x", (17,), "WN701")


def test_a_loader_has_its_own_batches(module: str) -> None:
    assert "of 13 batches of 16" in only(check(module, "loader", batch=64), "not-finite").message


def test_a_loader_that_shuffles_is_looked_at_as_it_comes(module: str) -> None:
    checked = check(module, "shuffled")
    assert (checked.facts["rows"], only(checked, "not-finite").row_count) == (200, 1)


def test_items_that_raise_are_named_and_the_rest_is_read(module: str) -> None:
    checked = check(module, "Words")
    found = only(checked, "item-raises")
    assert (found.severity, found.rows) == (Severity.BAD, (8, 31))
    assert "KeyError: 'no file 8'" in found.message
    assert (only(checked, "empty-rows", "input_ids").severity, only(checked, "empty-rows").rows) == (
        Severity.SUSPECT,
        (20,),
    )  # its own number, though item 8 is gone
    assert counted(checked) == [str(found), str(only(checked, "empty-rows"))]


def test_iterables(module: str) -> None:
    assert only(check(module, "Stream"), "not-finite").rows == (9,)
    assert only(check(module, "numbers"), "not-finite").row_count == 10


def test_what_never_ends_is_looked_at_for_a_while(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whynan.forensics.data.objects._ENDLESS", 1000)
    checked = check(module, "Endless")
    assert checked.facts["rows"] == 1000
    assert any("the first 1000 items" in f.message for f in checked.findings)


def test_named_tuples_and_lists_of_batches(module: str) -> None:
    assert only(check(module, "tuples"), "not-finite", "target").code == "WN702"
    assert check(module, "batches").facts["rows"] == 5


def test_values_that_are_none_are_missing(module: str) -> None:
    found = only(check(module, "holes"), "missing", "a")
    assert found.rows == (0, 10, 20, 30, 40)


def test_an_iterable_that_breaks_says_why(module: str) -> None:
    with pytest.raises(Unreadable, match="OSError: disk gone"):
        check(module, "Breaks")


def test_a_hugging_face_dataset(module: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    (tmp_path / "users_hub_data.py").write_text(
        "import datasets\nds = datasets.Dataset.from_dict({'v': [float('nan') if i == 3 else float(i) for i in range(50)]})\n"
        "back = ds.select(list(reversed(range(50))))\nboth = datasets.DatasetDict({'train': ds, 'test': back})\n"
    )
    assert only(check_object("users_hub_data:ds", Wishes()), "not-finite").rows == (3,)
    assert only(check_object("users_hub_data:back", Wishes()), "not-finite").rows == (46,)
    assert {f.place for f in check_object("users_hub_data:both", Wishes()).findings} == {"train.v", "test.v"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("nothing_here", "module:name"),
        ("no_such_module_x:y", "ModuleNotFoundError"),
        ("users_own_data:missing", "AttributeError"),
        ("users_own_data:five", "no rows"),
    ],
)
def test_wrong_names_are_one_line(module: str, spec: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_object(spec, Wishes())


def test_a_data_set_without_rows(module: str) -> None:
    with pytest.raises(Unreadable, match="no rows"):
        check(module, "nothing")


def test_a_generator_is_read_from_its_first_item(module: str, tmp_path: Path) -> None:
    """Looking at the first item to learn the columns must not lose it."""
    (tmp_path / "users_generator.py").write_text("def rows():\n    for i in range(30):\n        yield {'v': float('nan') if i == 0 else float(i)}\n")
    checked = check_object("users_generator:rows", Wishes())
    assert (checked.facts["rows"], only(checked, "not-finite").rows) == (30, (0,))


def test_items_no_one_foresaw_are_one_line(module: str, tmp_path: Path) -> None:
    """Items whose fields change from one to the next, and values that are no numbers."""
    (tmp_path / "users_odd_data.py").write_text(
        "import torch\nodd = [{'a': 1.0}, {'b': torch.ones(2)}, {'a': 'text'}, {'a': [1, 2, 3]}] * 5\n"
        "nested = [{'a': {'b': (1.0, [2.0, 3.0])}, 'c': None}] * 20\n"
        "objects = [object()] * 20\nragged = [[1.0] * (i % 4) for i in range(20)]\nflags = [True, False] * 10\nlong = [2**70] * 20\n"
    )
    for name in ("odd", "nested", "objects", "ragged", "flags", "long"):
        try:
            assert check_object(f"users_odd_data:{name}", Wishes()).facts["rows"] == 20
        except Unreadable as error:
            assert "\n" not in str(error)
