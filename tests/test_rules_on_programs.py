"""Sentences and codes of rules on whole programs: what is said must be true of that program's own values and lineage."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

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


def test_a_loss_made_of_a_bad_gradient_is_not_called_finite(box: Sandbox) -> None:
    """A derivative that is taken inside the step goes into its loss."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.rand(6, 4) + 0.1
    if step == 3:
        x[2] = 0
    x.requires_grad_()
    out = torch.sqrt(x.pow(2).sum(1)) * net(x)[:, 0]
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    loss = (slope.norm(dim=1) - 1).pow(2).mean()
""",
    )
    assert incident["cause"]["code"] == "WN501"
    assert "goes into the loss, which is nan" in sentences(incident)
    assert "(nan) are finite" not in sentences(incident)


def test_what_a_function_adds_up_inside_is_no_term(box: Sandbox) -> None:
    """Arguments of a call are not what is added."""
    head = HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 3)")
    body = """
for step in range(5):
    labels = torch.randint(0, 3, (6,))
    if step == 3:
        labels[:] = -100
    {}
"""
    one = first(box, body.format("loss = F.cross_entropy(net(torch.randn(6, 4)), labels, label_smoothing=0.1)"), head)
    assert one["cause"]["code"] == "WN402"
    assert "terms of the loss" not in sentences(one)


def test_terms_that_are_added_keep_their_names(box: Sandbox) -> None:
    """A term that adds something up inside is one term."""
    head = HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 3)")
    incident = first(
        box,
        """
for step in range(5):
    labels, out = torch.randint(0, 3, (6,)), net(torch.randn(6, 4))
    if step == 3:
        labels[:] = -100
    size = out.square().mean()
    loss = F.cross_entropy(out, labels, label_smoothing=0.1) + size
""",
        head,
    )
    (words,) = [line for line in sentences(incident).splitlines() if line.startswith("terms of the loss: ")]
    assert words.count("nan") == 1
    assert "size 0." in words and "labels nan" not in words


def test_arguments_exactly_at_the_edge_are_counted(box: Sandbox) -> None:
    """acos has a value at 1 itself: such an argument is at the edge all the same."""
    incident = first(
        box,
        """
for step in range(5):
    cosine = torch.tanh(net(torch.randn(6, 4)))[:, 0]
    if step == 3:
        cosine = cosine * 0 + torch.tensor([1.0, 1.0, 1.0000001, 0.5, 0.2, 0.1])
    loss = torch.acos(cosine).mean()
""",
    )
    assert incident["cause"]["code"] == "WN107"
    assert "3 of 6 arguments are at or past the edge, 1 gives no finite value" in sentences(incident)


def test_a_row_of_something_else_than_the_batch_is_no_sample(box: Sandbox) -> None:
    """A state that cannot be reached: the loss is finite and only its gradient is bad, and a large negative number gives the same loss."""
    incident = first(
        box,
        """
moves = nn.Parameter(torch.randn(5, 5) * 0.1)
never = torch.zeros(5, 5)
never[:, 0] = float("-inf")
opt = torch.optim.SGD([moves], 0.01)
for step in range(3):
    emit = torch.randn(7, 5)
    state = torch.full((5,), float("-inf"))
    state[0] = 0.0
    for at in range(7):
        state = torch.logsumexp(state[:, None] + moves + never, 0) + emit[at]
    loss = torch.logsumexp(state, 0) - moves.sum()
""",
    )
    remedy = incident["remedies"][0]
    assert incident["cause"]["code"] == "WN401"
    assert not incident["origin"]["samples"]
    assert "of the batch" not in sentences(incident)
    assert "is finite; the gradient is not" in sentences(incident)
    assert not any("samples" in remedy["title"] for remedy in incident["remedies"])
    assert (remedy["result"], "-1e30" in remedy["diff"]) == ("proven", True)


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
    assert "norm" not in sentences(incident)


RATES = {"a regression": ("torch.exp(out)", "0.7"), "counts": ("torch.exp(out) - out", "5.0"), "amsgrad": ("torch.exp(out)", "1.0, amsgrad=True")}
DEEP = """
import torch
from torch import nn
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.Adam(net.parameters(), lr={rate})
for step in range(6):
    x = torch.randn(32, 6)
    {bad}
    out = net(x).squeeze(-1)
    loss = ({made} - x.abs().sum(-1)).pow(2).mean()
"""


@pytest.mark.parametrize(("made", "rate"), RATES.values(), ids=list(RATES))
def test_a_rate_that_replaces_the_weights_of_layers_is_told(made: str, rate: str, box: Sandbox) -> None:
    """An update of Adam moves each weight by about the rate, whatever the gradient."""
    incident = first(box, DEEP.format(made=made, rate=rate, bad=""), head="")
    assert incident["cause"]["code"] == "WN605"
    assert f"the learning rate {float(rate.split(',')[0]):g}" in sentences(incident)
    assert "layers of these shapes are made with weights near 0.1685" in sentences(incident)


@pytest.mark.parametrize("rate", ["1e-3", "0.7"])
def test_a_huge_input_is_not_the_rate(rate: str, box: Sandbox) -> None:
    """In the first step nothing was updated yet, and ordinary weights leave the range too."""
    incident = first(box, DEEP.format(made="torch.exp(out)", rate=rate, bad="x = x * 1e6"), head="")
    assert incident["cause"]["code"] == "WN201"


def test_pixels_that_are_optimized_are_no_layer(box: Sandbox) -> None:
    """They are of any size, and a rate of 5 suits them."""
    incident = first(
        box,
        """
net = nn.Conv2d(3, 4, 3)
image = nn.Parameter(torch.rand(1, 3, 8, 8) * 9)
opt = torch.optim.Adam([image], lr=5.0)
for step in range(5):
    scale = 1.0 if step < 3 else 100.0
    loss = net(image).abs().mean() + torch.exp(image.abs().mean() * scale)
""",
    )
    assert incident["cause"]["code"] == "WN201"


@pytest.mark.parametrize("loss", ["nn.MSELoss()(net(x), y)", "crit(net(x), y[:6])", "F.mse_loss(net(x), y)", "(net(x) - y).pow(2).mean()", "crit(net(x), y)"])
def test_a_bad_target_has_its_name(loss: str, box: Sandbox) -> None:
    """The argument is called what the source calls it, or a target; an input it is not."""
    incident = first(
        box,
        f"""
crit = nn.MSELoss()
for step in range(5):
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    if step == 3:
        y[2] = float("nan")
    loss = {loss}
""",
    )
    (value,) = incident["origin"]["inputs"]
    assert incident["cause"]["code"] == "WN702"
    assert value["name"] == ("target" if loss.startswith("nn.") else "y[:6]" if "[" in loss else "y")


ONE = {
    "denominator": ("net(x).sum() / (net(x).sum() * w)", "the only denominator is 0"),
    "argument": ("torch.sqrt(net(x).square().sum() * w).mean()", "the only argument of sqrt is 0"),
    "pole": ("torch.lgamma(x[:, 0] * torch.tensor([w, 1, 1, 1, 1, 1])).sum() * net(x).sum()", "1 argument lies on a pole"),
    "quotient": ("((net(x) * w).sum() / (net(x) * w).sum())", "1 quotient is 0 / 0"),
    "zero": ("torch.log((net(x).sum().abs() * (2 * w - 1)).relu()).mean()", "the 0 comes from a relu"),
}


@pytest.mark.parametrize(("loss", "words"), ONE.values(), ids=list(ONE))
def test_one_thing_is_told_in_the_singular(loss: str, words: str, box: Sandbox) -> None:
    """There is one value, and it is bad; what made it is named as that."""
    incident = first(
        box,
        f"""
for step in range(5):
    x, w = torch.randn(6, 4), float(step != 3)
    loss = {loss}
""",
    )
    assert words in sentences(incident)


def test_one_column_is_one(box: Sandbox) -> None:
    """The bad values of the input stand in one column."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.randn(6, 4)
    if step == 3:
        x[1:3, 2] = float("nan")
    loss = net(x).mean()
""",
    )
    assert "column 2" in sentences(incident).splitlines()


@pytest.mark.parametrize(("loss", "function"), [("penalty(x, w)", "penalty"), ("sum([torch.log(v.abs() * w).mean() for v in x])", "")])
def test_a_comprehension_is_no_function(loss: str, function: str, box: Sandbox) -> None:
    """The header names the function that a comprehension stands in; at the level of the module there is none."""
    incident = first(
        box,
        f"""
def penalty(x, w):
    return sum([torch.log(v.abs() * w).mean() for v in x])
for step in range(5):
    x, w = torch.randn(6, 4), float(step != 3)
    loss = {loss} * net(x).mean()
""",
    )
    assert incident["origin"]["function"] == function


GRADIENTS = {
    "inside a formula": ("(1 / (out * scale)).mean() * (1 if step < 3 else 1e-22)", "1e-24", True),  # (1 / d) / d; the gradient itself is near 1e26
    "of a number": ("(out * 1e-35 * scale * scale).mean()", "1e30", False),
    "of a factor": ("(out * 1e-35 * torch.full((6, 1), scale) * torch.full((6, 1), scale)).mean()", "1e30", False),
}


@pytest.mark.parametrize(("loss", "scale", "inside"), GRADIENTS.values(), ids=list(GRADIENTS))
def test_a_value_inside_the_formula_of_a_gradient_is_not_called_the_gradient(loss: str, scale: str, inside: bool, box: Sandbox) -> None:
    """Where the backward node computes on with what overflowed, its size says nothing of the gradient."""
    incident = first(
        box,
        f"""
for step in range(5):
    out, scale = net(torch.randn(6, 4)).square() + 1, 1.0 if step < 3 else {scale}
    loss = {loss}
""",
    )
    said = sentences(incident)
    assert incident["cause"]["code"] == "WN503"
    assert ("a value on the way to the gradient, " in said, "a value on the way to the gradient of " in said) == (inside, inside)
    assert ("the gradient of " in said.replace("on the way to the gradient of ", "")) is not inside


CLASSES = """
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 0.01)
weights = torch.tensor([1.0, 2.0, float("{bad}")])
crit = {crit}
for step in range(5):
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 2 if step == 3 else 1])
    hot = F.one_hot(y, 3).float()
    loss = {loss}
"""
HANDED = {
    "keyword": ("F.cross_entropy(net(x), y, weight=weights)", "weights"),
    "smoothed": ("F.cross_entropy(net(x), y, weight=weights, label_smoothing=0.1)", "weight"),  # multiplied by hand inside: -inf, which is no mask
    "place": ("F.nll_loss(net(x).log_softmax(1), y, weights)", "weights"),
    "positive": ("F.binary_cross_entropy_with_logits(net(x), hot, pos_weight=weights)", "pos_weight"),  # written in the step that reads it first
}
OWNED = {
    "classes": ("nn.CrossEntropyLoss(weight=weights)", "crit(net(x), y)", "weight"),
    "smoothed": ("nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)", "crit(net(x), y)", "weight"),
    "log-probabilities": ("nn.NLLLoss(weights)", "crit(net(x).log_softmax(1), y)", "weight"),
    "positive": ("nn.BCEWithLogitsLoss(pos_weight=weights)", "crit(net(x), hot)", "pos_weight"),
}


@pytest.mark.parametrize(("loss", "name"), HANDED.values(), ids=list(HANDED))
def test_a_weight_that_is_handed_to_a_loss_is_no_target(loss: str, name: str, box: Sandbox) -> None:
    """It has the name that the source gives it, and its third entry is a class and not the third sample."""
    incident = first(box, CLASSES.format(bad="inf", crit="None", loss=loss))
    assert (incident["cause"]["code"], incident["origin"]["samples"]) == ("WN701", [])
    assert name in [value["name"] for value in incident["origin"]["inputs"]]
    assert f"`{name}` holds 1 non-finite value (entry 2)" in sentences(incident)


@pytest.mark.parametrize("bad", ["inf", "nan"])
@pytest.mark.parametrize(("crit", "loss", "name"), OWNED.values(), ids=list(OWNED))
def test_a_weight_that_a_loss_was_made_with(crit: str, loss: str, name: str, bad: str, box: Sandbox) -> None:
    """It is a buffer of the loss: known by its name, and with a finite number in its place the step is finite."""
    incident = first(box, CLASSES.format(bad=bad, crit=crit, loss=loss))
    assert incident["cause"]["code"] == "WN602"
    assert f"`{name}` of the loss is not finite: 1 of 3 values (entry 2)" in sentences(incident)
    assert not incident["origin"]["samples"]
    assert incident["remedies"][0]["result"] == "proven"


WEIGHED = {
    "after": ("((net(x) - y).pow(2) * w).mean()", "WN701", "w"),
    "before": ("(w * (net(x) - y).pow(2)).mean()", "WN701", "w"),
    "of torch's loss": ("(F.mse_loss(net(x), y, reduction='none') * w).mean()", "WN701", "w"),
    "a target in a product": ("-(w * F.logsigmoid(net(x))).mean()", "WN702", "w"),
}


@pytest.mark.parametrize(("loss", "code", "name"), WEIGHED.values(), ids=list(WEIGHED))
def test_a_factor_of_what_met_its_target_is_no_target(loss: str, code: str, name: str, box: Sandbox) -> None:
    """A weight of each sample has the rows of the batch; what is multiplied with the output of the model itself is a target."""
    incident = first(
        box,
        f"""
for step in range(5):
    x, y, w = torch.randn(6, 4), torch.randn(6, 1), torch.rand(6, 1)
    if step == 3:
        w[2] = float("nan")
    loss = {loss}
""",
    )
    (value,) = incident["origin"]["inputs"]
    assert (incident["cause"]["code"], value["name"], incident["origin"]["samples"]) == (code, name, [2])


@pytest.mark.parametrize(("index", "words"), [(6, "the slope of exp is 300"), (3, "the gradient that is handed back here is 300")])
def test_a_copy_has_no_slope(index: int, words: str) -> None:
    """Right after an exponential it is the copy that autograd keeps of the result; elsewhere nothing is known of what has the slope."""
    import torch

    from whynan.causes.absurd import absurd_value

    power = SimpleNamespace(op=SimpleNamespace(index=index), name="exp", site="line 1", input=lambda _: torch.tensor([4.0]))
    copy = SimpleNamespace(op=SimpleNamespace(index=7, node=2), name="detach", site="line 1", maker=lambda _: power, output=lambda: torch.tensor([2.0]))
    birth = SimpleNamespace(leaf=None, derivative=True, forward=copy)
    jump = SimpleNamespace(size=300.0, usual=0.5, name="gradient norm", value=300.0, level=0.5, explains=False)
    finding = absurd_value(cast("catalogue.Scene", SimpleNamespace(birth=birth, jump=jump)))
    assert finding is not None and finding.label == f"{words}; 0.5 is usual"


DIFFS = {
    "a log in a quotient": """
    a, b = torch.relu(net(x) + torch.ones(2)).unbind(-1)
    loss = (torch.log(a) / b + torch.sqrt(x.abs().sum(1) * a)).mean()
""",
    "a root below a fraction line": """
    a = net(x)
    b = a / torch.sqrt((a ** 2).sum(-1, keepdim=True))
    c = x[:, :2] - (b * x[:, :2]).sum(-1, keepdim=True) * b
    loss = (b - 1).pow(2).mean() + (c - 1).pow(2).mean()
""",
    "the rest of a sigmoid": """
    p = torch.sigmoid(net(x))
    loss = -((x[:, :2] > 0) * p**2 * torch.log(1 - p)).mean()
""",
}
BADS = {
    "a log in a quotient": "x[2], x[4] = -1e4 * net.weight[0].detach(), -1e4 * net.weight[1].detach()",
    "a root below a fraction line": "x[2] = 0",
    "the rest of a sigmoid": "x[2] = x[2].abs() * net.weight[0].detach().sign() * 900",
}


@pytest.mark.parametrize("case", DIFFS)
def test_changes_inside_of_others_come_as_one_diff(case: str, box: Sandbox) -> None:
    """The text of the outer one repeats the changed part, and the program that the diff gives trains through."""
    head = HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 2, bias=False)").replace("0.01", "0.001")
    body = f"""
for step in range(6):
    x = torch.randn(6, 4) * 0.3
    if step == 3:
        {BADS[case]}
{DIFFS[case].strip(chr(10))}
    print(loss.item())
"""
    incident = first(box, body, head)
    remedy = incident["remedies"][0]
    assert (incident["step"], remedy["result"]) == (3, "proven")
    healed = box.plain(box.write(patched(head + body + TAIL, remedy["diff"]), "healed.py"))
    assert len(healed.out.splitlines()) == 6
    assert "nan" not in healed.out and "inf" not in healed.out


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


def test_a_loss_that_was_near_0_once_did_not_grow() -> None:
    """The first loss of a policy gradient is rounding alone; from there to its usual size is no divergence."""
    from whynan.causes.progress import _growth

    assert _growth([1e-8, 0.35, 1.2e-8, 0.34, 0.35, 0.3467, 0.3467, 0.35, 0.06]) is None
    assert _growth([1e-8] * 30 + [1e-5, 1e-2, 10.0]) is not None
    assert _growth([1.0, 3.0, 40.0, 5e3, 1e7, 1e12]) is not None


def test_a_guard_that_is_added_to_1(box: Sandbox) -> None:
    """`1 + 1e-8 - a * a` has no guard in float32: that is said, and one that exists is proven."""
    body = """
for step in range(5):
    action = torch.tanh(net(torch.randn(8, 4)) * (400 if step == 3 else 1))
    loss = -torch.log(1 + 1e-8 - action.pow(2)).mean()
"""
    incident = first(box, body)
    assert (incident["cause"]["code"], incident["remedies"][0]["result"]) == ("WN204", "proven")
    assert "1 + 1e-08 rounds to 1 in float32" in sentences(incident)


OWN_BACKWARD = """
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * torch.sigmoid(x)
        ctx.save_for_backward(x, y)
        return y
    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        sig = y / x
        return grad * (sig + y * (1 - sig))
net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 1))
{before}
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(5):
    x = torch.randn(8, 4)
    {bad}
    loss = net[1](Swish.apply(net[0](x))).square().mean()
"""


@pytest.mark.parametrize(
    ("before", "bad", "result"),
    [("", "x[2] = 0 if step == 3 else x[2]", "proven"), ("nn.init.zeros_(net[0].weight[1:4])", "", "failed")],
    ids=["a row of zeros moves no weight", "units of zeros do"],
)
def test_a_change_in_a_backward_pass_of_the_programs_own(before: str, bad: str, result: str, box: Sandbox) -> None:
    """Its slope is held against forward passes beside the step: 0 in the place of 0/0 is right only where nothing is trained by it."""
    incident = first(box, OWN_BACKWARD.format(before=before, bad=bad))
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"]) == ("WN104", result)
    assert ("not the slope of the loss" in remedy["effect"]) == (result == "failed"), remedy


SURROGATE = """
class Level(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return {level}
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x.abs().sqrt()
net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 1))
{before}
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(5):
    x = torch.randn(8, 4)
    {bad}
    loss = net[1](Level.apply(net[0](x))).square().mean()
"""


@pytest.mark.parametrize("level", ["(x >= 0).float()", "torch.round(4 * x) / 4"])
@pytest.mark.parametrize(
    ("before", "bad"),
    [("", "x[2] = 0 if step == 3 else x[2]"), ("nn.init.zeros_(net[0].weight[1:4])", "")],
    ids=["healthy steps before", "the first step"],
)
def test_a_change_in_the_backward_pass_of_a_step_function(level: str, before: str, bad: str, box: Sandbox) -> None:
    """Spikes and quantisers are trained with the slope of something else: that it is not the slope of the loss says nothing against a change."""
    incident = first(box, SURROGATE.format(level=level, before=before, bad=bad))
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"]) == ("WN103", "proven"), remedy


def test_weights_that_are_float64_are_not_moved_to_judge_a_slope(box: Sandbox) -> None:
    """Their own memory would be moved to both sides of the step: that question is not asked, and the skipped step leaves every bit."""
    wide = OWN_BACKWARD.format(before="net.double()", bad="x = x.double(); x[2] = 0 if step == 3 else x[2]; held = net[0].weight.detach().clone()")
    watched = box.watched(f"{HEAD}{wide}{TAIL}    print(step, torch.equal(held, net[0].weight))\n")
    assert [line.split()[1] for line in watched.out.splitlines()] == ["False", "False", "False", "True", "False"], watched.err
    assert [i["remedies"][0]["result"] for i in watched.incidents] == ["proven"], watched.err


NAMED = {
    "a product": ("loss = (h @ w).mean()", "h = net(x) * (1e38 if bad else 1); w = torch.full((3, 2), 30.0)", ["h", "w"]),
    "a product of batches": (
        "loss = torch.bmm(h[None], w[None]).mean()",
        "h = net(x) * (1e38 if bad else 1); w = torch.full((3, 2), 30.0)",
        ["h[None]", "w[None]"],
    ),
    "a product that torch turns round": (
        "loss = torch.matmul(w, h).mean()",
        "h = net(x).reshape(2, 3, 3) * (1e38 if bad else 1); w = torch.full((2, 3), 30.0, requires_grad=True)",
        ["h", "w"],
    ),
    "a linear function": (
        "loss = F.linear(h, w, b).mean()",
        "h = net(x) * (1e38 if bad else 1); w, b = torch.full((2, 3), 30.0), torch.ones(2)",
        ["b", "h", "w"],
    ),
    "a layer": ("loss = net(x * scale).mean()", "scale = 5e37 if bad else 1; net.weight.data.fill_(9.0)", ["bias", "input", "weight.T"]),
    "an eigenvalue": ("loss = torch.linalg.eigh(cov)[1].sum()", "h = net(x); cov = torch.eye(3) * h.sum() * 0 if bad else h.T @ h", ["cov"]),
    "a determinant": ("loss = torch.logdet(gram)", "h = net(x); gram = h.T @ h * (0 if bad else 1)", ["gram"]),
    "a factorisation that fails": ("loss = torch.linalg.cholesky(gram).sum()", "h = net(x); gram = h.T @ h * (-1 if bad else 1)", ["gram"]),
}


@pytest.mark.parametrize(("line", "before", "names"), NAMED.values(), ids=list(NAMED))
def test_arguments_are_called_what_the_source_calls_them(line: str, before: str, names: list[str], box: Sandbox) -> None:
    """Also where torch's operation has another name than the function, or takes its arguments in another order."""
    body = f"""
for step in range(5):
    x, bad = torch.randn(6, 4), step == 3
    {before}
    {line}
"""
    incident = first(box, body, HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 3)"))
    assert [value["name"] for value in incident["origin"]["inputs"]] == names


def test_the_matrix_of_a_factorisation_that_fails_is_shown(box: Sandbox) -> None:
    """Torch raises in a check of one number; what was factorised stands before it, with its eigenvalues."""
    incident = first(
        box,
        """
for step in range(5):
    h = net(torch.randn(6, 4))
    gram = torch.eye(2) * (-h.square().sum() if step == 3 else 1)
    loss = torch.linalg.cholesky(gram).sum() + h.sum()
""",
    )
    (value,) = incident["origin"]["inputs"]
    assert (incident["cause"]["code"], value["name"], value["shape"]) == ("WN108", "gram", [2, 2])
    assert "eigenvalues from -" in sentences(incident)


def test_an_argument_without_a_name_is_called_by_its_place(box: Sandbox) -> None:
    """The names of torch's schemas (`self`, `other`) are none of the program's."""
    incident = first(
        box,
        """
from torch.distributions import MultivariateNormal
for step in range(5):
    x = torch.randn(6, 4)
    scale = torch.diag_embed(torch.ones(6, 2) * (0.0 if step == 3 else 1.0))
    loss = -MultivariateNormal(net(x).expand(6, 2), scale_tril=scale, validate_args=False).log_prob(x[:, :2]).mean()
""",
    )
    assert [value["name"] for value in incident["origin"]["inputs"]] == ["argument 1", "argument 2"]


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


@pytest.mark.parametrize("width", [4, 7])
def test_a_cast_by_autocast_is_not_the_result_of_the_call_it_is_made_for(width: int, box: Sandbox) -> None:
    """With another number of features out than in, the cast input in the place of the result would not even fit."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.randn(6, 4) * (3e5 if step == 3 else 1.0)
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(net(x).float(), torch.arange(6) % 4)
""",
        HEAD.replace("nn.Linear(4, 1)", f"nn.Linear(4, {width})"),
    )
    assert incident["cause"]["code"] == "WN202"
    assert "autocast made it float16 for linear" in incident["cause"]["evidence"]
    assert (incident["remedies"][0]["title"], incident["remedies"][0]["result"]) == (
        "use bfloat16 instead of float16: it has the range of float32",
        "proven",
    )


SMOOTHED = {
    "by torch": ("loss = F.cross_entropy(scores, y, label_smoothing=0.1)", "label smoothing gives masked classes a share of the target"),
    "by hand": (
        "lp = scores.log_softmax(-1)\n    loss = F.nll_loss(lp, y) - 0.1 * lp.mean(-1).mean()",
        "masked entries are added up: 2 of 24 values are -inf by a mask",
    ),
}


@pytest.mark.parametrize(("lines", "label"), SMOOTHED.values(), ids=list(SMOOTHED))
def test_a_smoothed_target_reaches_masked_classes(lines: str, label: str, box: Sandbox) -> None:
    """Every class is a little of the target, and some have probability 0 by a mask."""
    incident = first(
        box,
        f"""
for step in range(5):
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    ok = torch.ones(6, 4, dtype=torch.bool)
    ok[2, 2:] = step != 3
    scores = net(x).masked_fill(~ok, float("-inf"))
    {lines}
""",
        HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 4)"),
    )
    assert (incident["cause"]["code"], incident["cause"]["label"], incident["origin"]["samples"]) == ("WN405", label, [2])
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


TARGETS = {
    "prepared": "torch.log(out) - torch.log(y)",
    "compared before": "(torch.log(out) - torch.log(y))[~(y <= 0)]",
    "picked by a comparison": "torch.log(out[~(y <= 0)]) - torch.log(y[~(y <= 0)])",
}


@pytest.mark.parametrize("error", TARGETS.values(), ids=list(TARGETS))
def test_a_target_that_is_prepared_is_still_a_target(error: str, box: Sandbox) -> None:
    """It never meets the model; a comparison lets no NaN through and is not where it comes in."""
    incident = first(
        box,
        f"""
for step in range(5):
    x, y = torch.randn(6, 4), torch.rand(6) + 0.5
    y[2] = float("nan") if step == 3 else 1.0
    out = F.softplus(net(x)).squeeze(-1)
    keep = y.gt(0)
    error = {error}
    loss = error.square().mean()
""",
    )
    assert (incident["cause"]["code"], incident["origin"]["code"], incident["origin"]["samples"]) == ("WN702", f"error = {error}", [2])


def test_a_number_of_the_program_that_is_nan(box: Sandbox) -> None:
    """A weight of a loss that was computed outside torch came in like a bad input."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.randn(6, 4)
    weight = float("inf") - float("inf") if step == 3 else 0.1
    loss = net(x).square().mean() + weight * net.weight.abs().sum()
""",
    )
    assert (incident["cause"]["code"], incident["cause"]["label"]) == ("WN701", "a number that goes in here is nan")
    assert incident["origin"]["code"] == "loss = net(x).square().mean() + weight * net.weight.abs().sum()"


HALVES = {
    "a factor without dimensions": ("scale * half", "scale * half.float()"),
    "a number first": ("300.0 * half", "300.0 * half.float()"),
    "both with dimensions": ("half * factors", "half.float() * factors"),
}


@pytest.mark.parametrize(("product", "changed"), HALVES.values(), ids=list(HALVES))
def test_the_operand_that_is_widened_makes_the_result_wide(product: str, changed: str, box: Sandbox) -> None:
    """A float32 tensor without dimensions leaves a product with a float16 one at float16: that is no way to compute it in float32."""
    body = f"""
scale, factors = torch.tensor(300.0).half(), torch.full((8, 1), 300.0).half()
for step in range(5):
    half = net(torch.randn(8, 4)).half() * (1000 if step == 3 else 1)
    loss = ({product}).float().mean()
"""
    incident = first(box, body)
    titles = [r["title"] for r in incident["remedies"]]
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"], len(set(titles))) == ("WN202", "proven", len(titles))
    assert f"+    loss = ({changed}).float().mean()" in remedy["diff"].splitlines(), remedy["diff"]


def test_a_sum_in_float32_that_meets_float16_afterwards(box: Sandbox) -> None:
    """The product after it takes one dtype only: that is said, and what does help is first."""
    body = """
for step in range(5):
    half = net(torch.randn(8, 4)).half() * (300 if step == 3 else 1)
    total = half.pow(2).sum(1, keepdim=True)
    loss = (torch.log1p(total).t() @ half).float().mean()
"""
    incident = first(box, body, HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 16)"))
    first_one, *others = incident["remedies"]
    assert (incident["cause"]["code"], first_one["result"]) == ("WN202", "proven") and "bfloat16" in first_one["title"]
    assert any("gets float32 beside float16" in r["effect"] for r in others)


BROKEN_UP = {
    "inside the brackets": "(a - b).pow(2).sum(\n        1\n    ).sqrt()",
    "before a dot": "((a - b)\n        .pow(2)\n        .sum(1)\n        .sqrt())",
    "in an argument": "torch.sqrt(\n        (a - b).pow(2).sum(1)\n    )",
}


@pytest.mark.parametrize("distance", BROKEN_UP.values(), ids=list(BROKEN_UP))
def test_an_expression_over_several_lines_is_changed_like_one_on_one(distance: str, box: Sandbox) -> None:
    """As formatters write it: the change is tried, and the program that its diff gives trains through."""
    head = HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 3)")
    body = f"""
for step in range(5):
    x = torch.randn(6, 4)
    a, b = net(x), net(x if step == 3 else x.flip(0))
    distance = {distance}
    loss = (distance - 1).square().mean()
    print(loss.item(), net.weight.sum().item())
"""
    incident = first(box, body, head)
    remedy = incident["remedies"][0]
    assert (incident["step"], incident["cause"]["code"], remedy["result"]) == (3, "WN501", "proven")
    assert "vector_norm" in remedy["diff"]
    assert "nan" not in box.python(str(box.write(patched(head + body + TAIL, remedy["diff"]), "healed.py"))).out


CHOLESKY = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 9)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(5):
    x = torch.randn(8, 4)
    factor = net(x).view(8, 3, 3) + 3 * torch.eye(3)
    if step == 3:
        factor = factor * torch.tensor([1.0, 1.0, 0.0])[:, None]
    lower, _ = torch.linalg.cholesky_ex(factor @ factor.mT)
    loss = torch.linalg.solve_triangular(lower, torch.ones(8, 3, 1), upper=False).square().clamp(max=1e4).mean()
"""


def test_what_is_made_regular_is_the_matrix_and_not_its_factor(box: Sandbox) -> None:
    """The factor of a singular matrix is singular, wherever it is used: the change is where the factor is made."""
    incident = first(box, CHOLESKY, head="")
    assert incident["cause"]["code"] == "WN108"
    remedy = next(r for r in incident["remedies"] if "identity" in r["title"])
    assert "+    lower, _ = torch.linalg.cholesky_ex(" in remedy["diff"] and "torch.eye(" in remedy["diff"], remedy
    assert "still not finite" not in remedy["effect"], remedy


def test_a_qr_of_a_singular_matrix_is_told_by_its_rank(box: Sandbox) -> None:
    """A QR has no values that could coincide: R is singular, and a change that makes the columns independent is tried."""
    body = """
for step in range(5):
    x = torch.randn(8, 4)
    x[2] = 0 if step == 3 else x[2]
    q, _ = torch.linalg.qr(net(x).view(8, 5, 2))
    loss = (q[:, 0] - 1).square().mean()
"""
    incident = first(box, body, HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 10, bias=False)"))
    assert (incident["cause"]["code"], incident["origin"]["samples"]) == ("WN504", [2])
    told = sentences(incident)
    assert "solves with R, which is singular" in told and "1 of 8 matrices are singular: rank 0 of 2" in told and "coincide" not in told
    assert incident["remedies"][0]["result"] == "proven" and "torch.eye(" in incident["remedies"][0]["diff"]


ROOTS = {
    "pow": ("gap.pow(2).sum(dim=-1).pow(0.5)", "torch.linalg.vector_norm(gap, dim=-1)"),
    "operator": ("(gap * gap).sum(-1) ** 0.5", "torch.linalg.vector_norm(gap, dim=-1)"),
    "added by hand": ("(u * u + v ** 2) ** 0.5", "torch.linalg.vector_norm(torch.stack([u, v]), dim=0)"),
    "root of what was added": ("torch.sqrt(u * u + v * v)", "torch.linalg.vector_norm(torch.stack([u, v]), dim=0)"),
}


@pytest.mark.parametrize(("root", "norm"), ROOTS.values(), ids=list(ROOTS))
def test_a_length_however_it_is_written_is_a_norm(root: str, norm: str, box: Sandbox) -> None:
    """The power 0.5 of squares, summed or added by hand, has the same remedy as their root."""
    body = f"""
for step in range(5):
    x = torch.randn(8, 4)
    x[2] = 0 if step == 3 else x[2]
    gap = net(x)
    u, v = gap[:, 0], gap[:, 1]
    loss = ({root}).mean()
"""
    incident = first(box, body, HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 2, bias=False)"))
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"], remedy["safe"]) == ("WN501", "proven", True)
    assert f"+    loss = ({norm}).mean()" in remedy["diff"].splitlines(), remedy["diff"]


@pytest.mark.parametrize("root", ["(u * u + 2 * v) ** 0.5", "torch.add(u * u, v * v, alpha=2) ** 0.5", "(gap * 2).sum(-1).abs() ** 0.5"])
def test_what_is_no_length_is_no_norm(root: str, box: Sandbox) -> None:
    """Another sum under the power 0.5 is left as it is."""
    body = f"""
for step in range(5):
    x = torch.randn(8, 4)
    x[2] = 0 if step == 3 else x[2]
    gap = net(x)
    u, v = gap[:, 0], gap[:, 1].abs()
    loss = ({root}).mean()
"""
    incident = first(box, body, HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 2, bias=False)"))
    assert not any("vector_norm" in r["diff"] for r in incident["remedies"])


DETERMINANT = """
w = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))
opt = torch.optim.SGD([w], 0.01)
for step in range(5):
    m = {made}
    loss = (m @ torch.randn(4)).square().mean() - {taken}
"""


@pytest.mark.parametrize("taken", ["torch.logdet(m)", "m.logdet()", "torch.logdet(torch.stack([w, m])).sum()"])
def test_a_negative_determinant_is_told_as_that(taken: str, box: Sandbox) -> None:
    """The matrix has an inverse: what helps is the logarithm of the absolute value, and the matrix is shown, not the inside of logdet."""
    body = DETERMINANT.format(made="w * torch.tensor([-1.0, 1, 1, 1]) if step == 3 else w", taken=taken)
    incident = first(box, body)
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], incident["cause"]["title"], incident["step"]) == ("WN108", "logarithm of a negative determinant", 3)
    assert "the determinant is -" in incident["cause"]["label"] and "has an inverse" in sentences(incident)
    assert [row["name"] for row in incident["origin"]["inputs"]] == ["torch.stack([w, m])" if "stack" in taken else "m"]
    assert (remedy["result"], remedy["safe"], remedy["alive"]) == ("proven", False, True)
    changed = patched(HEAD + body + TAIL, remedy["diff"])
    assert "torch.slogdet(" in changed and "error[WN" not in box.watched(changed).err


def test_a_covariance_with_a_negative_determinant_has_no_logarithm_of_its_size(box: Sandbox) -> None:
    """A symmetric matrix with a negative eigenvalue: the size of its determinant would be finite and mean nothing."""
    incident = first(box, DETERMINANT.format(made="w @ torch.diag(torch.tensor([-1.0 if step == 3 else 1.0, 1, 1, 1])) @ w.T", taken="torch.logdet(m)"))
    assert incident["cause"]["code"] == "WN108" and "symmetric and not positive definite: eigenvalues from" in sentences(incident)
    assert not any("slogdet" in r["diff"] for r in incident["remedies"]) and not any(r["result"] == "proven" for r in incident["remedies"])


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
    assert "torch.where(z == 0, torch.ones_like(z), z)" in remedy["diff"] or "z.clamp_min(1e-6) ** -1" in remedy["diff"]
    assert "no gradient passes" not in remedy["effect"]  # none came to what is thrown away
    assert [value["name"] for value in incident["origin"]["inputs"]] == ["z"]


def test_what_throws_an_entry_away_is_named_and_not_a_mask_that_keeps_it(box: Sandbox) -> None:
    """Hardest pairs of a batch: a point's distance to itself passes its mask with factor 1; the largest of its row drops it."""
    body = """
for step in range(2):
    points, kind = net(torch.randn(6, 4)), torch.arange(6) // 3
    square = (points.unsqueeze(1) - points).square().sum(-1)
    gaps, same = square.sqrt(), kind[:, None] == kind
    loss = (gaps * same).max(1).values.mean() - (gaps + 9.0 * same).min(1).values.mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN502"
    assert "sqrt feeds max, which does not take the bad entries" in sentences(incident)
    assert "selected here by max" in sentences(incident) and "by mul" not in sentences(incident)


@pytest.mark.parametrize("made", ["net.weight = nn.Parameter(torch.empty(1, 4))", 'net = nn.Linear(4, 1, device="meta").to_empty(device="cpu")'])
def test_a_weight_without_a_value_is_told_where_it_was_made(made: str, box: Sandbox) -> None:
    """The line that uses it is where the NaN comes up; the one that took the memory is what has to be changed."""
    head = HEAD.replace("net = nn.Linear(4, 1)", f"torch.use_deterministic_algorithms(True)\nnet = nn.Linear(4, 1)\n{made}")
    incident = first(box, "\nfor step in range(2):\n    loss = net(torch.randn(8, 4)).square().mean()\n", head)
    assert incident["cause"]["code"] == "WN608"
    (span,) = incident["origin"]["from"]
    assert (span["line"], span["label"]) == (8, "made here, without a value")


def test_a_weight_that_a_loss_of_probabilities_was_made_with(box: Sandbox) -> None:
    """The loss multiplies by it under no name: 0 of an unseen class times inf is nan in every step."""
    incident = first(box, CLASSES.format(bad="inf", crit="nn.CrossEntropyLoss(weight=weights)", loss="crit(net(x), hot)"))
    assert incident["cause"]["code"] == "WN602" and [value["name"] for value in incident["origin"]["inputs"]] == ["weight"]
    assert "`weight` of the loss is not finite: 1 of 3 values (entry 2)" in sentences(incident)


def test_a_mask_below_label_smoothing_is_still_one(box: Sandbox) -> None:
    """The loss has a finite weight, and its logits are -inf where the program wrote it."""
    masked = 'F.cross_entropy(net(x).masked_fill(torch.arange(3) == 2, float("-inf")), y, weight=weights, label_smoothing=0.1)'
    assert first(box, CLASSES.format(bad="1", crit="None", loss=masked))["cause"]["code"] == "WN405"


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
    assert "clamp_min(1e-6)" in first(box, body)["remedies"][0]["diff"]


@pytest.mark.parametrize(
    ("made", "key", "said"),
    [
        ("torch.optim.Adam(net.parameters(), 0.01)", "exp_avg_sq", "the update divides by it, and these weights do not move"),
        ("torch.optim.Adam(net.parameters(), 0.01)", "exp_avg", "the update would write it into the weights"),
        ("torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)", "momentum_buffer", "the update would write it into the weights"),
    ],
)
def test_what_an_infinite_state_does_is_seen_by_making_the_update(made: str, key: str, said: str, box: Sandbox) -> None:
    """A second moment of inf makes an update of 0; a first moment of inf is added to the weight."""
    body = f"""
opt = {made}
for step in range(5):
    if step == 3:
        saved = opt.state_dict()
        saved["state"][0]["{key}"][0, 1] = float("inf")
        opt.load_state_dict(saved)
    loss = net(torch.randn(8, 4)).square().mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN603" and said in incident["cause"]["label"]


@pytest.mark.parametrize(("rate", "said"), [("np.sqrt(np.float64(2 - step))", "root of a negative number"), ("np.float64(0.1) / (3 - step)", "divides by 0")])
def test_a_bad_rate_is_told_by_what_gives_such_a_number(rate: str, said: str, box: Sandbox) -> None:
    """A quotient of 0 gives inf, the root of a negative number nan: neither is told as the other."""
    body = f"""
for step in range(5):
    opt.param_groups[0]["lr"] = float({rate})
    loss = net(torch.randn(8, 4)).square().mean()
"""
    incident = first(box, body, HEAD.replace("import torch\n", "import numpy as np\nnp.seterr(all='ignore')\nimport torch\n", 1))
    assert incident["cause"]["code"] == "WN604" and said in incident["remedies"][0]["title"]


def test_a_limit_is_not_the_same_mathematics(box: Sandbox) -> None:
    """binary_cross_entropy keeps the logarithm at -100 where the one written by hand is -inf: finite numbers are the same, this one is not."""
    body = """
for step in range(5):
    p, y = torch.sigmoid(net(torch.randn(8, 4)) * (1000 if step == 3 else 1)), (torch.rand(8, 1) > 0.5).float()
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
"""
    limited = [r for r in first(box, body)["remedies"] if "binary_cross_entropy" in r["title"]]
    assert limited and not limited[0]["safe"]


def test_many_bad_terms_are_listed_once(box: Sandbox) -> None:
    """Terms that are bad because of the birth are not named a second time as those that it goes into."""
    body = """
for step in range(3):
    rates = net(torch.randn(9, 4)).squeeze(1).exp() - (torch.arange(9) > 5) * (9.0 if step == 1 else 0.0)
    parts = [torch.log(rate) for rate in rates]
    loss = torch.stack(parts).sum()
"""
    said = sentences(first(box, body))
    assert "9, 3 not finite" in said and "born on the way" not in said
