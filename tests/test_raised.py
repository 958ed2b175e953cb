"""Programs that end with an exception: explained where its root is a number, left alone where it is not."""

from __future__ import annotations

import pytest
from conftest import Sandbox

HEAD = """
import torch
from torch import nn
from torch.distributions import Categorical, Normal
torch.manual_seed(0)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(6):
    x = torch.rand(8, 4)
    if step == 4:
        x[2] = 0.0
"""
TAIL = """
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

EXPLAINED = {
    "logits of a distribution": (
        "WN101",
        """
    share = x / x.sum(1, keepdim=True).clamp_min(1e-12)
    logits = net(x) * torch.log(share.sum(1, keepdim=True))  # here
    loss = -Categorical(logits=logits).log_prob(torch.zeros(8, dtype=torch.long)).mean()
""",
    ),
    "mean of a normal": (
        "WN104",
        """
    unit = x / x.norm(dim=1, keepdim=True)  # here
    loss = -Normal(net(unit), 1.0).log_prob(torch.zeros(8, 3)).mean()
""",
    ),
    "weights of a draw": (
        "WN104",
        """
    share = x / x.sum(1, keepdim=True)  # here
    column = torch.multinomial(share, 1).squeeze(1)
    loss = net(x).gather(1, column.clamp_max(2)[:, None]).mean()
""",
    ),
    "a mask that half cannot hold": (
        "WN202",
        """
    scores = net(x).half() if step == 4 else net(x)
    scores = scores.masked_fill(torch.eye(8, 3, dtype=torch.bool), -1e9)  # here
    loss = scores.float().softmax(-1)[:, 0].mean()
""",
    ),
    "a probability in a square matrix": (
        "WN104",
        """
    share = x[:3, :3] / x[:3, :3].sum(1, keepdim=True)  # here
    loss = nn.functional.binary_cross_entropy(share, torch.eye(3)) + net(x).mean()
""",
    ),
    "one value per channel": (
        "WN403",
        """
    h = net(x[:1] if step == 4 else x)
    loss = nn.functional.batch_norm(h, None, None, training=True).square().sum() + h.sum()  # here
""",
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_number_behind_an_exception_is_found(box: Sandbox, name: str) -> None:
    """An exception over a NaN leads to the line where the NaN was born; one over a range or a single value to its own line."""
    code, body = EXPLAINED[name]
    done = box.watched(HEAD + body + TAIL)
    line = next(n for n, text in enumerate((HEAD + body).splitlines(), 1) if "# here" in text)
    assert done.status == 1
    assert "Traceback" in done.err and "internal error" not in done.err
    assert [(i["step"], i["cause"]["code"], i["origin"]["line"], i["symptom"]["place"]) for i in done.incidents] == [(4, code, line, "exception")]


def test_inside_a_module(box: Sandbox) -> None:
    """The same inside a forward pass: the distribution refuses, the line that made the NaN is named."""
    source = """
import torch
from torch import nn
from torch.distributions import Normal

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x, scale):
        mean = self.body(x)
        spread = torch.sqrt(scale)
        return Normal(mean, spread).rsample()

torch.manual_seed(0)
net = Policy()
opt = torch.optim.Adam(net.parameters())
for step in range(5):
    loss = net(torch.rand(8, 4), torch.tensor(1.0 - 0.4 * step)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    incidents = box.watched(source).incidents
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"]) for i in incidents] == [(3, "WN105", "spread = torch.sqrt(scale)")]


FACTORS = """
import torch
from torch import nn

class NoFactor(Exception):
    pass

class Whiten(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x):
        h = self.body(x)
        root, info = torch.linalg.cholesky_ex(h.t() @ h / len(h))
        if info:
            raise NoFactor("the covariance has no factor")
        return torch.linalg.solve_triangular(root, h.t(), upper=False)

torch.manual_seed(0)
net = Whiten()
opt = torch.optim.Adam(net.parameters())
for step in range(5):
    loss = net(torch.rand(8 if step < 3 else 1, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_factorisation_that_reports_its_failure(box: Sandbox) -> None:
    """A program that reads `info` and raises an error of its own, inside a module: the factorisation is named."""
    done = box.watched(FACTORS)
    assert done.status == 1 and "internal error" not in done.err
    wanted = (3, "WN108", "root, info = torch.linalg.cholesky_ex(h.t() @ h / len(h))")
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"]) for i in done.incidents] == [wanted]


def test_the_remedy_of_a_refused_number_is_shown_as_far_as_it_goes(box: Sandbox) -> None:
    """A mask of -1e9 in float16 is replaced by the dtype's own lowest number; the call no longer raises, the rest of the step was not recorded."""
    _, body = EXPLAINED["a mask that half cannot hold"]
    remedy = box.watched(HEAD + body + TAIL).incidents[0]["remedies"][0]
    assert "torch.finfo(scores.dtype).min" in remedy["diff"]
    assert remedy["result"] == "not proven"
    assert remedy["effect"].startswith("the call that failed gives a finite result; what follows it was not recorded")


BAD_AGAIN = {
    "of a factor": """
    h = net(x) * (step != 4)
    cov = 100 * (h - h.mean(0)).T @ (h - h.mean(0))
    root = torch.linalg.cholesky(cov)
    loss = h.square().mean() - 0.01 * torch.log(root.diagonal() - 2e-2).sum()
""",
    "of a refused scale": """
    spread = net(x).abs() * (step != 4)
    spread = spread / spread.sum()
    loss = -Normal(net(x), spread).log_prob(torch.zeros(8, 3)).mean()
""",
    "of a label": """
    label = torch.randint(0, 3, (8,))
    if step == 4:
        label[2] = 3
    loss = torch.log(nn.functional.cross_entropy(net(x), label) * (step != 4))
""",
}


@pytest.mark.parametrize("name", BAD_AGAIN)
def test_a_remedy_is_not_proven_by_a_replay_that_ends_midway(box: Sandbox, name: str) -> None:
    """What the step would do with the finite result can raise or be infinite again: text, JSON and page do not call it proven."""
    done = box.watched(HEAD + BAD_AGAIN[name] + TAIL)
    (incident,) = done.incidents
    assert incident["symptom"]["place"] == "exception" and incident["cause"]["confidence"] == "proven"
    assert incident["remedies"][0]["result"] == "not proven"
    assert "= not proven: step 4 replayed with" in done.err and "all gradients finite" not in done.err


TURNED_AWAY = """
    share = torch.softmax(net(x) * (300 if step == 4 else 1), -1)
    loss = -torch.log(share).mean()
    if not torch.isfinite(loss):
        {leaves}
"""


@pytest.mark.parametrize("leaves", ["continue", "raise ValueError('not finite')"])
def test_a_loss_that_was_left_is_gone_back_from(box: Sandbox, leaves: str) -> None:
    """A program that looks at its bad loss and makes no backward pass: the replay makes it, so that a remedy is judged by its gradients too."""
    done = box.watched(HEAD + TURNED_AWAY.format(leaves=leaves) + TAIL)
    remedy = done.incidents[0]["remedies"][0]
    assert remedy["result"] == "proven" and "gradient norm" in remedy["effect"] and "loss" in remedy["effect"]


SILENT = {
    "shapes": "    loss = (net(x) @ net(x)).mean()",
    "shapes of a quotient with zeros": "    loss = (net(x) / (x[:, :2] * 0)).mean() if step == 4 else net(x).mean()",
    "shapes of a singular matrix": "    loss = torch.linalg.solve(torch.zeros(3, 3), net(x)).mean() if step == 4 else net(x).mean()",
    "the type of a large number": "    loss = (net(x) * 1e6).exp_().long().mean() if step == 4 else net(x).mean()",
    "own check": '    if step == 4:\n        raise ValueError("no data for this month")\n    loss = net(x).mean()',
    "key": "    loss = {}[step] if step == 4 else net(x).mean()",
    "caught before": (
        "    try:\n        if step == 4:\n            torch.embedding(net.weight, torch.tensor([99]))\n"
        '    except IndexError:\n        raise ValueError("vocabulary") from None\n    loss = net(x).mean()'
    ),
    "own check of a distribution": "    if step == 4:\n        Normal(torch.zeros(2), torch.tensor(-1.0))\n    loss = net(x).mean()",
    "whole numbers beside it": (
        "    def check(counts):\n        codes = counts + 1\n        if step == 4:\n            raise KeyError('no such code')\n"
        "    check(torch.ones(3, dtype=torch.int32))\n    loss = net(x).mean()"
    ),
    "a factor that is caught": (
        "    root, info = torch.linalg.cholesky_ex(-torch.eye(2))\n    def save():\n        if step == 4:\n"
        "            raise OSError('disk full')\n    save()\n    loss = net(x).mean()"
    ),
    "no numbers at all": "    loss = net(x).mean()\n    if step == 4:\n        raise RuntimeError('out of disk')",
}


@pytest.mark.parametrize("name", SILENT)
def test_other_exceptions_are_none_of_our_business(box: Sandbox, name: str) -> None:
    """An exception that is the program's own, or that has nothing to do with numbers, brings no incident and ends it as before."""
    done = box.watched(HEAD + SILENT[name] + TAIL)
    assert (done.status, done.incidents) == (1, [])
    assert "error[WN" not in done.err and "internal error" not in done.err


def test_a_caught_exception_is_silent(box: Sandbox) -> None:
    """A program that catches a refused distribution and goes on has no incident."""
    body = """
    try:
        Categorical(logits=torch.tensor([float("nan"), 0.0]))
    except ValueError:
        pass
    loss = net(x).square().mean()
"""
    done = box.watched(HEAD + body + TAIL)
    assert (done.status, done.incidents) == (0, [])


WHITENING = """
import torch
from torch import nn


class Whitening(torch.optim.Optimizer):
    def __init__(self, params, lr, power=-0.5):
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.grad.mul_(0.5).mul_(2)
                p.sub_(group["lr"] * self.turned(p.grad, group["power"]))

    def turned(self, grad, power):
        left, values, right = torch.linalg.svd(grad, full_matrices=False)
        values = values.pow(power)  # here
        again = torch.linalg.svdvals(left * values @ right)
        return left * (values / again.max()) @ right


torch.manual_seed(0)
net = nn.Linear(4, 3, bias=False)
"""
UPDATES = """
opt = Whitening(net.parameters(), 0.01, {power})
for step in range(6):
    x = torch.rand(8, 4) * (step != 4)
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_an_update_that_raises_over_its_own_number(box: Sandbox) -> None:
    """A factorisation inside an optimizer refuses what a power of 0 made two lines before: that line is told, and the exception ends the program."""
    source = WHITENING + UPDATES.format(power=-0.5)
    done = box.watched(source)
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "# here" in text)
    assert done.status == 1 and "LinAlgError" in done.err.splitlines()[-1] and "internal error" not in done.err
    wanted = (4, "WN604", line, "optimizer", "exception")
    assert [(i["step"], i["cause"]["code"], i["origin"]["line"], i["origin"]["phase"], i["symptom"]["place"]) for i in done.incidents] == [wanted]


def test_an_update_that_raises_over_a_matrix(box: Sandbox) -> None:
    """A matrix without inverse inside an optimizer is one like any other."""
    source = WHITENING.replace("values = values.pow(power)  # here", "values = torch.linalg.inv(values.diag()).diag()  # here") + UPDATES.format(power=-0.5)
    done = box.watched(source)
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "# here" in text)
    assert [(i["step"], i["cause"]["code"], i["origin"]["line"]) for i in done.incidents] == [(4, "WN108", line)]
    remedy = done.incidents[0]["remedies"][0]
    assert remedy["result"] == "proven" and remedy["effect"].endswith("the update is finite")


@pytest.mark.parametrize("written", ["raise ValueError('no such group')", "values = values @ torch.ones(7)", "values = {}[power]"])
def test_an_update_that_raises_for_another_reason(box: Sandbox, written: str) -> None:
    """A mistake in an optimizer that is none of its numbers' brings no incident."""
    done = box.watched(WHITENING.replace("values = values.pow(power)  # here", written) + UPDATES.format(power=-0.5))
    assert (done.status, done.incidents) == (1, [])
    assert "internal error" not in done.err


def test_what_an_update_that_raised_left_behind_stays(box: Sandbox) -> None:
    """Replaying it leaves weights, gradients and counters as the exception left them; one that the program catches is silent."""
    steps = "".join(f"    {line}\n" for line in UPDATES.format(power=-0.5).splitlines() if line)
    seen = "print(net.weight.tolist(), net.weight.grad.tolist(), opt.state[net.weight]['steps'])\n"
    caught = f"{WHITENING}try:\n{steps}except RuntimeError:\n    pass\n{seen}"
    ended = f"import contextlib, whynan\n{WHITENING}with contextlib.suppress(RuntimeError), whynan.watch(net, run_dir='watched'):\n{steps}{seen}"
    silent, told = box.watched(caught), box.python(str(box.write(ended, "ended.py")))
    plain = box.python("train.py")
    assert silent.out == told.out == plain.out and "5\n" in plain.out
    assert silent.incidents == [] and "error[WN604]" in told.err


def test_a_matrix_that_only_rounding_makes_singular_is_told_by_its_condition_number(box: Sandbox) -> None:
    """All its eigenvalues are above 0: that it has no inverse would not be true."""
    (incident,) = box.watched("""
import torch
torch.manual_seed(0)
noise = torch.tensor(0.0, requires_grad=True)
opt = torch.optim.SGD([noise], 0.1)
x = torch.linspace(0, 1, 24)
x = torch.cat([x, x[:6]])  # measured twice
for step in range(5):
    kernel = 2.25 * torch.exp(-0.5 * ((x[:, None] - x) / 0.1).square()) + (5e-4 if step == 3 else 0.1) ** 2 * noise.exp() * torch.eye(30)
    loss = torch.linalg.cholesky(kernel).diagonal().log().sum() * 1e-3
    opt.zero_grad()
    loss.backward()
""").incidents
    assert (incident["cause"]["code"], incident["cause"]["title"]) == ("WN108", "matrix that rounding makes singular")
    assert any("the condition number is" in words and "float32 can hold 8.4e+06" in words for words in incident["cause"]["evidence"])
    assert "no inverse" not in incident["cause"]["label"]


@pytest.mark.parametrize(
    ("labels", "given", "title", "diff"),
    [
        ("y[0] = 255", "", "let it be ignored: ignore_index=255", "+    loss = F.cross_entropy(net(torch.randn(8, 4)), y, ignore_index=255)"),
        ("y[0] = -100", ", ignore_index=-1", "let it be ignored: ignore_index=-100", ", y, ignore_index=-100)"),
        ("y[0], y[1] = -1, -100", "", "give it the label that is ignored, -100", "y.masked_fill(y == -1, -100)"),
        ("y[:] = 3", "", "if they begin at 1, take 1 off; else give the model 4 classes", ""),
        ("y[0], y[1] = 5, 0", "", "labels go up to 5: give the model 6 classes", ""),
    ],
    ids=["void", "the default mark", "a second mark", "perhaps from 1", "more classes"],
)
def test_a_label_outside_the_classes_is_no_row_that_a_table_lacks(labels: str, given: str, title: str, diff: str, box: Sandbox) -> None:
    """The numbers tell a mark for what has no label from a class that the model does not have."""
    (incident,) = box.watched(f"""
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
for s in range(5):
    y = torch.randint(0, 3, (8,))
    if s == 3:
        {labels}
    loss = F.cross_entropy(net(torch.randn(8, 4)), y{given})
    opt.zero_grad()
    loss.backward()
    opt.step()
""").incidents
    first = incident["remedies"][0]
    assert (incident["cause"]["code"], incident["step"]) == ("WN703", 3)
    assert title in first["title"] and diff in first["diff"] and "table" not in first["title"], first


def test_columns_are_no_samples_of_a_batch_that_is_never_gone_back_from(box: Sandbox) -> None:
    """What a refused number was computed from has one value for each feature; it says how such a variance is to be computed."""
    done = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
net, scale, offset = nn.Linear(4, 3), torch.tensor([0.3, 5.0, 0.2, 20.0]), torch.tensor([0.5, 350.0, 0.0, 101325.0])
opt, sums, squares = torch.optim.SGD(net.parameters(), 0.01), torch.zeros(4), torch.zeros(4)
for step in range(100):
    x = offset + scale * torch.randn(32, 4)
    sums, squares = sums + x.mean(0), squares + (x * x).mean(0)
    mean = sums / (step + 1)
    var = squares / (step + 1) - mean**2
    dist = torch.distributions.Categorical(logits=net((x - mean) / torch.sqrt(var + 1e-3)))
    loss = -dist.log_prob(dist.sample()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    (incident,) = done.incidents
    assert (incident["cause"]["code"], incident["origin"]["samples"]) == ("WN105", [])
    assert any("take the mean off before squaring, or keep these sums in float64" in e for e in incident["cause"]["evidence"])
    lowest = incident["origin"]["inputs"][0]["min"]
    assert [r["only"] for r in incident["remedies"] if "at or above" in r["title"]] == [f"below 1e-12: here {lowest:.4g} becomes 1e-12"]
