"""What a loop carries from step to step in tensors of its own is that of a run which never drew the dropped batch."""

from __future__ import annotations

import pytest
import torch
from conftest import Sandbox

import whynan

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
BAD = {bad}
WITHOUT = 0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.cell = nn.Linear(3, 4), nn.GRUCell(4, 4)
    def forward(self, x, h=None):
        y = self.linear(x / x.norm(dim=1, keepdim=True))
        return y if h is None else (y, self.cell(y, h))
net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-2)
data = torch.randn(12, 8, 3)
data[BAD, 3] = 0
held, total = torch.{start}, torch.zeros(())
average = [w.detach().clone() for w in net.parameters()]
for i in range(12):
    if WITHOUT and i == BAD:
        continue
    x = data[i]
    if i % 4 == 0:
        torch.ones(2).sum()  # the steps do not all make the same calls
"""
TAIL = """
    with torch.no_grad():
        for a, w in zip(average, net.parameters()):
            a.mul_(0.9).add_(w, alpha=0.1)
        total += loss.detach()
print(held.tolist(), total.item(), [w.sum().item() for w in net.parameters()])
"""
STEP = """
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
STATES = {
    "a recurrent state, cut off at once": ("zeros(8, 4)", "y, h = net(x, held); loss = (y + h).pow(2).mean(); held = h.detach()" + STEP),
    "a recurrent state, cut off in the next step": ("zeros(8, 4)", "held = held.detach(); y, held = net(x, held); loss = (y + held).pow(2).mean()" + STEP),
    "a prior, before the loss": (
        "ones(4) / 4",
        "p = net(x).softmax(1); held = 0.9 * held + 0.1 * p.detach().mean(0); loss = (p / held).pow(2).mean()" + STEP,
    ),
    "a prior, in place": ("ones(4) / 4", "p = net(x).softmax(1); held.mul_(0.9).add_(0.1 * p.detach().mean(0)); loss = (p / held).pow(2).mean()" + STEP),
    "a prior, after the update": (
        "ones(4) / 4",
        "p = net(x).softmax(1); loss = (p / held).pow(2).mean()" + STEP + "    held = 0.9 * held + 0.1 * p.detach().mean(0)\n",
    ),
    "a prior, after the update, in place": (
        "ones(4) / 4",
        "p = net(x).softmax(1); loss = (p / held).pow(2).mean()" + STEP + "    held.mul_(0.9).add_(0.1 * p.detach().mean(0))\n",
    ),
    "a queue": ("randn(16, 4)", "y = net(x); loss = (y @ held.T).logsumexp(1).mean(); held = torch.cat([held[8:], y.detach()])" + STEP),
    "a state that meets the batch before the model": (
        "zeros(8, 4)",
        "z = torch.cat([x, held[:, :0]], 1) * (1 + held.mean()); y, h = net(z, held * (i % 3 > 0)); loss = (y + h).pow(2).mean(); held = h.detach()" + STEP,
    ),
    "a state that the batch is brought to": ("zeros(8, 4)", "x = x.to(held); y, h = net(x, held); loss = (y + h).pow(2).mean(); held = h.detach()" + STEP),
    "a state that is a leaf": ("zeros(8, 4)", "held = held.detach().requires_grad_(); y, held = net(x, held); loss = (y + held).pow(2).mean()" + STEP),
    "a state behind a clone": ("zeros(8, 4)", "held = (held * 1.0).clone().detach(); y, held = net(x, held); loss = (y + held).pow(2).mean()" + STEP),
    "a running mean of losses that only later losses meet": (
        "zeros(())",
        "loss = net(x).pow(2).mean()" + STEP + "    held = 0.9 * held + 0.1 * loss.detach()\n",
    ),
    "two micro-batches": (
        "zeros(4, 4)",
        """
    opt.zero_grad()
    for part in x.chunk(2):
        y, h = net(part, held)
        loss = (y + h).pow(2).mean()
        loss.backward()
        held = h.detach()
    opt.step()
""",
    ),
}


@pytest.mark.parametrize("bad", [5, 0], ids=["in the midst", "at the beginning"])
@pytest.mark.parametrize("kind", STATES)
def test_after_a_dropped_step_it_is_as_if_the_batch_had_not_been_drawn(kind: str, bad: int, box: Sandbox) -> None:
    start, loop = STATES[kind]
    program = HEAD.format(bad=bad, start=start) + "    " + loop.lstrip() + TAIL
    done = box.watched(program)
    assert [i["step"] for i in done.incidents] == [bad]
    without = box.write(program.replace("WITHOUT = 0", "WITHOUT = 1"), "without.py")
    assert done.out == box.plain(without).out


CUTS = {
    "detach": lambda h: h.detach(),
    "detach_": lambda h: h.detach_(),
    "a clone": lambda h: h.clone().detach(),
    "a product": lambda h: (h * 0.5).detach(),
    "without gradients": torch.no_grad()(lambda h: h * 0.5),
    "data": lambda h: h.data,
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_state_that_is_cut_off_from_its_history_does_not_hold_the_steps_before(cut: str) -> None:
    """The tape of truncated backpropagation through time once held all batches of the run."""
    net = torch.nn.GRUCell(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    lengths = []
    with whynan.watch(net, optimizer, files=False) as watch:
        state = torch.zeros(2, 4)
        for _ in range(30):
            state = net(torch.randn(2, 3), CUTS[cut](state))
            optimizer.zero_grad()
            state.pow(2).mean().backward()
            optimizer.step()
            lengths.append(len(watch._guard.recorder.tape.entries))
    assert lengths[-1] == lengths[5]


def test_a_data_set_is_not_written_to(box: Sandbox) -> None:
    """`x.to(state)` may be `x` itself, a view of all the data."""
    done = box.watched("""
import torch
torch.manual_seed(0)
cell = torch.nn.GRUCell(3, 4)
opt = torch.optim.SGD(cell.parameters(), 0.1)
data = torch.randn(12, 6, 3)
data[5, 2] = 0
before, h = data.clone(), torch.zeros(6, 4)
for i in range(12):
    x = data[i].to(h)
    h = cell(x, h)
    loss = (h / x.norm(dim=1, keepdim=True)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    h = h.detach()
print(torch.equal(data, before))
""")
    assert [i["step"] for i in done.incidents] == [5] and done.out == "True\n"


def test_two_optimizers_of_one_step_and_a_validation_between_steps(box: Sandbox) -> None:
    """The state is that of the step's own line in training, not of a validation by the same function."""
    program = """
import torch
from torch import nn
torch.manual_seed(0)
cell, head = nn.GRUCell(3, 4), nn.Linear(4, 1)
first, second = torch.optim.Adam(cell.parameters(), 1e-2), torch.optim.Adam(head.parameters(), 1e-2)
data = torch.randn(12, 6, 3)
data[5, 2] = 0
WITHOUT = 0
def forward(x, h):
    h = cell(x / x.norm(dim=1, keepdim=True), h)
    return head(h), h
h = torch.zeros(6, 4)
for i in range(12):
    if WITHOUT and i == 5:
        continue
    y, h = forward(data[i], h.detach())
    loss = y.pow(2).mean()
    first.zero_grad()
    second.zero_grad()
    loss.backward()
    first.step()
    second.step()
    if i in (4, 6):
        with torch.no_grad():
            forward(data[0], torch.full((6, 4), 9.0))
print(h.tolist(), [w.sum().item() for w in (*cell.parameters(), *head.parameters())])
"""
    done = box.watched(program)
    assert [i["step"] for i in done.incidents][:1] and len(done.incidents) == 1
    assert done.out == box.plain(box.write(program.replace("WITHOUT = 0", "WITHOUT = 1"), "without.py")).out


def test_a_write_of_the_next_healthy_step_is_made(box: Sandbox) -> None:
    """What the next step logs of its own is no afterthought of the dropped one."""
    done = box.watched("""
import torch
torch.manual_seed(0)
net = torch.nn.GRUCell(3, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
log, h = torch.zeros(8), torch.zeros(4, 3)
for i in range(8):
    x = torch.randn(4, 3) * (i != 3)
    h = net(x / x.norm(), h.detach())
    loss = h.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    log[i] = loss.detach()
    opt.step()
print((log != 0).tolist())
""")
    assert done.out == str([True] * 3 + [False] + [True] * 4) + "\n"
