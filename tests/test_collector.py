"""What watching does to Python's garbage collector: nothing that the program's own collections would notice."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from conftest import Sandbox

import whynan
from whynan.resting import Collections

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="from Python 3.14 on the collector works in small parts, and nothing is done")

# in a process of its own: how many objects there are decides when Python collects
HEAD = """
import gc, weakref
import torch, whynan

class Cycle:
    def __init__(self):
        self.me = self

def old_garbage():
    cycle = Cycle()
    gc.collect()  # now only a full collection finds it
    return weakref.ref(cycle)

full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 and phase == "start" else None)
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], 1e-3)
gc.set_threshold(100, 3, 3)  # full ones after 1,600 objects instead of 85,000
"""


def test_records_of_a_step_cause_no_full_collection(box: Sandbox) -> None:
    """Those that come are empty, for a program that makes no garbage; its own call is not."""
    script = box.write(f"""{HEAD}
with whynan.watch(optimizer, files=False):
    for step in range(150):
        if step == 10:  # the first steps make objects that stay
            garbage = old_garbage()
            full.clear()
        value = weight
        for _ in range(200):
            value = value + 1
        optimizer.zero_grad()
        value.sum().backward()
        optimizer.step()
    print(len(full) > 3, garbage() is not None, gc.get_freeze_count())
    gc.collect()
    print(garbage())
""")
    assert box.python(str(script)).out == "True True 0\nNone\n"


def test_garbage_of_the_program_is_collected_all_the_same(box: Sandbox) -> None:
    """Beside many recorded calls, as many objects of its own bring the full collection."""
    script = box.write(f"""{HEAD}
kept, garbage = [], old_garbage()
with whynan.watch(optimizer, files=False):
    for step in range(60):
        for _ in range(20):
            weight.detach() + 1
        kept.append([Cycle() for _ in range(10_000)])
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    print(garbage())
""")
    assert box.python(str(script)).out == "None\n"


def test_what_the_program_froze_stays_frozen() -> None:
    """A collection is never made empty where the program has frozen something itself."""
    gc.freeze()
    try:
        heard = Collections(lambda: 10**9)
        heard._heard("start", {"generation": 2})
        assert not heard._emptied
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_nothing_is_left_behind() -> None:
    """The list of callbacks is as before."""
    before = list(gc.callbacks)
    with whynan.watch(torch.nn.Linear(2, 2), files=False):
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
