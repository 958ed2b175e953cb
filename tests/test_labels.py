"""Labels for a profiler: a watched program's profile is the one it has without us, and unheard labels do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ExecutionTraceObserver, profile, record_function

import whynan


@record_function("a function")
def labelled() -> torch.Tensor:
    return torch.ones(2) + 1


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    with record_function("forward"):
        loss = model(torch.ones(3, 2)).sum()
    loss.backward()
    optimizer.step()
    labelled()


def labels(found: profile) -> dict[str, int]:
    wanted = ("Optimizer", "forward", "a function")
    return {event.key: event.count for event in found.key_averages() if event.key.startswith(wanted)}


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def test_profile_of_a_watched_program_has_the_same_labels() -> None:
    model, optimizer = parts()
    with profile() as unwatched:
        a_step(model, optimizer)
    with whynan.watch(model, optimizer, files=False):
        a_step(model, optimizer)
        with profile() as watched:
            a_step(model, optimizer)
        a_step(model, optimizer)
        with profile() as again:
            a_step(model, optimizer)
    expected = {"Optimizer.step#AdamW.step": 1, "Optimizer.zero_grad#AdamW.zero_grad": 1, "forward": 1, "a function": 1}
    assert labels(unwatched) == labels(watched) == labels(again) == expected


def test_labels_cost_nothing_while_nobody_listens(monkeypatch: Any) -> None:
    """Without a profiler no label reaches the dispatcher, and with one it does."""
    begun = []
    begin = record_function.__enter__
    monkeypatch.setattr(record_function, "__enter__", lambda self: (begun.append(self.name), begin(self))[1])
    model, optimizer = parts()
    a_step(model, optimizer)
    assert len(begun) == 4
    with whynan.watch(model, optimizer, files=False):
        begun.clear()
        a_step(model, optimizer)
        assert begun == []
        with profile():
            a_step(model, optimizer)
        assert len(begun) == 4


def test_watching_may_end_inside_a_label() -> None:
    model, optimizer = parts()
    guard = whynan.watch(model, optimizer, files=False)
    with record_function("outer"):
        a_step(model, optimizer)
        guard.close()
    labelled()
    with record_function("outer"):
        guard = whynan.watch(model, optimizer, files=False)
    guard.close()
    assert record_function.__enter__.__module__ == record_function.__exit__.__module__ == "torch.autograd.profiler"
    assert not hasattr(record_function.__enter__, "__wrapped__")


def test_execution_traces_have_their_labels(tmp_path: Path) -> None:
    """An observer of torch's that is no profiler listens too."""
    model, optimizer = parts()
    with whynan.watch(model, optimizer, files=False):
        observer = ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
        observer.start()
        a_step(model, optimizer)
        observer.stop()
        observer.unregister_callback()
    names = {node["name"] for node in json.loads((tmp_path / "trace.json").read_text())["nodes"]}
    assert {"Optimizer.step#AdamW.step", "forward"} <= names


def test_a_label_that_ends_with_a_future() -> None:
    model, optimizer = parts()
    future: Any = torch.futures.Future()
    with whynan.watch(model, optimizer, files=False), record_function("until then") as label:
        extended = label._call_end_callbacks_on_future(future)
    future.set_result(3)
    assert extended.wait() == 3
