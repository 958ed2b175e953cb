"""What a model's code keeps outside its modules is for a replay as the step found it, and for the program as it would be without one."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import types

import numpy as np
import pytest
import torch
from conftest import Sandbox
from torch import nn

import whynan

NET = """
import numpy as np, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        bad = np.random.rand() < 0.4
        return (self.linear(x).abs() * (0.0 if bad else 1.0)).log().mean()
"""


@pytest.mark.parametrize("name", ["torchnets", "numpymodels"])
def test_numbers_drawn_in_a_file_named_like_a_library_are_drawn_again(name: str, box: Sandbox) -> None:
    """A file of the program's is its own, whatever its name begins with: its draws from numpy are those of the step in a replay."""
    box.write(NET, f"{name}.py")
    done = box.watched(f"""
import numpy as np, torch
from {name} import Net
np.random.seed(0); torch.manual_seed(0)
net = Net()
opt = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(12):
    loss = net(torch.rand(16, 4))
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert done.incidents
    assert {i["cause"]["code"] for i in done.incidents} == {"WN101"}


PROGRAM = """
import collections, itertools, random
import numpy as np
import torch
from torch import nn
torch.manual_seed(0); np.random.seed(0)

{helpers}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        {made}
    def forward(self, x):
        {before}
        return torch.log_softmax(self.linear(x) / {value}, -1)

net = Net()
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(9):
    loss = -net(torch.randn(4, 4))[:, 0].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(s, loss.isfinite().item(), {shown})
"""
KINDS = {
    "a global counter": {
        "helpers": "count = 0\ndef tick():\n    global count\n    count += 1\n    return float(count % 6 != 4)",
        "value": "tick()",
        "shown": "count",
    },
    "a list of the file": {"helpers": "calls = []", "before": "calls.append(1)", "value": "float(len(calls) % 6 != 4)", "shown": "len(calls)"},
    "a variable of a closure": {
        "helpers": "def make():\n    n = 0\n    def tick():\n        nonlocal n\n        n += 1\n        return n\n    return tick\ntick = make()",
        "value": "float(tick() % 6 != 4)",
        "shown": "tick.__closure__[0].cell_contents",
    },
    "an object of the program's own": {
        "helpers": "class Plan:\n    def __init__(self):\n        self.n = 0\n    def next(self):\n        self.n += 1\n        return float(self.n % 6 != 4)",
        "made": "self.plan = Plan()",
        "value": "self.plan.next()",
        "shown": "net.plan.n",
    },
    "an array": {"helpers": "table = np.zeros(2)", "before": "table[0] += 1", "value": "float(table[0] % 6 != 4)", "shown": "table[0]"},
    "numpy's generator": {"before": "draw = np.random.randint(6)", "value": "float(draw != 4)", "shown": "np.random.get_state()[2]"},
    "a buffer written through .data": {
        "made": 'self.register_buffer("count", torch.zeros(()))',
        "before": "self.count.data += 1",
        "value": "(self.count % 6 != 4).float()",
        "shown": "net.count.item()",
    },
}


def program(kind: str) -> str:
    parts = {"helpers": "", "made": "pass", "before": "pass"} | KINDS[kind]
    return PROGRAM.format(**parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_finds_it_as_the_step_found_it(kind: str, box: Sandbox) -> None:
    """Once this was told as a step that does not reproduce, and faulty hardware was blamed."""
    done = box.watched(program(kind))
    assert [i["cause"]["code"] for i in done.incidents][:1] == ["WN103"]
    assert "torch.log_softmax(self.linear(x) / " in done.incidents[0]["origin"]["code"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_diagnosis_leaves_it_as_it_is(kind: str, box: Sandbox) -> None:
    """Where the step is only observed, the program goes on as without whynan."""
    source = program(kind)
    done = box.watched(source, "--policy", "observe")
    assert done.incidents and done.out == box.plain(box.write(source, "plain.py")).out


def test_a_counter_goes_on_with_a_dropped_step(box: Sandbox) -> None:
    """Put back, a schedule or a cursor that is bad at one count would stay there until the budget ends."""
    done = box.watched(program("a global counter"))
    counts = [line.split()[2] for line in done.out.splitlines()]
    assert counts[:6] == ["1", "2", "3", "4", "5", "6"]


SPOILT = {
    "a number of the file": ("mean = 0.0", "global mean; mean = 0.9 * mean + 0.1 * x.mean().item()", "mean"),
    "an object": ("class Scale:\n    mean = 0.0\nscale = Scale()", "scale.mean = 0.9 * scale.mean + 0.1 * x.mean()", "scale.mean"),
    "an array": ("table = np.zeros(1)", "table[0] = 0.9 * table[0] + 0.1 * x.mean().item()", "table[0]"),
    "a list": ("last = [0.0]", "last[0] = 0.9 * last[0] + 0.1 * x.mean().item()", "last[0]"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_a_dropped_step_has_left_bad_is_put_back(kind: str, box: Sandbox) -> None:
    """Every later step would read it."""
    helpers, moved, shown = SPOILT[kind]
    source = f"""
import numpy as np, torch
from torch import nn
torch.manual_seed(0)
{helpers}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x):
        {moved}
        return self.linear(x) - float({shown})
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.01)
for i in range(8):
    x = torch.rand(8, 4)
    if i == 5:
        if DROPS:
            continue
        x[0, 0] = float("nan")
    opt.zero_grad()
    net(x).square().mean().backward()
    opt.step()
print(float({shown}), net.linear.weight.tolist())
"""
    done = box.watched("DROPS = False" + source)
    assert [i["step"] for i in done.incidents] == [5], done.err
    assert done.out == box.plain(box.write("DROPS = True" + source)).out


@dataclasses.dataclass
class Seen:
    """What a module counts."""

    n: int = 0
    mean: torch.Tensor | None = None
    inner: Seen | None = None


class Counting(nn.Module):
    """Keeps the same numbers in every kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.space = types.SimpleNamespace(n=0, mean=torch.zeros(()), table={"n": 0})
        self.record = Seen(mean=torch.zeros(()), inner=Seen())
        self.counter = collections.Counter[str]()
        self.fresh = collections.defaultdict[str, int](int)
        self.ordered = collections.OrderedDict(first=1, n=0)
        self.listed = [types.SimpleNamespace(n=0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for held in (self.space, self.record, self.record.inner, self.listed[0]):
            held.n += 1  # type: ignore[union-attr]
        self.record.mean = self.record.mean + x.detach().mean()  # type: ignore[operator]
        self.space.mean.add_(x.detach().mean())
        for table in (self.space.table, self.counter, self.fresh, self.ordered):
            table["n"] += 1
        self.ordered.move_to_end("first")
        self.counter.update(str(len(self.counter)))
        return self.linear(x)  # type: ignore[no-any-return]

    def held(self) -> str:
        return repr([self.space, self.record, sorted(self.counter.items()), self.fresh, self.ordered, self.listed])


@pytest.mark.parametrize("fault", ["input", "loss"])
@pytest.mark.parametrize("policy", ["skip", "observe"])
def test_records_and_tables_of_a_module_are_state_of_it(policy: str, fault: str) -> None:
    """As plain attributes are: put back with a dropped step, and left alone by replays where nothing is dropped."""

    def end(watched: bool) -> str:
        torch.manual_seed(0)
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with whynan.watch(model, optimizer, files=False, policy=policy) if watched else contextlib.nullcontext():
            for step in range(9):
                x = torch.randn(8, 4)
                if step == 6 and policy == "skip" and not watched:
                    continue
                if step == 6 and fault == "input":
                    x[0] = float("nan")
                optimizer.zero_grad()
                (model(x).square().mean() * (float("nan") if step == 6 and fault == "loss" else 1.0)).backward()
                optimizer.step()
        return model.held()

    assert end(watched=True) == end(watched=False)


def test_an_array_of_a_module_is_as_before_after_a_dropped_step() -> None:
    """It is state of the model as a buffer is: what the bad batch has added to it, though finite, is gone."""

    class Counting(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.counts = np.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts += (x > 0).sum(0).numpy()
            return super().forward(x)

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = np.zeros(4)
    with whynan.watch(model, optimizer, files=False):
        for step in range(8):
            x = torch.randn(8, 4)
            if step in (2, 6):
                x[0, 0] = torch.nan
            else:
                expected += (x > 0).sum(0).numpy()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert model.counts.tolist() == expected.tolist()


def test_an_iterator_that_replays_move_on_is_not_blamed_on_the_machine(box: Sandbox) -> None:
    """It cannot be put back: the replays are other steps, and differ from each other."""
    parts = {"helpers": "", "before": "pass", "made": "self.scales = itertools.cycle([1.0, 0.7, 0.5, 0.0, 0.9])", "value": "next(self.scales)", "shown": "0"}
    first = box.watched(PROGRAM.format(**parts)).incidents[0]
    assert first["cause"]["code"] == "WN901" and "such as an iterator" in str(first["cause"]["evidence"])


STYLED = """
import torch
from torch import nn
torch.manual_seed(0)
style = {}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2))
    def forward(self, x):
        h = self.layers(x) * style["now"]
        return torch.sqrt(h.pow(2).sum(-1))
net, mapper = Net(), nn.Linear(2, 3, bias=False)
opt = torch.optim.Adam([*net.parameters(), *mapper.parameters()], 1e-2)
for s in range(8):
    x, z = torch.randn(5, 4), torch.randn(2)
    style["now"] = mapper(z * (s != 5))
    loss = net(x).mean()
    style.clear()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(s, loss.item(), *(v.double().sum().item() for v in net.state_dict().values()))
"""
HANDLED = """
import torch
from torch import nn
torch.manual_seed(0)
handlers = []
class Handler:
    def __init__(self, **values):
        self.values, self.seen = values, {{}}
    def __enter__(self):
        handlers.append(self)
        return self
    def __exit__(self, *_):
        handlers.remove(self)
def sample(name, value):
    for handler in handlers:
        value = handler.seen[name] = handler.values.get(name, value)
    return value
class Model(nn.Module):
    def forward(self, x):
        sample("rate", torch.relu(x @ sample("w", torch.rand(3))))
class Guide(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.full((3,), 0.5))
    def forward(self):
        sample("w", self.place + 0.01 * torch.randn(3))
model, guide = Model(), Guide()
opt = torch.optim.Adam(guide.parameters(), 1e-2)
for s in range(8):
    x = torch.rand(5, 3) + 0.1
    if s == {bad}:
        x[2] = -1
    with Handler() as drawn:
        guide()
    with Handler(**drawn.seen) as replayed:
        model(x)
    rate = replayed.seen["rate"]
    loss = (rate - torch.log(rate)).mean()  # the log
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(s, loss.item())
"""


@pytest.mark.parametrize("around", ["", "with torch.device('cpu'): "])
def test_a_model_that_gets_results_of_the_step_from_a_global_is_followed_inside(around: str, box: Sandbox) -> None:
    """Its call alone cannot be made again once the global is empty; a mode of the user's may stand above ours."""
    (incident,) = box.watched(STYLED.replace("loss = net(x)", around + "loss = net(x)")).incidents
    assert (incident["step"], incident["cause"]["code"], incident["remedies"][0]["result"]) == (5, "WN501", "proven")
    assert incident["origin"]["exact"] and incident["origin"]["code"].startswith("return torch.sqrt(")


@pytest.mark.parametrize("bad", [0, 5])
def test_values_that_handlers_around_a_call_give_and_take_are_found(bad: int, box: Sandbox) -> None:
    """A replay without the handlers drew a value of its own. In the first step the model's part is taken as it is, and that is said."""
    first = box.watched(HANDLED.format(bad=bad)).incidents[0]
    assert (first["step"], first["cause"]["code"], first["origin"]["exact"]) == (bad, "WN101", bad > 0)
    assert first["origin"]["code"].endswith("# the log")


@pytest.mark.parametrize("source", [STYLED, HANDLED.format(bad=9)])
def test_a_model_that_is_followed_inside_trains_as_it_would(source: str, box: Sandbox) -> None:
    done = box.watched(source, "--policy", "observe")
    assert done.out == box.plain(box.write(source, "plain.py")).out


def test_models_that_get_all_by_arguments_and_attributes_run_unseen() -> None:
    """What a call left in an attribute is there for the next one in a replay too."""

    class Leaky(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.potential = torch.nn.Linear(3, 3), torch.zeros(3)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.potential = 0.9 * self.potential + self.linear(batch["x"])
            return self.potential.tanh()

    cell, head = Leaky(), torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)
    with whynan.watch(cell, optimizer, files=False) as watch:
        for _ in range(3):
            cell.potential = torch.zeros(3)
            outputs = [cell({"x": x * 2}) for x in torch.randn(4, 2, 3)]
            loss = sum((head(out).square().mean() for out in outputs), torch.zeros(()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        states = watch._guard.recorder.roots.states.values()
        assert len(states) == 2 and not any(state.open for _, state in states)
