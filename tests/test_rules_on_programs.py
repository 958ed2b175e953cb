"""Sentences and codes of rules on whole programs: what is said must be true of that program's own values and lineage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from conftest import Sandbox

from whynan.casebook.patching import patched
from whynan.causes import catalogue

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
"""
TAIL = """
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
LENGTHS = """
for step in range(5):
    x = torch.randn(3, 5, 4)
    lens = torch.tensor([5, 3, 0 if step == 3 else 2])
    counts = {mask}
    scores = net(x).squeeze(-1).masked_fill({masked}, float("-inf"))
    loss = (scores.softmax(-1)[..., None] * x).sum(1).pow(2).mean()
"""
MASKS = {
    "positions below lengths": ("torch.arange(5)[None] < lens[:, None]", "~counts"),
    "lengths above positions": ("lens[:, None] > torch.arange(5)", "~counts"),
    "positions past lengths": ("torch.arange(5)[None] >= lens[:, None]", "counts"),
    "lengths below positions": ("lens[:, None] <= torch.arange(5)", "counts"),
}


def first(box: Sandbox, body: str, head: str = HEAD, **options: Any) -> dict[str, Any]:
    """Run a program that goes bad and return what is said of its first bad step."""
    incident: dict[str, Any] = box.watched(head + body + TAIL, **options).incidents[0]
    return incident


def sentences(incident: dict[str, Any]) -> str:
    """All that is said about the cause, in one text."""
    spans = [span["label"] for span in incident["origin"]["from"]]
    return "\n".join([incident["cause"]["label"], *incident["cause"]["evidence"], *spans])


@pytest.mark.parametrize(("mask", "masked"), MASKS.values(), ids=list(MASKS))
def test_a_length_mask_leaves_an_empty_row(mask: str, masked: str, box: Sandbox) -> None:
    """Neither side of the comparison has the shape of the scores; the change lets one entry of the empty row count and no other row differ."""
    import torch

    body = LENGTHS.format(mask=mask, masked=masked)
    incident = first(box, body)
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], incident["step"]) == ("WN401", 3)
    assert "in row 2 no entry counts" in sentences(incident)
    assert remedy["result"] == "proven"
    source = HEAD + body + TAIL
    changed = next(line.strip() for line in patched(source, remedy["diff"]).splitlines() if line.strip().startswith("counts = "))
    scope: dict[str, Any] = {"torch": torch, "lens": torch.tensor([5, 3, 0])}
    exec(changed, scope)
    kept = scope["counts"] if masked != "counts" else ~scope["counts"]
    assert kept.sum(1).tolist() == [5, 3, 1]


def test_no_change_is_offered_where_the_nearest_entry_cannot_be_named(box: Sandbox) -> None:
    """Both sides differ along the row: neither's largest entry is the nearest to counting."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.randn(3, 5, 4)
    scores = net(x).squeeze(-1)
    floor = torch.full((3, 5), -9.0)
    if step == 3:
        floor[1] = 9.0 + torch.arange(5)
    scores = scores.masked_fill(~(scores > floor), float("-inf"))
    loss = (scores.softmax(-1)[..., None] * x).sum(1).pow(2).mean()
""",
    )
    assert incident["cause"]["code"] == "WN401"
    assert not any("passes the limit" in remedy["title"] for remedy in incident["remedies"])


def test_a_rule_that_failed_is_named(box: Sandbox) -> None:
    """That no rule fits is said only where all could answer."""

    def break_rule() -> None:
        def fails(scene: catalogue.Scene) -> None:
            raise IndexError("of ours")

        catalogue.forgiving = True
        catalogue._rules["WN401"] = dataclasses.replace(catalogue.rules()["WN401"], find=fails)

    mask, masked = MASKS["positions below lengths"]
    incident = first(box, LENGTHS.format(mask=mask, masked=masked), before=break_rule)
    assert incident["cause"]["code"] == "WN901"
    assert "the rule for WN401 failed" in sentences(incident)
    assert "no rule of the catalogue fits" not in sentences(incident)


SPREADS = {
    "a row": ("x[2] = 0.5", "(x - x.mean(1, keepdim=True)) / {of}", "x.std(1, keepdim=True)", "1 of 8 rows is constant along dim 1"),
    "by hand": (
        "x[2] = 0.5",
        "(x - x.mean(1, keepdim=True)) / {of}",
        "(x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True).sqrt()",
        "1 of 8 rows is constant along dim 1",
    ),
    "a range": ("x[2:4] = 0.5", "x / {of}", "x.amax(1, keepdim=True) - x.amin(1, keepdim=True)", "2 of 8 rows are constant along dim 1"),
    "a column": ("x[:, 1] = 0.5", "(x - x.mean(0)) / {of}", "x.std(0)", "1 of 4 columns hold one value in all 8 rows"),
    "all rows": ("x[:] = x[:1]", "(x - x.mean(0)) / {of}", "x.std(0)", "the standard deviation of 8 identical rows"),
}


@pytest.mark.parametrize(("bad", "norm", "of", "words"), SPREADS.values(), ids=list(SPREADS))
def test_what_is_constant_is_said_along_the_reduced_dimension(bad: str, norm: str, of: str, words: str, box: Sandbox) -> None:
    """Rows are called identical only where they are."""
    body = f"""
for step in range(5):
    x = torch.randn(8, 4)
    if step == 3:
        {bad}
    spread = {of}
    loss = (net({norm.format(of="spread")}) - 1).pow(2).mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN404"
    assert words in sentences(incident)
    assert ("identical rows" in sentences(incident)) is ("identical rows" in words)


def test_a_difference_of_sums_is_no_variance(box: Sandbox) -> None:
    """An overlap over a union is 0 / 0: what is subtracted is no mean of what it is subtracted from."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.rand(6, 4)
    target, guess = (torch.rand(6, 1) > 0.5).float(), net(x).sigmoid()
    if step == 3:
        target, guess = target * 0, (guess - 2).relu()
    both = (guess * target).sum()
    more, less = guess.sum() - both, target.sum() - both
    loss = 1 - both / (both + 0.5 * more + 0.5 * less)
""",
    )
    assert incident["cause"]["code"] == "WN104"
