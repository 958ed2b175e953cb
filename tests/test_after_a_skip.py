"""A skipped step leaves a training as one that never drew that batch: gradients of inputs, layers made later, work beside the steps, two passes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from conftest import Sandbox
from torch import nn

import whynan
from whynan.capsule.beginning import Beginning
from whynan.capsule.tape.entries import Entry
from whynan.engine.guard import open_guard

Batch = tuple[int, torch.Tensor, torch.Tensor]
Loop = Callable[[nn.Sequential, torch.optim.Optimizer, Iterable[Batch]], object]
STEPS = 9


def batches(bad: Iterable[int], without: bool) -> Iterator[Batch]:
    """Yield numbered batches, those that are bad with a NaN or not at all."""
    values = torch.Generator().manual_seed(11)
    for step in range(STEPS):
        x, y = torch.randn(8, 4, generator=values), torch.randn(8, 1, generator=values)
        if step in bad and without:
            continue
        if step in bad:
            x[1, 2] = float("nan")
        yield step, x, y


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def end_of(loop: Loop, bad: Iterable[int], without: bool = False, make: Callable[[], nn.Sequential] = normed) -> tuple[list[Any], list[tuple[int, str, str]]]:
    """Train; return all state at the end and what was told."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        loop(model, optimizer, batches(bad, without))
    told = [(i.step, i.cause.code, i.action.taken) for i in guard.incidents]
    return torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()]), told


def is_as_never_drawn(loop: Loop, bad: Iterable[int] = (5,), make: Callable[[], nn.Sequential] = normed) -> list[tuple[int, str, str]]:
    """Compare the ends of a training that skips and of one that never drew the batch; return what was told."""
    state, told = end_of(loop, bad, make=make)
    never, nothing = end_of(loop, bad, without=True, make=make)
    assert not nothing
    assert len(state) == len(never)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(state, never, strict=True))
    return told


# -- inputs that have gradients -----------------------------------------------------------------------------------


def leaf(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x.clone().requires_grad_()) - y).square().mean()


def leaf_in_place(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x.requires_grad_()) - y).square().mean()


def attack(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((model(inner) - y).square().mean(), inner)
    return (model(x + 0.1 * slope.sign()) - y).square().mean()


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    between = (0.3 * x + 0.7 * x.flip(1)).requires_grad_(True)
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(x).mean() - model(x.flip(1)).mean() + (slope.norm(2, 1) - 1).square().mean()


def force(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = x.detach().requires_grad_(True)
    energy = model(inner)
    (slope,) = torch.autograd.grad(energy, inner, torch.ones_like(energy), create_graph=True)
    return (slope[:, :1] + energy - y).square().mean()


@pytest.mark.parametrize("loss_of", [leaf, leaf_in_place, attack, penalty, force])
def test_a_bad_input_that_has_a_gradient_is_an_input(loss_of: Callable[..., torch.Tensor]) -> None:
    """It belongs to no model and no optimizer: the batch is skipped, the weights are not told to be damaged."""

    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: Iterable[Batch]) -> None:
        for _, x, y in drawn:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

    ((step, code, taken),) = is_as_never_drawn(loop)
    assert (step, taken) == (5, "skipped")
    assert code in ("WN701", "WN702")


@pytest.mark.parametrize("broken", ["weight", "input"])
@pytest.mark.parametrize("update", ["w.sub_(0.1 * w.grad)", "w.data.sub_(0.1 * w.grad)", "w.data = w.data - 0.1 * w.grad"])
def test_without_module_and_optimizer_a_weight_is_what_the_program_updates(update: str, broken: str, box: Sandbox) -> None:
    """A weight that goes bad is damage that no skip helps; an input with a gradient is not."""
    done = box.watched(f"""
import torch
torch.manual_seed(0)
w = torch.randn(4, 1, requires_grad=True)
for step in range(8):
    x = torch.randn(8, 4)
    if step == 4:
        {"w.detach()" if broken == "weight" else "x"}.numpy()[1, 0] = float("nan")
    x.requires_grad_()
    (x @ w).square().mean().backward()
    with torch.no_grad():
        {update}
    w.grad = None
print(bool(w.isfinite().all()))
""")
    told = [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents]
    assert told == [(4, "WN601", "stopped") if broken == "weight" else (4, "WN701", "skipped")]
    assert (done.status, done.out.strip()) == ((3, "") if broken == "weight" else (0, "True"))


# -- layers that were not there at the first call -----------------------------------------------------------------


def lazy() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 1))
    model(torch.ones(3, 4))
    return model


class Late(nn.Module):
    """Registers its buffer when it is first called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(8))
        self.seen.lerp_(x.detach().mean(0), 0.1)
        return x - self.seen


def grown(how: str) -> Loop:
    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: Iterable[Batch]) -> None:
        for step, x, y in drawn:
            if step == 3:
                new = nn.BatchNorm1d(8)
                if how == "inserted":
                    model.insert(2, new)
                elif how == "appended":
                    model.append(nn.Sequential(nn.Linear(1, 8), new, nn.Linear(8, 1)))
                else:
                    model[1] = new
                optimizer.add_param_group({"params": list(new.parameters())})
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def plain(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: Iterable[Batch]) -> None:
    for _, x, y in drawn:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("bad", [[3], [5], [4, 6]])
@pytest.mark.parametrize("how", ["inserted", "appended", "exchanged"])
def test_statistics_of_a_layer_that_came_later_are_put_back(how: str, bad: list[int]) -> None:
    """A layer is added or exchanged in the midst of a training: its statistics are as before the skipped batch."""
    assert [taken for _, _, taken in is_as_never_drawn(grown(how) if bad != [3] else _early(how), bad)] == ["skipped"] * len(bad)


def _early(how: str) -> Loop:
    """The same with the layer made at the end of the step before: the bad batch is its first."""

    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: Iterable[Batch]) -> None:
        first, *rest = drawn
        plain(model, optimizer, [first])
        grown(how)(model, optimizer, [(3, *first[1:])])
        plain(model, optimizer, rest)

    return loop


def test_statistics_of_lazy_layers_and_of_buffers_registered_late_are_put_back() -> None:
    """They got their shape in a call of the model, before watching began or while it did."""
    is_as_never_drawn(plain, make=lazy)
    is_as_never_drawn(plain, make=lambda: nn.Sequential(nn.Linear(4, 8), Late(), nn.Linear(8, 1)))


def test_lazy_layers_that_get_their_shape_while_watched(box: Sandbox) -> None:
    """A dry run before the optimizer is made gives the shapes, as usual."""
    done = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 1))
model(torch.ones(3, 4))
opt = torch.optim.Adam(model.parameters())
for step in range(8):
    x = torch.randn(8, 4)
    if step == 5:
        x[0] = float("nan")
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
print(bool(model[1].running_mean.isfinite().all()), int(model[1].num_batches_tracked))
""")
    assert done.out.strip() == "True 8"


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("graded", [False, True])
def test_a_bad_first_batch_after_a_dry_run_that_gave_lazy_layers_their_shape(graded: bool, bad: tuple[int, ...]) -> None:
    """The dry run is watched and came to nothing: statistics go back to what it left."""

    def end(without: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
        with whynan.watch(model, files=False) as guard:
            with torch.set_grad_enabled(graded):
                model(torch.arange(12.0).view(3, 4).sin())
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            plain(model, optimizer, batches(bad, without))
        assert [(i.step, i.action.taken) for i in guard.incidents] == [(step, "skipped") for step in bad if not without]
        return list(model.state_dict().values())

    assert all(map(torch.equal, end(without=False), end(without=True)))


# -- work between the last step and the bad batch -----------------------------------------------------------------


def beside(work: Callable[[nn.Module, torch.optim.Optimizer], object], at: int = 4) -> Loop:
    """Do something with the model after a step."""

    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, drawn: Iterable[Batch]) -> None:
        for step, x, y in drawn:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if step == at:
                work(model, optimizer)

    return loop


CLEAN = [torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def estimate(model: nn.Module, _: object) -> None:
    torch.optim.swa_utils.update_bn(CLEAN, model)


def estimate_and_validate(model: nn.Module, _: object) -> None:
    torch.optim.swa_utils.update_bn(CLEAN, model)
    model.eval()
    model(CLEAN[0])
    model.train()


def look(model: nn.Module, _: object) -> None:
    with torch.no_grad():
        model(CLEAN[0])


def sample(model: nn.Module, _: object) -> None:
    assert torch.stack([model(CLEAN[0]).detach() for _ in range(3)]).isfinite().all()


def curvature(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As Sophia: a pass whose gradients go into the optimizer's state and are dropped."""
    model(CLEAN[0]).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            optimizer.state[p]["exp_avg_sq"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
    optimizer.zero_grad()


@pytest.mark.parametrize("bad", [[5], [5, 6], [4], [6]])
@pytest.mark.parametrize("work", [estimate, estimate_and_validate, look, sample, curvature])
def test_work_beside_the_steps_stays_done(work: Callable[..., object], bad: list[int]) -> None:
    """Passes from before the bad batch, whose results nobody uses for it, are not undone with it."""
    if bad != [4]:
        assert [taken for _, _, taken in is_as_never_drawn(beside(work), bad)] == ["skipped"] * len(bad)
    else:  # a model that was called with a bad batch and then with others
        is_as_never_drawn(beside(work, at=3), bad)


def test_a_dry_run_before_a_bad_first_batch_stays_done(box: Sandbox) -> None:
    """What was done before the optimizer was made is no part of the first step, also where its result is still held."""
    done = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8), nn.Linear(8, 1))
out = model(torch.ones(3, 4))
before = [b.clone() for b in model.buffers()]
opt = torch.optim.Adam(model.parameters())
for step in range(3):
    x = torch.randn(8, 4)
    x[0] = float("nan")
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    print(all(map(torch.equal, before, model.buffers())))
""")
    assert done.out.split() == ["True"] * 3


@pytest.mark.parametrize(
    "first",
    [
        "t = model(x).detach()",
        "hard = model(x).square().mean().item()",
        "out.append(model(x).sum())",
        "values[0] = model(x).mean()",
        "model(x[:4])",
        "model(2 * x)",
        "model(x).mean().backward(); kept = [p.grad.clone() for p in model.parameters()]; opt.zero_grad()",
    ],
)
def test_a_first_pass_over_the_bad_batch_is_undone_too(first: str, box: Sandbox) -> None:
    """A teacher's pass, one that picks hard samples, one whose result is kept, one for the gradients of a task: of the same batch they are of the step."""
    done = box.watched(f"""
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters())
out, values = [], torch.zeros(1)
for step in range(8):
    x = torch.randn(8, 4)
    before = [b.clone() for b in model.buffers()]
    weight = torch.ones(8, 1)
    if step in (4, 6):
        x[0] = float("nan")
    with torch.set_grad_enabled("backward" in {first!r}):
        {first}
    loss = (model(x) * weight).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step in (4, 6):
        print(all(map(torch.equal, before, model.buffers())))
""")
    assert done.out.split() == ["True"] * 2, done.err


def test_a_bad_pass_beside_the_steps_is_told_and_put_back(box: Sandbox) -> None:
    """Statistics that a pass for nothing has damaged are told at its line, and are what they were before it."""
    done = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters())
for step in range(8):
    if step == 4:
        with torch.no_grad():
            model(torch.full((8, 4), float("inf")))  # here
    loss = model(torch.randn(8, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(bool(model[1].running_mean.isfinite().all()))
""")
    (incident,) = done.incidents
    assert (incident["cause"]["code"], incident["action"]["taken"]) == ("WN701", "skipped")
    assert incident["origin"]["code"].strip().endswith("# here") or incident["origin"]["line"] == 10
    assert done.out.strip() == "True"


LOOKS = {
    "detached": "if torch.isnan(loss.detach()): continue",
    "by numpy": "if np.isnan(loss.detach().numpy()): continue",
    "by numpy, nothing kept": "if np.isnan(loss.detach().numpy()):\n        del loss\n        continue",
    "by data": "if bool((loss.data != loss.data).item()): continue",
    "as it is": "if torch.isnan(loss): continue",
}


@pytest.mark.parametrize("bad", [[4, 5], [0]])
@pytest.mark.parametrize("look", LOOKS)
def test_the_step_after_one_that_the_program_left_is_made(look: str, bad: list[int], box: Sandbox) -> None:
    """Its statistics were damaged by the pass before it: however the program looked at that one's loss, it is told, and this update is not left out."""
    done = box.watched(f"""
import numpy as np, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters())
made = []
opt.register_step_post_hook(lambda *_: made.append(step))
for step in range(9):
    x = torch.randn(8, 4)
    if step in {bad}:
        x[0] = float("nan")
    loss = model(x).square().mean()
    {LOOKS[look]}
    opt.zero_grad()
    loss.backward()
    opt.step()
print(*made)
""")
    assert done.out.split() == [str(step) for step in range(9) if step not in bad], done.err
    rows = [json.loads(line)["step"] for line in (box.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {i["action"]["taken"] for i in done.incidents} == {"observed"}
    assert {i["cause"]["code"] for i in done.incidents} == {"WN701"}
    assert len(rows) == len(set(rows)), "a step is written once"


def test_a_step_begins_without_what_is_known_of_one_that_the_program_left() -> None:
    """Why that one could not be replayed is no reason for the next one, nor what other ranks gave to it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False):
        guard = open_guard()
        assert guard is not None
        received = guard.recorder.received
        for step in range(6):
            loss = model(torch.randn(8, 4) * (float("nan") if step == 3 else 1.0)).square().mean()
            if step == 3:
                received.refused, received.kept = "planted", [(0, None), (guard.recorder.tape.last, None)]  # type: ignore[list-item]
            if torch.isnan(loss):
                continue
            optimizer.zero_grad()
            if step == 4:
                assert received.refused == "planted"
            loss.backward()
            if step == 4:
                assert (received.refused, received.kept) == ("", [])
            optimizer.step()


@pytest.mark.parametrize(("policy", "made"), [("observe", 6), ("skip", 5)])
def test_updates_in_a_hook_of_the_backward_pass_are_counted_as_any(policy: str, made: int) -> None:
    """One that an observer lets the program make of a bad gradient was made; one that is left out was not."""
    model = nn.Linear(4, 1)
    each: dict[torch.Tensor, torch.optim.SGD] = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: each[p].step())
    with whynan.watch(model, *each.values(), files=False, policy=policy) as watch:
        for step in range(6):
            model(torch.randn(8, 4) * (float("nan") if step == 5 else 1.0)).square().mean().backward()
        guard = open_guard()
        assert guard is not None
        assert guard.session.applied == made
    assert [i.step for i in watch.incidents] == [5]


# -- two passes of a step, and the last update ----------------------------------------------------------------------


@pytest.mark.parametrize("second", ["x", "x + 0.1 * moved.grad.sign()"])
def test_statistics_of_both_passes_are_put_back(second: str, box: Sandbox) -> None:
    """A program that drops the gradients of a bad first pass itself, and goes back once more (sharpness-aware, an attack): both are undone."""
    done = box.watched(f"""
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters())
for step in range(8):
    x = torch.randn(8, 4)
    before = [b.clone() for b in model.buffers()]
    if step == 5:
        x[0] = float("nan")
    moved = torch.zeros_like(x, requires_grad=True)
    model(x + moved).square().mean().backward()
    nudged = {second}
    opt.zero_grad()
    model(nudged).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 5:
        print(all(map(torch.equal, before, model.buffers())))
""")
    assert done.out.strip() == "True"
    assert done.status == 0


@pytest.mark.parametrize("policy", ["skip", "rollback:2"])
@pytest.mark.parametrize("name", ["exp_avg", "ax"])
def test_what_the_last_update_has_broken_is_told_at_the_end(name: str, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No step comes that would meet it: weights and state are looked at once when watching ends; a state that is not kept for a rollback is said."""
    model = normed()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters()) if name == "exp_avg" else torch.optim.ASGD(model.parameters(), t0=0)
    with whynan.watch(model, optimizer, files=False, policy=policy, snapshot_every=1) as guard:
        for step, x, y in batches((), False):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if step == STEPS - 1:
                next(iter(optimizer.state.values()))[name].view(-1)[0] = float("nan")
            optimizer.step()
    assert [i.cause.code for i in guard.incidents] == ["WN601" if name == "exp_avg" else "WN603"]
    assert ("not finite and not kept" in capsys.readouterr().err) is False


def test_a_state_that_cannot_be_kept_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Where state is damaged that no step reads, no snapshot is taken from then on, and not without a word."""
    model = normed()
    optimizer = torch.optim.ASGD(model.parameters(), t0=0)
    with whynan.watch(model, optimizer, files=False, policy="rollback:2", snapshot_every=1) as guard:
        for step, x, y in batches((), False):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if step == 3:
                next(iter(optimizer.state.values()))["ax"].view(-1)[0] = float("nan")
    assert [i.cause.code for i in guard.incidents] == ["WN603"]
    assert "whynan: the state after 4 updates is not finite and not kept: a rollback goes to the one after 3 updates" in capsys.readouterr().err


@pytest.mark.parametrize(
    "write",
    [
        "for p in model.parameters(): p.mul_(0.99)",
        "for p in model.parameters(): p.data -= 0.01 * p.data",
        "for p in model.parameters(): p.data = p.data * 0.99",
        "for p in model.parameters(): p.copy_(p * 0.99)",
        "torch._foreach_mul_(list(model.parameters()), 0.99)",
        "pass",
        "seen.mul_(0.9).add_(loss.detach())",
    ],
)
def test_weights_are_said_to_be_as_before_only_where_they_are(write: str, box: Sandbox) -> None:
    """A loop that decays them by hand does so after the skipped step as well: the closing line does not promise what is not so."""
    done = box.watched(f"""
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.Adam(model.parameters())
seen = torch.zeros(())
for step in range(8):
    x = torch.randn(8, 4)
    if step == 5:
        x[0] = float("nan")
        before = [p.clone() for p in model.parameters()]
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    with torch.no_grad():
        {write}
    if step == 5:
        print(all(map(torch.equal, before, model.parameters())))
""")
    (kept,) = done.out.split()
    assert ("weights, moments and buffers are as before it" in done.err) is (kept == "True")
    assert ("moments and buffers are as before it; the program itself wrote to the weights after it" in done.err) is (kept == "False")


def test_many_calls_in_a_step_cost_no_more_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation with gradients on, whose calls all read one table: each asks the newest entries of the tape whether the step began anew, not all of them."""
    looked, original = [0], Beginning._entries

    def counted(self: Beginning) -> Iterator[Entry]:
        for entry in original(self):
            looked[0] += 1
            yield entry

    monkeypatch.setattr(Beginning, "_entries", counted)
    model, table = nn.Bilinear(4, 4, 1), torch.ones(8, 4)
    with whynan.watch(model, torch.optim.SGD(model.parameters(), 0.1), files=False):
        for _ in range(200):
            model(torch.randn(8, 4), table).mean().item()
    assert 0 < looked[0] < 200 * 8


class _Fault:
    """Raises once, when it is asked to."""

    def __init__(self) -> None:
        self.due = False

    def __call__(self, *_: object) -> None:
        if self.due:
            self.due = False
            raise RuntimeError("a fault of the program's own")


def _raising(where: str, bad: bool) -> list[torch.Tensor]:
    """Train with a batch whose turn raises and is caught, and one after it that is bad or is never drawn."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer, fault = torch.optim.Adam(model.parameters(), 0.02), _Fault()
    if where == "before":
        optimizer.register_step_pre_hook(fault)
    elif where == "after":
        optimizer.register_step_post_hook(fault)
    with whynan.watch(model, optimizer, files=False) if bad else contextlib.nullcontext():
        for step, x in enumerate(torch.randn(9, 16, 4)):
            if step == 5 and not bad:
                continue
            fault.due = step == 4
            loss = model(x * float("nan") if step == 5 else x).square().mean()
            optimizer.zero_grad()
            with contextlib.suppress(RuntimeError):
                if where == "closure":
                    optimizer.step(lambda loss=loss: (loss.backward(), fault(), loss)[2])  # type: ignore[misc]
                else:
                    loss.backward()
                    optimizer.step()
    return [*model.state_dict().values()]


@pytest.mark.parametrize("where", ["before", "after", "closure"])
def test_step_after_an_update_that_raised(where: str) -> None:
    """An update that raises and is caught ends its batch: what that one left in running statistics is not taken back with the next."""
    assert all(torch.equal(a, b) for a, b in zip(_raising(where, bad=True), _raising(where, bad=False), strict=True))
