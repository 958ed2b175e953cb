"""A model that runs inside a call which is recorded whole (compiled, checkpointed, an `autograd.Function`) has its state put back as any other."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from test_after_a_skip import STEPS, Batch, is_as_never_drawn, normed
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import whynan
from whynan.capsule.reached import modules_of

torch._dynamo.eval_frame.TorchPatcher.patch()  # the first compilation of a process patches optimizers itself; do it before anything is compared

Call = Callable[[torch.Tensor], torch.Tensor]
_here: dict[str, Any] = {}


class Inside(torch.autograd.Function):
    """Runs a model that it is given, and goes back through it itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: nn.Module, *weights: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y, ctx.weights = model(ctx.x), weights
        return ctx.y.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        first, *others = torch.autograd.grad(ctx.y, [ctx.x, *ctx.weights], slopes[0])
        return first, None, *others


class Named(torch.autograd.Function):
    """Runs one that it names."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + _here["model"][1](x.repeat(1, 2)).detach().sum(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        return slopes[0]


class Trainer:
    """Holds a model as trainers do."""

    def __init__(self, model: nn.Module) -> None:
        self.nets = {"student": model}

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.nets["student"](x)  # type: ignore[no-any-return]

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def within(model: nn.Module) -> Call:
    return lambda x: Inside.apply(x.requires_grad_(), model, *model.parameters())  # type: ignore[no-untyped-call, no-any-return]


def named(model: nn.Module) -> Call:
    _here["model"] = model
    return lambda x: Named.apply(model(x).repeat(1, 4))[:, :1]  # type: ignore[no-untyped-call, no-any-return]


def compiled(function: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")


CALLS: dict[str, Callable[[Any], Call]] = {
    "compiled": lambda m: compiled(lambda x: m(x)),
    "compiled forward": lambda m: compiled(m.forward),
    "compiled method": lambda m: compiled(Trainer(m).predict),
    "compiled, twice": lambda m: (f := compiled(lambda x: m(x)), lambda x: f(x) + f(2 * x))[1],
    "compiled, given a holder": lambda m: (f := compiled(lambda trainer, x: trainer.nets["student"](x)), functools.partial(f, Trainer(m)))[1],
    "compiled partial": lambda m: compiled(functools.partial(lambda net, x: net(x), m)),
    "checkpoint": lambda m: lambda x: checkpoint(m, x.requires_grad_(), use_reentrant=True),
    "checkpoint of a part": lambda m: lambda x: m[2](checkpoint(lambda z: m[1](z), m[0](x), use_reentrant=True)),
    "checkpoint of a method": lambda m: lambda x: checkpoint(Trainer(m).predict, x.requires_grad_(), use_reentrant=True),
    "checkpoint, sequential": lambda m: lambda x: checkpoint_sequential(m, 2, x.requires_grad_(), use_reentrant=True),
    "autograd function": within,
    "autograd function that names it": named,
}


def training(make: Callable[[Any], Call], fault: str) -> Callable[..., object]:
    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: Iterable[Batch]) -> None:
        call = make(model)
        for step, x, y in drawn:
            bad = float("nan") if fault == "loss" and step == 5 else 1.0
            if fault == "loss":
                x = x.nan_to_num()
            optimizer.zero_grad()
            ((call(x) - y).square().mean() * bad).backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("fault", ["input", "loss"])
@pytest.mark.parametrize("how", CALLS)
def test_statistics_of_a_model_inside_are_put_back(how: str, fault: str) -> None:
    """The running statistics and their counters are those of a run that never drew the batch, bit for bit."""
    assert [(step, taken) for step, _, taken in is_as_never_drawn(training(CALLS[how], fault))] == [(5, "skipped")]


@pytest.mark.parametrize("how", ["compiled method", "checkpoint", "autograd function"])
def test_replays_leave_no_trace_in_a_model_inside(how: str) -> None:
    """With nothing done about a bad step the counter stands where the program has left it."""
    counts = []
    for policy in ("observe", None):
        torch.manual_seed(0)
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with whynan.watch(model, optimizer, files=False, policy=policy) if policy else torch.enable_grad():
            training(CALLS[how], "input")(model, optimizer, [(i, x, torch.ones(8, 1)) for i, x in enumerate(torch.randn(STEPS, 8, 4).log())])
        counts.append(int(model[1].num_batches_tracked))  # type: ignore[call-overload]
    assert counts[0] == counts[1] > 0


class Refusing:
    """Answers to nothing without running code of the program."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    @property
    def model(self) -> Any:
        raise AssertionError

    def run(self, x: torch.Tensor) -> Any:
        return self.model(x)


def test_what_a_function_reaches_is_found_without_running_anything() -> None:
    """By names, through containers and methods, not through properties; a model it does not name is none of its own."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)

    def outer(x: torch.Tensor) -> torch.Tensor:
        def inner(z: torch.Tensor) -> torch.Tensor:
            return model(z)  # type: ignore[no-any-return]

        return inner(x)

    holder = Trainer(model)
    holder.unused = other  # type: ignore[attr-defined]
    assert modules_of(outer, (torch.ones(1),), {}) == [model]
    assert modules_of(holder.predict, (), {}) == [model]
    assert modules_of(lambda x: holder.run(x), (), {}) == [model]
    assert modules_of(len, ([other], {"a": model}), {"b": other}) == [other, model]
    assert modules_of(lambda held, x: held.unused(x), (holder,), {}) == [other]
    assert modules_of(Refusing().run, (Refusing(),), {}) == []
    assert modules_of(torch.Tensor.as_subclass, (torch.ones(1), torch.Tensor), {}) == []


class Late(torch.autograd.Function):
    """Names what is not there yet."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return late(x)  # type: ignore[name-defined, no-any-return]  # noqa: F821

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        return slopes[0]


class Later(Late):
    """Has its forward pass from another one."""


@pytest.mark.parametrize("function", [Late, Later])
def test_a_name_that_gets_its_value_later_is_found_from_then_on(function: Any) -> None:
    """What is remembered of code is what it names, not what that was."""
    model = nn.Linear(1, 1)
    assert modules_of(function.apply, (torch.ones(1),), {}) == []
    globals()["late"] = model
    try:
        assert modules_of(function.apply, (torch.ones(1),), {}) == [model]
    finally:
        del globals()["late"]
    assert modules_of(function.apply, (torch.ones(1),), {}) == []


@pytest.mark.parametrize(("home", "found"), [("torchnets", True), ("torchvision.models", True), ("numpy_of_mine", True), (None, True), ("torch.nn", False)])
def test_a_library_is_known_by_its_whole_name(home: Any, found: bool) -> None:
    """A module of the program's whose name begins like that of a library is none; a class need not say where it stands."""
    model = nn.Linear(1, 1)
    runner = type("Runner", (), {"go": lambda self, x: self.net(x), "__module__": home})()
    runner.net = model
    assert (modules_of(runner.go, (), {}) == [model]) or not found
    holder = type("Holder", (), {"__module__": home})()
    holder.net = model
    assert modules_of(lambda held: held.net, (holder,), {}) == [model] * found


class _Unhashable(type):
    __hash__ = None  # type: ignore[assignment]


class _Lazy:
    """Answers for another object, as the proxies of web frameworks do."""

    @property
    def __class__(self) -> Any:
        raise AssertionError

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError


ODD: dict[str, Callable[[], Any]] = {
    "a dead proxy": lambda: weakref.proxy(nn.ReLU()),
    "a class that lies": _Lazy,
    "a class without a home": lambda: type("Odd", (), {"__module__": None})(),
    "a class of no hash": lambda: _Unhashable("Odd", (), {})(),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("where", ["in a function of its own", "in a module"])
def test_an_odd_object_beside_a_model_does_not_end_the_watching(odd: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Code may name objects that cannot be asked for anything: they are not, and the bad step is dropped."""
    _here["odd"] = held = ODD[odd]()
    space: dict[str, Any] = {"held": held, "torch": torch}
    exec(compile(ODD_PROGRAM, __file__, "exec"), space)
    function, net = space["Function"], space["Net"]()
    assert modules_of(function.apply, (torch.ones(1),), {}) == []
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with whynan.watch(net, optimizer, files=False) as guard:
        for step in range(6):
            y = net(torch.rand(8, 4))
            loss = (function.apply(y) if where == "in a function of its own" else y).abs().mul(step != 4).log().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [(i.step, i.action.taken) for i in guard.incidents] == [(4, "skipped")]
    assert "internal error" not in capsys.readouterr().err


ODD_PROGRAM = """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if x is not None else held
    @staticmethod
    def backward(ctx, slope):
        return slope * 2

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
    def forward(self, x):
        return super().forward(x) if x is not None else held
"""


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(8, 4))], ids=["scripted", "traced"])
def test_statistics_of_a_scripted_model_are_put_back(make: Callable[[Any], Any], given: bool) -> None:
    """TorchScript keeps buffers in tables of its own; what it computes is not the same to the last bit from run to run."""

    def end(bad: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = normed()
        scripted = make(model)
        optimizer = torch.optim.SGD(scripted.parameters(), 0.01)
        with whynan.watch(scripted if given else model, optimizer, files=False) as guard:
            for step in range(STEPS):
                x = torch.full((8, 4), step / STEPS).cumsum(0).sin()
                if step == 5 and bad < 0:
                    continue
                x[0, 0] = float("nan") if step == bad else 0.0
                optimizer.zero_grad()
                scripted(x).square().mean().backward()
                optimizer.step()
        assert [(i.step, i.action.taken) for i in guard.incidents] == [(5, "skipped")][: bad > 0]
        return list(scripted.buffers())

    skipped, never = end(5), end(-1)
    assert int(skipped[2]) == int(never[2])
    assert all(map(torch.allclose, skipped, never))
