"""A diagnosis that fails costs its answer: the step is noticed, told and left out all the same, and the watching goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whynan
from whynan.records import Incident


def broken(*_: Any, **__: Any) -> Any:
    """Fail as whynan itself might."""
    raise ZeroDivisionError("planted")


class Run:
    """A training whose steps 2, 4 and 6 are bad, and one that never draws these batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batches = [torch.randn(5, 3) for _ in range(8)]

    def train(self, bad: tuple[int, ...] = (2, 4, 6), drawn: bool = True) -> list[torch.Tensor]:
        """Return the state that the training ends with."""
        for step, batch in enumerate(self.batches):
            if step not in bad or drawn:
                self.optimizer.zero_grad()
                torch.log(self.model(batch).square().sum() * (step not in bad)).backward()
                self.optimizer.step()
        return [*self.model.state_dict().values(), *(s["momentum_buffer"] for s in self.optimizer.state.values())]

    def without_bad_batches(self) -> list[torch.Tensor]:
        """Return the state that a training has which never draws the bad batches."""
        return Run().train(drawn=False)


def watched(run: Run, **wishes: Any) -> tuple[list[torch.Tensor], tuple[Incident, ...]]:
    """Train under whynan; return the state and what was told."""
    with whynan.watch(run.model, run.optimizer, files=False, **wishes) as guard:
        return run.train(), tuple(guard.incidents)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two states are, bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


IN_A_DIAGNOSIS = [
    "whynan.diagnosis.locate",
    "whynan.diagnosis.judge",
    "whynan.diagnosis.excerpts",
    "whynan.capsule.replay.Program.play",
    "whynan.capsule.replay.Program._weights_as_before",
    "whynan.engine.gathering.entries_for",
    "whynan.engine.diagnosing.diagnose",
]


@pytest.mark.parametrize("where", IN_A_DIAGNOSIS)
def test_failed_diagnosis_does_not_cost_the_skip(where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault is said once; every bad step is left out, bit for bit, and told with the reason why nothing else is known."""
    monkeypatch.setattr(where, broken)
    run = Run()
    state, incidents = watched(run)
    assert same(state, run.without_bad_batches())
    assert [(i.step, i.cause.code, i.action.taken) for i in incidents] == [(2, "WN901", "skipped"), (4, "WN901", "skipped"), (6, "WN901", "skipped")]
    assert "not seen: the diagnosis failed: ZeroDivisionError: planted" in incidents[0].cause.evidence
    assert "twice" in incidents[2].cause.evidence[0]
    said = capsys.readouterr().err
    assert said.count("internal error") == 1 and "watching is off" not in said


AFTER_IT = [
    "whynan.engine.acting.Acting._lost_weights",
    "whynan.engine.acting.Acting._advise",
    "whynan.engine.acting._only_the_loss",
    "whynan.engine.telling.Telling.mourn",
    "whynan.report.journal.Journal.incident",
    "whynan.engine.tallying.Tally.learn",
    "whynan.capsules.write_capsule",
    "whynan.engine.dropping.DroppedStep",
    "whynan.engine.dropping.Dropping.made_bad",
    "whynan.engine.recovering.Recovering.hold_averages",
    "whynan.engine.acting.gather",
    "whynan.engine.acting.Acting._settled",
]


@pytest.mark.parametrize("where", AFTER_IT)
def test_failure_while_a_bad_step_is_told_or_dropped(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else fails beside a bad step: it is left out, and what can be put back is put back."""
    run = Run()
    monkeypatch.setattr(where, broken)
    state, _ = watched(run)
    assert same(state, run.without_bad_batches())


def test_failure_that_ends_the_watching(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where watching must end in a step that is known to be bad, that one is still left out."""
    run = Run()
    monkeypatch.setattr("whynan.engine.acting.Acting.act", broken)
    with whynan.watch(run.model, run.optimizer, files=False):
        state = run.train(bad=(7,))
    assert same(state, Run().train(bad=(7,), drawn=False))
    assert "watching is off" in capsys.readouterr().err


def test_observer_only_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `observe` a failed diagnosis changes nothing either: the bad step is made, as without whynan."""
    monkeypatch.setattr("whynan.diagnosis.locate", broken)
    state, incidents = watched(Run(), policy="observe")
    assert all(torch.allclose(a, b, equal_nan=True) for a, b in zip(state, Run().train(), strict=True))
    assert {i.action.taken for i in incidents} == {"observed"}


def test_budget_counts_failed_diagnoses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that nobody can explain use up what the policy allows, as others do."""
    monkeypatch.setattr("whynan.diagnosis.locate", broken)
    with pytest.raises(whynan.TrainingStopped):
        watched(Run(), in_total=2)


def test_replay_that_cannot_put_one_thing_back_puts_back_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a replay ends in a fault, what it held is put back as far as possible: random state, gradients, attributes."""
    from whynan.capsule.state.stasis import Stasis

    module = torch.nn.BatchNorm1d(2)
    module.count = 1  # type: ignore[assignment]
    monkeypatch.setattr("whynan.capsule.state.stasis.write_back", broken)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), Stasis([module], list(module.parameters())):
        module.count = 2  # type: ignore[assignment]
        module(torch.randn(4, 2)).sum().backward()
    assert module.count == 1 and module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
