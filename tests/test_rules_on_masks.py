"""Masks, counts, means and what is divided by them, on whole programs: what is said must be true of that program's own values and lineage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from conftest import Sandbox
from going_bad import HEAD, TAIL, first, sentences

from whynan.casebook.patching import patched
from whynan.causes import catalogue

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


# a target without a hit, and a guess without one
OVERLAP = """
for step in range(5):
    x = torch.rand(6, 4)
    target, guess = (torch.rand(6, 1) > 0.5).float(), net(x).sigmoid()
    if step == 3:
        target, guess = target * 0, (guess - 2).relu()
"""


def test_a_difference_of_sums_is_no_variance(box: Sandbox) -> None:
    """An overlap over a union is 0 / 0: what is subtracted is no mean of what it is subtracted from."""
    incident = first(
        box,
        OVERLAP
        + """    both = (guess * target).sum()
    more, less = guess.sum() - both, target.sum() - both
    loss = 1 - both / (both + 0.5 * more + 0.5 * less)
""",
    )
    assert incident["cause"]["code"] == "WN104"


ZEROS = {
    "weights over their sum": ("torch.rand(6, 1) * 0.01", "w = w * 0", "w / w.sum()"),
    "an input over its sum": ("torch.rand(6, 1)", "w = torch.zeros(6, 1)", "w / w.sum(0, keepdim=True)"),
    "a mean with weights": ("torch.rand(6, 1)", "w = torch.zeros(6, 1)", "w.expand(6, 2) / w.expand(6, 2).sum(0)"),
}
SELECTIONS = {
    "a float mask": ("(torch.rand(6, 1) > 0.2).float()", "w = w * 0", "w / w.sum()"),
    "ones": ("torch.ones(6, 1)", "w = torch.zeros(6, 1)", "w / w.sum()"),
    "a mask on weights": ("torch.rand(6, 1)", "keep = keep * 0", "w * keep / (w * keep).sum(0, keepdim=True)"),
}


def weighted(box: Sandbox, w: str, bad: str, share: str) -> dict[str, Any]:
    """A loss with shares that add up to 1, and in the bad step to nothing."""
    return first(
        box,
        f"""
for step in range(5):
    x, w, keep = torch.randn(6, 4), {w}, (torch.rand(6, 1) > 0.1).float()
    if step == 3:
        {bad}
    loss = ({share} * (net(x) - 1).pow(2)).sum()
""",
    )


@pytest.mark.parametrize(("w", "bad", "share"), ZEROS.values(), ids=list(ZEROS))
def test_weights_that_are_0_are_no_mask(w: str, bad: str, share: str, box: Sandbox) -> None:
    """In healthy steps they are other numbers than 0 and 1."""
    incident = weighted(box, w, bad, share)
    assert (incident["step"], incident["cause"]["code"]) == (3, "WN104")
    assert "mask" not in sentences(incident)


@pytest.mark.parametrize(("w", "bad", "share"), SELECTIONS.values(), ids=list(SELECTIONS))
def test_masks_of_floats_stay_masks(w: str, bad: str, share: str, box: Sandbox) -> None:
    """They hold 0 and 1 only, in healthy steps too."""
    assert weighted(box, w, bad, share)["cause"]["code"] == "WN402"


def test_opacities_that_are_0_are_no_mask(box: Sandbox) -> None:
    """They are learned: that they are 0 everywhere is what the network says."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.rand(8, 5, 4)
    density = torch.relu(net(x)[..., 0] + (2 if step < 3 else -20))
    opacity = 1 - torch.exp(-density)
    passed = torch.cumprod(torch.cat([torch.ones(8, 1), 1 - opacity], 1), 1)[:, :-1]
    w = opacity * passed
    loss = ((w[..., None] * x).sum(1) / w.sum(1, keepdim=True) - 1).pow(2).mean()
""",
    )
    assert incident["cause"]["code"] == "WN104"


def test_a_union_is_no_count(box: Sandbox) -> None:
    """The mask of the target is a part of it only."""
    incident = first(
        box,
        OVERLAP
        + """    total = target.sum() + guess.sum()
    loss = 1 - 2 * (guess * target).sum() / total.clamp_min(0)
""",
    )
    assert incident["cause"]["code"] == "WN104"


def test_a_union_with_a_norm_in_it_is_no_norm(box: Sandbox) -> None:
    """That a zero vector is divided by its own norm is said only where it is that vector's."""
    incident = first(
        box,
        OVERLAP
        + """    apart = torch.linalg.vector_norm(guess - target, ord=1)
    both = (guess.sum() + target.sum() - apart) / 2
    loss = 1 - both / (both + apart)
""",
    )
    assert incident["cause"]["code"] == "WN104"
    assert "norm" not in sentences(incident).replace("gradient norm", "")


def test_a_projection_taken_off_is_no_mean(box: Sandbox) -> None:
    """What is left of a vector without its part along another one is 0 / 0 over its own length."""
    incident = first(
        box,
        """
for step in range(5):
    x, along = torch.randn(6, 4), torch.eye(4)[:1]
    if step == 3:
        x[2, 1:] = 0
    rest = x - (x * along).sum(-1, keepdim=True) * along
    loss = net(rest / torch.sqrt((rest**2).sum(-1, keepdim=True))).pow(2).mean()
""",
    )
    assert incident["cause"]["code"] == "WN104"


def test_a_mean_whose_weights_are_all_0(box: Sandbox) -> None:
    """Weights that are numbers, not a mask: a mean of nothing all the same, and the words say weights."""
    done = box.watched("""
        import torch
        from torch import nn
        torch.manual_seed(0)
        net = nn.Linear(5, 3)
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        for s in range(8):
            w = torch.rand(6) * (1.0 if s != 5 else 0.0)
            each = nn.functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 3, (6,)), reduction="none")
            loss = (each * w).sum() / w.sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
    """)
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["remedies"][0]["result"]) == (5, "WN402", "proven")
    assert "mask" not in " ".join(incident["cause"]["evidence"])


UNDERFLOWS = {
    "a sum of exponentials": ("loss = -torch.log(torch.exp(s).sum(1)).mean()", "torch.logsumexp(s, dim=1)"),
    "a sum that keeps its dimension": ("loss = -(torch.exp(s).sum(1, keepdim=True).log() + s).mean()", "torch.logsumexp(s, dim=1, keepdim=True)"),
    "a sum with a name": ("e = s.exp()\n    total = e.sum(dim=1)\n    loss = -torch.log(total).mean()", "torch.logsumexp(s, dim=1)"),
    "a mean": ("loss = -torch.log(torch.exp(s).mean(1)).mean()", "torch.logsumexp(s, dim=1) - torch.tensor(s.shape[1]).log()"),
    "a mean of what cannot be computed twice": (
        "loss = torch.log(torch.mean(torch.exp(net(x) * torch.where(bad, 400.0, 1.0)))) - s[:2].mean()",
        "torch.logsumexp((exponent := net(x) * torch.where(bad, 400.0, 1.0)).flatten(), dim=0) - torch.tensor(exponent.numel()).log()",
    ),
    "a sum over everything": ("loss = -torch.log((s - 150.0 * (step == 3)).exp().sum())", "torch.logsumexp((s - 150.0 * (step == 3)).flatten(), dim=0)"),
    "a softmax": ("loss = (torch.exp(s) / torch.exp(s).sum(-1, keepdim=True) * x).pow(2).mean()", "torch.softmax(s, dim=-1)"),
    "a softmax on two lines": ("w = torch.exp(s)\n    loss = (w / w.sum(-1, keepdim=True) * x).pow(2).mean()", "torch.softmax(s, dim=-1)"),
    "a rest of 1": ("loss = -torch.log(1 - torch.exp(-h)).mean()", "torch.log(-torch.expm1(-h))"),
    "a rest of 1 with a name": ("p = 1 - torch.exp(-h)\n    loss = -p.log().mean()", "torch.log(-torch.expm1(-h))"),
    "a rest of 1 by log1p": ("loss = -torch.log1p(-torch.exp(-h)).mean()", "torch.log(-torch.expm1(-h))"),
    "a rest of 1 where the factor is 0": ("loss = -(torch.log(1 - torch.exp(-h)) * ~bad).mean()", "torch.log(-torch.expm1(-h))"),
}


@pytest.mark.parametrize(("lines", "text"), UNDERFLOWS.values(), ids=list(UNDERFLOWS))
def test_exponentials_that_underflow_have_a_form_that_does_not(lines: str, text: str, box: Sandbox) -> None:
    """The function that never leaves the logarithms comes before any clamp, and the program that the diff gives trains through."""
    head = HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 4)")
    body = f"""
for step in range(6):
    x = torch.randn(6, 4)
    bad = (torch.arange(6) == 2)[:, None] & (step == 3)
    s = net(x) - torch.where(bad, 150.0, 0.0)
    h = F.softplus(net(x)) * torch.where(bad, 1e-9, 1.0)
    {lines}
    print(loss.item())
"""
    incident = first(box, body, head)
    remedy = incident["remedies"][0]
    assert (incident["step"], remedy["result"], remedy["safe"]) == (3, "proven", True)
    assert text in remedy["diff"]
    healed = box.plain(box.write(patched(head + body + TAIL, remedy["diff"]), "healed.py"))
    assert len(healed.out.splitlines()) == 6
    assert "nan" not in healed.out and "inf" not in healed.out


def test_a_mean_over_dimensions_with_a_name_gets_no_diff(box: Sandbox) -> None:
    """Their size cannot be written down: the change is proven, and told in words."""
    incident = first(
        box,
        """
over = (0, 1)
for step in range(5):
    s = net(torch.randn(6, 4)) - 150.0 * (step == 3)
    loss = -torch.exp(s).mean(over).log()
""",
    )
    remedy = incident["remedies"][0]
    assert (incident["step"], remedy["result"], remedy["safe"], remedy["diff"]) == (3, "proven", True, "")


def test_a_quotient_of_other_exponentials_is_no_softmax(box: Sandbox) -> None:
    """What is divided by must be the sum of the same exponentials, and the name must not have been given another value."""
    for lines in (
        "w = torch.exp(s) / torch.exp(2 * s).sum(-1, keepdim=True)",
        "e = torch.exp(s)\n    e = e * 2\n    w = torch.exp(s) / e.sum(-1, keepdim=True)",
    ):
        incident = first(
            box,
            f"""
for step in range(5):
    x = torch.randn(6, 4)
    s = net(x).expand(6, 4) - (300.0 if step == 3 else 0.0)
    {lines}
    loss = (w * x).pow(2).mean()
""",
        )
        assert incident["cause"]["code"] == "WN104"
        assert not any("softmax" in remedy["title"] for remedy in incident["remedies"])


SMOOTHED = {
    "by torch": ("loss = F.cross_entropy(scores, y, label_smoothing=0.1)", "label smoothing gives masked classes a share of the target"),
    "by hand": (
        "lp = scores.log_softmax(-1)\n    loss = F.nll_loss(lp, y) - 0.1 * lp.mean(-1).mean()",
        "masked entries are added up: 2 of 24 values are -inf by a mask",
    ),
}


@pytest.mark.parametrize("masked", ['scores = net(x).masked_fill(~ok, float("-inf"))', 'scores = net(x)\n    scores[~ok] = float("-inf")'])
@pytest.mark.parametrize(("lines", "label"), SMOOTHED.values(), ids=list(SMOOTHED))
def test_a_smoothed_target_reaches_masked_classes(lines: str, label: str, masked: str, box: Sandbox) -> None:
    """Every class is a little of the target, and some have probability 0 by a mask, however it is written."""
    incident = first(
        box,
        f"""
for step in range(5):
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    ok = torch.ones(6, 4, dtype=torch.bool)
    ok[2, 2:] = step != 3
    {masked}
    {lines}
""",
        HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 4)"),
    )
    assert (incident["cause"]["code"], incident["cause"]["label"], incident["origin"]["samples"]) == ("WN405", label, [2])
    assert incident["remedies"][0]["result"] == "proven"


def test_classes_that_are_never_to_be_chosen_are_written_over(box: Sandbox) -> None:
    """Padding of a vocabulary: the same columns of every row, set in place; a change lets no gradient into them, and they had none."""
    body = "for step in range(5):\n    x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])\n    out = net(x)\n    out[..., 2:] = -float('inf')\n"
    line = "    loss = F.cross_entropy(out.view(-1, 4), y, label_smoothing=0.1 * (step == 3))\n"
    incident = first(box, body + line, HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 4)"))
    assert (incident["cause"]["code"], incident["origin"]["code"]) == ("WN405", line.strip())
    assert incident["remedies"][0]["result"] == "proven"


def test_a_log_softmax_by_hand_over_a_masked_row(box: Sandbox) -> None:
    """The infinity that is taken off is that of a row in which nothing is left; forbidden places must not count as sure ones."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.randn(6, 4)
    far = torch.rand(6, 4) < 0.3
    far[2] = step == 3
    score = (x * net(x)).masked_fill(far, float("-inf"))
    score = score - torch.logsumexp(score, dim=-1, keepdim=True)
    loss = score.exp().square().mean()
""",
    )
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["samples"]) == (3, "WN401", [2])
    assert "1 of 6 rows are entirely -inf" in incident["cause"]["evidence"][0]
    assert (incident["remedies"][0]["result"], "log_softmax" in incident["remedies"][0]["diff"]) == ("proven", True)


@pytest.mark.parametrize("spelling", ["z.reciprocal()", "z ** -1", "1.0 / z", "2 / z", "torch.div(1.0, z)", "torch.true_divide(1, z)"])
@pytest.mark.parametrize("selected", ["torch.where(z > 0, {}, 0.0)", "({}).masked_fill(z == 0, 0.0)"], ids=["where", "masked_fill"])
def test_a_division_that_is_thrown_away_is_one_cause_in_every_spelling(spelling: str, selected: str, box: Sandbox) -> None:
    """Torch computes `1 / z` as a reciprocal, and the slope of `div(1, z)` before it meets the gradient: the code and the change are the same."""
    body = f"""
for step in range(5):
    z = net(torch.randn(8, 4)).abs() * (torch.arange(8) != 2 if step == 3 else torch.ones(8))[:, None]
    inv = {selected.format(spelling)}
    loss = inv.tanh().square().mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN502" and incident["cause"]["confidence"] == "proven"
    remedy = incident["remedies"][0]
    assert "z.where(z != 0, 1.0)" in remedy["diff"] or "z.clamp_min(1e-6) ** -1" in remedy["diff"]
    assert "no gradient passes" not in remedy["effect"]  # none came to what is thrown away
    assert [value["name"] for value in incident["origin"]["inputs"]] == ["z"]


def test_what_throws_an_entry_away_is_named_and_not_a_mask_that_keeps_it(box: Sandbox) -> None:
    """Hardest pairs of a batch: a point's distance to itself passes its mask with factor 1; what is picked by size is no branch."""
    body = """
for step in range(2):
    points, kind = net(torch.randn(6, 4)), torch.arange(6) // 3
    square = (points.unsqueeze(1) - points).square().sum(-1)
    gaps, same = square.sqrt(), kind[:, None] == kind
    loss = (gaps * same).max(1).values.mean() - (gaps + 9.0 * same).min(1).values.mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN501"
    assert "selected here" not in sentences(incident)


@pytest.mark.parametrize("called", ["pow_(-0.5)", "pow_(-2)"])
@pytest.mark.parametrize("written", ["inv.masked_fill_(inv == float('inf'), 0)", "inv.masked_fill_(dead, 0)"], ids=["by the result", "by the argument"])
def test_an_inverse_in_place_that_is_thrown_away(called: str, written: str, box: Sandbox) -> None:
    """Degrees of a graph: autograd copies what is overwritten, and the copy is not what the program computed; the change is proven in place."""
    body = f"""
for step in range(5):
    deg = net(torch.rand(8, 4)).abs() * (torch.arange(8) != 2 if step == 3 else torch.ones(8))[:, None]
    dead = deg == 0
    inv = deg.{called}
    {written}
    loss = inv.tanh().square().mean()
"""
    incident = first(box, body)
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["code"]) == (3, "WN502", f"inv = deg.{called}")
    assert "clone" not in sentences(incident) and "selected here by masked_fill" in sentences(incident)
    assert [value["name"] for value in incident["origin"]["inputs"]] == ["deg"]
    remedy = incident["remedies"][0]
    assert (remedy["result"], "deg.copy_(" in remedy["diff"]) == ("proven", True)


def test_what_is_thrown_away_further_on_leaves_a_finite_loss(box: Sandbox) -> None:
    """A density by hand: a limit and a choice some operations after the quotient take it out, and only the gradient shows it."""
    body = """
for step in range(5):
    x = torch.randn(8, 4)
    scale = torch.relu(net(x)) * 0 if step == 3 else net(x).abs() + 1
    dens = -torch.log(scale) - 0.5 * ((x - net(x)) / scale) ** 2
    loss = torch.where(scale > 0.05, dens.clamp(-20, 20), torch.zeros_like(dens)).mean() + net(x).square().mean()
"""
    incident = first(box, body)
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["phase"]) == (3, "WN502", "backward")
    assert "is finite: only the gradient shows this" in sentences(incident) and "selected here by" in sentences(incident)


SPARSE = """
def sparse(score, dim=-1):
    top = score.max(dim, keepdim=True)[0]
    low, high = top - 1, top - 1 / score.shape[dim]
    for _ in range(20):
        middle = low + (high - low) / 2
        low = torch.where((score - middle).clamp_min(0).square().sum(dim, keepdim=True) >= 1, middle, low)
    share = (score - low).clamp_min(0).square()
    return share / share.sum(dim, keepdim=True)

def by_hand(score, dim=-1):
    share = torch.exp(score - score.amax(dim, keepdim=True))
    return share / share.sum(dim, keepdim=True)

"""


@pytest.mark.parametrize("written", ["torch.where(none, -torch.inf, score)", "score.masked_fill(none, float('-inf'))"], ids=["where", "masked_fill"])
@pytest.mark.parametrize("name", ["sparse", "by_hand"])
def test_a_normalisation_by_hand_over_a_masked_row(name: str, written: str, box: Sandbox) -> None:
    """The maximum of a row that is all -inf is taken off: the row is told, and a finite number is tried where the program writes the infinity."""
    body = f"""
for step in range(5):
    x, ids = torch.randn(6, 4), torch.randint(1, 9, (6, 4))
    ids[torch.arange(6) == (2 if step == 3 else 9)] = 0
    none = ids == 0
    score = x * net(x)
    score = {written}
    loss = ({name}(score) * x).sum(1).square().mean()
"""
    incident = first(box, body, HEAD + SPARSE)
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["samples"]) == (3, "WN401", [2])
    assert "1 of 6 rows are entirely -inf" in incident["cause"]["evidence"][0]
    remedy = incident["remedies"][0]
    assert (remedy["result"], "-1e4" in remedy["diff"]) == ("proven", True)


@pytest.mark.parametrize(("quotient", "code"), [("counts.sum() / counts", "WN103"), ("torch.zeros(4).index_add(0, y, picked) / counts", "WN402")])
def test_a_share_over_a_count_of_zero_is_no_mean(quotient: str, code: str, box: Sandbox) -> None:
    """Counts stand below the fraction line of a class weight too; only a mean of nothing has 0 above it."""
    body = f"""
for step in range(5):
    y = torch.arange(8) % (3 if step == 3 else 4)
    picked, counts = net(torch.randn(8, 4)).squeeze(1), torch.bincount(y, minlength=4).float()
    loss = ({quotient} * net.weight).sum()
"""
    assert first(box, body)["cause"]["code"] == code


GRAPH = """
row, col = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2]), torch.tensor([1, 2, 3, 4, 5, 0, 2, 1])
for step in range(5):
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    keep = (col != 0) | (step != 3)
    r, c = row[keep], col[keep]
    {share}
    loss = (torch.zeros(6, 1).index_add(0, c, w[r, None] * w[c, None] * net(x)[r]) - y).pow(2).mean()
    print(loss.item())
"""
DEGREES = {
    "a power": "w = torch.zeros(6).index_add(0, c, torch.ones(len(c))).pow(-0.5)",
    "an operator": "w = torch.bincount(c, minlength=6).float() ** -0.5",
    "rsqrt": "w = torch.rsqrt(torch.bincount(c, minlength=6).float())",
    "reciprocal": "w = torch.bincount(c, minlength=6).float().reciprocal().sqrt()",
    "in place": "w = torch.bincount(c, minlength=6).float(); w.pow_(-0.5)",
}


@pytest.mark.parametrize("share", DEGREES.values(), ids=list(DEGREES))
def test_a_count_of_0_gives_0(share: str, box: Sandbox) -> None:
    """A node without neighbours has no share; with 1e-6 in the place of its degree it would have the largest. The others stay as they are."""
    body = GRAPH.format(share=share)
    incident = first(box, body)
    remedy = incident["remedies"][0]
    assert (incident["step"], incident["cause"]["code"], remedy["result"]) == (3, "WN106", "proven")
    changed = box.plain(box.write(patched(HEAD + body + TAIL, remedy["diff"]), "healed.py")).out
    zeroed = GRAPH.format(share=f"{share}; w = w.nan_to_num(posinf=0)")
    assert changed == box.plain(box.write(HEAD + zeroed + TAIL, "zeroed.py")).out


def test_what_is_no_count_is_kept_above_0(box: Sandbox) -> None:
    """Sums of weights are no whole numbers: what stands for 0 there is for the program to say."""
    body = GRAPH.format(share="w = torch.zeros(6).index_add(0, c, torch.rand(len(c))).pow(-0.5)")
    assert any("clamp_min(1e-6)" in remedy["diff"] for remedy in first(box, body)["remedies"])


SHARES = {
    "features, in the step": ("", "rows = words / words.sum(1, keepdim=True)", "net(rows)", "WN104"),
    "features, before it": ("rows = words / words.sum(1, keepdim=True)", "", "net(rows)", "WN104"),
    "neighbours, in the step": ("", "rows = words / words.sum(1, keepdim=True)", "rows @ net(x)", "WN402"),
    "neighbours, before it": ("rows = words / words.sum(1, keepdim=True)", "", "rows @ net(x)", "WN402"),
}


@pytest.mark.parametrize(("before", "within", "used", "code"), SHARES.values(), ids=list(SHARES))
def test_rows_that_add_up_to_1_are_a_mean_only_where_they_weigh_something(before: str, within: str, used: str, code: str, box: Sandbox) -> None:
    """A bag of words over its own sum is data: 0 / 0. The same as an adjacency is multiplied by what it averages."""
    head = f"""{HEAD.partition("opt =")[0]}
words = (torch.rand(4, 4) > 0.3).float()
words[1] = 0
{before}
opt = torch.optim.SGD(net.parameters(), 0.01)
"""
    body = f"""
for step in range(2):
    x = torch.rand(4, 4)
    {within or "pass"}
    loss = {used}.pow(2).mean()
"""
    assert first(box, body, head)["cause"]["code"] == code


def test_a_logaddexp_of_nothing_is_not_called_a_softmax(box: Sandbox) -> None:
    """The title says what the program wrote; no entry of a row was masked."""
    body = """
for step in range(5):
    low = torch.full((8, 1), -torch.inf if step == 3 else 0.0)
    loss = torch.logaddexp(net(torch.randn(8, 4)) + low, low).clamp_min(-9).mean()
"""
    incident = first(box, body)
    assert (incident["cause"]["code"], incident["cause"]["title"]) == ("WN401", "logaddexp of two that are both -inf")


@pytest.mark.parametrize(
    ("kept", "guard"),
    [("torch.where(has, pooled, torch.zeros(1))", "where"), ("pooled[has[:, 0]]", "index"), ("pooled.nan_to_num()", "nan_to_num")],
    ids=["where", "rows that are picked", "nan_to_num"],
)
def test_a_guard_that_keeps_the_loss_finite_is_told_why_it_does_not_keep_the_gradient(kept: str, guard: str, box: Sandbox) -> None:
    """The loss is told as finite, with the line that keeps the bad rows out of it; two places of one line stand under that line once."""
    body = f"""
for step in range(3):
    x, mask = torch.randn(6, 5, 4), torch.arange(5) < torch.tensor([[3], [1], [0 if step == 2 else 2], [5], [4], [2]])
    h = net(x)
    score = h.squeeze(-1).masked_fill(mask == 0, float("-inf"))
    pooled = (score.softmax(-1).unsqueeze(-1) * h).sum(1)
    has = mask.any(1, keepdim=True)
    loss = {kept}.square().mean()  # the guard
"""
    program = HEAD + body + TAIL
    done = box.watched(program)
    (incident,) = done.incidents
    line = next(number for number, text in enumerate(program.splitlines(), 1) if "# the guard" in text)
    told = f" is finite: {guard} at line {line} does not take these entries; on the way back their gradient is 0, and 0 * nan is nan"
    assert incident["cause"]["code"] == "WN401" and any(words.endswith(told) for words in incident["cause"]["evidence"]), incident["cause"]
    assert "this keeps it out of the loss, not out of the gradient" in sentences(incident)
    assert done.err.count("score = h.squeeze") == 1 and "an `if` that asks whether everything is masked" in done.err
