"""Training in another thread than the one that watching began in: watched there, where nothing was trained before, or the thread has ended."""

from __future__ import annotations

import pytest
from conftest import Sandbox

HEAD = """
import asyncio, sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
from torch import nn
torch.manual_seed(0)
lock = threading.Lock()

def train(name="a"):
    with lock:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    fit(net, torch.optim.Adam(net.parameters(), 1e-2), name)

def fit(net, opt, name="a"):
    for step in range(12):
        x = torch.randn(8, 4)
        d = net(x) * (step != 7)
        loss = d.square().sum(1).sqrt().mean()  # here
        opt.zero_grad()
        loss.backward()
        opt.step()
    sys.stdout.write(f"{name} {[p.detach().double().sum().item() for p in net.parameters()]}\\n")
"""
WAYS = {
    "a thread": ("t = threading.Thread(target=train)\nt.start()\nt.join()", [7]),
    "a thread that nobody waits for": ("threading.Thread(target=train).start()", [7]),
    "the model from outside": (
        "net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))\nopt = torch.optim.Adam(net.parameters(), 1e-2)\n"
        "t = threading.Thread(target=fit, args=(net, opt))\nt.start()\nt.join()",
        [7],
    ),
    "an executor": ("with ThreadPoolExecutor(1) as pool:\n    pool.submit(train).result()", [7]),
    "an executor that is left open": ("pool = ThreadPoolExecutor(1)\npool.submit(train).result()", [7]),
    "asyncio": ("asyncio.run(asyncio.to_thread(train))", [7]),
    "one thread after the other": ("for name in 'ab':\n    t = threading.Thread(target=train, args=(name,))\n    t.start()\n    t.join()", [7, 19]),
    "a thread that prepares batches, and the main one trains": (
        "augment = nn.Linear(4, 4)\nt = threading.Thread(target=lambda: augment(torch.ones(2, 4)))\nt.start()\nt.join()\ntrain()",
        [7],
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_training_in_another_thread_is_watched(name: str, box: Sandbox) -> None:
    """The bad step is told at its line and left out; weights stay finite."""
    way, steps = WAYS[name]
    done = box.watched(HEAD + way)
    line = next(n for n, text in enumerate(HEAD.splitlines(), 1) if "# here" in text)
    told = [(i["step"], i["cause"]["code"], i["origin"]["line"], i["action"]["taken"]) for i in done.incidents]
    assert told == [(step, "WN501", line, "skipped") for step in steps], done.err
    assert done.status == 0 and "nan" not in done.out and done.out
    assert ("in another thread" in done.err) == ("main one" not in name)


def test_a_stop_ends_the_thread_and_the_status_says_so(box: Sandbox) -> None:
    """No traceback, exit status 3."""
    done = box.watched(HEAD + WAYS["a thread"][0] + "\nprint('main goes on')", "--policy", "stop")
    assert (done.status, done.out) == (3, "main goes on\n")
    assert "Traceback" not in done.err and "training stopped" in done.err


def test_an_exception_over_numbers_in_a_thread_is_explained(box: Sandbox) -> None:
    """As in the main thread, with the traceback that Python prints for threads."""
    program = HEAD.replace("loss = d.", "torch.linalg.cholesky(d.T @ d)\n        loss = d.")
    box.write(program + WAYS["a thread"][0])
    done = box.whynan("train.py")  # in a process of its own: pytest has a hook for threads
    assert [(i["cause"]["code"], i["symptom"]["place"]) for i in done.incidents] == [("WN108", "exception")]
    assert "Exception in thread" in done.err and "whynan/" not in done.err.split("Traceback")[1].split("whynan:")[0]


@pytest.mark.parametrize("bad", ["step != 7", "step > -1"])
def test_of_two_trainings_at_once_one_is_watched_and_none_is_harmed(bad: str, box: Sandbox) -> None:
    """It is said that the other is not; while a bad step of the one is diagnosed, the other's updates are made."""
    batch = "        go.wait()\n        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))\n"
    program = HEAD.replace("        x = torch.randn(8, 4)\n", batch).replace("(step != 7)", f"(name == 'b' or {bad})")
    program += "go = threading.Barrier(2)\nts = [threading.Thread(target=train, args=(s,)) for s in 'ab']\nts[0].start()\n"
    program += "while go.n_waiting == 0:\n    pass\nts[1].start()\n[t.join() for t in ts]"
    done = box.watched(program)
    plain = box.plain(box.folder / "train.py")
    other = [next(line for line in run.out.splitlines() if line.startswith("b")) for run in (done, plain)]
    assert (done.status, len(done.incidents), len(done.out.splitlines())) == (0, int(bad == "step != 7"), 2)
    assert "internal error" not in done.err and "that one alone is" in done.err
    assert other[0] == other[1]


def test_the_thread_that_was_left_computes_as_before(box: Sandbox) -> None:
    """Evaluations of the main thread beside the training are not part of its steps."""
    program = HEAD + "t = threading.Thread(target=train)\nt.start()\nwhile t.is_alive():\n    torch.log(torch.zeros(2)) * 0\nt.join()"
    done = box.watched(program)
    assert [i["cause"]["code"] for i in done.incidents] == ["WN501"], done.err
    assert "internal error" not in done.err and done.status == 0
