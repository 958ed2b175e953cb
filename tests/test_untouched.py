"""What a dropped step or a replay must leave alone: rollouts, batches prepared ahead, flags of other threads, graphs still to be gone back from."""

from __future__ import annotations

import pytest
from conftest import Sandbox

HEAD = """
import threading, time
import torch
from torch import nn
torch.manual_seed(0)
"""
LOOP = """
opt = torch.optim.SGD(net.parameters(), 0.1)
for i in range(8):
    x = torch.rand(8, 4)
    if i == 3:
        x[0, 0] = float("nan")
    loss = net(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_rollout_outlives_a_bad_minibatch(box: Sandbox) -> None:
    """The later minibatches of a policy update read what the model wrote down before any of them."""
    done = box.watched(
        HEAD
        + """
net = nn.Linear(3, 1)
opt = torch.optim.Adam(net.parameters(), 1e-2)
values, intact = torch.zeros(16), []
for update in range(4):
    states = torch.rand(16, 3)
    with torch.no_grad():
        for t in range(16):
            values[t] = net(states[t]).squeeze()
    before = values.clone()
    for part in range(4):
        weight = torch.ones(4) * (part > 0 or update != 2)
        rows = slice(4 * part, 4 * part + 4)
        loss = (net(states[rows]).squeeze(1) - values[rows] - 1).pow(2).mean() + weight.log().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    intact.append(torch.equal(before, values))
print(intact)
"""
    )
    assert [i["step"] for i in done.incidents] == [8] and done.out == "[True, True, True, True]\n"


def test_a_batch_prepared_one_step_ahead_is_not_exchanged(box: Sandbox) -> None:
    """It stands where the bad one stood, and has nothing to do with it."""
    done = box.watched(
        HEAD
        + """
class Scale(nn.Module):
    def forward(self, x):
        return (x - 0.5) / 0.25
scale, net = Scale(), nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
data = torch.rand(9, 8, 4)
data[4, 0, 0] = float("nan")
following, same = scale(data[0]), []
for i in range(8):
    x, following = following, scale(data[i + 1])
    loss = net(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    same.append(torch.equal(x.nan_to_num(), ((data[i] - 0.5) / 0.25).nan_to_num()))
print(all(same))
"""
    )
    assert [i["step"] for i in done.incidents] == [4] and done.out == "True\n"


def test_what_another_thread_sets_during_a_replay_stays_set(box: Sandbox) -> None:
    """A run that is asked to stop while a bad step is diagnosed stops."""
    net = """
class Control:
    stop = False
    def __init__(self):
        self.stop, self.noise = False, 0.0
control = Control()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 1), 0
    def forward(self, x):
        if x.isnan().any():
            time.sleep(0.05)
            threading.Thread(target=setattr, args=(control, "stop", True)).start()
            time.sleep(0.05)
        return self.linear(x) + control.noise
net = Net()
"""
    done = box.watched(
        HEAD + net + LOOP.replace("    opt.step()", "    control.stop = False if i == 3 else control.stop\n    opt.step()") + "print(control.stop)\n"
    )
    assert [i["step"] for i in done.incidents] == [3] and done.out == "True\n"


def test_a_graph_that_holds_a_tensor_of_the_program_can_still_be_gone_back_from(box: Sandbox) -> None:
    """A replay writes to a running mean outside the modules, which the generator's graph has saved."""
    done = box.watched(
        HEAD
        + """
mean = torch.ones(8)
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, z):
        h = torch.tanh(self.first(z))
        with torch.no_grad():
            mean.mul_(0.9).add_(0.1 * h.mean(0))
        return self.second(h * mean)
one, other = Generator(), nn.Linear(4, 1)
first, second = torch.optim.SGD(one.parameters(), 0.01), torch.optim.SGD(other.parameters(), 0.01)
for i in range(6):
    real, fake = torch.rand(8, 4), one(torch.rand(8, 4))
    if i == 3:
        real[0, 0] = float("nan")
    second.zero_grad()
    (other(real) - other(fake.detach())).pow(2).mean().backward()
    second.step()
    first.zero_grad()
    other(fake).pow(2).mean().backward()
    first.step()
print("done")
"""
    )
    assert done.out == "done\n" and done.incidents


def test_a_state_with_its_history_can_still_be_gone_back_from(box: Sandbox) -> None:
    """What is put back keeps its version: the graph of the dropped step is the program's."""
    done = box.watched(
        HEAD
        + """
net, h = nn.Linear(4, 4), torch.zeros(8, 4)
opt = torch.optim.SGD(net.parameters(), 0.01)
for i in range(6):
    x = torch.rand(8, 4)
    if i == 3:
        x[0, 0] = float("nan")
    h = torch.tanh(net(x) + h)
    opt.zero_grad()
    h.pow(2).mean().backward(retain_graph=True)
    opt.step()
print("done")
"""
    )
    assert done.out == "done\n" and done.incidents


MODELS = {
    "a tree that knows its parents": """
        self.tree = {"children": []}
        self.tree["children"].append({"parent": self.tree, "scale": torch.ones(1)})
""",
    "a configuration that raises": """
        self.width = self.config.width
""",
}


@pytest.mark.parametrize("kind", MODELS)
def test_what_stands_in_a_model_does_not_end_the_watching(kind: str, box: Sandbox) -> None:
    net = f"""
class Config:
    def __init__(self, **values):
        self.__dict__["values"] = values
    def __getattr__(self, name):
        return self.__dict__["values"][name]
class Net(nn.Module):
    config = Config(width=4)
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
{MODELS[kind]}
    def forward(self, x):
        return self.linear(x)
net = Net()
"""
    done = box.watched(HEAD + net + LOOP)
    assert [i["step"] for i in done.incidents] == [3] and "internal error" not in done.err


def test_a_micro_batch_dropped_alone_takes_back_its_own_part_only(box: Sandbox) -> None:
    done = box.watched(
        HEAD
        + """
seen = [0.0]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x, name):
        seen[0] += (x * 0).sum().item() + (name[0] == 2)
        return self.linear(x)
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.01)
for i in range(4):
    opt.zero_grad()
    for k in range(4):
        x = torch.rand(8, 4)
        if (i, k) == (2, 2):
            x[0, 0] = float("nan")
        net(x, (i, k)).pow(2).mean().backward()
    opt.step()
print(seen)
""",
        "--drop-alone",
    )
    assert done.out == "[3.0]\n"  # not 2: those before it stay


def test_what_a_program_writes_down_about_its_steps_stays_as_it_wrote_it(box: Sandbox) -> None:
    """A loss of nan is a record, not a state that the next step builds on."""
    done = box.watched(
        HEAD
        + """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
losses, table, mean = [], torch.zeros(8), torch.zeros(())
for i in range(8):
    x = torch.rand(8, 4)
    if i == 4:
        x[0, 0] = float("nan")
    loss = net(x).pow(2).mean()
    losses.append(loss.detach())
    smooth = torch.stack(losses[-3:]).mean()
    mean = 0.9 * mean + 0.1 * loss.detach()
    opt.zero_grad()
    loss.backward()
    opt.step()
    table[i] = loss.detach()
print([v.isnan().item() for v in losses], table.isnan().tolist(), mean.isnan().item())
"""
    )
    bad = [i == 4 for i in range(8)]
    assert done.out == f"{bad} {bad} False\n", done.out
    assert done.err.count("tensors that the loop itself carries from step to step are put back with the dropped step") == 1


def test_a_cache_that_the_program_drops_is_let_go(box: Sandbox) -> None:
    done = box.watched(
        HEAD
        + """
import weakref
cache = []
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x)
    def look(self):
        return cache
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.01)
def train(steps):
    for i in range(steps):
        opt.zero_grad()
        net(torch.rand(8, 4)).pow(2).mean().backward()
        opt.step()
train(8)
cache.append(torch.rand(4))
held = weakref.ref(cache[0])
cache = []
train(130)
print(held() is None)
"""
    )
    assert done.out == "True\n", done.err
