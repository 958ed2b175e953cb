"""Where a bad step was really born, where something nearby looks like it: found by programs of other people."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from conftest import Sandbox
from torch import nn

from whynan.capsule.sites import is_installed
from whynan.engine.trainings import Trainings

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""


def test_a_backward_pass_that_raises_is_no_part_of_the_next_step(box: Sandbox) -> None:
    """The bad loss is told with its line, and the step after it is trained as without whynan."""
    source = f"""{HEAD}
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(8):
    x, t = torch.randn(8, 8), torch.randn(8)
    loss = (net(x).squeeze(1) - t).square().mean()
    if s == 4:
        loss = torch.log(-loss.detach())
    try:
        loss.backward()
        opt.step()
        opt.zero_grad()
    except RuntimeError as error:
        continue
    print(s, net.weight.sum().item())
"""
    done = box.watched(source)
    assert done.out == box.plain(box.write(source)).out
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"], i["action"]["taken"]) for i in done.incidents] == [
        (4, "WN102", "loss = torch.log(-loss.detach())", "observed")
    ]


def test_weights_that_the_step_itself_writes(box: Sandbox) -> None:
    """A teacher whose weights are computed in the step is not damaged before it; a change by which they all become 0 hides that nothing was averaged yet."""
    done = box.watched(f"""{HEAD}
import copy
student = nn.Linear(4, 3)
teacher = copy.deepcopy(student)
average = [torch.zeros_like(p) for p in student.parameters()]
count = torch.zeros(())
opt = torch.optim.SGD(student.parameters(), 0.1)
for s in range(4):
    x = torch.randn(16, 4)
    with torch.no_grad():
        for a, p in zip(average, teacher.parameters()):
            p.copy_(a / (1 - 0.99**count))
        aim = teacher(x)
    loss = F.mse_loss(student(x), aim)
    opt.zero_grad()
    loss.backward()
    opt.step()
    count += 1
    for a, p in zip(average, student.parameters()):
        a.mul_(0.99).add_(p.detach(), alpha=0.01)
""")
    assert done.status == 0
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"]) for i in done.incidents] == [(0, "WN104", "p.copy_(a / (1 - 0.99**count))")]
    assert "proven" not in [remedy["result"] for remedy in done.incidents[0]["remedies"]]
    assert any("it hides the fault" in words for words in done.incidents[0]["cause"]["evidence"]), done.incidents[0]["cause"]


def test_weights_that_torch_func_hands_from_step_to_step_are_no_input(box: Sandbox) -> None:
    """They are plain tensors, of a shape like that of the batch."""
    done = box.watched(f"""{HEAD}
from torch.func import functional_call, grad
net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))
weights = {{k: v.detach().clone() for k, v in net.named_parameters()}}
def loss_of(weights, x, y):
    apart = functional_call(net, weights, (x,)) - functional_call(net, weights, (y,))
    return (torch.sqrt(apart.square()) - 1).square().mean()
for s in range(6):
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    if s == 3:
        y[5] = x[5]
    g = grad(loss_of)(weights, x, y)
    weights = {{k: v - 0.01 * g[k] for k, v in weights.items()}}
""")
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(3, "WN501"), (4, "WN601")]


def test_a_bad_loss_was_born_in_the_forward_pass(box: Sandbox) -> None:
    """0 / sqrt(0): the slope of the root is infinite too, and a remedy there mends both, but the loss was bad before any derivative."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 2)
opt = torch.optim.Adam(net.parameters())
for s in range(5):
    t = torch.ones(8) if s != 3 else torch.zeros(8)
    p = net(torch.randn(8, 4)).sigmoid()
    a, b = (p[:, 0] * t).sum(), (p[:, 1] * t).sum()
    both = torch.sqrt(a * b)
    loss = 1 - a / both
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    incident = done.incidents[0]
    assert (incident["cause"]["code"], incident["origin"]["phase"], incident["origin"]["code"]) == ("WN104", "loss", "loss = 1 - a / both")
    assert incident["remedies"][0]["result"] == "proven"


def test_nothing_grows_out_of_a_loss_of_zero(box: Sandbox) -> None:
    """A hinge without a violation, three steps before an overflow: no divergence."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(8):
    out = net(torch.randn(4, 4))
    loss = F.relu(1.0 + out).mean() * (0.0 if s == 4 else 1.0) + ((out * 1e25).pow(2).mean() if s == 7 else 0.0)
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(7, "WN203")]


@pytest.mark.parametrize("line", ["F.layer_norm(out * 1e30 ** (s == 3), (4,))", "(out * 1e20 ** (s == 3)).norm(dim=-1)"], ids=["layer norm", "norm"])
def test_a_result_that_fits_is_not_called_past_the_range(line: str, box: Sandbox) -> None:
    """The squares that a norm adds up overflow, not the norm."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(5):
    out = net(torch.randn(8, 4))
    loss = {line}.square().mean() * 1e-30
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    incident = done.incidents[0]
    assert incident["cause"]["code"] == "WN203"
    assert "what it adds up is past" in done.err and "on the way to it" in " ".join(incident["cause"]["evidence"])


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("SGD(net.parameters(), 50.0)", "times the gradient norm"),
        ("Adam(net.parameters(), 1e15)", "on each of"),
        ("RMSprop(net.parameters(), 1e13)", "on each of"),
    ],
)
def test_one_update_that_replaced_the_weights(optimizer: str, words: str, box: Sandbox) -> None:
    """No growth over many steps is seen; the rate is named all the same, also in the steps after one that was skipped."""
    done = box.watched(f"""{HEAD}
net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.{optimizer}
for s in range(6):
    x = torch.randn(32, 10)
    loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert {i["cause"]["code"] for i in done.incidents} == {"WN605"}
    assert words in " ".join(done.incidents[0]["cause"]["evidence"])


def test_a_huge_input_of_young_weights_is_not_the_rates_fault(box: Sandbox) -> None:
    """Weights that begin at 0 are all update; they are small."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(10, 1)
nn.init.zeros_(net.weight)
opt = torch.optim.Adam(net.parameters(), 1e-2)
for s in range(6):
    x = torch.randn(32, 10)
    x[3] *= 1e30 ** (s == 2)
    loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert [i["cause"]["code"] for i in done.incidents] == ["WN203"]


def test_scores_of_a_fused_attention_past_the_range(box: Sandbox) -> None:
    """Its result would fit; what it adds up does not."""
    done = box.watched(f"""{HEAD}
net = nn.MultiheadAttention(16, 2, batch_first=True)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(5):
    x = torch.randn(2, 5, 16) * 1e25 ** (s == 3)
    loss = net(x, x, x, need_weights=False)[0].tanh().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert (done.incidents[0]["step"], done.incidents[0]["cause"]["code"]) == (3, "WN203")
    assert "what it adds up is past" in done.err


IMPUTED = {
    "a mean of those that are there": "centre = torch.nanmean(x, dim=0)",
    "a mean by hand": "centre = torch.nan_to_num(x).sum(0) / (~gone).sum(0)",
}


@pytest.mark.parametrize("line", IMPUTED.values(), ids=list(IMPUTED))
def test_missing_values_that_are_filled_in_are_not_the_fault(line: str, box: Sandbox) -> None:
    """Every batch has some; the one that goes bad has a column of nothing else, whose mean is 0/0."""
    done = box.watched(f"""{HEAD}
class Fill(nn.Module):
    def forward(self, x):
        gone = torch.isnan(x)
        {line}
        return torch.where(gone, centre, x)
net = nn.Sequential(Fill(), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.05)
data = torch.randn(5, 8, 4)
data[torch.rand(5, 8, 4) < 0.2] = float("nan")
data[3, :, 2] = float("nan")
for x in data:
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["code"]) == (3, "WN402", line)
    assert incident["remedies"][0]["result"] == "proven" and incident["remedies"][0]["diff"]


def test_what_expands_is_no_exponential(box: Sandbox) -> None:
    """An infinity that is spread to all rows was not made by that."""
    done = box.watched(f"""{HEAD}
start = nn.Parameter(torch.zeros(1, 3))
net = nn.Linear(3, 3)
opt = torch.optim.SGD([start, *net.parameters()], 0.05)
x = torch.randn(8, 3)
opt.zero_grad()
first = torch.log(start).expand(8, -1)
torch.logcumsumexp(torch.stack([first, net(x)], 1), 1)[:, 1].exp().mean().backward()
opt.step()
""")
    assert (done.incidents[0]["cause"]["code"], done.incidents[0]["origin"]["code"]) == ("WN101", "first = torch.log(start).expand(8, -1)")


DERIVATIVE = """
def derivative(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]
"""
ZEROS = {
    "a second derivative": "slope = derivative(derivative(x.abs() ** 1.5, x), x)",
    "a forward-mode derivative": "slope = torch.func.jvp(lambda v: v.clamp_min(0).abs() + 2, (x,), (torch.ones_like(x),))[1] - 1 + x.detach().log()",
}


@pytest.mark.parametrize("lines", ZEROS.values(), ids=list(ZEROS))
def test_tensors_without_memory_do_not_end_the_process(lines: str, box: Sandbox) -> None:
    """Derivatives that are known to be 0 have no memory; read inside a dispatch mode they would crash."""
    source = f"""{HEAD}{DERIVATIVE}net = nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(4):
    x = torch.rand(8, 1) + 0.5
    x[3] = 0 if s == 2 else 1
    x.requires_grad_()
    {lines}
    loss = (net(x) * slope).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    done = box.watched(source)
    assert done.status == 0
    assert [i["step"] for i in done.incidents] == [2]


def test_the_loss_that_torch_func_keeps_to_itself(box: Sandbox) -> None:
    """It is bad, so the fault is not one of the way back only; and an update that is a new tensor is not said to be skipped."""
    done = box.watched(f"""{HEAD}
theta = {{"w": torch.ones(4)}}
def nll(p, t):
    survival = torch.exp(-F.softplus(p["w"]) * t)
    return -torch.log(1 - survival).mean()
for s in range(6):
    t = torch.rand(4) + 0.5
    t[1] = 1e-9 if s == 3 else 1
    g = torch.func.grad(nll)(theta, t)
    theta = {{k: theta[k] - 0.05 * g[k] for k in theta}}
""")
    incident = done.incidents[0]
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["phase"], incident["action"]["taken"]) == (3, "WN101", "loss", "observed")
    assert "could not be left out" in incident["cause"]["evidence"][-1]


CARRIED_ALONG = {
    "a Jacobian": ("torch.sqrt((x ** 2).sum())", "torch.func.vmap(lambda p: torch.func.jacfwd(u)(p).sum())(points)", "WN501"),
    "a directional derivative": ("(x ** 2).sum() ** 0.5", "torch.stack([torch.func.jvp(u, (p,), (torch.ones(2),))[1] for p in points])", "WN501"),
    "a Hessian": ("torch.sqrt((x ** 2).sum())", "torch.func.vmap(lambda p: torch.func.hessian(u)(p).trace())(points)", "WN501"),
    "a quotient of its own": ("(x / torch.sqrt((x ** 2).sum())).sum()", "torch.func.vmap(lambda p: torch.func.jacfwd(u)(p).sum())(points)", "WN501"),
}


@pytest.mark.parametrize("kind", CARRIED_ALONG)
def test_derivatives_that_forward_mode_carries_along_are_told_as_such(kind: str, box: Sandbox) -> None:
    """The tangent of sqrt is a division inside its call, which nobody wrote; before a quotient of its own, where a number under the root heals both."""
    radius, derived, code = CARRIED_ALONG[kind]
    done = box.watched(f"""{HEAD}
net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters(), 1e-3)
def u(x):
    radius = {radius}
    return (net(x) * radius).squeeze()
for s in range(5):
    points = torch.rand(6, 2) + 0.1
    points[2] *= s != 3
    loss = ({derived} - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["remedies"][0]["result"]) == (3, code, "proven"), done.err
    assert incident["origin"]["code"] == f"radius = {radius}"
    assert incident["origin"]["phase"] == "backward"


def test_a_stop_over_damaged_weights_does_not_call_them_sound(box: Sandbox) -> None:
    """The program itself brought the bad values in."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(6):
    if s == 3:
        net.load_state_dict({{k: torch.tensor([float("nan")] * v.numel()).view(v.shape) for k, v in net.state_dict().items()}})
    loss = net(torch.randn(4, 3)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert [i["cause"]["code"] for i in done.incidents] == ["WN601"]
    assert "what a step begins with is damaged" in done.err and "as before" not in done.err


PENALISED = {
    "a derivative of a derivative": (
        "rough = x.abs() ** 1.5",
        "derivative(derivative(rough, x), x).square().mean()",
        "WN501",
        "rough = x.abs() ** 1.5",
        "backward",
    ),
    "loss code on a gradient": ("rough = x * x", "(x.detach() / derivative(rough, x)).square().mean()", "WN104", "    loss = LOSS", "loss"),
}


INNER = {
    "a power of a negative number": ("u ** 1.5", "WN105", "loss"),
    "an angle past the edge": ("torch.acos(1 - u)", "WN107", "loss"),
    "a power that is left out": ("torch.where(u > 0, u ** 1.5, 0.0)", "WN502", "backward"),
}


@pytest.mark.parametrize(("line", "code", "phase"), INNER.values(), ids=list(INNER))
def test_a_derivative_of_a_bad_value_is_told_as_that_value(line: str, code: str, phase: str, box: Sandbox) -> None:
    """Only the derivative goes into the loss (a residual of a differential equation); what the program threw away is not the value it is taken of."""
    source = f"""{HEAD}
net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(4):
    x = torch.rand(24, 2, requires_grad=True)
    u = net(x).abs() * 0.01 + 1e-4
    u = u * torch.where(torch.arange(24) % 5 == 0, -1.0 if s == 2 else 1.0, 1.0)[:, None]
    flux = {line}
    loss = torch.autograd.grad(flux.sum(), x, create_graph=True)[0].square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    incident = box.watched(source).incidents[0]
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["phase"]) == (2, code, phase)
    assert incident["origin"]["code"] == f"flux = {line}"
    said = " ".join([incident["cause"]["label"], *incident["cause"]["evidence"]])
    assert "are 0" not in said and "is taken of are finite" not in said


@pytest.mark.parametrize(("line", "loss", "code", "place", "phase"), PENALISED.values(), ids=list(PENALISED))
def test_losses_made_of_gradients(line: str, loss: str, code: str, place: str, phase: str, box: Sandbox) -> None:
    """The line is the one whose derivative goes bad, and what a loss is made of is no update."""
    source = f"""{HEAD}{DERIVATIVE}net = nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(4):
    x = net(torch.rand(8, 1) + 0.5).detach().abs() + 0.1
    x[3] = 0 if s == 2 else 1
    x.requires_grad_()
    {line}
    loss = net(x).square().mean() + {loss}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    incident = box.watched(source).incidents[0]
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["phase"]) == (2, code, phase)
    assert incident["origin"]["code"] == place.replace("LOSS", f"net(x).square().mean() + {loss}").strip()


NUMPY = """
import numpy as np


class Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        with np.errstate(all="ignore"):
            made = -np.log(x.detach().numpy() ** 2 * scale)
            if scale == 0 and {nan}:
                made = made * 0
        return {returned}

    @staticmethod
    def backward(ctx, grad):
        return -2 * grad.sum() / ctx.saved_tensors[0], None


class Loss(nn.Module):
    def forward(self, h, scale):
        return Outside.apply(h, scale)


net, measure = nn.Linear(4, 3), Loss()
opt = torch.optim.SGD(net.parameters(), 1e-4)
for s in range(5):
    h = net(torch.randn(8, 4)) {more}
    out = {called}(h, 0 if s == 3 else 1)
    loss = out.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("called", ["Outside.apply", "measure"])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("returned", ["torch.Tensor(made)[:, :1] * 2", "torch.from_numpy(made)", "torch.from_numpy(made.mean(keepdims=True))"])
def test_what_a_function_makes_outside_of_torch(box: Sandbox, called: str, nan: bool, returned: str) -> None:
    """numpy inside an autograd Function: its call is named, not the mean after it, and what it made is no input."""
    done = box.watched(HEAD + NUMPY.format(nan=nan, returned=returned, more="", called=called))
    line = "out = Outside.apply(h, 0 if s == 3 else 1)" if called == "Outside.apply" else "return Outside.apply(h, scale)"
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"], i["origin"]["phase"]) for i in done.incidents] == [(3, "WN901", line, "forward")]
    assert done.incidents[0]["cause"]["label"] == "the arguments of `Outside` are finite, its result is not"


def test_what_a_function_is_given_is_not_its_own_fault(box: Sandbox) -> None:
    """A bad value that goes through numpy is not said to be made there."""
    source = NUMPY.format(nan=False, returned="torch.from_numpy(made)", more="/ (0 if s == 2 else 1)", called="Outside.apply")
    (incident, *_) = box.watched(HEAD + source).incidents
    assert incident["step"] == 2 and "its result is not" not in incident["cause"]["label"]


def test_an_infinity_that_a_function_selects_with_is_meant(box: Sandbox) -> None:
    """A number made with `torch.tensor` inside a Function is a constant; the selection that found nothing else is told."""
    done = box.watched(f"""{HEAD}
class Nearest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return torch.where(kept, x, torch.tensor(float("inf"))).amin(1)

    @staticmethod
    def backward(ctx, grad):
        return grad[:, None] * ctx.saved_tensors[0], None


net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 1e-3)
for s in range(5):
    kept = torch.ones(8, 3, dtype=torch.bool)
    kept[2] = s != 3
    loss = Nearest.apply(net(torch.randn(8, 4)), kept).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert done.incidents[0]["step"] == 3 and "outside" not in str(done.incidents[0]["origin"])


SCRIPTED = """
{decorator}
def distance(a, b):
    d = a - b
    return torch.sqrt((d * d).sum(-1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
    def forward(self, x, t):
        return distance(self.linear(x), t)

net = {net}
opt = torch.optim.SGD(net.parameters(), 0.1)
for s in range(5):
    x = torch.randn(4, 3)
    t = net.linear(x).detach() + (s != 3)
    loss = net(x, t).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    "decorator", ["@torch.jit.script", "@(lambda f: torch.jit.trace(f, (torch.ones(2, 3), torch.zeros(2, 3))))"], ids=["scripted", "traced"]
)
def test_a_scripted_function_is_told_at_its_own_line(decorator: str, box: Sandbox) -> None:
    (incident,) = box.watched(HEAD + SCRIPTED.format(decorator=decorator, net="Net()")).incidents
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["code"]) == (3, "WN501", "return torch.sqrt((d * d).sum(-1))")
    assert incident["origin"]["exact"] and incident["remedies"][0]["result"] == "proven"


def test_a_place_inside_a_scripted_module_is_not_called_exact(box: Sandbox) -> None:
    """Its lines are not seen: the line that calls it is named, also for the way back."""
    done = box.watched(HEAD + SCRIPTED.format(decorator="", net="torch.jit.script(Net())"))
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["code"]) == (3, "WN501", "loss = net(x, t).mean()")
    assert not incident["origin"]["exact"] and "TorchScript" in incident["origin"]["note"] and "@guard.step" not in done.err


NUMBERS = {
    "in the loop": ("scale = (1.0 / x.abs().max()).item()", "((net(x) - 1) * scale).pow(2).mean()", "scale = (1.0 / x.abs().max()).item()"),
    "as a float": ("scale = -float(1.0 / x.abs().max())", "((net(x) - 1) * scale).pow(2).mean()", "scale = -float(1.0 / x.abs().max())"),
    "with Python's own arithmetic": ("a = (1.0 / x.abs().max()).item(); w = a / (a + 1)", "w * (net(x) - 1).pow(2).mean()", "a = (1.0 / x.abs().max()).item()"),
    "in a module": ("pass", "Scaled()(net(x) - 1, x).pow(2).mean()", "return y * (1.0 / x.abs().max()).item()"),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_bad_number_that_went_through_python_is_told_where_torch_made_it(kind: str, box: Sandbox) -> None:
    before, loss, line = NUMBERS[kind]
    done = box.watched(f"""{HEAD}
class Scaled(nn.Module):
    def forward(self, y, x):
        return y * (1.0 / x.abs().max()).item()
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(6):
    x = torch.randn(8, 4) * (s != 3)
    {before}
    loss = {loss}
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(s, loss.item())
""")
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"]) == (3, "WN103")
    assert incident["origin"]["code"].startswith(line)
    tried = [r["result"] for r in incident["remedies"] if r["result"] != "not tried"]
    assert bool(tried) == (kind == "in a module")  # the loop's own Python is not run again
    assert "second place" not in done.err


def test_an_infinity_that_fills_is_not_the_loss_that_was_printed(box: Sandbox) -> None:
    """A bad number was read out before: the mask of the next loss is no use of it."""
    (incident,) = box.watched(f"""{HEAD}
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(5):
    x = torch.randn(8, 4)
    gauge = (1.0 / (x.abs().max() * (s != 3))).item()
    mask = torch.zeros(8, 3, dtype=torch.bool)
    mask[2] = s == 3
    loss = net(x).masked_fill(mask, float("-inf")).softmax(-1)[:, 0].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""").incidents
    assert (incident["step"], incident["cause"]["code"]) == (3, "WN401")


def test_gradients_that_hooks_hang_on_weights_are_no_input(box: Sandbox) -> None:
    """Gradients of each sample, made in the backward pass, clipped and added up before the update: the line is the one whose slope is infinite."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), 1e-2)
kept = {{}}
net.register_forward_hook(lambda module, args, out: kept.update(x=args[0].detach()))
def of_each(module, inner, outer):
    module.weight.of_each = torch.einsum("ni,nj->nij", outer[0], kept["x"])
net.register_full_backward_hook(of_each)
for s in range(6):
    x = torch.randn(8, 4)
    target = torch.randn(8, 2) if s != 4 else net(x).detach()
    d2 = (net(x) - target).square().sum(1)
    loss = torch.sqrt(d2).mean()
    opt.zero_grad()
    loss.backward()
    each = net.weight.of_each
    net.weight.grad = (each / each.flatten(1).norm(dim=1).clamp_min(1)[:, None, None]).sum(0)
    net.bias.grad = None
    opt.step()
""")
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"]) for i in done.incidents] == [(4, "WN501", "loss = torch.sqrt(d2).mean()")]


HOLDER = """
class Holder:
    def __init__(self, losses, weights):
        self.losses, self.weights = losses, list(weights)
    def product(self, v, retain_graph=True):
        return torch.autograd.grad(self.losses, self.weights, v, retain_graph=retain_graph)
"""
JACOBIANS = {
    "of globals": ("{body}", "torch.vmap(lambda v: torch.autograd.grad(losses, weights, v, retain_graph=True))(torch.eye(2))"),
    "of a closure": ("def run():\n{body}\nrun()", "torch.func.vmap(lambda v: torch.autograd.grad(losses, weights, v, retain_graph=True))(torch.eye(2))"),
    "of a method": (HOLDER + "{body}", "torch.vmap(Holder(losses, weights).product)(torch.eye(2))"),
    "of a method, some of it given": (
        "import functools" + HOLDER + "{body}",
        "torch.vmap(functools.partial(Holder(losses, weights).product, retain_graph=True))(torch.eye(2))",
    ),
    "of a function, some of it given": (
        "import functools\n{body}",
        "torch.vmap(functools.partial(torch.autograd.grad, losses, weights, retain_graph=True))(torch.eye(2))",
    ),
}


@pytest.mark.parametrize(("frame", "jacobian"), JACOBIANS.values(), ids=list(JACOBIANS))
def test_a_function_that_takes_results_from_around_it(frame: str, jacobian: str, box: Sandbox) -> None:
    """Gradients of several losses by `vmap`: the function is made anew with the losses of the replay, and its backward pass leads to their line."""
    body = f"""
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(6):
    x = torch.randn(8, 4)
    y = torch.randn(8, 2) if s != 3 else net(x).detach()
    d = torch.sqrt((net(x) - y).square().sum(1))
    losses, weights = torch.stack([d.mean(), net(x).square().mean()]), list(net.parameters())
    rows = {jacobian}
    for p, row in zip(weights, rows):
        p.grad = row.mean(0)
    opt.step()
"""
    body = body if not frame.startswith("def run") else body.replace("\n", "\n    ")
    done = box.watched(HEAD + frame.replace("{body}", body))
    told = [(i["step"], i["cause"]["code"], i["origin"]["code"], i["remedies"][0]["result"]) for i in done.incidents]
    assert told == [(3, "WN501", "d = torch.sqrt((net(x) - y).square().sum(1))", "proven")]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("loss = (1 / torch.cosh(z)).mean()", "WN201"),
        ("loss = torch.logsumexp(torch.cat([z, -torch.special.i0(z).log()], 1), 1).mean()", "WN201"),
        ("loss = torch.sigmoid(z**15).mean()", "WN203"),
        ("loss = torch.atan(1 / (z * (z < 500))).mean()", "WN103"),
        ("loss = (1 / (z * (z < 500))).clamp(-9, 9).mean()", "WN502"),
    ],
)
def test_an_overflow_that_a_finite_loss_comes_of_is_told_as_that(line: str, code: str, box: Sandbox) -> None:
    """The slope is computed anew on the way back and is infinite too: it is the forward pass that overflowed, at the same line."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for s in range(3):
    z = net(torch.randn(8, 4)) + (1000.0 if s == 1 else 1.0)
    {line}
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    incident = done.incidents[0]
    phase = "backward" if code == "WN502" else "loss"  # a limit throws the infinity away, and only its gradient comes back
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["phase"], incident["origin"]["code"]) == (1, code, phase, line)


def test_a_logarithm_of_zero_that_is_meant_keeps_its_own_name(box: Sandbox) -> None:
    """log(0) is no overflow: where exp takes it back, the slope is the fault."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for s in range(3):
    z = net(torch.randn(8, 4)).relu() * (0.0 if s == 1 else 1.0) + (0.0 if s == 1 else 1.0)
    loss = torch.exp(torch.log(z).mean())
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert done.incidents[0]["cause"]["code"] == "WN501"


TWO_TRAININGS = f"""{HEAD}
def train(rate, size, steps):
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), rate)
    for s in range(steps):
        loss = (net(torch.randn(16, 4)) * size).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

train(0.01, 1e-3, 6)
train(0.5, 50.0, 40)
"""


def test_a_training_that_was_over_before_says_nothing_about_the_next(box: Sandbox) -> None:
    """The growth of a loss is told from the first step of its own training on."""
    done = box.watched(TWO_TRAININGS)
    incident = done.incidents[0]
    assert incident["cause"]["code"] == "WN605"
    grown = float(incident["cause"]["label"].split()[1])
    lines = [line for line in done.metrics if 6 <= line["step"] < incident["step"]]
    assert f"in {len(lines)} steps" in incident["cause"]["label"]
    assert grown == pytest.approx(lines[-1]["loss"] / lines[0]["loss"], rel=1e-3)


@pytest.mark.parametrize(("again", "since"), [("new", 6), ("same", 0), ("both", 0)])
def test_which_steps_are_those_of_one_training(again: str, since: int) -> None:
    """A new optimizer of the same weights goes on with their training, and what is trained beside it is not over."""
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    trainings = Trainings()
    before = torch.optim.SGD(first.parameters(), 0.1)
    for step in range(6):
        trainings.stepped(step, before)
    after = torch.optim.SGD((first if again == "same" else second).parameters(), 0.1)
    if again == "both":
        trainings.stepped(6, after)
        trainings.stepped(7, before)
    assert trainings.since(8, after) == since


def test_a_sequence_without_tokens_in_a_jagged_tensor(box: Sandbox) -> None:
    """Rows of a nested tensor differ in length: nothing asks for their number, and the mean over none is told with a remedy."""
    done = box.watched("""
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(8):
            lengths = [3, 0 if step == 5 else 4, 2]
            rows = net(torch.nested.nested_tensor([torch.randn(n, 4) for n in lengths], layout=torch.jagged)).unbind()
            loss = torch.stack([row.sum(0) / row.shape[0] for row in rows]).square().mean()  # here
            opt.zero_grad()
            loss.backward()
            opt.step()
    """)
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"]) == (5, "WN402")
    assert "# here" in incident["origin"]["code"]
    assert "internal error" not in done.err


@pytest.mark.parametrize("line", ["-torch.special.entr(p)", "-p.pow(0.5)", "torch.special.gammaincc(torch.tensor(0.5), p)"])
def test_a_gradient_of_minus_infinity_is_no_mask(line: str, box: Sandbox) -> None:
    """A softmax accepts masked scores; that its gradient comes in as -inf is not its own fault."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 5)
opt = torch.optim.SGD(net.parameters(), 0.1)
legal = torch.tensor([True, True, False, True, True])
p = torch.softmax(net(torch.randn(6, 4)).masked_fill(~legal, float("-inf")), -1)
cost = {line}
loss = cost.sum(-1).mean()
loss.backward()
opt.step()
""")
    born = [(i["cause"]["code"], i["origin"]["code"], i["origin"]["exact"]) for i in done.incidents]
    assert born == [("WN501", f"cost = {line}", True)] or born == [("WN501", line.lstrip("-"), True)]


@pytest.mark.parametrize("write", ["torch.cumsum(sizes, 0, out=start.narrow(0, 1, 3))", "torch.topk(sizes.cumsum(0), 3, sorted=True, out=(start[1:], where))"])
def test_what_a_call_writes_to_out_is_made_again(write: str, box: Sandbox) -> None:
    """Indices that are summed up into a part of an empty tensor, as libraries of graphs do; the kept healthy steps are whole, too."""
    done = box.watched(f"""{HEAD}
net = nn.Embedding(7, 2)
opt = torch.optim.SGD(net.parameters(), 0.01)
for s in range(8):
    sizes = torch.tensor([3, 2, 1] if "topk" not in {write!r} else [3, -1, -1])
    start, where = sizes.new_empty(4), sizes.new_empty(3)
    start.narrow(0, 0, 1).zero_()
    {write}
    ends = start.unbind(0)
    a = net(torch.stack([ends[0], ends[1]]))
    b = net(torch.stack([ends[2], ends[3] if s < 4 else ends[1]]))
    loss = ((a - b) ** 2).sum(-1).sqrt().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert [(i["step"], i["cause"]["code"], i["origin"]["code"]) for i in done.incidents][:1] == [(4, "WN501", "loss = ((a - b) ** 2).sum(-1).sqrt().sum()")]
    assert "further on" in done.incidents[0]["remedies"][0]["effect"]


def test_a_running_value_that_is_written_by_out_is_put_back(box: Sandbox) -> None:
    """A moving average and a plain copy, as if the bad batch had never come."""
    done = box.watched(f"""{HEAD}
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
average, kept = torch.zeros(3), torch.zeros(3)
for s in range(6):
    x = torch.full((8, 4), float("inf")) if s == 3 else torch.ones(8, 4) * s
    h = net(x)
    torch.lerp(average, h.detach().mean(0), 0.1, out=average)
    torch.mul(h.detach().mean(0), 2, out=kept)
    loss = h.square().mean() + 0 * kept.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(s, average.isfinite().all().item(), kept.isfinite().all().item())
""")
    assert [i["step"] for i in done.incidents] == [3]
    assert "False" not in done.out, done.out


@pytest.mark.parametrize(
    "line",
    [
        "F.conv_transpose1d(100 * h, w, stride=2).float().sum()",  # the weight's gradient, not the first result
        "(F.embedding(ids, w.flatten(1)) * push).sum().float()",  # what is summed up in float16 on the way to 0
    ],
)
def test_what_is_linear_has_no_infinite_slope(line: str, box: Sandbox) -> None:
    """Where its gradient is not finite in float16 and is in float64, the range was left."""
    done = box.watched(f"""{HEAD}
w = nn.Parameter(torch.full((4, 1, 4), 1e-3).half())
opt = torch.optim.SGD([w], 1e-6)
h, ids = torch.ones(8, 4, 32).half(), torch.zeros(4, dtype=torch.long)
push = torch.tensor([[6e4], [6e4], [-6e4], [-6e4]]).half()
loss = {line}
(loss * 4).backward() if "conv" in {line!r} else loss.backward()
opt.step()
""")
    assert [(i["cause"]["code"], i["cause"]["confidence"], i["origin"]["line"]) for i in done.incidents] == [("WN503", "proven", 11)]
    assert "float16 ends at" in str(done.incidents[0]["cause"]["evidence"])


def test_gradients_are_called_finite_only_where_those_of_every_optimizer_are(box: Sandbox) -> None:
    """Some programs give each weight an optimizer of its own."""
    done = box.watched(f"""{HEAD}
a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
first, second = torch.optim.SGD([a], 0.1), torch.optim.SGD([b], 0.1)
loss = a.square().sum() - b.log().sum()
loss.backward()
first.step()
second.step()
""")
    assert "the gradients of this step are finite" not in str(done.incidents)
    assert done.incidents[0]["cause"]["code"] == "WN101"


def test_a_folder_filled_by_pip_holds_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the program that calls one is told also where it is not in site-packages."""
    (tmp_path / "some-1.0.dist-info").mkdir()
    code = compile("1", str(tmp_path / "some" / "module.py"), "eval")
    monkeypatch.setattr(sys, "path", [sys.path[0], str(tmp_path)])
    assert is_installed(code)
    assert not is_installed(compile("1", str(tmp_path.parent / "program.py"), "eval"))
