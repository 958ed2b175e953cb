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
    "a thread, then the main one": ("t = threading.Thread(target=train)\nt.start()\nt.join()\ntrain('b')", [7, 19]),
    "ended by sys.exit": ("threading.Thread(target=train).start()\nimport time\ntime.sleep(0.3)\nsys.exit(0)", [7]),
    "a thread that prepares batches, and the main one trains": (
        "augment = nn.Linear(4, 4)\nt = threading.Thread(target=lambda: augment(torch.ones(2, 4)))\nt.start()\nt.join()\ntrain()",
        [7],
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_training_in_another_thread_is_watched(name: str, box: Sandbox) -> None:
    """The bad step is told at its line and left out; weights stay finite."""
    way, steps = WAYS[name]
    box.write(HEAD + way)
    done = box.watched(HEAD + way) if "nobody" not in name else box.whynan("train.py")  # a forked child does not wait for its threads at the end
    line = next(n for n, text in enumerate(HEAD.splitlines(), 1) if "# here" in text)
    told = [(i["step"], i["cause"]["code"], i["origin"]["line"], i["action"]["taken"]) for i in done.incidents]
    assert told == [(step, "WN501", line, "skipped") for step in steps], done.err
    assert done.status == 0 and "nan" not in done.out and done.out
    assert ("in another thread" in done.err) == ("prepares" not in name)


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
def test_of_two_trainings_at_once_none_is_harmed(bad: str, box: Sandbox) -> None:
    """A replay would disturb the other: watching ends, and that is said. Both train as without it."""
    batch = "        go.wait()\n        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))\n"
    program = HEAD.replace("        x = torch.randn(8, 4)\n", batch).replace("(step != 7)", f"(name == 'b' or {bad})")
    program += "go = threading.Barrier(2)\nts = [threading.Thread(target=train, args=(s,)) for s in 'ab']\nts[0].start()\n"
    program += "while go.n_waiting == 0:\n    pass\nts[1].start()\n[t.join() for t in ts]"
    box.write(program)
    done, plain = box.whynan("train.py"), box.python("train.py")  # in processes of their own: torch itself may crash with two threads in a fork
    assert (done.status, done.incidents, sorted(done.out.splitlines())) == (0, [], sorted(plain.out.splitlines()))
    assert "a second thread trains" in done.err and "internal error" not in done.err


@pytest.mark.parametrize("daemon", [False, True])
def test_a_program_that_trained_in_a_thread_ends_as_without_it(daemon: bool, box: Sandbox) -> None:
    """The mode is taken off a thread that ends, while there is an interpreter to do it; a daemon, that may outlive it, is not watched."""
    box.write(HEAD.replace("(step != 7)", "1") + f"t = threading.Thread(target=train, daemon={daemon})\nt.start()\nt.join()")
    for _ in range(3):
        done = box.whynan("train.py")
        assert (done.status, "terminate" in done.err) == (0, False)
    assert ("in another thread: watching goes on" in done.err) is not daemon


def test_a_backward_pass_elsewhere_does_not_draw_the_watching_away(box: Sandbox) -> None:
    """A gradient that a side thread takes before the training begins is no training."""
    side = "side = torch.ones(2, requires_grad=True)\nt = threading.Thread(target=lambda: side.sum().backward())\nt.start()\nt.join()\n"
    assert [i["step"] for i in box.watched(HEAD + side + "train()").incidents] == [7]


def test_what_other_threads_print_and_schedule_during_a_diagnosis_is_theirs(box: Sandbox) -> None:
    """Only the replaying thread is silenced, and only its calls are left out."""
    program = (
        HEAD
        + """
other = nn.Linear(1, 1)
opt = torch.optim.SGD(other.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.99)
t = threading.Thread(target=train)
t.start()
count = 0
while t.is_alive():
    count += 1
    schedule.step()
    print("line", count, flush=True)
print("end", count, schedule.last_epoch)
"""
    )
    done = box.watched(program)
    *_, last = done.out.splitlines()
    assert len([line for line in done.out.splitlines() if line.startswith("line")]) == int(last.split()[1]) == int(last.split()[2])
    assert len(done.incidents) == 1 and done.status == 0


def test_the_thread_that_was_left_computes_as_before(box: Sandbox) -> None:
    """Evaluations of the main thread beside the training are not part of its steps."""
    program = HEAD + "t = threading.Thread(target=train)\nt.start()\nwhile t.is_alive():\n    torch.log(torch.zeros(2)) * 0\nt.join()"
    done = box.watched(program)
    assert [i["cause"]["code"] for i in done.incidents] == ["WN501"], done.err
    assert "internal error" not in done.err and done.status == 0


@pytest.mark.parametrize("left", ["ProcessPoolExecutor(1).submit(abs, -3).result()", "threading.Thread(target=watch).start()"])
def test_threads_that_end_with_the_interpreter_are_not_waited_for(left: str, box: Sandbox) -> None:
    """A pool of processes that is left open, a thread that looks whether the main one lives."""
    head = "import threading, time\nfrom concurrent.futures import ProcessPoolExecutor\n"
    watch = "def watch():\n    while threading.main_thread().is_alive():\n        time.sleep(0.01)\n"
    box.write(head + watch + "pool = " + left + "\nprint('end')")
    assert (box.whynan("train.py", timeout=60).out, box.whynan("train.py", timeout=60).status) == ("end\n", 0)
