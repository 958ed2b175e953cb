"""What is done about a bad step: observe, skip, stop, and their budgets; a skipped step leaves no mark on the state."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Sandbox
from hypothesis import given
from hypothesis import strategies as st

import whynan
from whynan.capsule.snapshot import Snapshot
from whynan.recovery.policy import Budget, parse

# -- budgets ------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 5), st.integers(0, 12))
def test_budget_is_exact(bad_steps: list[bool], in_a_row: int, in_total: int) -> None:
    """Skips are allowed up to both limits; the first bad step past either limit stops."""
    budget = Budget(parse("skip", in_a_row), in_total)
    streak = total = 0
    for bad in bad_steps:
        if not bad:
            budget.healthy()
            streak = 0
            continue
        streak, total = streak + 1, total + 1
        allowed = streak <= in_a_row and total <= in_total
        assert budget.decide() == ("skipped" if allowed else "stopped")
        if not allowed:
            break
    assert (budget.total, budget.streak) == (total, streak)


def test_policies_of_a_budget() -> None:
    """Observe never acts, stop acts at once, and what skipping cannot help is stopped."""
    assert [Budget(parse("observe"), 0).decide() for _ in range(20)] == ["observed"] * 20
    assert Budget(parse("stop")).decide() == "stopped"
    assert Budget().decide(hopeless=True) == "stopped"
    assert Budget(parse("observe")).decide(hopeless=True) == "observed"


RUN = """
    import torch

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for step in range(40):
        optimizer.zero_grad()
        loss = weight.square().sum()
        if CONDITION:
            loss = loss + torch.log(weight.sum() * 0)
        loss.backward()
        optimizer.step()
        print(step, torch.isfinite(weight).all().item())
"""


@pytest.mark.parametrize(
    ("condition", "options", "status", "taken", "steps"),
    [
        ("step >= 5", [], 3, ["skipped"] * 3 + ["stopped"], 8),
        ("step % 2 == 1", [], 3, ["skipped"] * 10 + ["stopped"], 21),
        ("step in (3, 4, 5)", [], 0, ["skipped"] * 3, 40),
        ("step >= 5", ["--in-a-row", "1"], 3, ["skipped", "stopped"], 6),
        ("step % 2 == 1", ["--in-total", "2"], 3, ["skipped", "skipped", "stopped"], 5),
        ("step == 7", ["--in-a-row", "0"], 3, ["stopped"], 7),
        ("step == 7", ["--policy", "stop"], 3, ["stopped"], 7),
        ("step == 7", ["--policy", "observe"], 0, ["observed"], 40),
        ("step % 2 == 1", ["--policy", "observe", "--in-total", "1"], 0, ["observed"], 40),
    ],
)
def test_policies_of_a_run(box: Sandbox, condition: str, options: list[str], status: int, taken: list[str], steps: int) -> None:
    """Policies and budgets on the command line: what was done, how far the script got, and its exit status."""
    done = box.watched(RUN.replace("CONDITION", condition), *options)
    assert done.status == status, done.err
    assert [i["action"]["taken"] for i in done.incidents][: len(taken)] == taken
    assert len(done.out.splitlines()) == steps
    if "observe" not in options:
        assert len(done.incidents) == len(taken)
        assert "False" not in done.out
    assert [i["action"]["total"] for i in done.incidents] == list(range(1, len(done.incidents) + 1))
    if status == 3:
        assert "stopped" in done.err
        assert done.report


def test_observe_changes_nothing(box: Sandbox) -> None:
    """Under observe the weights become what they become without whynan: the bad update is applied."""
    done = box.watched(RUN.replace("CONDITION", "step == 7"), "--policy", "observe")
    finite = [line.split()[1] for line in done.out.splitlines()]
    assert finite == ["True"] * 7 + ["False"] * 33


def test_many_alike_are_told_once(box: Sandbox) -> None:
    """Incidents of the same cause and place are all written, and printed in full only once."""
    done = box.watched(RUN.replace("CONDITION", "step % 2 == 1"))
    assert len(done.incidents) == 11
    assert done.err.count("error[WN101]") == 1
    assert "11 incidents" in done.err


# -- the promise of a skip ----------------------------------------------------------------------------------------

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW tiny eps": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-40),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "LBFGS search": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}
NEEDS_CLOSURE = {"LBFGS", "LBFGS search"}


class Net(torch.nn.Module):
    """A model with buffers that a forward pass changes, and an attribute that it counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
        self.register_buffer("average", torch.zeros(()))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers and leave marks."""
        self.seen += 1
        out = self.b(torch.tanh(self.norm(self.a(x))))
        self.average = 0.9 * self.average + 0.1 * out.detach().mean()
        return out


def damaged_loss(out: torch.Tensor, net: Net) -> torch.Tensor:
    """A loss that is not finite."""
    return out.square().mean() + torch.log(out.sum() * 0)


def damaged_gradient(out: torch.Tensor, net: Net) -> torch.Tensor:
    """A finite loss whose gradients are not."""
    return out.square().mean() + torch.sqrt((out * 0).square().sum())


def damaged_bias(out: torch.Tensor, net: Net) -> torch.Tensor:
    """A finite loss with one gradient that is not."""
    return out.square().mean() + torch.sqrt((net.b.bias * 0).square().sum())


def sound(out: torch.Tensor, net: Net) -> torch.Tensor:
    """A finite loss with finite gradients."""
    return out.square().mean()


Loss = Callable[[torch.Tensor, Net], torch.Tensor]


def train(make: Make, losses: list[tuple[int, Loss]], closure: bool, clip: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    """Train on numbered batches, each with its own loss."""
    torch.manual_seed(0)
    net = Net()
    optimizer = make(list(net.parameters()))
    for number, loss_of in losses:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))

        def step(x: torch.Tensor = x, loss_of: Loss = loss_of) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net(x), net)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            return loss

        if closure:
            optimizer.step(step)
        else:
            step()
            optimizer.step()
    return net, optimizer


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Return the places at which two trees of state are not equal bit for bit."""
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and left.detach().numpy().tobytes() == right.detach().numpy().tobytes()
        return [] if same else [f"{where}: {left.tolist()} is not {right.tolist()}"]
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{where}: {list(left)} is not {list(right)}"]
        return [found for key in left for found in differences(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return [f"{where}: {len(left)} is not {len(right)} long"]
        return [found for n, (a, b) in enumerate(zip(left, right, strict=True)) for found in differences(a, b, f"{where}[{n}]")]
    return [] if left == right else [f"{where}: {left!r} is not {right!r}"]


@pytest.mark.parametrize("damage", [damaged_loss, damaged_gradient])
@pytest.mark.parametrize(("name", "closure"), [(n, c) for n in OPTIMIZERS for c in (False, True) if c or n not in NEEDS_CLOSURE])
def test_skipped_step_leaves_no_mark(name: str, closure: bool, damage: Loss) -> None:
    """After skipped steps weights, optimizer state, buffers and attributes are those of a run that never drew those batches."""
    good = [(n, sound) for n in range(6)]
    bad = [(90, damage), *good[:3], (91, damage), (92, damage), *good[3:], (93, damage)]
    expected_net, expected_optimizer = train(OPTIMIZERS[name], good, closure)
    with whynan.watch(files=False, in_total=20) as guard:
        net, optimizer = train(OPTIMIZERS[name], bad, closure)
    assert [i.action.taken for i in guard.incidents] == ["skipped"] * 4
    assert differences(net.state_dict(), expected_net.state_dict()) == []
    assert net.seen == expected_net.seen
    assert differences(optimizer.state_dict(), expected_optimizer.state_dict()) == []


def test_clipping_does_not_spread_the_damage() -> None:
    """With clipping in the loop a skipped step leaves no mark either, and the gradient named is the one bad before it."""
    good = [(n, sound) for n in range(4)]
    expected_net, expected_optimizer = train(OPTIMIZERS["Adam"], good, False, clip=True)
    with whynan.watch(files=False) as guard:
        net, optimizer = train(OPTIMIZERS["Adam"], [*good[:2], (9, damaged_bias), *good[2:]], False, clip=True)
    (incident,) = guard.incidents
    assert differences(net.state_dict(), expected_net.state_dict()) == []
    assert differences(optimizer.state_dict(), expected_optimizer.state_dict()) == []
    assert incident.symptom.name == "b.bias"
    assert incident.symptom.detail == ""


@pytest.mark.parametrize("before", [True, False], ids=["made before watching", "made while watching"])
def test_optimizer_with_a_scheduler(before: bool) -> None:
    """An optimizer whose step a scheduler has wrapped is skipped alike, and torch does not warn of a wrong order of calls."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if before else None
    with whynan.watch(net, optimizer, files=False) as guard, warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = scheduler or torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(5):
            old = copy.deepcopy((dict(net.named_parameters()), optimizer.state_dict()["state"]))
            optimizer.zero_grad()
            (damaged_loss if step == 0 else sound)(net(torch.randn(8, 4)), net).backward()
            optimizer.step()
            assert (differences(old, (dict(net.named_parameters()), optimizer.state_dict()["state"])) == []) == (step == 0)
            scheduler.step()
    assert [i.step for i in guard.incidents] == [0]


def test_bad_part_of_an_accumulated_step() -> None:
    """With gradient accumulation one bad part skips the whole step, and the next step begins clean."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    with whynan.watch(net, optimizer, files=False) as guard:
        for step in range(3):
            before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            optimizer.zero_grad()
            for part in range(3):
                loss_of = damaged_gradient if (step, part) == (1, 0) else sound
                (loss_of(net(torch.randn(8, 4)), net) / 3).backward()
            optimizer.step()
            assert (differences(before, (net.state_dict(), optimizer.state_dict())) == []) == (step == 1)
    assert [i.step for i in guard.incidents] == [1]


def test_update_that_breaks_the_weights_is_taken_back() -> None:
    """Finite gradients and an update that is not: weights and state are as before it."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight], lr=0.1, eps=0.0)
    with whynan.watch(optimizer, files=False) as guard:
        (weight * torch.tensor([0.0, 1.0, 2.0])).sum().backward()
        optimizer.step()
    (incident,) = guard.incidents
    assert incident.cause.code == "WN604"
    assert incident.origin.phase == "optimizer"
    assert weight.tolist() == [0.0, 0.0, 0.0]
    assert not optimizer.state


# -- state that is bad at the start -------------------------------------------------------------------------------

START = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        DAMAGE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        print("stepped")
"""


@pytest.mark.parametrize(
    ("damage", "code", "name", "share"),
    [
        ("model[0].weight[1, :3] = float('nan')", "WN601", "0.weight", "3 of 8"),
        ("model[2].bias.fill_(float('inf'))", "WN601", "2.bias", "1 of 1"),
        ("model[1].running_mean[0] = float('nan'); model.eval()", "WN602", "1.running_mean", "1 of 2"),
    ],
)
def test_state_that_is_bad_at_the_start(box: Sandbox, damage: str, code: str, name: str, share: str) -> None:
    """Weights or buffers that are not finite when the run starts: said at once, with tensor and count, and stopped with status 3."""
    done = box.watched(START.replace("DAMAGE", damage))
    assert done.status == 3
    assert done.out == ""
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["action"]["taken"]) == (0, code, "stopped")
    assert name in done.err
    assert share in done.err


MEANT = """
    import torch

    torch.manual_seed(0)

    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            moves = torch.randn(3, 3)
            moves[0, 1] = -torch.inf  # cannot be
            self.moves, self.emit = torch.nn.Parameter(moves), torch.nn.Linear(4, 3)
            self.range = torch.nn.Parameter(torch.tensor([[-torch.inf, -9.0, -9.0], [9.0, 9.0, torch.inf]]), requires_grad=False)

        def forward(self, x):
            scores = self.emit(x).clamp(*self.range)
            total = scores[0]
            for score in scores[1:]:
                total = torch.logsumexp(total[:, None] + self.moves, 0) + score
            return -torch.logsumexp(total, 0)

    model = Chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        loss = model(torch.randn(5, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


def test_infinities_meant_in_a_weight_are_no_damage(box: Sandbox) -> None:
    """Transitions that cannot be, and a frozen bound, are infinite for good: the run is as without whynan."""
    path = box.write(MEANT)
    done = box.watched(MEANT)
    assert (done.status, done.out, done.incidents) == (0, box.plain(path).out, []), done.err


def test_infinite_weight_that_breaks_the_gradients_is_told(box: Sandbox) -> None:
    """A loss that is finite does not clear an infinite weight: its gradients are looked at as well."""
    done = box.watched(MEANT.replace("-torch.logsumexp(total, 0)", "(-self.moves.square()).exp().sum() - torch.logsumexp(total, 0)"))
    assert (done.status, done.out) == (3, "")
    assert [(i["symptom"]["place"], i["cause"]["code"]) for i in done.incidents] == [("parameter", "WN601")]


def test_loaded_optimizer_state_that_is_bad(box: Sandbox) -> None:
    """Optimizer state loaded with a NaN in it is found before it gets into the weights."""
    source = """
        import torch

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        state["state"][0]["exp_avg"][1] = float("nan")
        optimizer.load_state_dict(state)
        weight.grad = None
        weight.sum().backward()
        optimizer.step()
        print("stepped")
    """
    done = box.watched(source)
    assert (done.status, done.out) == (3, "")
    (incident,) = done.incidents
    assert incident["cause"]["code"] == "WN603"
    assert "exp_avg" in done.err


# -- what is not an incident, and what the program handles itself -------------------------------------------------


@pytest.mark.parametrize(
    "check",
    [
        "torch.isnan(loss)",
        "not torch.isfinite(loss).all()",
        "math.isnan(loss.item())",
        "not math.isfinite(float(loss))",
        "torch.isnan(loss.detach())",
        "not math.isfinite(loss.detach().cpu().item())",
        "not math.isfinite(loss.data)",
        "math.isnan(loss.detach().numpy())",
    ],
)
def test_own_check_of_the_program_gets_a_diagnosis(box: Sandbox, check: str) -> None:
    """A program that looks at its loss and turns away is left alone, every later step too, and told where the NaN was born."""
    source = f"""
        import math, torch

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.25)
        for step in range(6):
            scale = (weight * (step != 2)).sum()
            loss = weight.square().sum() / scale * scale
            if {check}:
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, weight.sum().item())
    """
    done = box.watched(source)
    assert done.status == 0
    assert done.out.split() == ["0", "1.5", "1", "0.75", "3", "0.375", "4", "0.1875", "5", "0.09375"]
    (incident,) = done.incidents
    assert (incident["step"], incident["origin"]["line"], incident["action"]["taken"]) == (2, 8, "observed")
    assert incident["cause"]["code"] == "WN103"


GUARDED = """
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                self.scale = 0.9 * self.scale + 0.1 * x.abs().mean(0)
            return x / self.scale

    torch.manual_seed(0)
    model = torch.nn.Sequential(FIRST, torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(x):
        return model(x / x.norm(dim=1, keepdim=True)).square().mean()

    for step in range(7):
        x = torch.randn(8, 4)
        if step == 3:
            x[0] = 0
        LOOP
        print(step, loss.item())
    print(model[1].weight.tolist(), [b.tolist() for b in model.buffers()])
"""
OWN_SKIPS = {
    "gradients, zeroed late": """loss = forward(x)
        optimizer.zero_grad()
        loss.backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()""",
    "gradients, zeroed first": """optimizer.zero_grad()
        loss = forward(x)
        loss.backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()""",
    "loss": """loss = forward(x)
        if not loss.isfinite():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()""",
}


@pytest.mark.parametrize("skip", OWN_SKIPS)
def test_steps_after_an_own_skip_are_left_alone_with_running_statistics_in_the_model(box: Sandbox, skip: str) -> None:
    """A step that the program leaves damages running statistics: that is said once, and every later step is as without whynan."""
    done = box.watched(GUARDED.replace("FIRST", "torch.nn.BatchNorm1d(4)").replace("LOOP", OWN_SKIPS[skip]))
    assert (done.status, done.out) == (0, box.plain(box.folder / "train.py").out)
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["action"]["taken"]) == (3, "WN104", "observed")
    assert "the buffer `0.running_mean` and 1 more are nan from here on" in " ".join(done.err.split())


@pytest.mark.parametrize("skip", OWN_SKIPS)
def test_a_buffer_damaged_by_a_step_that_the_program_left_is_what_later_steps_fail_by(box: Sandbox, skip: str) -> None:
    """Where the steps after it read the damaged buffer, they are told to fail because of it."""
    done = box.watched(GUARDED.replace("FIRST", "Scaled()").replace("LOOP", OWN_SKIPS[skip]))
    assert (done.status, done.out) == (0, box.plain(box.folder / "train.py").out)
    assert [i["cause"]["code"] for i in done.incidents[:2]] == ["WN104", "WN602"]
    assert {i["action"]["taken"] for i in done.incidents} == {"observed"}


def test_a_buffer_that_became_finite_again_is_watched_again(box: Sandbox) -> None:
    """A step that damages running statistics anew, with nothing else, is skipped although the program left one before."""
    loop = (
        OWN_SKIPS["gradients, zeroed first"]
        + """
        if step == 4:
            model[0].reset_running_stats()
        if step == 5:
            model[0](torch.full((8, 4), float("nan")))"""
    )
    done = box.watched(GUARDED.replace("FIRST", "torch.nn.BatchNorm1d(4)").replace("LOOP", loop))
    assert [(i["step"], i["action"]["taken"]) for i in done.incidents] == [(3, "observed"), (6, "skipped")]


@pytest.mark.parametrize("zero", ["optimizer.zero_grad()", "model.weight.grad = None"])
def test_a_step_left_before_another_training_is_told_by_its_own_line(box: Sandbox, zero: str) -> None:
    """A new optimizer does not take away what is needed to tell of the last step of the training before, nor has it a part in that."""
    source = f"""
        import torch

        torch.manual_seed(0)
        for fold in range(3):
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                x = torch.randn(4, 3) * (fold or step < 3)
                loss = (model(x) / x.norm(dim=1, keepdim=True)).square().mean()
                {zero}
                loss.backward()
                if model.weight.grad.isfinite().all():
                    optimizer.step()
                print(fold, step, loss.item())
    """
    done = box.watched(source)
    assert (done.status, done.out) == (0, box.plain(box.folder / "train.py").out)
    (incident,) = done.incidents
    assert (incident["step"], incident["origin"]["line"], incident["cause"]["code"]) == (3, 10, "WN103")
    assert incident["action"]["taken"] == "observed"


def test_a_bad_value_looked_at_before_another_optimizer_is_made_is_told_by_its_own_line(box: Sandbox) -> None:
    """What was recorded of it is still there when it is known what became of it: nothing, or the loss of the next step."""
    source = """
        import torch

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        print(weight[:0].mean().item())
        other = torch.nn.Parameter(torch.ones(3))
        first = torch.optim.SGD([other], lr=0.1)
        other.sum().backward()
        first.step()
        loss = torch.log(other - other).sum()
        print(loss.item())
        second = torch.optim.SGD([other], lr=0.1)
        loss.backward()
        second.step()
        print(other.tolist())
    """
    done = box.watched(source)
    told = [(i["origin"]["line"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents]
    assert told == [(6, "WN402", "observed"), (11, "WN101", "skipped")]


def test_nan_that_reaches_nothing_is_silent(box: Sandbox) -> None:
    """A non-finite value that never reaches loss, gradients or state is not reported."""
    source = """
        import torch

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for step in range(3):
            shown = torch.log(weight.detach() - weight.detach()).mean()
            scores = weight.masked_fill(torch.tensor([True, False, True]), float("-inf"))
            loss = torch.softmax(scores, 0)[1] + weight.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{shown.item()} {loss.item():.3f}")
    """
    done = box.watched(source)
    assert (done.err, done.status, done.incidents) == ("", 0, [])


def scaled_training(watch: bool) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Train with a gradient scaler whose first scales are far too large."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-4)
    guard = whynan.watch(model, optimizer, files=False) if watch else None
    scales = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = 1e5 * model(torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    if guard is not None:
        guard.close()
    return scales, model.state_dict(), guard.incidents if guard is not None else []


def test_first_overflows_of_a_scaler_are_normal() -> None:
    """A gradient scaler's first overflows are no incidents, and the run is bit for bit the unwatched one."""
    scales, weights, _ = scaled_training(watch=False)
    assert scales[0] < 1e38
    watched_scales, watched_weights, incidents = scaled_training(watch=True)
    assert incidents == []
    assert watched_scales == scales
    assert differences(watched_weights, weights) == []


def test_scale_that_never_settles_is_an_incident() -> None:
    """A scaler that skips step after step is an incident in the end."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with whynan.watch(optimizer, files=False, policy="observe") as guard:
        for _ in range(14):
            optimizer.zero_grad()
            scaler.scale(torch.sqrt((weight - weight.detach()).square().sum())).backward()
            scaler.step(optimizer)
            scaler.update()
    assert guard.incidents
    assert all(i.symptom.place in ("gradient", "scaler") for i in guard.incidents)
    assert math.isfinite(float(weight.sum()))


class Counting(torch.optim.Optimizer):
    """Keeps numbers where optimizers of other people keep them: on itself and in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.calls, self.seen, self.total = 0, [0], torch.zeros(1)
        self.held = self.param_groups[0]["params"]  # as LBFGS does

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.param_groups[0]["k"] += 1
        self.seen.append(self.calls)
        self.total += 1


def test_snapshot_takes_an_optimizers_own_counters_back() -> None:
    """An undone update leaves no mark on attributes and groups either, and lists of weights stay the lists they are."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Counting([weight])
    optimizer.step()
    before = Snapshot(optimizer)
    optimizer.step()
    before.restore()
    assert (optimizer.calls, optimizer.param_groups[0]["k"], optimizer.seen, optimizer.total.item()) == (1, 1, [0, 1], 1.0)
    assert optimizer.held is optimizer.param_groups[0]["params"]
    assert optimizer.held[0] is weight


def test_observing_damaged_weights_diagnoses_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Once the weights are damaged and nobody is to touch them, later steps are counted and not diagnosed again."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False, policy="observe") as guard:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3) if step else torch.full((2, 3), torch.nan)).sum().backward()
            optimizer.step()
    assert [i.cause.code for i in guard.incidents] == ["WN701", "WN601"]
    assert "6 incidents" in capsys.readouterr().err


def test_a_dropped_step_leaves_what_another_optimizer_gathers() -> None:
    """A generator gathers gradients over two iterations; the discriminator's dropped step in between takes none of them away."""
    ends = []
    for draws_it in (False, True):
        torch.manual_seed(0)
        maker, judge = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        slow, fast = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.1)
        with whynan.watch(maker, judge, slow, fast, files=False) as guard:
            for number in range(6):
                x = torch.full((4, 2), 0.1 * (number + 1))
                judge(maker(x)).mean().backward(inputs=list(maker.parameters()))
                if number != 2 or draws_it:
                    fast.zero_grad()
                    batch = x.clone()
                    batch[0, 0] = torch.nan if number == 2 else 0.5
                    judge(batch).square().mean().backward()
                    fast.step()
                if number % 2:
                    slow.step()
                    slow.zero_grad()
        assert [i.action.taken for i in guard.incidents] == ["skipped"] * draws_it
        ends.append([p.detach().clone() for p in (*maker.parameters(), *judge.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("together", [False, True], ids=["one optimizer", "two that step together"])
def test_bad_gradients_of_a_finished_training_do_not_concern_the_next(together: bool) -> None:
    """A training ends with an overflow that its scaler skips, and is kept: those that are made afterwards lose no update."""
    kept = []
    with whynan.watch(files=False) as guard:
        for fold in range(3):
            model, scaler = torch.nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=2.0, enabled=fold == 0)
            groups = [[model.weight], [model.bias]] if together else [list(model.parameters())]
            optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
            kept.append((model, optimizers))
            for overflows in (False, False, fold == 0):
                before = model.weight.detach().clone()
                model.zero_grad()
                if overflows:
                    scaler.update(new_scale=3e38)
                scaler.scale(model(torch.ones(3, 2)).add(10.0).square().mean()).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                assert torch.equal(model.weight, before) == overflows
    assert not guard.incidents


def test_a_bad_loss_with_finite_gradients_is_told_as_that(box: Sandbox) -> None:
    """The logarithm of a negative number is NaN and its slope is not: the step is left out, and the text says what is bad."""
    done = box.watched("""
import torch
w = torch.nn.Parameter(torch.ones(3))
opt = torch.optim.SGD([w], 0.01)
for step in range(4):
    x = torch.tensor([1.0, 2.0, -1.0 if step == 2 else 3.0])
    loss = torch.log(w * x).square().mean() if step != 2 else torch.log(w * x).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    (incident,) = done.incidents
    assert (incident["step"], incident["action"]["taken"]) == (2, "skipped")
    assert "only the loss is nan: the gradients of this step are finite" in incident["cause"]["evidence"]


def test_a_detached_number_that_is_only_logged_is_silent(box: Sandbox) -> None:
    """A relative error on validation data, a perplexity past the range and a logged copy of a finite loss are looked at and never gone back from."""
    source = """
        import torch

        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(6):
            loss = net(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.data.item(), (1e4 * loss.detach()).exp().item())
            relative = (net(torch.randn(8, 4)) / torch.zeros(8, 1)).abs().mean()
            print(relative.detach().item(), relative.detach().numpy() > 1)
    """
    done = box.watched(source)
    assert (done.status, done.incidents) == (0, [])
    assert done.out == box.plain(box.write(source)).out


@pytest.mark.parametrize("check", ["not torch.isnan(extra)", "math.isfinite(extra)"])
def test_a_term_that_is_left_out_of_the_loss_is_silent(box: Sandbox, check: str) -> None:
    """A term that the program looks at and leaves out reaches nothing; the step goes on from the same forward pass."""
    source = f"""
        import math, torch

        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(6):
            out = net(torch.randn(8, 4)).squeeze(1)
            loss = out.abs().mean()
            extra = out[torch.full((8,), step % 2 == 0)].mean()
            if {check}:
                loss = loss + extra
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item())
    """
    done = box.watched(source)
    assert (done.status, done.incidents) == (0, [])
    assert done.out == box.plain(box.write(source)).out


TASKS = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(3, 2)
opt = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(6):
    losses = []
    for task in range(4):
        x = torch.randn(8, 3)
        loss = net(x)[x[:, 0] < (-9 if step == 4 and task == 2 else 9)].square().mean()
        if not loss.isfinite():
            {leaves}
        losses.append(loss)
    opt.zero_grad()
    torch.stack(losses).mean().backward()
    opt.step()
"""


@pytest.mark.parametrize(("leaves", "told"), [("continue", 0), ("losses.clear(); continue", 1)])
def test_one_of_several_terms_that_is_left_out_reaches_nothing(leaves: str, told: int, box: Sandbox) -> None:
    """The update is made of terms from before it too. Where nothing of the step is used that was made before the bad value, the step was left."""
    assert len(box.watched(TASKS.format(leaves=leaves)).incidents) == told


def test_tasks_without_labels_that_a_loop_leaves_out_are_silent(box: Sandbox) -> None:
    """Terms of heads on one trunk are looked at when all are made, and those that are finite make the loss."""
    source = """
        import torch
        from torch import nn
        from torch.nn import functional as F

        torch.manual_seed(2)
        trunk, heads = nn.Sequential(nn.Linear(6, 24), nn.ReLU()), nn.ModuleList(nn.Linear(24, 3) for _ in range(3))
        opt = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=5e-3)
        for step in range(40):
            z, terms = trunk(torch.randn(12, 6)), []
            for task, head in enumerate(heads):
                empty = step > 2 and (step >> task) % 2 and step % 8 != 7
                terms.append(F.cross_entropy(head(z), torch.full((12,), -1 if empty else task), ignore_index=-1))
            good = [t for t in terms if torch.isfinite(t)]
            loss = torch.stack(good).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(sum(p.sum().item() for p in trunk.parameters()))
    """
    done = box.watched(source)
    assert (done.status, done.incidents) == (0, [])
    assert done.out == box.plain(box.write(source)).out


INITIALISED = """
    import torch
    from torch import nn

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.done = nn.Parameter(torch.zeros(1, 4)), False

        def inverse(self, z):
            if not self.done:
                self.scale.data = torch.log(z.std(0, keepdim=True) + 1e-6).data
                self.done = True
            return z * torch.exp(-self.scale)

    torch.manual_seed(0)
    norm, net = Norm(), nn.Linear(4, 4)
    optimizer = torch.optim.Adam([*norm.parameters(), *net.parameters()], lr=1e-3)
    for step in range(4):
        z = torch.randn(8 if step else 1, 4)
        loss = net(norm.inverse(z)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, norm.scale.isfinite().all().item())
"""


def test_a_weight_that_a_method_sets_from_the_first_batch(box: Sandbox) -> None:
    """Outside every module call: the line that made it is found, and the weight is put back with the step."""
    done = box.watched(INITIALISED)
    [incident] = done.incidents
    assert (incident["step"], incident["cause"]["code"]) == (0, "WN403")
    assert incident["origin"]["code"] == "self.scale.data = torch.log(z.std(0, keepdim=True) + 1e-6).data"
    assert (done.status, done.out.split()) == (0, ["0", "True", "1", "True", "2", "True", "3", "True"])


def test_a_replay_that_is_another_step_is_no_faulty_hardware(box: Sandbox) -> None:
    """The gradient is bad only where code that the tape does not see says so: the loss of the replay differs, and no claim is made."""
    done = box.watched("""
        import ctypes, torch

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        number = ctypes.c_float(0.0)
        for step in range(4):
            number.value = 0.0 if step == 2 else 1.0
            data = torch.frombuffer(number, dtype=torch.float32)
            loss = (weight * data).square().sum().sqrt() + 2 * (1 - data).sum()
            optimizer.zero_grad()
            loss.backward()
            number.value = 5.0
            optimizer.step()
    """)
    [incident] = done.incidents
    assert incident["step"] == 2
    assert incident["cause"]["code"] == "WN901"
    assert any("is not the step that ran" in words for words in incident["cause"]["evidence"])


def test_a_weight_called_scale_is_a_weight(box: Sandbox) -> None:
    """Its gradient is bad in one step, which is skipped; that there is a gradient scaler whose scale is lost is not read out of its name."""
    done = box.watched("""
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))
            def forward(self, x):
                return torch.sqrt((x * self.scale).square().sum(1)).mean()
        net = Net()
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        for step in range(6):
            x = torch.randn(8, 3)
            if step == 3:
                x[2] = 0
            opt.zero_grad()
            net(x).backward()
            opt.step()
    """)
    assert [(i["step"], i["symptom"]["name"], i["action"]["taken"]) for i in done.incidents] == [(3, "scale", "skipped")]
    assert done.status == 0
