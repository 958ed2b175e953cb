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
