"""Where a few bad samples are the cause and no change is proven, leaving them out is offered, with what that gave."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Finished, Sandbox

PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(6, 8)
opt = torch.optim.SGD(net.parameters(), 0.001)
data = torch.randn(6, 12, 6)
data[4, {rows}] *= 3e4  # a unit that was mistaken
for x in data:
    mean, log_variance = net(x).chunk(2, -1)
{body}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
DIVERGENCE = "    loss = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()"
SIZED = """
    total = torch.zeros(len(x))
    total += (mean**2 + log_variance.exp() - log_variance).view(len(x), -1).sum(-1)
    loss = total.mean() + torch.ones(len(x)).mean()
"""


def watched(box: Sandbox, body: str, rows: str) -> tuple[dict[str, Any], Finished]:
    """Run the program; return what is said of its bad step."""
    done = box.watched(PROGRAM.format(body=body.strip("\n"), rows=rows))
    incident: dict[str, Any] = done.incidents[0]
    assert (incident["step"], incident["cause"]["code"]) == (4, "WN201")
    return incident, done


@pytest.mark.parametrize(("rows", "them"), [("5", "this sample"), ("2:4", "these samples")])
@pytest.mark.parametrize("body", [DIVERGENCE, SIZED], ids=["all by the batch", "tensors of its size"])
def test_leaving_the_bad_samples_out_is_offered(body: str, rows: str, them: str, box: Sandbox) -> None:
    """No clamp gives a usual loss; the step without the samples does. It is no change at the line, and is said to change results."""
    incident, done = watched(box, body, rows)
    remedy = incident["remedies"][0]
    assert (remedy["result"], remedy["safe"], remedy["diff"]) == ("proven", False, "")
    assert f"leave {them} out, which changes results" in remedy["title"]
    assert remedy["effect"].startswith(f"without {them}: loss ")
    assert f"= proven: step 4 replayed without {them}: loss " in done.err
    assert {r["result"] for r in incident["remedies"][1:]} <= {"failed", "not tried"}


def test_most_of_a_batch_is_not_left_out(box: Sandbox) -> None:
    """Then it is not the samples."""
    incident, _ = watched(box, DIVERGENCE, "2:11")
    assert not any("out, which changes results" in remedy["title"] for remedy in incident["remedies"])


def test_not_proven_is_said_of_the_advice_where_the_cause_is_proven(box: Sandbox) -> None:
    """An index outside its table raises: the cause is certain, what to do about it was not replayed."""
    done = box.watched("""
        import torch
        from torch import nn
        table = nn.Embedding(4, 2)
        opt = torch.optim.SGD(table.parameters(), 0.1)
        for step in range(3):
            ids = torch.tensor([7 if step == 2 else 1])
            loss = table(ids).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
    """)
    assert done.incidents[0]["cause"]["confidence"] == "proven"
    told = " ".join(done.err.split())
    assert "= not proven: this advice was not replayed; the cause itself is proven, by direct evidence" in told


_ROWS = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), 0.01)
for s in range(6):
    {body}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
_SAMPLES = """
    x = torch.randn(8, 3)
    x[2] *= 0 if s == 4 else 1
    out = net(x) - net.bias
    loss = (out / out.norm(dim=1, keepdim=True)).square().mean()"""
_NODES = """
    pairs = torch.ones(8, 8)
    pairs[2] *= 0 if s == 4 else 1
    loss = (pairs.sum(1).pow(-0.5)[:, None] * (pairs @ net(torch.randn(8, 3)))).square().mean()"""
_QUERIES = """
    later = torch.ones(8, 8).triu(1) > 0 if s == 0 else later
    scores = net(torch.randn(8, 3)) @ torch.randn(3, 8)
    p = scores.masked_fill(later, float("-inf")).softmax(1)
    loss = (p * (p.log() if s == 4 else p)).sum(1).mean()"""
_POINTS = """
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    x[2] *= 0 if s == 4 else 1
    out = net(x) - net.bias
    kernel = torch.cdist(net(x), y).neg().exp()
    loss = (kernel @ (out / out.norm(dim=1, keepdim=True))).square().mean()"""
_STATES = """
    states, table = torch.tensor([3, 1, 2, 0]), torch.randn(4, 3)
    likely = net(table[states.repeat_interleave(3)]).view(4, 9).mean(1)
    loss = (likely / (states != (2 if s == 4 else 9))).square().mean()"""


@pytest.mark.parametrize(
    ("body", "samples"),
    [(_SAMPLES, [2]), (_NODES, []), (_QUERIES, []), (_POINTS, []), (_STATES, [])],
    ids=["samples", "nodes of a graph", "queries of an attention", "points of one problem", "states of a chain"],
)
def test_only_rows_that_the_batch_has_are_samples(body: str, samples: list[int], box: Sandbox) -> None:
    """What a step computes of pairs, or adds up with each other, has no samples that could be left out; nor has what no module is given."""
    (incident,) = box.watched(_ROWS.format(body=body.strip())).incidents
    assert incident["origin"]["samples"] == samples
