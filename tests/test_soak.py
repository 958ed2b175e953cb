"""A long run with faults in it leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import soak

STEPS = 1500


def test_memory_stays_flat_and_training_unharmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 1,500 steps with faults in 2% of them memory does not grow with steps or faults, and the loss ends where it would have.

    What an incident leaves is its record, a few dozen small objects, and a process makes and drops some hundred by itself.
    A step or an incident that kept a tape would keep dozens of tensors and hundreds of objects: the bounds are far below
    that. In a process of its own, where no other test leaves anything.
    """
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # what a notebook's test left there cannot be started anew
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        run = alone.submit(soak.watched, STEPS, 0.02, 5).result()
        plain = alone.submit(soak.train, STEPS, 0, {}).result()
    assert run.incidents == run.faults > 20
    early, late = run.readings[1], run.readings[-1]  # the first fifth also fills caches
    new = run.faults * (late.step - early.step) / STEPS
    assert late.tensors - early.tensors <= 40, "tensors of one step may be alive at a reading, not those of many"
    assert late.objects - early.objects <= 40 * new + 800
    assert late.resident - early.resident <= 20
    assert abs(run.loss - plain.loss) <= 0.1 * plain.loss
