"""The tape and its replay: the same bits again, and no trace of it afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import whynan
from whynan.capsule.replay import Program
from whynan.engine.guard import Guard

# -- exactness ----------------------------------------------------------------------------------------------------

Step = Callable[[], torch.Tensor]


class Stashing(torch.nn.Module):
    """Leaves an auxiliary loss on itself, as mixture-of-experts layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers and leave marks."""
        out = self.inner(x)
        self.aux = out.softmax(-1).square().sum()
        return out.tanh()


class Square(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """x squared."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """2x."""
        return grad * 2 * ctx.saved_tensors[0]


class Batch(NamedTuple):
    """A batch that is not a plain tuple."""

    x: torch.Tensor
    y: torch.Tensor


def net() -> torch.nn.Sequential:
    """A model with everything that has state in it."""
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def dropout() -> Step:
    """Random numbers inside and outside the model."""
    model = net()

    def step() -> torch.Tensor:
        x = torch.randn(6, 4)
        noise = torch.rand_like(x) + torch.bernoulli(torch.full((6, 4), 0.5))
        return F.dropout(model(x + 0.1 * noise), 0.3).square().mean() + F.gumbel_softmax(model(x), dim=-1).max()

    return step


def in_place() -> Step:
    """Inputs changed in place, through views, before and after the model reads them."""
    model = net()
    data = torch.randn(6, 4)

    def step() -> torch.Tensor:
        x = data.clone()
        x[0] *= 2
        x.view(-1)[3:5].fill_(0.5)
        first = model(x * 1)
        x[:, 1:3].add_(first.detach()[:, :2])
        x.t()[0].clamp_(min=0)
        data[2].mul_(-1)  # the data set itself
        out = model(x) + first
        out[:, 0] = out[:, 0] * data[:, 1]
        return out.square().mean()

    return step


def stashed() -> Step:
    """An auxiliary loss picked up from an attribute."""
    model = torch.nn.Sequential(Stashing(), Stashing())

    def step() -> torch.Tensor:
        out = model(torch.randn(3, 4))
        return out.square().mean() + 0.1 * sum(layer.aux for layer in model)

    return step


def hooked() -> Step:
    """Features captured by forward hooks."""
    model = net()
    features: dict[str, torch.Tensor] = {}
    model[0].register_forward_hook(lambda m, a, out: features.update(first=out))
    model[3].register_forward_hook(lambda m, a, out: features.update(last=out * 2))

    def step() -> torch.Tensor:
        out = model(torch.randn(6, 4))
        return out.mean() + features["first"].square().mean() + features["last"].sum()

    return step


def autocast() -> Step:
    """Mixed precision, with a part of it switched off."""
    model = net()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(6, 4))
            with torch.autocast("cpu", enabled=False):
                loss = (out.float() @ torch.randn(4, 2)).square().mean()
            return loss + (out @ torch.randn(4, 4).to(out.dtype)).float().mean()

    return step


def teacher() -> Step:
    """A target made without gradients by another model, and one in inference mode."""
    model, other = net(), net().eval()

    def step() -> torch.Tensor:
        x = torch.randn(6, 4)
        with torch.no_grad():
            target = other(x).softmax(-1)
        with torch.inference_mode():
            weight = other(x).abs().mean().item()
        return F.kl_div(model(x).log_softmax(-1), target) * weight

    return step


def checkpointed() -> Step:
    """Activation checkpointing with dropout inside, in both forms."""
    model = net()

    def step() -> torch.Tensor:
        x = torch.randn(6, 4, requires_grad=True)
        return checkpoint(model, x, use_reentrant=False).square().mean() + checkpoint(model, x, use_reentrant=True).mean()

    return step


def custom() -> Step:
    """A function of the user's own, and one by torch.func."""
    model = net()

    def step() -> torch.Tensor:
        out = model(torch.randn(6, 4))
        rows = torch.func.vmap(lambda row: row.sin().sum())(out)
        return Square.apply(out).sum() + rows.mean()

    return step


def recurrent() -> Step:
    """A recurrent net whose hidden state is passed on."""
    cell = torch.nn.LSTM(4, 5, num_layers=2, dropout=0.4, batch_first=True)

    def step() -> torch.Tensor:
        out, state = cell(torch.randn(2, 3, 4))
        again, _ = cell(torch.randn(2, 3, 4), state)
        return out.square().mean() + again.mean()

    return step


def tied() -> Step:
    """A weight used in two places, once outside every module."""
    table = torch.nn.Embedding(7, 4)

    def step() -> torch.Tensor:
        ids = torch.randint(0, 7, (5,))
        return F.cross_entropy(table(ids).tanh() @ table.weight.t(), ids.flip(0))

    return step


def structured() -> Step:
    """Batches and outputs in named tuples, dicts and objects."""
    model = net()

    def step() -> torch.Tensor:
        batch = Batch(torch.randn(6, 4), torch.randn(6, 4))
        outputs = {"logits": model(batch.x), "parts": [batch.y * 2]}
        return F.mse_loss(outputs["logits"], outputs["parts"][0]) + torch.stack([outputs["logits"].sum(), batch.y.sum()]).mean()

    return step


def penalty() -> Step:
    """A gradient penalty: a gradient inside the loss."""
    model = net().eval()

    def step() -> torch.Tensor:
        x = torch.randn(6, 4, requires_grad=True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out.square() + (slope.norm(dim=-1) - 1).square().mean()

    return step


class Noisy(torch.nn.Module):
    """Draws noise now and then, as Python's generator decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add noise to half of the batches."""
        return self.inner(x + torch.randn_like(x) if random.random() < 0.5 else x)


def seldom() -> Step:
    """Noise in some calls only."""
    model = Noisy()
    x = torch.randn(3, 4)
    return lambda: model(x).square().mean()


def alternating() -> Step:
    """A module that is called in training, where it draws, and out of it, where it does not."""
    model = net()
    x = torch.randn(3, 4)

    def step() -> torch.Tensor:
        with torch.no_grad():
            model.eval()(x)
        return model.train()(x).square().mean()

    return step


def hung() -> Step:
    """Hooks on tensors that the loop made, and one that keeps its gradient."""
    model = net()
    x = torch.randn(3, 4)
    seen: list[float] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(float(gradient.norm()))
        return gradient / 2

    def step() -> torch.Tensor:
        assert len(seen) <= 7  # once a step: what a replay appends is taken back
        out = model(x)
        out.register_hook(halve)
        other = out * 3
        other.register_hook(hook=lambda gradient: gradient.clamp(max=0.01))
        other.retain_grad()
        return other.square().mean()

    return step


OWN = torch.Generator().manual_seed(3)


class Drawing(torch.nn.Module):
    """Draws from generators of its own, of its file, and given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.numbers = np.random.default_rng(4)
        self.python = random.Random(5)
        self.older = np.random.RandomState(6)
        self.system = random.SystemRandom()  # has no state: nothing to put back

    def forward(self, x: torch.Tensor, given: torch.Generator) -> torch.Tensor:
        """Add noise."""
        noise = torch.randn(x.shape, generator=OWN) + torch.randn(x.shape, generator=given)
        return self.inner(x + noise) * float(self.numbers.random() + self.python.random() + self.older.rand())


def own_generators() -> Step:
    """Random generators that are not torch's common one."""
    model = Drawing()
    x, given = torch.randn(3, 4), torch.Generator().manual_seed(7)
    return lambda: model(x, given).square().mean()


PROGRAMS = [
    *(dropout, in_place, stashed, hooked, autocast, teacher, checkpointed, custom, recurrent, tied, structured, penalty, seldom, alternating),
    *(hung, own_generators),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
def test_replay_is_bit_exact(program: Callable[[], Step]) -> None:
    """A recorded step played again, twice, gives the same loss and the same gradients bit for bit."""
    torch.manual_seed(0)
    with Guard() as guard:
        step = program()
        parameters = [p for root in _modules_of(step) for p in root.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.001)
        for _ in range(7):  # the second time the model has been seen before; from the fourth on it is known whether it draws
            loss = step()
            loss.backward()
            _assert_replays(guard, loss, parameters)
            optimizer.step()
            optimizer.zero_grad()
    assert guard.journal.incidents == []


def _modules_of(step: Step) -> list[torch.nn.Module]:
    cells = [cell.cell_contents for cell in step.__closure__ or ()]
    return [c for c in cells if isinstance(c, torch.nn.Module)]


def _assert_replays(guard: Guard, loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    tape = guard.recorder.tape
    last = max(entry.number for entry in tape if entry.kind == "backward")
    program = Program(guard.recorder, tape.needed_for({last}), list(parameters))
    assert program.inexact() == ""
    before = [p.grad for p in parameters]
    for _ in range(2):
        with program.still():
            run = program.play()
            assert run.error is None
            assert torch.equal(run.losses[-1].detach(), loss.detach())
            for parameter, grad in zip(parameters, before, strict=True):
                assert (parameter.grad is None) == (grad is None)
                assert grad is None or (parameter.grad is not grad and torch.equal(parameter.grad, grad))
    assert all(p.grad is g for p, g in zip(parameters, before, strict=True))


def test_tensor_changed_behind_the_tape_is_said() -> None:
    """An input changed by code the tape does not see (numpy here) makes no silent wrong answer: not exact, or still right."""
    data = np.ones((2, 3), dtype=np.float32)
    weight = torch.nn.Parameter(torch.ones(3))
    with whynan.watch(files=False) as guard:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        x = torch.from_numpy(data)
        loss = torch.log((weight * x).sum() - 6)
        data[:] = 7
        loss.backward()
        optimizer.step()
    (incident,) = guard.incidents
    assert incident.origin.exact is False or (incident.cause.code == "WN101" and "torch.log" in incident.origin.span.code)


ZEROING: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "zeros in its place": lambda p: setattr(p, "grad", torch.zeros_like(p.grad)),  # type: ignore[arg-type]
    "in place": lambda p: p.grad.zero_(),  # type: ignore[union-attr]
    "past autograd": lambda p: p.grad.data.zero_(),  # type: ignore[union-attr]
    "detached first": lambda p: p.grad.detach_().zero_(),  # type: ignore[union-attr]
    "all at once": lambda p: torch._foreach_zero_([p.grad]),
}


def train_with_left_over(before: Callable[[torch.nn.Parameter], object], after: Callable[[torch.nn.Parameter], object] = id) -> Guard:
    """Train three steps whose loop touches the gradient of the step before; the last has the slope of a root at 0."""
    weight = torch.nn.Parameter(torch.ones(3))
    with whynan.watch(files=False) as guard:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(3):
            if weight.grad is not None:
                before(weight)
            target = weight.detach().clone() if step == 2 else torch.zeros(3)
            loss = (weight - target).square().sum().sqrt()
            loss.backward()
            after(weight)
            optimizer.step()
    return guard


@pytest.mark.parametrize("how", ZEROING)
def test_gradients_zeroed_by_hand(how: str) -> None:
    """A loop that zeroes the gradients of the step before by itself is replayed: the birth is found, and the answer is exact."""
    (incident,) = train_with_left_over(ZEROING[how]).incidents
    assert (incident.cause.code, incident.origin.exact) == ("WN501", True)
    assert "sqrt()" in incident.origin.span.code


def test_gradients_of_the_step_before_that_are_computed_with() -> None:
    """Gradients of the step before that go into this one are not there in a replay: the answer says that it is not exact."""
    kept: list[torch.Tensor] = []

    def keep(weight: torch.nn.Parameter) -> None:
        assert weight.grad is not None
        kept[:] = [weight.grad * 0.5]
        weight.grad = None

    def add(weight: torch.nn.Parameter) -> None:
        assert weight.grad is not None
        weight.grad.add_(kept[0] if kept else 0.0)

    (incident,) = train_with_left_over(keep, add).incidents
    assert (incident.cause.code, incident.origin.exact) == ("WN501", False)
    assert "gradients of the step before" in incident.origin.note


# -- no trace -----------------------------------------------------------------------------------------------------


class Busy(torch.nn.Module):
    """Does to itself everything a forward pass can do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(()))
        self.calls = 0
        self.log: list[float] = []
        self.cache: dict[int, torch.Tensor] = {}
        self.seen: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers and leave marks everywhere."""
        self.calls += 1
        self.log.append(float(x.sum()))
        self.cache[self.calls] = x.mean()
        self.seen.add(self.calls)
        out = self.drop(self.norm(self.lin(x)))
        self.average.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        self.replaced = self.replaced + 1
        if self.calls == 2:
            self.late = "made in the second call"
        return out


def traces(model: Busy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a replay could disturb."""
    found: dict[str, Any] = {"rng": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1].tolist()}
    found |= {f"{n} value": b.clone() for n, b in model.named_buffers()}
    found |= {f"{n} version": b._version for n, b in model.named_buffers() if n != "replaced"}
    found |= {f"{n} value": p.detach().clone() for n, p in model.named_parameters()}
    found |= {f"{n} grad": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    found |= {k: v for k, v in vars(model).items() if k in ("calls", "log", "seen", "late", "training")}
    found |= {"cache": sorted(model.cache), "attributes": sorted(vars(model))}
    found |= {f"state {n} {k}": v for n, s in enumerate(optimizer.state.values()) for k, v in s.items()}
    return found


def busy_run(watched: bool, damage: str) -> dict[str, Any]:
    """Train a busy model on finite and damaged losses; return what it left."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    model = Busy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)  # a rate of 0 keeps weights usable under observe
    guard = whynan.watch(model, optimizer, policy="observe", files=False) if watched else None
    for number in range(4):
        optimizer.zero_grad()
        x = torch.randn(5, 4) * (1 + random.random()) + np.random.rand()
        out = model(x)
        loss = out.square().mean()
        if number == 2 and damage == "loss":
            loss = loss + torch.log((x.sum() + out.detach().sum()) * 0)
        if number == 2 and damage == "gradient":
            loss = loss + torch.sqrt((out * 0).square()).sum()
        loss.backward()
        optimizer.step()
    left = traces(model, optimizer)
    if guard is not None:
        guard.close()
        assert len(guard.incidents) >= 1
        assert guard.incidents[0].experiments or guard.incidents[0].origin.exact
    return left


@pytest.mark.parametrize("damage", ["loss", "gradient"])
def test_replay_leaves_no_trace(damage: str) -> None:
    """After a diagnosis (many replays) random states, buffers with versions, gradients, attributes and lists are as without it."""
    plain, watched = busy_run(False, damage), busy_run(True, damage)
    assert list(plain) == list(watched)
    assert [key for key in plain if not _same(plain[key], watched[key])] == []


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(torch.nan_to_num(a.float(), nan=7e9), torch.nan_to_num(b.float(), nan=7e9))
    return bool(a == b)


def test_live_graph_survives_a_replay() -> None:
    """A graph that has saved a buffer can still go backward after the step was replayed: its version has not moved."""
    torch.manual_seed(0)
    model = Busy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.ones(4, requires_grad=True)
    with whynan.watch(model, optimizer, policy="observe", files=False) as guard:
        out = model(torch.randn(5, 4))
        kept = (other * model.average).sum()
        torch.log(out.sum() * 0).backward()
        optimizer.step()
        kept.backward()
    assert len(guard.incidents) == 1
    assert torch.equal(other.grad, model.average)


def test_python_random_numbers_in_the_model() -> None:
    """A forward pass that draws from `random` and numpy: the replay draws the same ones and leaves both streams where they were."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = random.random() + np.random.rand()  # as in stochastic depth
            return self.lin(x) * keep

    streams = []
    for watched in (False, True):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        model = Layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = whynan.watch(model, optimizer, files=False) if watched else None
        out = model(torch.randn(2, 4))
        torch.log((out - out.detach()).sum()).backward()
        optimizer.step()
        streams.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        if guard is not None:
            guard.close()
            assert guard.incidents[0].origin.exact
    assert streams[0] == streams[1]


def test_own_generators_stay_where_they_are() -> None:
    """A diagnosis draws from the program's own generators what the step drew, and leaves them where the step did."""
    drawn = []
    for watched in (False, True):
        torch.manual_seed(1)
        OWN.manual_seed(3)
        model, given = Drawing(), torch.Generator().manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = whynan.watch(model, optimizer, files=False) if watched else None
        out = model(torch.randn(2, 4), given)
        torch.log((out - out.detach()).sum()).backward()
        optimizer.step()
        drawn.append((torch.rand((), generator=OWN), torch.rand((), generator=given), model.numbers.random(), model.python.random(), model.older.rand()))
        if guard is not None:
            guard.close()
            assert guard.incidents[0].cause.code == "WN101"
            assert guard.incidents[0].origin.exact
    assert drawn[0] == drawn[1]


def test_hook_on_a_tensor_of_the_loop() -> None:
    """What a tensor's hook divides by is found in the replay; without the hook the step would be finite."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False) as guard:
        out = model(torch.randn(5, 4)) * 2
        out.register_hook(lambda gradient: gradient / gradient.norm())
        (out * 0).sum().backward()
        optimizer.step()
    [incident] = guard.incidents
    assert incident.cause.code == "WN104"
    assert incident.origin.span.code == "out.register_hook(lambda gradient: gradient / gradient.norm())"


def test_list_filled_by_a_hook() -> None:
    """What a hook of the user's appends to a list of its own during a replay is taken back: the next step finds it as it was."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda m, a, out: captured.append(out))
    lengths = []
    with whynan.watch(model, optimizer, files=False) as guard:
        for number in range(3):
            optimizer.zero_grad()
            out = model(torch.randn(5, 4))
            lengths.append(len(captured))
            loss = out.mean() + sum(c.square().mean() for c in captured) + torch.log(out.detach().sum() * 0 + (number != 1))
            captured.clear()
            loss.backward()
            optimizer.step()
    assert len(guard.incidents) == 1
    assert lengths == [1, 1, 1]
    assert captured == []


def test_output_of_the_script_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that prints does so once a call, not once a replay."""

    class Chatty(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("called")
            return x * 2

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with whynan.watch(optimizer, files=False) as guard:
        torch.log(Chatty()(weight).sum() * 0).backward()
        optimizer.step()
    assert len(guard.incidents) == 1
    assert capsys.readouterr().out == "called\n"


def test_a_module_that_begins_to_draw_late() -> None:
    """Random numbers of Python's that a module begins to draw after its first calls are not known to the tape: the answer says that it is not exact."""

    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.noise = torch.nn.Linear(4, 4), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x + self.noise * random.random()) if self.noise else self.lin(x)

    torch.manual_seed(0)
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        for number in range(14):
            model.noise = 0.1 * (number > 8)
            out = model(torch.randn(2, 4)).square().sum()
            loss = torch.log(out - out.detach()) if number == 10 else out
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [(i.step, i.origin.exact) for i in guard.incidents] == [(10, False)]
    assert "drew from Python's or numpy's random" in guard.incidents[0].origin.note
