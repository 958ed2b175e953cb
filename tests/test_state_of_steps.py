"""State that a step writes in ways of its own: it is put back for a replay and after a skip, and the line is told, not the state."""

from __future__ import annotations

import pytest
from conftest import Sandbox

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
"""
CENTRE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("centre", torch.ones(4))
    def forward(self, x):
        h = self.linear(x)
        {update}
        return h - self.centre
net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-2)
for s in range(8):
    x = torch.randn(8, 4)
    size = x.abs().sum(-1, keepdim=True)
    if s >= 4 and s < 6:
        size[2] = 0
    loss = net(x / size).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(bool(net.centre.isfinite().all()), bool(loss.isfinite()))
"""


@pytest.mark.parametrize(
    "update",
    [
        "self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)",
        "self.centre.data.lerp_(h.detach().mean(0), 0.1)",
        "self.centre.mul_(0.9).add_(0.1 * h.detach().mean(0))",
    ],
    ids=["put in its place", "through .data", "in place"],
)
def test_a_buffer_that_the_step_itself_spoils(update: str, box: Sandbox) -> None:
    """It was finite before the step: the quotient is told, proven, and two bad batches in a row are skipped, no more."""
    done = box.watched(HEAD + CENTRE.format(update=update))
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(4, "WN103"), (5, "WN103")]
    assert done.incidents[0]["remedies"][0]["result"] == "proven"
    assert done.status == 0
    finite = [line.split() for line in done.out.splitlines()]
    assert [loss for _, loss in finite] == ["True"] * 4 + ["False"] * 2 + ["True"] * 2
    assert all(centre == "True" for centre, _ in (finite[3], finite[6], finite[7]))


PART = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(4), 0
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
    def forward(self, x):
        self.calls += 1
        self.total += 1
        y = self.norm(x)
        UPDATE
        return y * (1 + torch.sqrt(CAPACITY - self.total))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.head = Part(), nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.part(x))
net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-2)
for s in range(9):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(s))
    if s in (5, 6):
        if SKIPPED:
            continue
        x[2] = 0
    x = x / x.norm(dim=1, keepdim=True)
    if FIRST:
        loss = net(x).square().mean() + net.part(x + 0.1).mean()
    else:
        loss = net.part(x + 0.1).mean() + net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(net.part.calls, [b.tolist() for b in net.buffers()], [p.tolist() for p in net.parameters()])
"""


@pytest.mark.parametrize("update", ["self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)", "self.mean.lerp_(y.detach().mean(0), 0.1)"])
@pytest.mark.parametrize("first", ["True", "False", "s % 2", "s % 2 == 0"])
def test_a_model_and_a_part_of_it_called_in_one_step(first: str, update: str, box: Sandbox) -> None:
    """Both have a state of their own, one from after the other's call: after a skip all is as before the first call of the step."""
    source = HEAD + PART.replace("FIRST", first).replace("CAPACITY", "99.0").replace("UPDATE", update)
    done = box.watched(source.replace("SKIPPED", "False"))
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(5, "WN104"), (6, "WN104")]
    assert done.out == box.plain(box.write(source.replace("SKIPPED", "True"))).out


@pytest.mark.parametrize(("first", "good", "bad"), [("True", "net(x).square().mean()", "net.part(x + 0.1).mean()"),
                                                    ("False", "net.part(x + 0.1).mean()", "net(x).square().mean()")])  # fmt: skip
def test_a_replay_begins_before_the_first_of_two_calls_of_one_part(first: str, good: str, bad: str, box: Sandbox) -> None:
    """What only the second call makes of a counter is not told of the first."""
    done = box.watched(HEAD + PART.replace("FIRST", first).replace("CAPACITY", "9.0").replace("UPDATE", "").replace("SKIPPED", "True"))
    text = " ".join(done.err.split())
    assert (done.incidents[0]["step"], done.incidents[0]["cause"]["code"]) == (4, "WN105")
    assert f"born on the way to {bad}" in text
    assert f"{good} nan" not in text


def test_statistics_of_a_batch_norm_that_overflow_twice(box: Sandbox) -> None:
    """The forward pass of the step before is no part of the replay, although its loss is still held: not told as a buffer that was bad before."""
    done = box.watched(f"""{HEAD}
net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
opt = torch.optim.Adam(net.parameters(), 1e-2)
for s in range(9):
    x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
    if s in (3, 4):
        x[2, 1] = 1e25
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(3, "WN203"), (4, "WN203")]


def test_a_replay_gives_the_loss_of_the_step(box: Sandbox) -> None:
    """A change that touches only a buffer's update leaves the loss as it was, to the digits that are told."""
    done = box.watched(f"""{HEAD}
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))
    def forward(self, y, w):
        out = (y - self.centre.clone()).pow(2).mean()
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * (y * w[:, None]).sum(0) / w.sum())
        return out
linear, centred = nn.Linear(6, 5), Centred()
opt = torch.optim.SGD(linear.parameters(), 0.1)
for s in range(5):
    w = torch.ones(8) * (s != 3)
    loss = centred(linear(torch.randn(8, 6) + 3), w)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{{loss.item():.4g}}")
""")
    assert f"loss {done.out.splitlines()[3]}," in done.incidents[0]["remedies"][0]["effect"]


def test_a_codebook_that_is_put_in_place_as_a_parameter(box: Sandbox) -> None:
    """A new parameter in the forward pass, as vector quantisers average theirs: the old one stands there again after a skip."""
    done = box.watched(f"""{HEAD}
class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.code = nn.Embedding(8, 4)
        self.sums = nn.Parameter(self.code.weight.detach().clone())
    def forward(self, x):
        hit = torch.cdist(x, self.code.weight).argmin(1)
        one = nn.functional.one_hot(hit, 8).type_as(x)
        with torch.no_grad():
            self.sums = nn.Parameter(0.9 * self.sums + 0.1 * one.T @ x)
            self.code.weight = nn.Parameter(self.sums / (one.sum(0).unsqueeze(1) + 1))
        return (x - self.code.weight.detach()[hit]).pow(2).mean()
encoder, quantiser = nn.Linear(4, 4), Quantiser()
opt = torch.optim.Adam(encoder.parameters(), 1e-2)
for s in range(8):
    x = torch.randn(16, 4)
    size = x.abs().sum(-1, keepdim=True)
    if s == 5:
        size[2] = 0
    loss = quantiser(encoder(x / size))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(bool(quantiser.code.weight.isfinite().all()))
""")
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(5, "WN103")]
    assert (done.out, done.incidents[0]["remedies"][0]["result"]) == ("True\n", "proven")


@pytest.mark.parametrize("edit", ["emb.weight[0] *= 0.0", "emb.weight[4:].clamp_(-1, 1)", "emb.weight[1].div_(2.0)"])
def test_rows_of_a_weight_written_without_gradient(edit: str, box: Sandbox) -> None:
    """torch refuses to say where such a view comes from; watching goes on, and the bad step is told."""
    done = box.watched(f"""{HEAD}
emb = nn.Embedding(10, 4)
opt = torch.optim.SGD(emb.parameters(), 0.1)
for s in range(6):
    with torch.no_grad():
        {edit}
        if s == 3:
            emb.weight[2] = 0.0
    e = emb(torch.tensor([1, 2, 5, 6]))
    loss = (e / e.norm(dim=-1, keepdim=True))[:, 0].sub(1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert "internal error" not in done.err
    assert (done.incidents[0]["step"], done.incidents[0]["cause"]["code"]) == (3, "WN104")


@pytest.mark.parametrize("write", ["p.{op}_({value})", "p.data.{op}_({value})"], ids=["under no_grad", "through .data"])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_weights_that_a_loop_moves_between_two_passes(bad: str, write: str, box: Sandbox) -> None:
    """Sharpness-aware minimisation: a bad first pass is told with its line, and its perturbation never reaches the weights."""
    line = "torch.log(p * (s != 4)).mean()" if bad == "loss" else "(p * (s != 4)).sum(1).sqrt().mean()"
    add, sub = (write.format(op=op, value="moved[p]") for op in ("add", "sub"))
    source = f"""{HEAD}
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
moved = {{}}
def loss_of(x, s):
    p = net(x).softmax(-1)
    return {line}
for s in range(8):
    x = torch.randn(8, 4)
    loss_of(x, s).backward()
    with torch.no_grad():
        size = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        for p in net.parameters():
            moved[p] = p.grad * 0.05 / (size + 1e-12)
            {add}
    opt.zero_grad()
    loss_of(x, s).backward()
    with torch.no_grad():
        for p in net.parameters():
            {sub}
    opt.step()
    opt.zero_grad()
    print(all(bool(p.isfinite().all()) for p in net.parameters()))
"""
    done = box.watched(source)
    code, at = (
        ("WN101", source.splitlines().index(f"    return {line}") + 1) if bad == "loss" else ("WN501", source.splitlines().index(f"    return {line}") + 1)
    )
    assert {(i["cause"]["code"], i["origin"]["line"]) for i in done.incidents} == {(code, at)}
    assert done.out == "True\n" * 8


@pytest.mark.parametrize("check", ["assert step > 0, 'underflow'", "if not step > 0: raise ValueError('step')"])
def test_a_check_that_raises_over_a_nan(check: str, box: Sandbox) -> None:
    """What made the NaN that the raising function holds is told; a check that holds none says nothing."""
    source = f"""{HEAD}
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
def solve(x):
    h = torch.log(x)
    step = 1 / (1 + h.abs().sum())
    {check}
    return h
for s in range(8):
    loss = net(solve(torch.rand(8, 4) - 1.0 * (s == 4))).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    done = box.watched(source)
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents] == [(4, "WN102")]
    assert box.watched(source.replace("torch.log(x)", "x.abs()").replace("> 0", "> 1")).err.count("error[WN") == 0


def test_a_buffer_that_was_bad_before_and_is_put_in_its_place(box: Sandbox) -> None:
    """The forward pass replaces it: it is known as the buffer it was when the step began."""
    done = box.watched(f"""{HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.register_buffer("centre", torch.zeros(5))
    def forward(self, x):
        h = self.linear(x) - self.centre
        self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)
        return h
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.1)
for s in range(6):
    if s == 3:
        net.centre[1] = float("nan")
    loss = net(torch.randn(8, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert [(i["step"], i["cause"]["code"]) for i in done.incidents][:1] == [(3, "WN602")]


GAN = """
import torch.nn.functional as F
made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
judge = nn.Linear(4, 1)
first, second = torch.optim.Adam(made.parameters()), torch.optim.Adam(judge.parameters())
for s in range(6):
    real, z = torch.randn(6, 4), torch.randn(6, 4)
    if s == 4:
        real[0, 0] = float("nan")
    fake = made(z)
    second.zero_grad()
    (F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()).backward()
    second.step()
    first.zero_grad()
    F.softplus(-judge(fake)).mean().backward()
    first.step()
print("end", bool(made[1].running_mean.isfinite().all()))
"""


def test_a_generator_goes_back_after_its_judge_was_skipped(box: Sandbox) -> None:
    """The statistics that a skipped step puts back are held by the graph of the other network, which the program still goes back through."""
    done = box.watched(HEAD + GAN)
    assert done.out == "end True\n", done.err
    assert [(i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [("WN701", "skipped")], done.err


GRAPH = """
import torch.nn.functional as F
edges, net = torch.eye(6).to_sparse(), nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
for s in range(5):
    loss = F.cross_entropy(torch.sparse.mm(edges, net(x)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        print(F.cross_entropy(torch.sparse.mm(edges, net(x)), y).item())
"""


def test_sparse_tensors_without_gradient(box: Sandbox) -> None:
    """A graph network is validated with its sparse matrix, and the watching goes on."""
    done = box.watched(HEAD + GRAPH)
    assert (done.incidents, done.err, len(done.metrics)) == ([], "", 5)


AUXILIARY = """
import torch.nn.functional as F
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        chosen = probs.argmax(-1)
        self.aux = probs[chosen == 2, 2].mean()
        return probs @ torch.ones(3, 2)
net, head = Experts(), nn.Linear(2, 2)
opt = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.01)
for s in range(12):
    x = torch.randn(64, 4) if s != 9 else torch.ones(64, 4)
    loss = F.cross_entropy(head(net(x)), torch.zeros(64, dtype=torch.long)) + 0.1 * net.aux
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_change_inside_a_module_that_leaves_a_loss_in_an_attribute(box: Sandbox) -> None:
    """The change makes other autograd nodes than the step had: the auxiliary loss is found again where the module keeps it, under its own name."""
    done = box.watched(HEAD + AUXILIARY)
    (incident,) = done.incidents
    assert (incident["cause"]["code"], incident["remedies"][0]["result"]) == ("WN402", "proven"), done.err
    assert any("net.aux nan" in note for note in incident["cause"]["evidence"]), incident["cause"]["evidence"]


def test_warnings_of_a_step_are_shown_once(box: Sandbox) -> None:
    """Replays show no warnings, and leave those that were shown already as they are."""
    body = """
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
for s in range(9):
    x = torch.randn(1 if s in (2, 5, 7) else 6, 4)
    loss = net(x).square().mean() + net(x).var(0).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    path = box.write(HEAD + body)
    done = box.whynan(str(path))
    plain = box.python(str(path))
    assert len(done.incidents) == 3
    assert done.err.count("degrees of freedom is <= 0. Correction") == plain.err.count("degrees of freedom is <= 0. Correction") == 1


def test_what_a_program_keeps_on_its_weights_is_as_before_a_replay(box: Sandbox) -> None:
    """Counters and per-sample gradients that hooks hang on parameters (Opacus): a diagnosis does not move them."""
    body = """
net = nn.Linear(4, 1)
net.weight.uses, net.weight.parts = 0, []
def count(module, args, out):
    module.weight.uses += 1
    module.weight.parts.append(out.shape[0])
net.register_forward_hook(count)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for s in range(6):
    x = torch.rand(8, 4)
    if s == 3:
        x[2] = -1.0
    loss = (net(x) - torch.log(x.sum(1, keepdim=True))).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(net.weight.uses, len(net.weight.parts))
"""
    done = box.watched(HEAD + body)
    assert len(done.incidents) == 1
    assert done.out.split("\n")[:-1] == [f"{n} {n}" for n in range(1, 7)]


SHARPNESS = """
class SAM(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})
    @torch.no_grad()
    def step(self, closure):
        weights = self.param_groups[0]["params"]
        old = [p.clone() for p in weights]
        for p in weights:
            p.add_(0.05 * p.grad / p.grad.norm())
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, before in zip(weights, old):
            p.copy_(before - 0.05 * p.grad)
net = nn.Linear(4, 1)
opt = SAM(net.parameters())
for s in range(8):
    x = torch.rand(8, 4)
    if s == 4:
        x[3] = -1
    def closure():
        loss = (net(x) - torch.log(x.sum(1, keepdim=True))).square().mean()  # the log
        loss.backward()
        return loss
    loss = closure()
    opt.step(closure)
    opt.zero_grad()
    print(bool(loss.isfinite()))
"""


def test_a_pass_before_a_step_with_a_closure_is_looked_at_before_the_weights_move(box: Sandbox) -> None:
    """SAM moves the weights by the first pass: its NaN would be told as a damaged weight, and the run be stopped."""
    done = box.watched(HEAD + SHARPNESS)
    (incident,) = done.incidents
    assert (incident["cause"]["code"], incident["action"]["taken"]) == ("WN102", "skipped"), done.err
    assert incident["origin"]["code"].endswith("# the log")
    assert done.out.split() == ["True"] * 4 + ["False"] + ["True"] * 3


def test_a_tensor_of_another_class_is_still_what_the_model_made(box: Sandbox) -> None:
    """`as_subclass` goes past every function mode; its result was taken for a target."""
    body = """
class Marked(torch.Tensor):
    pass
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
for s in range(6):
    x = torch.rand(8, 4)
    if s == 3:
        net.weight.data[0, 1] = float("nan")
    loss = nn.functional.mse_loss(net(x).as_subclass(Marked), x[:, :1])
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    done = box.watched(HEAD + body)
    assert done.incidents[0]["cause"]["code"] == "WN601", done.err


def test_a_loss_divided_in_place_does_not_bring_the_step_before_into_the_replay(box: Sandbox) -> None:
    """The loss of the step before is still alive; its write is no part of this one."""
    body = """
w = nn.Parameter(torch.randn(4))
opt = torch.optim.SGD([w], lr=0.1)
for s in range(6):
    x = torch.rand(8, 4)
    y = x.sum(1)
    if s == 4:
        y[2] = -1
    loss = (x @ w - torch.log(y)).square().mean()
    loss /= 2
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    done = box.watched(HEAD + body)
    (incident,) = done.incidents
    assert (incident["cause"]["code"], incident["origin"]["exact"]) == ("WN102", True), done.err


HYPER = """
class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = None
    def forward(self, x):
        return torch.log((x @ self.w).pow(2).sum(-1))
hyper, target = nn.Linear(3, 12), Target()
opt = torch.optim.Adam(hyper.parameters(), 1e-2)
for s in range(8):
    z, x = torch.randn(3), torch.randn(5, 4)
    if s == 5:
        x[2] = 0
    target.w = hyper(z).view(4, 3)
    loss = target(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
FAST = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.fast = nn.Parameter(torch.randn(4, 3)), {empty}
    def forward(self, x):
        w = {read}
        return torch.sqrt((x @ w).pow(2).sum(-1))
net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-2)
for s in range(8):
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    if s == 5:
        y[2] = 0
    net.fast = {empty}
    (g,) = torch.autograd.grad(net(x).mean(), net.w, create_graph=True)
    {write}
    loss = net(y).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
EXCHANGED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))
    def forward(self, x):
        return torch.sqrt((x @ self.w).pow(2).sum(-1))
net, scale = Net(), nn.Parameter(torch.ones(4))
first = net.w{copy}
opt = torch.optim.Adam([scale], 1e-2)
for s in range(8):
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    if s == 5:
        y[2] = 0
    net._parameters["w"] = first
    for turn in range(2):
        (g,) = torch.autograd.grad(net(x * scale).mean(), net.w, create_graph=True)
        net._parameters["w"] = net.w - 0.1 * g
    loss = net(y * scale).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
GIVEN = {
    "the weights of a hypernetwork": (HYPER, "WN101"),
    "fast weights": (FAST.format(empty="None", read="self.w if self.fast is None else self.fast", write="net.fast = net.w - 0.1 * g"), "WN501"),
    "fast weights in a list": (FAST.format(empty="[]", read="self.fast[-1] if self.fast else self.w", write="net.fast.append(net.w - 0.1 * g)"), "WN501"),
    "parameters that are exchanged": (EXCHANGED.format(copy=""), "WN501"),
    "parameters that begin as copies": (EXCHANGED.format(copy=".clone()"), "WN501"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_the_loop_puts_into_a_module_is_computed_again(kind: str, box: Sandbox) -> None:
    """A replay puts it there before the call, made from the same weights: the line is found and the change proven."""
    source, code = GIVEN[kind]
    (incident,) = box.watched(HEAD + source).incidents
    assert (incident["step"], incident["cause"]["code"], incident["remedies"][0]["result"]) == (5, code, "proven")
    assert incident["origin"]["code"].startswith("return torch.")


SECANT = """
class Secant(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure):
        weights = self.param_groups[0]["params"]
        with torch.enable_grad():
            loss = closure()
        first = [p.grad.clone() for p in weights]
        for p, g in zip(weights, first):
            p.sub_(0.1 * g)
        with torch.enable_grad():
            closure()
        for p, g in zip(weights, first):
            p.sub_(0.1 * g * (g.sum() / (g - p.grad).sum()))  # here
        with torch.enable_grad():
            closure()
        for p in weights:
            p.sub_(0.001 * p.grad)
        return loss
opt = Secant(net.parameters())
"""
PERTURBED = """
class Perturbed(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure):
        weights = self.param_groups[0]["params"]
        with torch.enable_grad():
            closure()
        old = [p.clone() for p in weights]
        for p in weights:
            p.add_(0.05 * p.grad / p.grad.norm())  # here
        with torch.enable_grad():
            closure()
        for p, before in zip(weights, old):
            p.copy_(before - 0.05 * p.grad)
opt = Perturbed(net.parameters())
"""
LAST_MOVE = """
opt = torch.optim.LBFGS(net.parameters(), max_iter=1)
"""
EVALUATED = """
net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
{optimizer}
calls = 0
for s in range(5):
    x = torch.randn(16, 3)
    if s == 2 and {left_out}:
        continue
    def closure():
        global calls
        calls += 1
        opt.zero_grad()
        h = net(x)
        loss = {loss}
        loss.backward()
        return loss
    if {far}:
        opt.param_groups[0]["lr"] = 3e38 if s == 2 else 1.0
    opt.step(closure)  # step
print(calls, [round(float(p.sum()), 8) for p in net.parameters()], float(net[0].running_mean.sum()))
"""
FLAT = "(h - x.sum(1, keepdim=True)).square().mean() * (s != 2)"
FITTED = "(h - x.sum(1, keepdim=True) * 100).square().mean()"


@pytest.mark.parametrize(
    ("optimizer", "loss", "line"),
    [(SECANT, FLAT, "here"), (PERTURBED, FLAT, "here"), (LAST_MOVE, FITTED, "step")],
    ids=["secant", "perturbed", "last move"],
)
def test_an_update_that_breaks_weights_between_evaluations_is_told_and_left_out(box: Sandbox, optimizer: str, loss: str, line: str) -> None:
    """Not the evaluation that meets the broken weights is to blame; the closure is not called for the replay, and the run ends as one without that step."""
    program = HEAD + EVALUATED.replace("{optimizer}", optimizer).replace("{loss}", loss).replace("{far}", str(optimizer is LAST_MOVE))
    done = box.watched(program.replace("{left_out}", "False"))
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["action"]["taken"]) == (2, "WN604", "skipped"), done.err
    assert incident["origin"]["code"].endswith(f"# {line}") and incident["origin"]["phase"] == "optimizer"
    assert all(remedy["result"] != "proven" for remedy in incident["remedies"])
    without = box.plain(box.write(program.replace("{left_out}", "True")))
    assert done.out.split()[1:] == without.out.split()[1:]


SEARCH = """
X = torch.randn(60, 3) * 3
Y = torch.poisson(torch.exp(X @ torch.tensor([0.4, -0.3, 0.2])))
net = nn.Linear(3, 1)
opt = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe")
calls = 0
def closure():
    global calls
    calls += 1
    opt.zero_grad()
    h = net(X).squeeze(-1)
    loss = (torch.exp(h) - Y * h).mean()
    loss.backward()
    return loss
for rate in {rates}:
    opt.param_groups[0]["lr"] = rate
    opt.step(closure)  # step
print(calls, net.weight.tolist())
"""


def test_a_line_search_that_computes_no_length_is_told_and_left_out(box: Sandbox) -> None:
    """Slopes whose squares leave float32 make the next point of LBFGS NaN: the step is told, its evaluations are not, and the fit goes on from before it."""
    done = box.watched(HEAD + SEARCH.format(rates=[30.0, 0.1, 0.1]))
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["action"]["taken"]) == (0, "WN604", "skipped"), done.err
    assert incident["origin"]["code"] == "opt.step(closure)  # step" and "inside the optimizer" in incident["cause"]["label"]
    assert done.out.split()[1:] == box.plain(box.write(HEAD + SEARCH.format(rates=[0.1, 0.1]))).out.split()[1:]
    assert box.forked("replay", str(box.run_dir)).status == 0  # the capsule carries what the closure gave


OBSERVED = {
    "secant": EVALUATED.replace("{optimizer}", SECANT).replace("{loss}", FLAT).replace("{far}", "False").replace("{left_out}", "False"),
    "line search": SEARCH.format(rates=[30.0, 0.1]),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_an_update_that_breaks_weights_between_evaluations_is_only_observed(box: Sandbox, name: str) -> None:
    """The step ends as it would; then it is told, and optimizer, weights and closure go on as without whynan."""
    done = box.watched(HEAD + OBSERVED[name], "--policy", "observe")
    assert done.incidents[0]["cause"]["code"] == "WN604"
    assert done.out == box.plain(box.write(HEAD + OBSERVED[name])).out


LATE = """
net, opt = nn.Linear(3, 1), None
for s in range(12):
    x = torch.rand(8, 3)
    if s in (0, 1, 5):
        x[0] = 0
    if DROPS and s in (0, 1, 5):
        opt = opt or torch.optim.Adam(net.parameters(), lr=0.05)
        continue
    loss = (0.01 * x.sum(1).log() + net(x).squeeze(-1).pow(2)).mean()
    loss.backward()
    opt = opt or torch.optim.Adam(net.parameters(), lr=0.05)
    opt.step()
    opt.zero_grad()
print([p.tolist() for p in net.parameters()])
"""


def test_a_training_whose_first_step_is_bad_and_whose_optimizer_is_made_after_it_goes_on(box: Sandbox) -> None:
    """As pyro makes its optimizers: every later update was left out without a word."""
    done = box.watched(HEAD + "DROPS = False" + LATE)
    assert [(i["step"], i["action"]["taken"]) for i in done.incidents] == [(0, "skipped"), (1, "skipped"), (5, "skipped")], done.err
    assert done.out == box.plain(box.write(HEAD + "DROPS = True" + LATE)).out


AROUND = """
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
def hinge(x, margin):
    return torch.relu(margin - net(x) * x[:, :1].sign()).mean()
for s in range(12):
    x = torch.randn(16, 4)
    if DROPS and s == 6:
        continue
    margin = -50.0 if s == 6 else 0.3
    opt.zero_grad()
    hinge(x, margin).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        scale = 0.05 / norm  # the division
        moves = [p.grad * scale for p in net.parameters()]
        for p, move in zip(net.parameters(), moves):
            p.add_(move)
    opt.zero_grad()
    hinge(x, margin).backward()
    with torch.no_grad():
        for p, move in zip(net.parameters(), moves):
            p.sub_(move)
    opt.step()
print([p.tolist() for p in net.parameters()])
"""


def test_a_weight_that_a_loop_would_break_between_two_passes_is_kept_and_the_line_is_told(box: Sandbox) -> None:
    """SAM written in the loop, with a gradient of 0: the weights were told as damaged before the step, and the run was stopped."""
    done = box.watched(HEAD + "DROPS = False" + AROUND)
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["action"]["taken"]) == (6, "WN103", "skipped"), done.err
    assert incident["origin"]["code"].endswith("# the division")
    assert done.out == box.plain(box.write(HEAD + "DROPS = True" + AROUND)).out


def test_weights_handed_to_a_derivative_as_a_generator_are_there_for_a_replay(box: Sandbox) -> None:
    """`torch.autograd.grad(loss, net.parameters())` can go through them once."""
    done = box.watched(
        HEAD
        + """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for s in range(8):
    x = torch.rand(8, 4)
    loss = net(x).square().mean()
    grads = torch.autograd.grad(loss, net.parameters(), create_graph=True)
    reach = sum((g * g).sum() for g in grads) * (s != 4)
    total = loss + torch.sqrt(reach)  # the root
    opt.zero_grad()
    total.backward(inputs=iter(list(net.parameters())))
    opt.step()
"""
    )
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"]) == (4, "WN501"), done.err
    assert incident["origin"]["code"].endswith("# the root")


CLIMBING = """
class SAM(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})
    @torch.no_grad()
    def climb(self):
        weights = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        self.moves = [p.grad / norm for p in weights]  # the division
        for p, move in zip(weights, self.moves):
            p.add_(move, alpha=0.05)
        self.zero_grad()
    @torch.no_grad()
    def step(self):
        for p, move in zip(self.param_groups[0]["params"], self.moves):
            p.sub_(move, alpha=0.05)
            p.sub_(p.grad, alpha=0.05)
net = nn.Linear(4, 1)
opt = SAM(net.parameters())
for s in range(6):
    x, margin = torch.randn(16, 4), -50.0 if s == 3 else 1.0
    for way in (opt.climb, opt.step):
        opt.zero_grad()
        torch.relu(margin - net(x)).mean().backward()
        way()
"""


def test_a_method_of_an_optimizer_that_moves_the_weights_is_an_update(box: Sandbox) -> None:
    """The first half of SAM as its own method: finite weights and gradients, and the optimizer divides them by 0."""
    done = box.watched(HEAD + CLIMBING)
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["origin"]["phase"]) == (3, "WN604", "optimizer"), done.err
    assert incident["origin"]["code"].endswith("# the division")
    assert incident["remedies"][0]["result"] == "proven"
