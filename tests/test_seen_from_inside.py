"""A watched program looks from inside as an unwatched one: its warnings name its own lines, its tracebacks have no frames of ours."""

from __future__ import annotations

import functools
import inspect
import os
import signal
from pathlib import Path
from types import FrameType, FunctionType

import pytest
from conftest import Finished, Sandbox

from whynan.capsule.doors.hooks import WatchedHook
from whynan.capsule.recorder import Recorder
from whynan.engine.goingback import GoingBack
from whynan.errors import let_through

HEAD = """
import logging, sys, traceback, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
"""
# what each place of a training calls: code of the program's own, deep inside torch
PLACES = """
class Net(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner, self.weight = nn.ModuleList(inner), nn.Parameter(torch.ones(3))
    def forward(self, x):
        said("forward" if self.inner else "inner forward")
        for module in self.inner:
            x = module(x)
        return Twice.apply(x) * self.weight

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        said("Function.forward")
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        said("Function.backward")
        return grad * 2

class Plain(torch.optim.SGD):
    def step(self, closure=None):
        said("step")
        return super().step(closure)

class Rate(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        said("get_lr")
        return [group["lr"] for group in self.optimizer.param_groups]

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        said("__getitem__")
        return torch.full((3,), float(i))

def hook(place):
    return lambda *args: said(place)

def closure():
    said("closure")
    opt.zero_grad()
    loss = net(torch.rand(2, 3)).sum()
    loss.backward()
    return loss

net = Net(Net(), nn.Linear(3, 3))
opt = Plain(net.parameters(), 0.01)
net.register_state_dict_post_hook(hook("state hook"))
net.register_load_state_dict_post_hook(hook("load hook"))
net.inner[0].register_forward_hook(hook("forward hook"))
net.register_full_backward_hook(hook("backward hook"))
opt.register_step_pre_hook(hook("step hook"))
opt.register_load_state_dict_post_hook(hook("optimizer load hook"))
net.weight.register_hook(hook("gradient hook"))
scheduler = Rate(opt)
average = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda old, new, n: (said("avg_fn"), old)[1])
scaler = torch.amp.GradScaler("cpu")

def one_step(x):
    loss = net(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    scheduler.step()
    average.update_parameters(net)

def all_places():
    for batch in DataLoader(Rows(), batch_size=4, collate_fn=lambda rows: (said("collate"), torch.stack(rows))[1]):
        one_step(batch)
    opt.step(closure)
    opt.zero_grad()
    scaler.scale(net(torch.rand(2, 3)).sum()).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    torch.autograd.backward(net(torch.rand(2, 3)).sum())
    torch.autograd.grad(net(torch.rand(2, 3)).sum(), list(net.parameters()), create_graph=True)
    torch.func.grad(lambda x: (said("func.grad"), x.sum())[1])(torch.ones(2))
    torch.vmap(lambda x: (said("vmap"), x.sum())[1])(torch.ones(2, 2))
    torch.func.functional_call(net, dict(net.named_parameters()), (torch.rand(2, 3),))
    torch.utils.checkpoint.checkpoint(net, torch.rand(2, 3), use_reentrant=False).sum().backward()
    opt.load_state_dict(opt.state_dict())
    net.load_state_dict(net.state_dict())
    scheduler.load_state_dict(scheduler.state_dict())
    with torch.no_grad():
        net(torch.rand(2, 3))
    net.inner[0](torch.rand(3))
"""


def same(box: Sandbox, source: str, *options: str) -> Finished:
    """Run a program as it is, and watched: what it printed is the same. Return how the watched one ended."""
    plain = box.plain(box.write(source))
    assert plain.status == 0, plain.err
    done = box.watched(source, *options)
    assert done.out == plain.out
    assert [line for line in done.err.splitlines() if not line.startswith("whynan: ")] == plain.err.splitlines()
    return done


@pytest.mark.parametrize("options", [(), ("--track", "out:*<1e9")], ids=["plainly", "outputs tracked"])
def test_every_level_of_a_warning_is_the_same_line(box: Sandbox, options: tuple[str, ...]) -> None:
    """Said from inside torch with any `stacklevel`, up to the line of the program that began it; so with logging."""
    done = same(
        box,
        HEAD
        + """
top, levels = None, range(1, 40)
def said(place):
    if top is None:
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for level in levels:
            warnings.warn(place, stacklevel=level)
    lines = [(w.filename, w.lineno) for w in seen]
    lines = lines[: lines.index(top) + 1]
    logged.clear()
    for level in range(1, len(lines) - 1):
        logging.error(place, stacklevel=level)
    print(place, *(f"{file.rpartition('/')[2]}:{line}" for file, line in lines + logged))

logged = []
class Handler(logging.Handler):
    def emit(self, record):
        logged.append((record.pathname, record.lineno))
logging.getLogger().addHandler(Handler())
"""
        + PLACES
        + """
def outermost():
    all_places()
top = (outermost.__code__.co_filename, outermost.__code__.co_firstlineno + 1)
outermost()
""",
        *options,
    )
    assert {line.split(" train.py:")[0] for line in done.out.splitlines()} >= {"forward", "Function.backward", "step", "avg_fn", "closure", "backward hook"}


@pytest.mark.parametrize("options", [(), ("--track", "out:*<1e9")], ids=["plainly", "outputs tracked"])
def test_a_traceback_that_the_program_prints_is_the_same(box: Sandbox, options: tuple[str, ...]) -> None:
    """Wherever in a step it was raised; our frames are not in it, and those that we stand for are."""
    done = same(
        box,
        HEAD
        + """
raising, came = set(), []
def said(place):
    came.append(place)
    if place in raising:
        raising.discard(place)
        raise ValueError(place)
"""
        + PLACES
        + """
all_places()
for place in dict.fromkeys(came):
    raising.add(place)
    try:
        all_places()
    except ValueError:
        traceback.print_exc(file=sys.stdout)
""",
        *options,
    )
    assert done.out.count("Traceback") > 15 and "_wrapped_call_impl" in done.out


def test_tracebacks_of_calls_that_torch_refuses_are_the_same(box: Sandbox) -> None:
    """Of calls outside modules too, in `logging`, in other threads, and of what is raised on the way."""
    done = same(
        box,
        HEAD
        + """
from concurrent.futures import ThreadPoolExecutor
logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
opt = torch.optim.SGD(net.parameters(), 0.1)
loss = net(torch.rand(4, 3)).sum()
loss.backward()
opt.step()
def chained():
    try:
        net(torch.rand(4, 5))
    except RuntimeError as error:
        raise KeyError("which one") from error
def in_thread():
    with ThreadPoolExecutor(1) as pool:
        raise pool.submit(net, torch.rand(4, 5)).exception()
for wrong in (
    lambda: net(torch.rand(4, 5)),
    lambda: torch.rand(2, 3) @ torch.rand(2, 3),
    lambda: torch.rand(2).item(),
    lambda: torch.linalg.cholesky(-torch.eye(3)),
    lambda: loss.backward(),
    lambda: torch.autograd.backward(loss),
    lambda: torch.autograd.grad(loss, torch.rand(2)),
    lambda: opt.step(closure=3),
    lambda: net.load_state_dict({}),
    lambda: opt.load_state_dict({"param_groups": [], "state": {}}),
    lambda: torch.optim.lr_scheduler.StepLR(opt, 0).step(),
    lambda: torch.amp.GradScaler("cpu").step(opt),
    lambda: nn.utils.clip_grad_norm_([loss], 1.0, norm_type="three"),
    lambda: next(iter(DataLoader([1, torch.zeros(2)], batch_size=2))),
    lambda: next(iter(DataLoader([]))),
    chained,
    in_thread,
):
    try:
        wrong()
    except Exception:
        logging.exception("refused")
""",
    )
    assert done.out.count("refused") == 17


def test_a_function_of_torch_that_asks_for_modes_is_seen_twice(box: Sandbox) -> None:
    """As docs/limits.md says: no frame of ours, and one more of torch's."""
    done = box.watched(
        HEAD
        + """
try:
    nn.functional.cross_entropy(torch.rand(2, 3), torch.tensor([7, 1]))
except IndexError:
    traceback.print_exc(file=sys.stdout)
"""
    )
    assert done.out.count("in cross_entropy") == 2 and "whynan" not in done.out


def test_warnings_of_torch_are_filtered_and_shown_as_those_of_the_program(box: Sandbox) -> None:
    """By module, and once for each line of the program."""
    done = same(
        box,
        HEAD
        + """
warnings.simplefilter("default")
warnings.showwarning = lambda message, category, file, line, *more: print(file.rpartition("/")[2], line, str(message)[:40])
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.01)
net[0].register_full_backward_hook(lambda module, grad_input, grad_output: None)
def step():
    loss = net(torch.rand(4, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
def train():
    step(), step()
    net(torch.rand(4, 4)).sum().backward()
    torch.autograd.backward(net(torch.rand(4, 4)).sum())
    net(torch.rand(4, 4)).sum().backward(create_graph=True)
    for _ in range(2):
        nn.functional.softmax(net(torch.rand(4, 4)))
        nn.functional.mse_loss(net(torch.rand(4, 4)), torch.zeros(4))
train()
torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), 0.01), 5).step()
with warnings.catch_warnings():
    warnings.filterwarnings("error", module="__main__")
    for raising in step, lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), 0.01), 5).step():
        try:
            raising()
        except UserWarning as warning:
            print("raised", str(warning)[:40])
""",
    )
    assert done.out.count("raised") == 2 and done.out.count("train.py") == 7


@pytest.mark.parametrize("function", [Recorder.outermost, GoingBack.backward, WatchedHook.__call__])
def test_the_source_of_a_function_is_still_found(function: FunctionType) -> None:
    """By a debugger, by coverage, and for the text of a failure of ours."""
    name = function.__code__.co_filename
    assert "importlib" in name and "_bootstrap" in name and Path(os.path.normpath(name)).exists()
    assert inspect.getsource(function).lstrip().startswith(f"def {function.__name__}")


def test_a_frame_that_a_signal_handler_interrupted_is_left_in() -> None:
    """By it we know whose exception that is."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise LookupError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(LookupError) as caught:
            WatchedHook(functools.partial(signal.raise_signal, signal.SIGUSR1), Recorder())()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(LookupError):
        let_through(caught.value)


def test_wrapped_classes_travel_to_a_process_without_whynan(box: Sandbox) -> None:
    """cloudpickle takes a script's own classes by value, with what we put on them."""
    pytest.importorskip("cloudpickle")
    made = box.watched("""
        import cloudpickle, torch

        class Descent(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        class Rate(torch.optim.lr_scheduler.LRScheduler):
            def __init__(self, optimizer):
                super().__init__(optimizer)
            def get_lr(self):
                return [0.5]
            def step(self, epoch=None):
                return super().step(epoch)

        optimizer = Descent([torch.nn.Parameter(torch.ones(2))], 0.1)
        scheduler, slope = Rate(optimizer), torch.func.grad(lambda x: (x**2).sum())
        open("own.bin", "wb").write(cloudpickle.dumps((Descent, Rate, slope)))
    """)
    assert made.status == 0, made.err
    reader = box.write("""
        import sys
        sys.modules["whynan"] = None
        import cloudpickle, torch
        Descent, Rate, slope = cloudpickle.load(open("own.bin", "rb"))
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = Descent([weight], 0.1)
        scheduler = Rate(optimizer)
        weight.grad = slope(weight.detach())
        optimizer.step()
        scheduler.step()
        print(weight.tolist())
    """)
    done = box.python(str(reader))
    assert done.out == "[0.0, 0.0]\n", done.err


def test_a_report_names_calls_as_the_program_does(box: Sandbox) -> None:
    """`torch.tensor(...)` ends in an operation that torch calls lift_fresh; nobody has written that."""
    done = box.watched("""
        import torch
        net = torch.nn.Linear(4, 2)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for s in range(4):
            share = torch.tensor(0.0 if s == 2 else 1.0)
            loss = (net(torch.zeros(3, 4)) * share / share).half().float().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    """)
    (incident,) = done.incidents
    assert "the argument was made here by torch.tensor" in [span["label"] for span in incident["origin"]["from"]], done.err
    assert not {"lift_fresh", "_to_copy", "to_copy", "alias"}.intersection(stage["op"] for stage in incident["path"])
