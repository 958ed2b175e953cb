"""0 / 0 at a line of the data set: the bad samples are made again with a change, and the step is played with them."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Sandbox
from test_diffs import heal

WINDOWS = """
import torch
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)

class Windows(Dataset):
    def __init__(self):
        self.x = torch.randn(48, 6) + 3
        self.x[21] = 2.0
    def __len__(self):
        return 48
    def __getitem__(self, index):
        past = self.x[index]
        mean, std = past.mean(), past.std()
        {line}
        return {returned}

if __name__ == "__main__":
    net = torch.nn.Linear(6, 1)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for x, y in DataLoader(Windows(), 8{options}):
        loss = (net(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())
"""


def remedies(box: Sandbox, line: str, returned: str = "past, mean", options: str = "") -> list[dict[str, Any]]:
    (incident,) = box.watched(WINDOWS.format(line=line, returned=returned, options=options)).incidents
    assert incident["cause"]["code"] in ("WN701", "WN702"), incident["cause"]
    found: list[dict[str, Any]] = incident["remedies"]
    return found


@pytest.mark.parametrize(
    ("line", "options", "kept"),
    [
        ("past = (past - mean) / std", "", "past = (past - mean) / std.where(std != 0, float('inf'))"),
        ("past = (past - mean) / std", ", shuffle=True, num_workers=1", "std.where(std != 0, float('inf'))"),
        ("past = torch.div(past - mean, std)", "", "std.where(std != 0, float('inf'))"),
        ("past = past - mean; past /= std", "", "past /= std.clamp_min(1e-6)"),
    ],
    ids=["a quotient", "shuffled, with a worker", "a function", "in place"],
)
def test_a_division_by_zero_in_the_data_set_is_mended_there(line: str, options: str, kept: str, box: Sandbox) -> None:
    """The change is shown as a diff of the data set's own line, and with it the program runs to its end."""
    first = remedies(box, line, options=options)[0]
    assert first["result"] == "proven" and kept in first["diff"], first
    assert "the bad samples were made again with it" in first["effect"]
    assert len(heal(box, first["diff"])) == 6


def test_a_target_that_was_divided_is_mended_too(box: Sandbox) -> None:
    """The batch holds the second of what the data set gives."""
    first = remedies(box, "mean = (past[:1] - mean) / std", returned="past, mean")[0]
    assert first["result"] == "proven" and "std.where" in first["diff"], first


@pytest.mark.parametrize(
    "line",
    [
        "past = torch.cat([past[:3] + torch.rand(3), (past[3:] - mean) / std])",
        "past = (past - mean) * std.log()",
        "past = past / std",
        "import numpy; past = torch.from_numpy(past.numpy() * 0 / std.numpy())",
    ],
    ids=["random", "no division", "a number over 0", "numpy"],
)
def test_what_comes_out_otherwise_or_is_no_division_of_torch_has_no_change(line: str, box: Sandbox) -> None:
    """A sample that is another when it is asked for again proves nothing, and what a number over 0 stands for nobody knows; the bad rows can be left out."""
    assert not any(r["diff"] for r in remedies(box, line))
