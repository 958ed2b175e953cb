"""The changes that are offered on whole programs: each is at the right place, and proven by what it does there."""

from __future__ import annotations

import pytest
from conftest import Sandbox
from going_bad import HEAD, TAIL, first, sentences

from whynan.casebook.patching import patched

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
    remedy = next(r for r in incident["remedies"] if r["diff"])
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
    assert "nan" not in box.plain(box.write(patched(head + body + TAIL, remedy["diff"]), "healed.py")).out


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
    remedy = next(r for r in incident["remedies"] if "identity" in r["title"] and r["diff"])
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


def test_a_limit_is_not_the_same_mathematics(box: Sandbox) -> None:
    """binary_cross_entropy keeps the logarithm at -100 where the one written by hand is -inf: finite numbers are the same, this one is not."""
    body = """
for step in range(5):
    p, y = torch.sigmoid(net(torch.randn(8, 4)) * (1000 if step == 3 else 1)), (torch.rand(8, 1) > 0.5).float()
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
"""
    limited = [r for r in first(box, body)["remedies"] if "binary_cross_entropy" in r["title"]]
    assert limited and not limited[0]["safe"]


STASHED = """
import torch
from torch import nn
torch.manual_seed(0)
entropies = []
def record(module, args, p):
    entropies.append(-torch.where(p > 0, p * p.log(), torch.zeros_like(p)).sum())
class Weights(nn.Module):
    def forward(self, scores):
        p = scores.softmax(-1)
        {inside}
        return p
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.weights = nn.Linear(6, 6), Weights()
    def forward(self, x):
        return self.weights(self.score(x).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf))
net = Net()
{hook}
opt = torch.optim.Adam(net.parameters(), 1e-2)
for s in range(3):
    loss = (net(torch.randn(6, 6)) - 0.2).square().sum() + 0.01 * entropies.pop()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("inside", "hook"), [("pass", "net.weights.register_forward_hook(record)"), ("record(self, (), p)", "pass")], ids=["in a hook", "in the model"]
)
def test_a_change_is_tried_where_what_it_makes_is_picked_up_from_inside_a_module(box: Sandbox, inside: str, hook: str) -> None:
    """Such a value is known by its autograd node, and a change makes other nodes: it is known by its call then."""
    done = box.watched(STASHED.replace("{inside}", inside).replace("{hook}", hook))
    first = done.incidents[0]
    assert first["cause"]["code"] == "WN502"
    assert [(r["result"], ".clamp_min(1e-12).log()" in r["diff"]) for r in first["remedies"]][:1] == [("proven", True)], done.err
    assert "KeyError" not in str(first)


INNER = """
import torch
from torch.func import functional_call, grad
torch.manual_seed(0)
net = torch.nn.Linear(3, 2, bias=False)
opt = torch.optim.SGD(net.parameters(), 0.05)
def distance(params, x, y):
    return {distance}
for s in range(8):
    x, q = torch.randn(4, 3), torch.randn(4, 3)
    if s == 5:
        x = torch.zeros(4, 3)
    params = dict(net.named_parameters())
    slopes = grad(distance)(params, x, x[:, :2])
    moved = {name: p - 0.1 * slopes[name] for name, p in params.items()}
    loss = (functional_call(net, moved, (q,)) - q[:, :2]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("distance", "change"),
    [
        ("(functional_call(net, params, (x,)) - y).square().mean().sqrt()", "+ 1e-6).sqrt()"),
        ("(functional_call(net, params, (x,)) - y).square().sum(1).sqrt().mean()", "+ 1e-6).sqrt()"),
        ("torch.where(x[:, :2] == 0, 0, functional_call(net, params, (x,)) / x[:, :2]).square().mean()", "!= 0, float("),
    ],
)
def test_changes_are_tried_inside_a_function_that_torch_func_differentiates(box: Sandbox, distance: str, change: str) -> None:
    """There torch refuses the hooks that tell how much of a gradient a change stops; that is asked outside of the transform."""
    done = box.watched(INNER.replace("{distance}", distance))
    (incident,) = done.incidents
    assert (incident["step"], incident["origin"]["code"]) == (5, f"return {distance}")
    assert incident["remedies"][0]["result"] == "proven", done.err
    assert change in incident["remedies"][0]["diff"]


KEPT = {
    "a number over a range": (
        """
    z = torch.relu(net(x)) * (0.0 if step == 3 else 1.0)
    loss = ((z - z.min()) * (2 / (z.max() - z.min()))).square().mean() + net(x).square().mean()
""",
        "WN404",
        "2 / ((z.max() - z.min()).clamp_min(1e-6))",
    ),
    "a distance in a ball": (
        """
    a, b = x[:, None] * net.weight * 1e-3, torch.randn(6, 5, 4) * 1e-3
    b[2, 1] = a[2, 0].detach() if step == 3 else 0.001
    apart = 2 * (a - b).square().sum(-1)
    loss = F.cross_entropy(-torch.acosh(1 + apart), torch.zeros(6, dtype=torch.long))
""",
        "WN501",
        "torch.acosh((1 + apart) + 1e-6)",
    ),
    "the second derivative of an angle at the origin": (
        """
    x[2] = 0 if step == 3 else 1
    v = x[:, :2] * net.weight[:, :2]
    angle = torch.atan2(v[:, 0], v[:, 1])
    loss = torch.autograd.grad(angle.sum(), v, create_graph=True)[0].square().mean() * 1e-3
""",
        "WN501",
        "v[:, 1].where((v[:, 1] != 0) | (v[:, 0] != 0), 1.0)",
    ),
    "an entropy of tiny shares": (
        """
    y = net(x) * 0.1
    p = F.softmax(torch.cat([y, y - 40, y - 45, y - (900 if step == 3 else 0)], 1), 1).mean(0)
    loss = (p * torch.log(p)).sum()
""",
        "WN101",
        "p.clamp_min(1e-37)",
    ),
}


@pytest.mark.parametrize(("lines", "code", "new"), KEPT.values(), ids=list(KEPT))
def test_a_change_that_leaves_what_is_alive_alone(lines: str, code: str, new: str, box: Sandbox) -> None:
    """A bound below the values that are not at the edge, a number added where a bound would stop others, and the operand that is really divided by."""
    incident = first(box, f"for step in range(5):\n    x = torch.randn(6, 4){lines}")
    assert (incident["step"], incident["cause"]["code"]) == (3, code)
    proven = [r for r in incident["remedies"] if r["result"] == "proven"]
    assert proven and new in proven[0]["diff"]


def test_a_spread_of_one_element_that_sets_initial_values(box: Sandbox) -> None:
    """Divided by n it is 0, whose logarithm is no better: what helps is a batch of more than one, and nothing is called finite that is not."""
    body = """
scale = nn.Parameter(torch.zeros(1))
opt.add_param_group({"params": [scale]})
for step in range(3):
    x = torch.randn(1, 4)
    y = net(x)
    if step == 0:
        scale.data = torch.log(1 / y.detach().std(dim=0))
    loss = (y * scale.exp()).square().mean()
"""
    incident = first(box, body)
    assert incident["cause"]["code"] == "WN403"
    assert any(r["title"].startswith("take it over more than one element") for r in incident["remedies"])
    assert not any("finite, but without" in r["title"] for r in incident["remedies"])
