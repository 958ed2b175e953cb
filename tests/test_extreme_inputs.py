"""A row or a column of the batch that lies far outside the others is told where something overflowed, and the row is named if the step does without it."""

from __future__ import annotations

import pytest
import torch
from conftest import Sandbox
from going_bad import first, sentences

from whynan.causes.extremes import _exception

WHOLE_SLICED = """
data = torch.randn(64, 4)
data[21, 2] = -99999.0
net.weight.data.fill_(-0.1)
for step in range(0, 64, 8):
    loss = torch.exp(net(data[step:step + 8])).mean()
"""
BATCHES = """
net.weight.data.fill_(0.1)
batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(4)]
batches[2][0][3, 1] = 30000.0
for x, y in batches:
    loss = ((net(x).exp().squeeze(1) - y) ** 2).mean()
"""
COLUMN = """
net.weight.data.fill_(0.1)
for step in range(4):
    x = torch.randn(8, 4)
    x[:, 2] = 20000 + 1000 * torch.rand(8)
    loss = torch.exp(net(x)).mean()
"""
MADE = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(6):
    x = torch.randn(8, 4)
    if step == 4:
        x[3] = -99999.0
    loss = net(x).abs().exp().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
COMPUTED = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
call = CALL
for step in range(6):
    x = torch.randint(1, 100, (8, 4)).float() / 50 - 1
    x = x.clone()
    if step == 4:
        x = torch.where(torch.arange(8)[:, None] == 3, x * 0 - 196000, x)
    loss = call(x).abs().exp().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
AS_EVER = """
for step in range(4):
    x = torch.randn(8, 4)
    x[3, 1] = 30000.0
    out = net(x * torch.tensor([1.0, 1e-6, 1.0, 1.0]))
    loss = torch.exp(out.square() + (200 if step == 2 else 0)).mean()
"""


@pytest.mark.parametrize(
    ("body", "samples", "words"),
    [
        (WHOLE_SLICED, [5], "input: row 5 of f32[8, 4] holds -99999; the values of the other rows lie between -"),
        (BATCHES, [3], "input: row 3 of f32[8, 4] holds 30000; the values of the other rows lie between -"),
        (COLUMN, [], "input: column 2 of f32[8, 4] holds "),
    ],
    ids=["data cut in the loop", "batches", "a feature in other units"],
)
def test_what_lies_far_outside_is_told(body: str, samples: list[int], words: str, box: Sandbox) -> None:
    """The report names the input, and the row of it where the step is finite without."""
    incident = first(box, body)
    assert words in sentences(incident)
    assert incident["origin"]["samples"] == samples
    assert not samples or "; without it: loss " in sentences(incident)


def test_a_capsule_tells_it_too(box: Sandbox) -> None:
    """Also of a batch that the step itself has made, which nobody holds any more: a replay makes it again."""
    script = box.write(MADE)
    box.forked("run", "--run-dir", str(box.run_dir), script.name)
    done = box.forked("replay", "--trust", str(box.run_dir))
    assert "input: row 3 of f32[8, 4] holds -99999" in " ".join(done.out.split()), done.out
    assert "the same diagnosis" in done.err
    assert "also said" not in done.err


@pytest.mark.parametrize("call", ["net", "torch.compile(lambda v: net(v), backend='eager')"])
def test_what_only_the_run_can_tell_is_told_as_such(call: str, box: Sandbox) -> None:
    """That no healthy step was given such values is known to the run alone; a model may run inside a compiled function."""
    script = box.write(COMPUTED.replace("CALL", call))
    ran = box.forked("run", "--run-dir", str(box.run_dir), script.name)
    words = "input: row 3 of f32[8, 4] holds -196000"
    assert words in " ".join(ran.err.split()), ran.err
    assert words not in " ".join((done := box.forked("replay", "--trust", str(box.run_dir))).out.split())
    assert f"also said: {words}" in done.err
    assert done.status == 0


def test_values_that_healthy_steps_hold_too_are_no_news(box: Sandbox) -> None:
    """An input that was as large before did not make this step bad."""
    assert "input: " not in sentences(first(box, AS_EVER))


@pytest.mark.parametrize(
    ("data", "places"),
    [
        (torch.tensor([0.1, -0.4, 0.2, 900.0, 0.3]), [3]),
        (torch.tensor([0.0, 0.0, 0.0, 900.0]), None),  # one of a few that count at all: a sparse input
        (torch.arange(1.0, 9.0), None),
        (torch.tensor([1.0, 900.0]), None),
        (torch.zeros(8, 3), None),
        (torch.zeros(0, 3), None),
        (torch.tensor(5.0), None),
    ],
)
def test_only_an_exception_is_one(data: torch.Tensor, places: list[int] | None) -> None:
    """Few rows, rows of zeros and a wide spread have none."""
    found = _exception(data, data)
    assert (None if found is None else found.places) == places
