"""torch.compile: watching adds no graph, no graph break and no recompilation, and a compiled step is diagnosed by its eager original."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.eval_frame
from conftest import Sandbox, strict_lines
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import whynan

torch._dynamo.eval_frame.TorchPatcher.patch()  # the first compilation of a process patches optimizers itself; do it before anything is compared

Step = Callable[[torch.Tensor], object]
Built = tuple[tuple[Any, ...], Step]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No compiled code of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    counters.clear()


class Net(nn.Module):
    """A small model with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.n(self.a(x))))


def loss_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Divide by the spread of the batch: rows that are all the same give 0."""
    return y.float().square().mean() / x.var(0).sum()  # the division


def parts() -> tuple[Any, Any]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


def stepper(model: Any, loss: Any, optimizer: Any, update: Any = None, half: bool = False) -> Step:
    """An ordinary training step."""

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = model(x)
        loss(y, x).backward()
        (update or optimizer.step)()

    return step


def compiled(item: Any, **options: Any) -> Any:
    """Compile without a code generator: what is counted is made before it."""
    return torch.compile(item, backend="eager", **options)


def model_alone() -> Built:
    net, optimizer = parts()
    return (net, optimizer), stepper(compiled(net), loss_of, optimizer)


def model_in_place() -> Built:
    net, optimizer = parts()
    net.compile(backend="eager")
    return (net, optimizer), stepper(net, loss_of, optimizer)


def parts_of_a_model() -> Built:
    net, optimizer = parts()
    net.a.compile(backend="eager")
    net.b = compiled(net.b)
    return (net, optimizer), stepper(net, loss_of, optimizer)


def forward_method() -> Built:
    net, optimizer = parts()
    net.forward = compiled(net.forward)
    return (net, optimizer), stepper(net, loss_of, optimizer)


def loss_alone() -> Built:
    net, optimizer = parts()
    return (net, optimizer), stepper(net, compiled(loss_of), optimizer)


def model_and_loss() -> Built:
    net, optimizer = parts()
    return (net, optimizer), stepper(compiled(net), compiled(loss_of, fullgraph=True), optimizer)


def function_in_function() -> Built:
    net, optimizer = parts()
    inner = compiled(loss_of)
    return (net, optimizer), stepper(net, compiled(lambda y, x: inner(y, x) * 2), optimizer)


def forward_and_loss() -> Built:
    net, optimizer = parts()
    whole = compiled(lambda x: loss_of(net(x), x))
    return (net, optimizer), stepper(lambda x: x, lambda y, x: whole(x), optimizer)


def forward_loss_and_backward() -> Built:
    net, optimizer = parts()

    def there_and_back(x: torch.Tensor) -> None:
        loss_of(net(x), x).backward()

    whole = compiled(there_and_back)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        whole(x)
        optimizer.step()

    return (net, optimizer), step


def optimizer_step() -> Built:
    net, optimizer = parts()
    return (net, optimizer), stepper(net, loss_of, optimizer, compiled(optimizer.step))


def optimizer_step_in_a_function() -> Built:
    net, optimizer = parts()
    return (net, optimizer), stepper(compiled(net), loss_of, optimizer, compiled(lambda: optimizer.step()))


def optimizer_step_put_back() -> Built:
    net, _ = parts()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    optimizer.step = compiled(optimizer.step)  # type: ignore[method-assign]
    return (net, optimizer), stepper(net, loss_of, optimizer)


def with_autocast() -> Built:
    net, optimizer = parts()
    return (net, optimizer), stepper(compiled(net), compiled(loss_of), optimizer, half=True)


def with_checkpointing() -> Built:
    net, optimizer = parts()
    model = compiled(net)
    return (net, optimizer), stepper(lambda x: checkpoint(model, x, use_reentrant=False), loss_of, optimizer)


def with_a_hook() -> Built:
    net, optimizer = parts()
    net.a.register_forward_hook(lambda module, inputs, out: out * 1.0)
    return (net, optimizer), stepper(compiled(net), loss_of, optimizer)


def with_a_hook_inside_a_function() -> Built:
    net, optimizer = parts()
    net.a.register_forward_hook(lambda module, inputs, out: out * 1.0)
    net.register_forward_pre_hook(lambda module, inputs: inputs)
    whole = compiled(lambda x: loss_of(net(x), x))
    return (net, optimizer), stepper(lambda x: x, lambda y, x: whole(x), optimizer)


def with_a_hook_inside_a_method() -> Built:
    net, optimizer = parts()
    net.a.register_forward_hook(lambda module, inputs, out: out * 1.0)

    class Task:
        def __init__(self) -> None:
            self.net = net

        @torch.compile(backend="eager")
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return loss_of(self.net(x), x)

    task = Task()
    return (net, optimizer), stepper(lambda x: x, lambda y, x: task.loss(x), optimizer)


EVERY = [
    model_alone, model_in_place, parts_of_a_model, forward_method, loss_alone, model_and_loss, function_in_function, forward_and_loss,
    forward_loss_and_backward, optimizer_step, optimizer_step_in_a_function, optimizer_step_put_back, with_autocast, with_checkpointing, with_a_hook,
    with_a_hook_inside_a_function, with_a_hook_inside_a_method,
]  # fmt: skip


def batches(bad: int = -1, sizes: tuple[int, ...] = (8,) * 6) -> list[torch.Tensor]:
    """Batches of random rows; one of zeros at `bad`."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(size, 4, generator=draw) for size in sizes]
    if bad >= 0:
        made[bad] = torch.zeros(sizes[bad], 4)
    return made


def count(build: Callable[[], Built], watching: str, sizes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Train three times over and count frames, graphs, breaks and recompilations; `watching` says in which of the three."""
    torch._dynamo.reset()
    counters.clear()
    objects, step = build()
    for turn in range(3):
        guard = whynan.watch(*objects, files=False, **options) if str(turn) in watching else None
        for x in batches(sizes=sizes):
            step(x)
        if guard is not None:
            guard.close()
            assert guard.incidents == []
    counted = {name: dict(counters[name]) for name in ("frames", "graph_break", "recompiles", "unimplemented")}
    return counted | {name: counters["stats"][name] for name in ("unique_graphs", "calls_captured")}


@pytest.mark.parametrize("build", EVERY, ids=lambda f: f.__name__)
def test_watching_adds_no_graph_no_break_and_no_recompilation(build: Callable[[], Built]) -> None:
    plain = count(build, "", (8, 8))
    assert plain["unique_graphs"] > 0
    assert count(build, "012", (8, 8)) == plain
    assert count(build, "1", (8, 8)) == plain  # compiled and run before watching begins, and after it ends


@pytest.mark.parametrize("build", EVERY, ids=lambda f: f.__name__)
def test_tracked_outputs_are_no_part_of_compiled_code(build: Callable[[], Built]) -> None:
    """Every second step is listened to, and nothing is compiled more often for it."""
    track = {"out:*": {"below": 1e6, "grows": 1e6, "every": 2}}
    plain = count(build, "", (8,) * 5)
    assert count(build, "012", (8,) * 5, track=track) == plain
    assert count(build, "1", (8,) * 5, track=track) == plain


class Broken(Net):
    """A compiled method whose graph breaks in a layer of a model that is not compiled itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n.register_forward_hook(lambda module, inputs, out: torch._dynamo.graph_break())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x)  # type: ignore[no-any-return]

    @torch.compile(backend="eager")
    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def graph_that_breaks_inside() -> Built:
    torch.manual_seed(0)
    net = Broken()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return (net, optimizer), stepper(net, loss_of, optimizer)


def test_what_looks_at_outputs_is_not_compiled_itself() -> None:
    """Between two graphs the compiler meets our code, and leaves it alone."""
    plain = count(graph_that_breaks_inside, "", (8,) * 5)
    assert plain["unique_graphs"] > 1
    track = {"out:*": {"below": 1e6, "every": 2}}
    assert count(graph_that_breaks_inside, "012", (8,) * 5, track=track) == plain
    assert count(graph_that_breaks_inside, "1", (8,) * 5, track=track) == plain


def tracked(folder: Path, model: Any, net: Any, optimizer: Any) -> list[str]:
    """Train for three steps with a limit that every output crosses; return what was said."""
    with whynan.watch(net, optimizer, run_dir=folder, track={"out:*": {"below": 0.0, "every": 1}}):
        for x in batches()[:3]:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return [str(row["text"]).partition(" is ")[0] for row in strict_lines(folder / "warnings.jsonl")]


def test_compiled_modules_are_heard_as_a_whole_and_their_inside_is_named(tmp_path: Path) -> None:
    """The output of a compiled layer is looked at; what is inside it is said once."""
    net, optimizer = parts()
    net.a.compile(backend="eager")
    net.b = compiled(net.b)
    text = "track: 'out:*' names a module inside compiled code, not looked at: b._orig_mod"
    assert tracked(tmp_path, net, net, optimizer) == ["out:Net", "out:a", "out:n", "out:b", text]


def test_a_model_inside_a_compiled_function_is_said_to_be_unheard(tmp_path: Path) -> None:
    """The function runs as one call: its model is known, what that returns is not."""
    net, optimizer = parts()
    assert tracked(tmp_path, compiled(lambda x: net(x)), net, optimizer) == [
        "track: 'out:*' has seen no output: Net, a, n and 1 more not called so far, or only inside compiled code or a transform",
    ]


def test_a_model_inside_a_checkpoint_is_heard(tmp_path: Path) -> None:
    """What it returns in the forward pass is looked at as always."""
    net, optimizer = parts()
    held = [f"out:{name}" for name in ("Net", "a", "n", "b")]
    assert tracked(tmp_path, lambda x: checkpoint(net, x.clone().requires_grad_(), use_reentrant=True), net, optimizer) == held


@pytest.mark.parametrize("build", [model_and_loss, forward_and_loss], ids=lambda f: f.__name__)
def test_changing_shapes_recompile_as_often_as_without(build: Callable[[], Built]) -> None:
    sizes = (8, 9, 11, 5, 12)
    plain = count(build, "", sizes)
    assert count(build, "012", sizes) == plain
    assert count(build, "1", sizes) == plain


@pytest.mark.parametrize("build", EVERY, ids=lambda f: f.__name__)
def test_a_bad_compiled_step_is_diagnosed_by_its_source_and_replayed_without_compiling(build: Callable[[], Built]) -> None:
    objects, step = build()
    state = []
    with whynan.watch(*objects, files=False) as guard:
        for number, x in enumerate(batches(bad=3)):
            if number == 3:
                graphs = counters["stats"]["unique_graphs"]
                state = [p.detach().clone() for p in objects[0].parameters()]
            step(x)
            if number == 3:
                assert all(torch.equal(a, b) for a, b in zip(state, objects[0].parameters(), strict=True))
    assert [i.step for i in guard.incidents] == [3]
    assert guard.incidents[0].origin.span.code.endswith("# the division")
    assert guard.incidents[0].action.taken == "skipped"
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_hook_registered_while_watching_costs_no_compilation_and_is_recorded_in_eager_calls() -> None:
    """After a compiled call the watched hook stands in its place again, until the guard is closed."""
    net, optimizer = parts()
    model = compiled(net)
    seen: list[int] = []
    step = stepper(model, loss_of, optimizer)
    step(batches()[0])
    with whynan.watch(net, optimizer, files=False) as guard:
        net.a.register_forward_hook(lambda module, inputs, out: out * 1.0)
        step(batches()[0])
        graphs = counters["stats"]["unique_graphs"]
        (hook,) = net.a._forward_hooks.values()
        net.b.register_forward_hook(lambda module, inputs, out: seen.append(guard._guard.recorder.here))
        net(batches()[0])
        assert seen == [True]
    step(batches()[0])
    assert net.a._forward_hooks and hook not in net.a._forward_hooks.values()
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_model_with_a_hook_that_is_compiled_again_while_watching_keeps_its_graph() -> None:
    net, optimizer = parts()
    net.a.register_forward_hook(lambda module, inputs, out: out * 1.0)
    step = stepper(compiled(net), loss_of, optimizer)
    step(batches()[0])
    with whynan.watch(net, optimizer, files=False):
        again = stepper(compiled(net), loss_of, optimizer)
        again(batches()[0])
        step(batches()[0])
    again(batches()[0])
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("what", ["model", "loss", "in place"])
def test_a_step_that_only_the_compiled_code_breaks_is_told_so(what: str) -> None:
    number = [0]  # set by the loop: a count of calls would be put back with the step, as Lightning lets the model know its compiler

    def wrong(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return tuple(t / 0 if number[0] == 2 and t.is_floating_point() else t for t in graph(*args))

        return run

    net, optimizer = parts()
    model, loss = net, loss_of
    if what == "model":
        model = torch.compile(net, backend=wrong)
    elif what == "loss":
        loss = torch.compile(loss_of, backend=wrong)
    else:
        net.compile(backend=wrong)
    step = stepper(model, loss, optimizer)
    with whynan.watch(net, optimizer, files=False) as guard:
        for number[0], x in enumerate(batches()):
            step(x)
    assert [(i.step, i.cause.code, str(i.cause.confidence)) for i in guard.incidents] == [(2, "WN803", "proven")]


def test_a_function_compiled_while_watching_is_the_same_object_and_plain_again_afterwards() -> None:
    net, optimizer = parts()
    before = compiled(loss_of)
    code = before.__code__
    with whynan.watch(net, optimizer, files=False):
        during = compiled(loss_of)
        assert before.__code__ is not code
        assert before.__name__ == during.__name__ == "loss_of"
        assert before.__wrapped__ is loss_of
    assert before.__code__ is code
    assert during.__code__ is code
    assert before.__kwdefaults__ is None
    assert torch.isfinite(before(*(torch.ones(2, 1), torch.randn(4, 2))))


def test_a_compiled_function_that_raises_raises_the_same_error() -> None:
    @torch.compile(backend="eager")
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no batches of {x.shape[0]}")

    with whynan.watch(files=False), pytest.raises(ValueError, match="no batches of 3"):
        refuse(torch.ones(3))


@pytest.mark.skipif(shutil.which("g++") is None, reason="the code generator for the CPU needs g++")
def test_with_generated_code_too() -> None:
    from torch._inductor import metrics

    made: list[tuple[int, int]] = []
    for watching in (False, True):
        torch._dynamo.reset()
        counters.clear()
        metrics.reset()
        net, optimizer = parts()
        step = stepper(torch.compile(net), torch.compile(loss_of), optimizer)
        guard = whynan.watch(net, optimizer, files=False) if watching else None
        for x in batches(bad=3 if watching else -1):
            step(x)
        if guard is not None:
            guard.close()
            assert [(i.step, i.origin.span.code.endswith("# the division")) for i in guard.incidents] == [(3, True)]
        made.append((metrics.generated_kernel_count, counters["stats"]["unique_graphs"]))
    assert made[0] == made[1]
    assert made[0][0] > 0


def test_guards_of_two_threads_leave_in_any_order() -> None:
    """The one that came first leaves first: the other one still watches, and nothing of ours stays behind."""
    compiled = torch.compile(lambda a, *, k=2: a * k, backend="eager")
    code, named, call = compiled.__code__, compiled.__kwdefaults__, torch.nn.Module.__call__
    begun, end = threading.Event(), threading.Event()
    found: list[str] = []

    def other() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with whynan.watch(model, optimizer, files=False) as guard:
            begun.set()
            end.wait(60)
            torch.log(compiled(model(torch.ones(1, 1)), k=0)).sum().backward()
            optimizer.step()
        found.extend(i.cause.code for i in guard.incidents)

    with whynan.watch(torch.nn.Linear(1, 1), files=False):
        thread = threading.Thread(target=other)
        thread.start()
        begun.wait(60)
    end.set()
    thread.join(60)
    assert found == ["WN101"]
    assert compiled.__code__ is code and compiled.__kwdefaults__ is named
    assert torch.nn.Module.__call__ is call


def test_of_wrapped_and_nested_models_the_inner_one_is_saved_once(tmp_path: Path) -> None:
    """A compiled model has the names of the plain one; a part that is called by itself is no second model; a loss has no state."""
    encoder = nn.Linear(3, 4)
    model = nn.Sequential(encoder, nn.ReLU(), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[nn.Module] = []
    with whynan.watch(model, optimizer, run_dir=tmp_path, save_every=2, validate=lambda m: seen.append(m) or 0.0, validate_every=2):  # type: ignore[func-returns-value]
        for _ in range(4):
            x = torch.randn(8, 3)
            loss = nn.MSELoss()(compiled(x), x[:, :1]) + 0.1 * encoder(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    saved = torch.load(tmp_path / "checkpoints" / "step-00000004.pt", weights_only=True)  # due at the end of the run
    assert saved["model"].keys() == model.state_dict().keys()
    assert [m is model for m in seen] == [True, True]


def test_labels_in_compiled_and_scripted_code() -> None:
    """What stands at a profiler's labels does not stand in a compiler's way."""
    model, optimizer = parts()

    def body(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.profiler.record_function("inside"):
            return x + 1

    with whynan.watch(model, optimizer, files=False):
        assert torch.jit.script(body)(torch.ones(2)).tolist() == [2, 2]
        assert torch.compile(body, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("watched", [False, True])
def test_transforms_inside_a_compiled_function_are_left_to_the_compiler(watched: bool, box: Sandbox) -> None:
    """`torch.func` in compiled code, called there or made before: one graph with and without watching; before, compiling it raised."""
    path = box.write("""
        import torch
        import torch._dynamo.utils
        from torch.func import functional_call, grad, jvp, vmap
        net = torch.nn.Linear(4, 1)
        opt = torch.optim.SGD(net.parameters(), 0.01)
        slopes = vmap(grad(lambda row: (row**4).sum()))

        @torch.compile(backend="aot_eager")
        def energy(x):
            more = vmap(grad(lambda row: (row**2).sum()))(x) + jvp(torch.sin, (x,), (x,))[1]
            return (slopes(x) + more).sum(-1, keepdim=True) + functional_call(net, dict(net.named_parameters()), (x,))

        for step in range(3):
            opt.zero_grad()
            (net(torch.rand(8, 4)) - energy(torch.rand(8, 4))).square().mean().backward()
            opt.step()
        counters = torch._dynamo.utils.counters
        print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    """)
    done = box.whynan(str(path)) if watched else box.python(str(path))
    assert (done.status, done.out.split()) == (0, ["1", "0"])


def test_names_that_compiled_code_uses_are_not_exchanged(box: Sandbox) -> None:
    """What was compiled before watching begins is not compiled again."""
    path = box.write("""
        import torch
        import torch._dynamo.utils
        import whynan
        from torch.func import grad
        net = torch.nn.Linear(4, 1)
        opt = torch.optim.SGD(net.parameters(), 0.01)
        energy = torch.compile(lambda x: grad(lambda y: (y**4).sum())(x).sum(-1, keepdim=True), backend="aot_eager")
        for step in range(4):
            if step == 2:
                guard = whynan.watch(net, opt, files=False)
            opt.zero_grad()
            (net(torch.rand(8, 4)) - energy(torch.rand(8, 4))).square().mean().backward()
            opt.step()
        guard.close()
        print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    """)
    assert box.python(str(path)).out.split() == ["1"]
