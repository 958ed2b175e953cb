"""A bad sample is told at the line of the data set that made it; one that was read in as it is, at the line that handed it in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from conftest import Sandbox

from whynan.capsule.sites import resolve
from whynan.trace.lines import first_bad_line

ROW = torch.tensor([1.0, 2.0, 4.0])
FLAT = torch.full((3,), 5.0)


def by_torch() -> torch.Tensor:
    x = FLAT.clone()
    centre, spread = x.mean(), x.std()
    scaled = (x - centre) / spread  # here
    return scaled + 1


def returned() -> tuple[torch.Tensor, int]:
    x = FLAT.clone()
    return (x - x.mean()) / x.std(), 3  # here


def by_numpy() -> dict[str, Any]:
    x = FLAT.numpy()
    with numpy.errstate(all="ignore"):
        return {"x": (x - x.min()) / (x.max() - x.min())}  # here


def in_place() -> torch.Tensor:
    x = FLAT.clone()
    x -= x.mean()
    x /= x.std()  # here
    return x


def in_a_helper() -> torch.Tensor:
    return helper(FLAT.clone())


def helper(x: torch.Tensor) -> torch.Tensor:
    total = (x - 5).sum()
    return torch.stack([v * 0 / total for v in x])  # here


def of_numbers() -> list[float]:
    count = 0.0
    largest = math.inf if count else 0.0
    mean = numpy.float64(largest) / numpy.float64(count)  # here
    return [float(mean)]


def of_an_attribute() -> torch.Tensor:
    return Holder(FLAT.clone()).scaled()


class Holder:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def scaled(self) -> torch.Tensor:
        return (self.values - self.values.mean()) / self.values.std()  # here


MADE = [by_torch, returned, by_numpy, in_place, in_a_helper, of_numbers, of_an_attribute]


@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_line_that_makes_it(make: Callable[[], Any]) -> None:
    found = first_bad_line(make, nan=True)
    assert found is not None
    assert resolve(found.site).code.endswith("# here")


def test_what_the_line_computes_with_is_told() -> None:
    found = first_bad_line(by_torch, nan=True)
    assert found is not None
    assert found.values == ["spread is 0", "x is 5 throughout", "centre is 5"]


def read_in() -> torch.Tensor:
    x = numpy.array([1.0, math.nan])
    return torch.from_numpy(x) * 2


class Stored:
    def __init__(self) -> None:
        self.rows = torch.tensor([[1.0, math.nan]])

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        return row * 2


def by_chance() -> torch.Tensor:
    return ROW / ROW.mean()


def of_minus_infinity() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(3)
    mask[1:] = -math.inf
    return ROW, mask


@pytest.mark.parametrize("make", [read_in, lambda: Stored()[0], by_chance, of_minus_infinity], ids=["read_in", "stored", "finite", "mask"])
def test_no_line_makes_it(make: Callable[[], Any]) -> None:
    assert first_bad_line(make, nan=True) is None


def test_tracing_of_the_program_itself_is_put_back() -> None:
    import sys

    def mine(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        first_bad_line(by_torch, nan=True)
        assert sys.gettrace() is mine
        with pytest.raises(ZeroDivisionError):
            first_bad_line(lambda: 1 / 0, nan=True)
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)


PROGRAM = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Signals(Dataset):
    def __init__(self):
        self.rows = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
        self.rows[13] = 4.0
        self.own = np.random.default_rng(5)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        row = self.rows[i]
        with np.errstate(all="ignore"):
            row = (row - row.mean()) / row.std()
        noise = torch.randn(6) * 0.01 + float(np.random.rand() + self.own.random()) * 0.01
        return torch.from_numpy(row) + noise, i % 2

def main():
    torch.manual_seed(0)
    np.random.seed(0)
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    data = Signals()
    for x, y in DataLoader(data, batch_size=6, num_workers={workers}):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), torch.rand(()).item(), np.random.rand())
    print(0, data.own.random(), 0)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_is_drawn_by_a_loader(box: Sandbox, workers: int) -> None:
    """The line, the sample and the hand-over are told; asking for the sample again moves no random numbers of the program."""
    source = PROGRAM.replace("{workers}", str(workers))
    plain, watched = box.plain(box.write(source)), box.watched(source)
    [incident] = watched.incidents
    origin = incident["origin"]
    assert incident["cause"]["code"] == "WN701"
    assert origin["code"] == "row = (row - row.mean()) / row.std()"
    assert origin["from"][0]["code"] == "loss = nn.functional.cross_entropy(net(x), y)"
    assert any("number 13 of Signals" in words for words in incident["cause"]["evidence"])
    rows = [[line.split() for line in run.out.splitlines() if len(line.split()) == 3] for run in (plain, watched)]
    assert [r[1:] for r in rows[0]] == [r[1:] for r in rows[1]]
    assert rows[0][:2] == rows[1][:2]
