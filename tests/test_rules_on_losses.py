"""Targets, weights and terms of losses on whole programs: what is said must be true of that program's own values and lineage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from conftest import Sandbox
from going_bad import HEAD, first, sentences

from whynan.causes import catalogue


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


def test_a_loss_that_was_near_0_once_did_not_grow() -> None:
    """The first loss of a policy gradient is rounding alone; from there to its usual size is no divergence."""
    from whynan.causes.progress import _growth

    assert _growth([1e-8, 0.35, 1.2e-8, 0.34, 0.35, 0.3467, 0.3467, 0.35, 0.06]) is None
    assert _growth([1e-8] * 30 + [1e-5, 1e-2, 10.0]) is not None
    assert _growth([1.0, 3.0, 40.0, 5e3, 1e7, 1e12]) is not None


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


def test_many_bad_terms_are_listed_once(box: Sandbox) -> None:
    """Terms that are bad because of the birth are not named a second time as those that it goes into."""
    body = """
for step in range(3):
    rates = net(torch.randn(9, 4)).squeeze(1).exp() - (torch.arange(9) > 5) * (9.0 if step == 1 else 0.0)
    parts = [torch.log(rate) for rate in rates]
    loss = torch.stack(parts).sum()
"""
    said = sentences(first(box, body))
    assert "3 of 9 not finite" in said and "born on the way" not in said


LIMITED = {
    "a limit that lets the pair pass": ("(y * d.square() + (1 - y) * (1 - d).clamp(min=0).square()).mean()", "WN501"),
    "a maximum that does": ("(y * d.square() + (1 - y) * torch.maximum(1 - d, torch.zeros(())).square()).mean()", "WN501"),
    "a limit that holds the pair back": ("(d - 0.5).clamp(min=0).square().mean()", "WN502"),
}


@pytest.mark.parametrize(("loss", "code"), LIMITED.values(), ids=list(LIMITED))
def test_a_limit_selects_only_what_it_does_not_let_pass(loss: str, code: str, box: Sandbox) -> None:
    """The distance of a pair of equal rows has no slope; whether it is thrown away is asked of the values."""
    body = f"""
for step in range(5):
    a, y = torch.rand(6, 4), torch.arange(6) % 2
    b = torch.rand(6, 4)
    if step == 3:
        b[3] = a[3]
    d = torch.sqrt((net(a) - net(b)).square().sum(1))
    loss = {loss}
"""
    incident = first(box, body)
    assert (incident["cause"]["code"], incident["origin"]["code"]) == (code, "d = torch.sqrt((net(a) - net(b)).square().sum(1))")


@pytest.mark.parametrize("half", ["tril", "triu"])
def test_a_triangle_throws_the_other_one_away(half: str, box: Sandbox) -> None:
    """Exponentials of what lies ahead overflow and are cut off; their gradient of 0 meets an infinite slope."""
    ahead = "-" if half == "tril" else ""
    body = f"""
for step in range(5):
    t = torch.rand(6).cumsum(0) * (1 if step != 3 else 300)
    rate = net(torch.ones(1, 4)).exp()
    kernel = torch.exp({ahead}rate * (t[:, None] - t[None]))
    loss = torch.{half}(kernel).sum(1).log1p().mean()
"""
    incident = first(box, body)
    assert (incident["cause"]["code"], incident["remedies"][0]["result"]) == ("WN502", "proven")


@pytest.mark.parametrize(("taken", "code"), [("torch.atan(-(w / h))", "WN104"), ("(w / h).abs()", "WN103")])
def test_a_few_zeros_over_zero_beside_infinities_that_saturate(taken: str, code: str, box: Sandbox) -> None:
    """Of x / 0 and 0 / 0 the one is told that reaches the loss: an angle of x / 0 is finite."""
    body = f"""
for s in range(2):
    w = torch.tensor([0.0, 1.0, 2.0, 3.0]) * net(torch.ones(4)).exp()
    h = torch.tensor([0.0, 0.0, 0.0, 1.0])
    loss = {taken}.mean()
"""
    assert first(box, body)["cause"]["code"] == code


@pytest.mark.parametrize(
    ("loss", "code", "new"),
    [
        ("-(y * torch.log(p)).sum(-1).mean()", "WN101", "torch.log_softmax(z, -1)"),
        ("-(y * p.log()).sum(-1).mean()", "WN101", "torch.log_softmax(z, -1)"),
        ("-(y * torch.log(p + 0)).sum(-1).mean()", "WN101", "torch.log_softmax(z, -1)"),
        ("-(F.softmax(net(x) * 1, dim=1).log() * y).sum(-1).mean()", "WN101", "torch.log_softmax(net(x) * 1, dim=1)"),
        ("-(y * torch.log2(p)).sum(-1).mean()", "WN101", "torch.log_softmax(z, -1) / 0.6931471805599453"),
        ("-torch.log(gamma + torch.sigmoid(z * torch.ones(1))).mean()", "WN101", "torch.nn.functional.logsigmoid(z * torch.ones(1))"),
    ],
)
def test_the_logarithm_of_a_probability_in_a_line_with_more(loss: str, code: str, new: str, box: Sandbox) -> None:
    """A target in front of it that is not 0 everywhere there, or a 0 added inside of it, leave the change that is exact: the logarithm from the logits."""
    head = HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 3)") + "gamma = 0.0\n"
    body = f"""
for step in range(5):
    x = torch.randn(16, 4) * (900 if step == 3 else 1)
    y = torch.eye(3)[torch.randint(0, 3, (16,))]
    z = net(x)
    p = torch.softmax(z, -1)
    loss = {loss}
"""
    incident = first(box, body, head)
    remedy = incident["remedies"][0]
    assert (incident["step"], incident["cause"]["code"]) == (3, code)
    assert (remedy["result"], remedy["safe"]) == ("proven", True) and new in remedy["diff"], remedy


def test_a_number_that_is_added_to_a_probability_is_not_left_out(box: Sandbox) -> None:
    """Only what is 0 everywhere may be."""
    body = """
shift = torch.tensor([0.0, 0.0, 0.5])
for step in range(5):
    z = net(torch.randn(16, 4) * (9e4 if step == 3 else 1)).expand(16, 3)
    loss = -torch.log(torch.sigmoid(z) + shift).mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN101" and not any("directly" in r["title"] and r["result"] == "proven" for r in incident["remedies"])
    assert "the 0 comes from a sigmoid that rounded to 0" in incident["cause"]["evidence"]


CONTRASTIVE = """
from torch import nn
net = nn.Linear(8, 16)
opt = torch.optim.Adam(net.parameters(), 1e-3)
def nce(sim, T):
    other = 1 - torch.eye(12)
{body}
for step in range(6):
    a = F.normalize(net(torch.randn(12, 8)), dim=-1)
    b = F.normalize(a + 0.5 * torch.randn_like(a), dim=-1)
    loss = nce(a @ b.T, 0.5 * 0.3 ** step)
"""


@pytest.mark.parametrize(
    ("body", "new"),
    [
        (
            """    near = torch.exp(sim.diagonal() / T)
    far = other * torch.exp(sim / T)
    return -torch.log(near / torch.sum(far, dim=1)).mean()""",
            "-((sim.diagonal() / T) - torch.logsumexp(torch.log(other) + (sim / T), dim=1)).mean()",
        ),
        (
            """    near = torch.exp(sim.diagonal() / T)
    return -torch.log(near / (near + (torch.exp(sim / T) * other).sum(1))).mean()""",
            "torch.logaddexp((sim.diagonal() / T), torch.logsumexp((sim / T) + torch.log(other), 1))",
        ),
        (
            """    near, rest = torch.exp(sim.diagonal() / T), 0.5
    far = torch.exp(sim / T)
    return -torch.log(near / far.sum(dim=1)).mean() - rest * (near / far.sum(dim=0)).log().mean()""",
            "",
        ),
        (
            """    near = torch.exp(sim.diagonal() / T)
    far = torch.exp(sim / T)
    return -torch.log(near / far.sum(dim=1)).mean() - (near / far.sum(dim=0)).log().mean()""",
            "dim=1)).mean() - ((sim.diagonal() / T) - torch.logsumexp((sim / T), dim=0)).mean()",
        ),
        (
            """    all_of_them = torch.exp(sim / T)
    near = all_of_them.diagonal()
    return -torch.log(near / (near + (all_of_them * other).sum(1) + 1e-8)).mean()""",
            "",
        ),
    ],
    ids=["a quotient", "a sum", "names given together", "two of them", "picked, without a text"],
)
def test_a_contrastive_loss_written_with_exponentials(body: str, new: str, box: Sandbox) -> None:
    """The logarithm of a quotient of masked sums of exponentials is made from the exponents, wherever they got their names; clamps do not help there."""
    incident = first(box, CONTRASTIVE.format(body=body))
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"], remedy["safe"]) == ("WN201", "proven", True), remedy
    assert (new in remedy["diff"]) if new else not remedy["diff"]
    assert sum(r["result"] == "failed" for r in incident["remedies"]) <= 2


def test_samples_are_those_whose_bad_value_is_picked(box: Sandbox) -> None:
    """Logarithms of raw outputs are NaN in most rows; the loss picks one class of each row."""
    body = """
for step in range(4):
    x, y = torch.randn(16, 4), torch.zeros(16, dtype=torch.long)
    y[5], y[9] = 1, 1
    out = net(x).square() * torch.tensor([1.0, -1.0]) + torch.tensor([1.0, 0.0 if step == 2 else 1e3])
    loss = F.nll_loss(torch.log(out), y)
"""
    incident = first(box, body, HEAD)
    assert (incident["cause"]["code"], incident["origin"]["samples"]) == ("WN102", [5, 9])
