"""What a model's code keeps outside its modules is for a replay as the step found it, and for the program as it would be without one."""

from __future__ import annotations

import pytest
from conftest import Sandbox

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


def test_an_iterator_that_replays_move_on_is_not_blamed_on_the_machine(box: Sandbox) -> None:
    """It cannot be put back: the replays are other steps, and differ from each other."""
    parts = {"helpers": "", "before": "pass", "made": "self.scales = itertools.cycle([1.0, 0.7, 0.5, 0.0, 0.9])", "value": "next(self.scales)", "shown": "0"}
    first = box.watched(PROGRAM.format(**parts)).incidents[0]
    assert first["cause"]["code"] == "WN901" and "such as an iterator" in str(first["cause"]["evidence"])
