"""Sentences and codes of rules on whole programs: what is said must be true of that program's own values and lineage."""

from __future__ import annotations

import pytest
from conftest import Sandbox
from going_bad import HEAD, first, sentences


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


@pytest.mark.parametrize(("given", "samples"), [("x", []), ("mean[:, None].expand(4, 4)", [2]), ("net.weight", [2])])
def test_rows_of_statistics_are_no_samples(given: str, samples: list[int], box: Sandbox) -> None:
    """More tensors have as many rows as there are weights than the batch has: the rows of what a model is given are samples."""
    body = f"""
mean, square, odd = torch.ones(4), torch.ones(4), torch.tensor([0.0, 0.0, 1.0, 0.0])
for step in range(3):
    x = torch.rand(8, 4)
    spread = torch.sqrt(square - mean**2 + 0.1 - 0.2 * odd * (step == 1))
    loss = spread.mean() + net({given}).square().mean()
"""
    incident = first(box, body)
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["samples"]) == (1, "WN105", samples)


def test_a_loss_scale_written_by_hand_is_named_where_float16_ends(box: Sandbox) -> None:
    """Nothing lowers it after an overflow; to widen what is a cast to float32 already changes nothing."""
    incident = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 2).half()
opt = torch.optim.SGD(net.parameters(), 1e-6)
for s in range(6):
    y = torch.randn(8, 2) * (400 if s == 4 else 1)
    loss = (net(torch.randn(8, 4).half()).float() - y).square().mean()
    opt.zero_grad()
    (loss * 4096.0).backward()
    opt.step()
""").incidents[0]
    assert (incident["cause"]["code"], incident["step"]) == ("WN503", 4)
    assert any(
        "multiplied by 4096 at line 11 (what is told here is the product): lower that factor, or use torch.amp.GradScaler" in words
        for words in incident["cause"]["evidence"]
    )
    assert not any(".float().float()" in remedy["diff"] for remedy in incident["remedies"])


def test_a_root_of_two_squares_is_told_by_both_of_its_arguments(box: Sandbox) -> None:
    """There hypot has no slope, whichever of the two is looked at."""
    body = """
for step in range(3):
    x = torch.randn(8, 4)
    x[5] *= step != 2
    out = net(x) - net.bias
    loss = torch.hypot(out[:, 0], out[:, 0] * 2).square().mean()
"""
    incident = first(box, body)
    assert incident["cause"]["label"] == "hypot has no slope where both of its arguments are 0"
    assert "1 of 8 pairs of arguments of hypot are 0 (row 5)" in incident["cause"]["evidence"]
