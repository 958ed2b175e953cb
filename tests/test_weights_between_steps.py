"""What a program does to its weights itself between two steps: projections, averages, soups. A bad one is told at its line, and undone."""

from __future__ import annotations

import pytest
from conftest import Sandbox

PROGRAM = """
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.{optimizer}(net.parameters(), 0.05)
ema = {{k: v.clone() for k, v in net.state_dict().items()}}
pool = []

def soup(states, scores):
    w = torch.tensor(scores)
    w = w / w.sum()  # soup
    return {{k: sum(wi * s[k] for wi, s in zip(w, states)) for k in states[0]}}

def standard(m):
    if isinstance(m, nn.Linear):
        with torch.no_grad():
            m.weight.sub_(m.weight.mean()).div_(m.weight[:0].std())  # applied

for step in range(12):
    x = torch.randn(8, 5)
    loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    w = net[0].weight
{after}
print("weights", [p.detach().double().sum().item() for p in net.parameters()])
"""
AFTER = {
    "written over": ("WN104", "    with torch.no_grad():\n        w[0] *= step != 6\n        w.copy_(w / w.norm(dim=1, keepdim=True))  # here"),
    "in place": ("WN104", "    with torch.no_grad():\n        w[0] *= step != 6\n        w.div_(w.norm(dim=1, keepdim=True))  # here"),
    "by data": ("WN104", "    d = w.data\n    d[0] *= step != 6\n    d.div_(d.norm(dim=1, keepdim=True))  # here"),
    "rows that are empty": ("WN402", "    if step == 6:\n        with torch.no_grad():\n            w[1] = w[w.abs().sum(1) > 1e9].mean(0)  # here"),
    "as a vector": (
        "WN103",
        "    if step == 6:\n        vector_to_parameters(parameters_to_vector(net.parameters()) / torch.zeros(()), net.parameters())  # here",
    ),
    "an average that is loaded": (
        "WN104",
        "    for k, v in net.state_dict().items():\n        ema[k].lerp_(v, 0.1)\n"
        "    if step == 6:\n        net.load_state_dict({k: (v - v) / torch.tensor(0.0) for k, v in ema.items()})  # here",
    ),
    "a soup": (
        "WN104",
        "    pool.append({k: v.clone() for k, v in net.state_dict().items()})\n"
        "    if step == 6:\n        net.load_state_dict(soup(pool[-3:], [0.0, 0.0, 0.0]))  # by a soup",
    ),
    "a function that is applied": ("WN403", "    if step == 6:\n        net.apply(standard)  # by applied"),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize(("code", "after"), AFTER.values(), ids=list(AFTER))
def test_what_makes_a_weight_bad_between_two_steps_is_told_and_undone(code: str, after: str, optimizer: str, box: Sandbox) -> None:
    """The line that made it, not the one that read it; the weights are as before it, and the steps after are finite."""
    source = PROGRAM.format(optimizer=optimizer, after=after)
    done = box.watched(source)
    (incident,) = done.incidents
    mark = "# " + after.split()[-1]
    line = next(n for n, text in enumerate(source.splitlines(), 1) if text.endswith(mark))
    assert (incident["cause"]["code"], incident["origin"]["line"]) == (code, line), done.err
    assert incident["origin"]["phase"] == ("loss" if "vector" in after else "parameter")  # a vector made with autograd on is part of the step's graph
    assert (incident["step"], incident["action"]["taken"], done.status) == (7, "skipped", 0)
    assert "weights that the program itself has made bad are put back" in done.err
    assert "nan" not in done.out.splitlines()[-1]


def test_weights_that_stay_good_are_left_alone(box: Sandbox) -> None:
    """Bit for bit the run without whynan."""
    for _, after in AFTER.values():
        source = PROGRAM.format(optimizer="Adam", after=after.replace("step == 6", "step == 60").replace("step != 6", "step != 60"))
        done = box.watched(source)
        assert not done.incidents
        assert done.out == box.plain(box.folder / "train.py").out


FEDERATED = """
import copy, torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 2)

def local(net, n):
    own = copy.deepcopy(net)
    opt = torch.optim.SGD(own.parameters(), 0.1)
    for x in torch.randn(n, 4).split(8):
        if len(x):
            opt.zero_grad()
            own(x).square().mean().backward()
            opt.step()
    return own.state_dict()

def average(states, counts):
    share = torch.tensor(counts, dtype=torch.float32)
    share = share / share.sum()  # here
    return {k: torch.einsum("c,c...->...", share, torch.stack([s[k] for s in states])) for k in states[0]}

for turn in range(6):
    counts = [0, 0] if turn == 3 else [8, 24]
    net.load_state_dict(average([local(net, n) for n in counts], counts))
"""


def test_an_average_that_new_models_are_copied_from(box: Sandbox) -> None:
    """The optimizers are made after it: what was before one is kept until its weights are known to be good. What they were is not: the run is stopped."""
    done = box.watched(FEDERATED)
    line = next(n for n, text in enumerate(FEDERATED.splitlines(), 1) if "# here" in text)
    assert [(i["cause"]["code"], i["origin"]["line"], i["symptom"]["place"]) for i in done.incidents] == [("WN104", line, "parameter")]
    assert done.status == 3 and "what a step begins with is damaged" in done.err


CODEBOOK = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 3)
class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("book", torch.randn(5, 3))
    def forward(self, z):
        return (z - self.book[torch.cdist(z, self.book).argmin(-1)]).square().mean()
codes = Codes()
opt = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(12):
    z = net(torch.randn(16, 4))
    loss = codes(z)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        near = torch.cdist(z, codes.book).argmin(-1) * (step != 6)
        hot = nn.functional.one_hot(near, 5).float() + (step != 6)
        codes.book.copy_(hot.T @ z / hot.sum(0)[:, None])  # here
print(codes.book.isfinite().all().item())
"""


def test_a_buffer_that_the_loop_makes_bad_is_put_back(box: Sandbox) -> None:
    """A codebook that is averaged after the update: the next step is bad by it, and the one after that is not."""
    done = box.watched(CODEBOOK)
    line = next(n for n, text in enumerate(CODEBOOK.splitlines(), 1) if "# here" in text)
    assert [(i["step"], i["origin"]["line"], i["action"]["taken"]) for i in done.incidents] == [(7, line, "skipped")]
    assert "buffers that the program itself has made bad are put back" in done.err
    assert done.out == "True\n"
