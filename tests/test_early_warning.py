"""Early warning: spikes by a statistic nothing can poison, head-room, limits of named values, and how they are told."""

from __future__ import annotations

import doctest
import importlib
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import strict_lines
from hypothesis import given
from hypothesis import strategies as st

import whynan
from whynan.errors import UsageError
from whynan.records import Notice, NoticeKind
from whynan.recovery.policy import Budget
from whynan.recovery.spikes import SpikePolicy, on_spike
from whynan.report.journal import Journal
from whynan.tripwire.early import EarlyWarning, has_spike
from whynan.tripwire.headroom import HeadroomWatch, headroom, headroom_text
from whynan.tripwire.late import LateNumbers
from whynan.tripwire.spikes import Spike, SpikeWatch
from whynan.tripwire.tracking import Tracker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

NONFINITE = st.sampled_from([math.nan, math.inf, -math.inf])
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", ["tripwire.spikes", "tripwire.headroom", "tripwire.tracking", "tripwire.early", "recovery.spikes", "report.terminal"])
def test_examples_in_docstrings(name: str) -> None:
    """The examples in the docstrings run and give what they say."""
    result = doctest.testmod(importlib.import_module(f"whynan.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def noisy(seed: int, steps: int, level: float = 1.0, noise: float = 0.1) -> list[float]:
    """A curve that wobbles around its level."""
    dice = random.Random(seed)
    return [level * (1 + noise * dice.gauss(0, 1)) for _ in range(steps)]


def alarms(values: list[float], watch: SpikeWatch | None = None) -> list[Spike]:
    """Watch a curve."""
    watch = watch or SpikeWatch()
    found = [watch.see(step, value) for step, value in enumerate(values)]
    return [spike for spike in found if spike is not None]


# -- spikes -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(1, 300), st.lists(st.tuples(st.integers(0, 300), NONFINITE), max_size=20))
def test_no_nonfinite_number_leaves_a_trace(seed: int, steps: int, damage: list[tuple[int, float]]) -> None:
    """A curve with NaN and infinities strewn in gets the same answers as the curve without them."""
    clean = [*noisy(seed, steps), 50.0]
    dirty = list(clean)
    for place, value in damage:
        dirty.insert(min(place, steps), value)
    assert [(s.value, s.level, s.limit) for s in alarms(dirty)] == [(s.value, s.level, s.limit) for s in alarms(clean)]


@given(st.integers(0, 99), st.integers(40, 300), st.floats(100.0, 1e300))
def test_one_spike_does_not_hide_the_next(seed: int, place: int, size: float) -> None:
    """After a spike healthy values pass, and a second spike of the same size alarms at the same level."""
    values = noisy(seed, place)
    watch = SpikeWatch()
    assert alarms(values, watch) == []
    first = watch.see(place, size)
    assert alarms(noisy(seed + 1, 3), watch) == []
    second = watch.see(place + 4, size)
    assert first is not None and second is not None
    assert second.level == pytest.approx(first.level, rel=0.5)
    assert second.limit <= 2 * first.limit


@given(st.floats(1e12, 1e300), st.integers(0, 99))
def test_an_absurd_first_value_does_not_poison(size: float, seed: int) -> None:
    """A first value nobody could judge is forgotten: the same value a few dozen steps later alarms."""
    watch = SpikeWatch()
    assert alarms([size, *noisy(seed, 60)], watch) == []
    assert watch.see(61, size) is not None


@given(st.lists(st.floats(1e-6, 1e6), max_size=400), st.integers(-60, 60))
def test_units_do_not_matter(values: list[float], power: int) -> None:
    """A curve in other units gets alarms at the same steps."""
    scaled = [value * 2.0**power for value in values]
    assert [(s.step, s.row) for s in alarms(values)] == [(s.step, s.row) for s in alarms(scaled)]


@given(FINITE, st.integers(1, 400), st.integers(0, 99))
def test_a_constant_curve_never_alarms(value: float, steps: int, seed: int) -> None:
    """A curve that stands still is silent, also when its last digits change."""
    dice = random.Random(seed)
    assert alarms([value] * steps) == []
    assert alarms([value * (1 + 1e-7 * dice.random()) for _ in range(steps)]) == []


@pytest.mark.parametrize("period", [3, 5, 7])
@pytest.mark.parametrize("ratio", [2000.0, 5000.0])
def test_rarer_task_of_a_mix_is_not_absurd_from_its_first_batch_on(period: int, ratio: float) -> None:
    """With few values to compare with, one may be of a rarer kind: nothing is said of it, then or when it comes back."""
    watch, draw = SpikeWatch(), random.Random(0)
    seen = [watch.see(step, draw.uniform(0.5, 1.5) * (ratio if step % period == period // 2 else 1.0)) for step in range(200)]
    assert not any(spike is not None and spike.absurd for spike in seen)


@pytest.mark.parametrize("before", [3, 8, 15])
def test_a_jump_that_no_mix_makes_is_absurd_with_few_values_too(before: int) -> None:
    """A million times all before it."""
    watch = SpikeWatch()
    for step in range(before):
        watch.see(step, 1.0 + 0.01 * step)
    spike = watch.see(before, 1.2e6)
    assert spike is not None and spike.absurd


@given(st.floats(0.01, 1.0), st.integers(1, 100), st.sampled_from([4.5e12, -4.5e12, 1e300, -1e300]))
def test_absurd_values_alarm_from_the_second_step_on(level: float, before: int, value: float) -> None:
    """4.5e12 among 0.05 alarms however short the history is, in both directions."""
    watch = SpikeWatch()
    assert alarms([level] * before, watch) == []
    assert watch.see(before, value) is not None


@pytest.mark.parametrize("before", [3, 10, 16, 40, 500])
def test_a_thousandfold_value_alarms_from_the_fourth_step_on(before: int) -> None:
    """Three noisy values are enough to know that two thousand times as much is wrong."""
    watch = SpikeWatch()
    assert alarms(noisy(1, before), watch) == []
    assert watch.see(before, 2000.0) is not None


@given(st.lists(FINITE | NONFINITE, max_size=600))
def test_memory_is_bounded_and_nothing_raises(values: list[float]) -> None:
    """Whatever comes, the watch keeps a few hundred numbers, in order."""
    watch = SpikeWatch()
    alarms(values, watch)
    assert len(watch._recent) == len(watch._recent_sorted) <= 17
    assert len(watch._distances) == len(watch._distances_sorted) <= 256
    assert len(watch._pending) < 5
    assert sorted(watch._recent) == watch._recent_sorted
    assert sorted(watch._distances) == watch._distances_sorted
    assert all(map(math.isfinite, watch._distances_sorted))


@given(st.integers(0, 99), st.floats(20.0, 1e6))
def test_a_lasting_shift_becomes_the_new_normal(seed: int, level: float) -> None:
    """A curve that moves to another level is told a few times, then learnt; a spike from there alarms again."""
    watch = SpikeWatch()
    assert alarms(noisy(seed, 100), watch) == []
    told = alarms(noisy(seed + 1, 200, level), watch)
    assert [spike.row for spike in told] == [1, 2, 3, 4, 5]
    assert watch.see(300, 10 * level) is not None


def test_a_steep_fall_and_a_later_rise() -> None:
    """A loss that falls over four decades is silent; the old level, come back at once, is a spike."""
    watch = SpikeWatch()
    fall = [2.3 * 0.98**step * factor for step, factor in enumerate(noisy(3, 500))]
    assert alarms(fall, watch) == []
    assert watch.see(500, 2.3) is not None


def test_negative_and_crossing_losses() -> None:
    """A loss around zero is judged by its own noise: what is usual passes, forty times the noise does not."""
    dice = random.Random(5)
    watch = SpikeWatch()
    assert alarms([dice.gauss(0, 0.3) for _ in range(2000)], watch) == []
    assert watch.see(2000, 12.0) is not None
    assert alarms([-15 + value for value in noisy(2, 500)]) == []


def test_heavy_tails_get_a_wider_limit() -> None:
    """The same eightfold value is a spike among smooth norms and passes among log-normal ones."""
    dice = random.Random(7)
    smooth, wild = SpikeWatch(1.0), SpikeWatch(1.0)
    alarms(noisy(1, 400), smooth)
    assert alarms([dice.lognormvariate(0, 0.7) for _ in range(400)], wild) == []
    assert smooth.see(400, 8.0) is not None
    assert wild.see(400, 8.0) is None


def test_a_curve_of_zeros_has_the_scale_it_had_before() -> None:
    """A hinge loss that rests at zero may be positive again; a curve that was always zero says nothing of small values."""
    watch = SpikeWatch()
    assert alarms([*noisy(1, 100), *[0.0] * 400, 0.8], watch) == []
    assert alarms([0.0] * 100 + [0.5]) == []
    assert len(alarms([0.0] * 100 + [4.5e12])) == 1


@pytest.mark.parametrize("rate", [1.1, 1.3, 2.0])
def test_a_steady_climb_alarms_before_it_is_a_hundredfold(rate: float) -> None:
    """A loss that grows by a tenth each step does not take its own climb for noise."""
    climb = [factor * rate**step for step, factor in enumerate(noisy(9, 40))]
    told = alarms([*noisy(8, 200), *climb])
    assert told
    assert told[0].value < 100


def test_frequent_spikes_widen_the_limit() -> None:
    """Spikes that keep coming are part of the curve: the alarms end."""
    values = [30.0 if step % 10 == 9 and step > 300 else value for step, value in enumerate(noisy(4, 3000))]
    told = alarms(values)
    assert 0 < len(told) < 20
    assert max(spike.step for spike in told) < 600


@pytest.mark.parametrize(("begin", "told"), [(0, 5), (500, 10)])
@pytest.mark.parametrize("every", [3, 5, 20])
def test_batches_of_another_kind_that_come_back_are_usual(begin: int, told: int, every: int) -> None:
    """Once 4 % of the last values were as far out, two thousand times the level and more is no news; twice as far still is."""
    dice = random.Random(6)
    high = [100 * dice.uniform(0.8, 1.2) for _ in range(begin + 1000)]
    values = [high[step] if step >= begin and step % every == every - 1 else value for step, value in enumerate(noisy(4, begin + 1000, 0.05))]
    watch = SpikeWatch()
    assert 1 <= len(alarms(values, watch)) <= told
    assert watch.see(len(values), 500.0) is not None and watch.see(len(values) + 1, 4.5e12) is not None


def test_what_comes_back_seldom_or_is_out_of_all_proportion_is_told_each_time() -> None:
    """Every fiftieth batch is no kind of batch, and 4.5e12 among 0.05 is never usual, however often it comes."""
    seldom = [100.0 if step % 50 == 49 else value for step, value in enumerate(noisy(4, 1000, 0.05))]
    broken = [4.5e12 if step % 3 == 2 else value for step, value in enumerate(noisy(4, 300, 0.05))]
    assert len(alarms(seldom)) == 20
    assert len(alarms(broken)) == 100


def test_a_training_on_two_kinds_of_batches_keeps_both() -> None:
    """With `spike="skip"` the first few batches of the rarer kind are left out, and then no more."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with torch.no_grad():
        model.weight.fill_(1.0)
    made = 0
    with whynan.watch(model, optimizer, files=False, spike="skip"):
        for step in range(300):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            (model(torch.full((1, 1), 10.0, dtype=torch.float64)) * (1000.0 if step % 5 == 0 else 0.5)).mean().backward()
            optimizer.step()
            made += not torch.equal(before, model.weight)
    assert made >= 300 - 5


def test_the_benchmark_counts_alarms_and_finds_what_it_puts_in() -> None:
    """A short healthy training is silent; 4.5e12 put into it is found everywhere, a value that fits nowhere."""
    from false_alarms import found, measure
    from healthy_curves import FIRST
    from held_out_curves import HELD_OUT

    rows = [measure("a", FIRST["classification"], 1, 150), measure("b", HELD_OUT["several tasks"], 2, 150)]
    assert [(row.steps, row.loss, row.norm) for row in rows] == [(150, 0, 0), (300, 0, 0)]
    assert found(rows[1].curves, "loss", 100, 4.5e12) == (2, 2)
    assert found(rows[1].curves, "gradient norm", 100, None, 1.0) == (0, 2)


# -- head-room --------------------------------------------------------------------------------------------------


@given(st.floats(1e-30, 1e30))
def test_one_doubling_takes_one_doubling(value: float) -> None:
    """Twice the value has one doubling less left; the sign does not matter."""
    left = headroom(value, torch.float32)
    assert headroom(-2 * value, torch.float32) == pytest.approx(left - 1)
    assert left == pytest.approx(math.log2(torch.finfo(torch.float32).max / value))


def test_headroom_at_the_ends() -> None:
    """Zero has all the room there is, infinity none, and the text says so."""
    assert headroom(0.0, torch.float16) == math.inf
    assert headroom(math.inf, torch.float16) == -math.inf
    assert headroom_text(65504.0, torch.float16) == "no doubling left: float16 ends at 65504"
    assert headroom_text(7100.0, torch.float16) == "3.2 doublings left before float16 ends at 65504"


def test_headroom_warns_once_until_recovered() -> None:
    """The warning comes below two doublings, not again while low, and again after it was above three."""
    watch = HeadroomWatch()
    seen = [watch.see(step, "loss", value, torch.float16) for step, value in enumerate([100.0, 20000.0, 30000.0, 14000.0, 20000.0, 5000.0, 20000.0])]
    assert [notice.step for notice in seen if notice is not None] == [1, 6]
    assert watch.see(7, "other", math.nan, torch.float16) is None


def test_float16_weights_and_buffers_are_looked_at_every_hundred_steps() -> None:
    """A large float16 weight and buffer are named; the same values in float32 are not."""
    model = torch.nn.BatchNorm1d(3).half()
    with torch.no_grad():
        model.weight[1] = -60000.0
        model.running_var[0] = 30000.0
    assert {n.name: n.value for n in HeadroomWatch().look(100, [model])} == {"weight": 60000.0, "running_var": 30000.0}
    assert HeadroomWatch().look(101, [model]) == []
    assert HeadroomWatch().look(100, [model.float()]) == []


# -- limits -----------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """A model with a scale of its own and one in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.tensor([0.2, 0.5]))
        self.part = torch.nn.PReLU()
        self.register_buffer("beta", torch.tensor(0.5))


def texts(notices: list[Notice]) -> list[str]:
    """What is said."""
    return [notice.text for notice in notices]


def test_a_value_is_to_stay_within_its_limits() -> None:
    """Reaching a limit warns once, coming back re-arms it; below looks at the largest element, above at the smallest."""
    model = Scaled()
    tracker = Tracker({"*.alpha": {"below": 1.0, "above": 0.0}})
    said = []
    for step, values in enumerate([(0.2, 0.5), (0.2, 1.0), (0.1, 3.0), (0.1, 0.9), (0.1, 1.5), (0.0, 0.5)]):
        model.alpha.data = torch.tensor(values)
        said += texts(tracker.look(step, [model], []))
    assert said == [
        "alpha is 1 at step 1; it was to stay below 1",
        "alpha is 1.5 at step 4; it was to stay below 1",
        "alpha is 0 at step 5; it was to stay above 0",
    ]


def test_patterns_reach_parts_buffers_and_optimizer_values() -> None:
    """Names of parts, buffers that were replaced, and lr of each group are found."""
    model = Scaled()
    optimizer = torch.optim.SGD([{"params": [model.alpha]}, {"params": model.part.parameters(), "lr": 5.0}], lr=0.1)
    tracker = Tracker({"part.*": {"below": 0.1}, "beta": {"below": 1.0}, "lr": {"below": 1.0}})
    tracker.look(0, [model], [optimizer])
    model.beta = torch.tensor(2.0)
    assert {n.name for n in Tracker({"part.*": {"below": 0.1}, "lr": {"below": 1.0}}).look(0, [model], [optimizer])} == {"part.weight", "lr of group 1"}
    assert texts(tracker.look(1, [model], [optimizer])) == ["beta is 2 at step 1; it was to stay below 1"]


def test_large_tensors_are_looked_at_less_often() -> None:
    """More than 1024 elements: every 100 steps, unless `every` says otherwise."""
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model.weight[3, 4] = 7.0
    rare, often = Tracker({"weight": {"below": 1.0}}), Tracker({"weight": {"below": 1.0, "every": 3}})
    assert [step for step in range(1, 101) if rare.look(step, [model], [])] == [100]
    assert [step for step in range(1, 101) if often.look(step, [model], [])] == [3]


def test_nonfinite_values_are_left_to_the_tripwire() -> None:
    """A NaN crosses no limit and does not re-arm one."""
    model = Scaled()
    tracker = Tracker({"beta": {"below": 0.4}})
    found = []
    for step, value in enumerate([0.5, math.nan, 0.5]):
        model.beta = torch.tensor(value)
        found.append(len(tracker.look(step, [model], [])))
    assert found == [1, 0, 0]


def test_a_pattern_that_matches_nothing_is_named_once() -> None:
    """The complaint waits for a model, comes once, and offers similar names."""
    tracker = Tracker({"*.alhpa": {"below": 1.0}})
    assert tracker.look(0, [], []) == []
    assert texts(tracker.look(1, [Scaled()], [])) == ["track: no value is named '*.alhpa'; similar names: alpha"]
    assert tracker.look(2, [Scaled()], []) == []


@pytest.mark.parametrize(
    ("track", "words"),
    [
        (["*.alpha"], "a mapping"),
        ({3: {"below": 1.0}}, "not 3"),
        ({"a": 1.0}, "needs limits"),
        ({"a": {}}, "needs limits"),
        ({"a": {"below": 1.0, "under": 1.0}}, "unknown limit 'under'"),
        ({"a": {"below": "1"}}, "is a number, not '1'"),
        ({"a": {"below": math.nan}}, "is a number, not nan"),
        ({"a": {"below": True}}, "is a number, not True"),
        ({"a": {"below": 0.0, "above": 1.0}}, "swap"),
        ({"a": {"below": 1.0, "every": 0}}, "from 1 on, not 0"),
        ({"a": {"below": 1.0, "every": 1.5}}, "from 1 on, not 1.5"),
    ],
)
def test_limits_that_make_no_sense_are_usage_errors(track: Any, words: str) -> None:
    """One line that says what was wrong with the value."""
    with pytest.raises(UsageError) as caught:
        Tracker(track)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_looking_changes_nothing() -> None:
    """Weights, gradients, generator and version counters are as before a look."""
    model = Scaled().half()
    model.alpha.grad = torch.ones(2, dtype=torch.float16)
    before = (model.alpha.clone(), model.alpha._version, torch.get_rng_state())
    EarlyWarning({"*": {"below": 0.0}}).state(0, [model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert torch.equal(model.alpha, before[0])
    assert model.alpha._version == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


# -- together ---------------------------------------------------------------------------------------------------


def test_curves_that_take_turns_are_kept_apart() -> None:
    """The two halves of a GAN have levels of their own."""
    early = EarlyWarning()
    found = [n for step in range(200) for n in early.numbers(step, 100.0 if step % 2 else 0.01, None, "generator" if step % 2 else "critic")]
    assert found == []
    (notice,) = early.numbers(200, 100.0, None, "critic")
    assert notice.name == "loss of critic"
    assert has_spike([notice])


def test_curves_of_trainings_that_are_over_are_forgotten() -> None:
    """A number as large as that of a training that is over is compared with those that go on alone."""
    early = EarlyWarning()
    for step in range(4):
        assert not early.numbers(step, 1.0, 1.0, "optimizer 0") + early.numbers(step, 1e9, 1e9, "optimizer 1")
    early.keep(["optimizer 1"])
    assert early.ceilings() == (1e12, 1e12)
    assert not early.numbers(4, 1e9, 1e9, "optimizer 0") and early.numbers(4, 1e15, 1e9, "optimizer 1")


def test_numbers_carry_their_dtype() -> None:
    """A norm computed in float16 near its end is a notice, and no spike; without spikes there is only head-room."""
    early = EarlyWarning(spikes=False)
    notices = [n for step, norm in enumerate([1.0, 1.0, 1.0, 40000.0]) for n in early.numbers(step, 4.5e12, norm, norm_dtype=torch.float16)]
    assert [(n.kind, n.name) for n in notices] == [(NoticeKind.HEADROOM, "gradient norm")]
    assert not has_spike(notices)


def test_what_a_policy_does_depends_on_when_the_spike_was_known() -> None:
    """Skipping needs the numbers before the update; rolling back and stopping do not."""
    answers = {policy: (on_spike(policy, True), on_spike(policy, False)) for policy in SpikePolicy}
    assert answers == {
        SpikePolicy.WARN: ("observed", "observed"),
        SpikePolicy.SKIP: ("skipped", "observed"),
        SpikePolicy.ROLLBACK: ("rolled back", "rolled back"),
        SpikePolicy.STOP: ("stopped", "stopped"),
        SpikePolicy.OFF: ("observed", "observed"),
    }


def test_numbers_on_the_cpu_are_there_at_once() -> None:
    """Each number comes back with its label, once."""
    late = LateNumbers()
    late.send([("a", torch.tensor(1.5)), ("b", torch.tensor([2.0], dtype=torch.float16))])
    assert late.under_way
    assert late.take() == [("a", 1.5), ("b", 2.0)]
    assert not late.under_way
    assert late.take() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_limits_on_the_device_are_read_later_without_waiting() -> None:
    """While the device is busy nothing is read and the host is not held up; the crossing is told afterwards, with its own step."""
    model = Scaled().cuda()
    tracker = Tracker({"alpha": {"below": 0.4}})
    tracker.look(0, [model], [], wait=True)
    tracker = Tracker({"alpha": {"below": 0.4}})
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    during = tracker.look(3, [model], []) + tracker.look(4, [model], [])
    waited = busy.query()
    assert during == []
    assert not waited
    assert texts(tracker.look(5, [model], [], wait=True)) == ["alpha is 0.5 at step 3; it was to stay below 0.4"]


# -- telling ----------------------------------------------------------------------------------------------------


def spike(step: int, name: str = "loss") -> Notice:
    """A notice about a spike."""
    return Notice(NoticeKind.SPIKE, step, name, 4.5e12, f"{name} 4.5e+12 at step {step}")


def test_every_warning_is_written_and_few_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds all, stderr one line a thing and thousand steps, and the end counts them."""
    journal = Journal(tmp_path)
    for notice in (spike(5), spike(6), spike(900, "gradient norm"), spike(1005)):
        journal.warning(notice)
    journal.close(2000, Budget())
    rows = strict_lines(tmp_path / "warnings.jsonl")
    assert [(row["kind"], row["step"], row["name"], row["value"]) for row in rows] == [
        ("spike", 5, "loss", 4.5e12),
        ("spike", 6, "loss", 4.5e12),
        ("spike", 900, "gradient norm", 4.5e12),
        ("spike", 1005, "loss", 4.5e12),
    ]
    assert set(rows[0]) == {"schema", "kind", "step", "name", "value", "text", "severe", "rank", "time"}
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [f"whynan: warning: {name} 4.5e+12 at step {step}" for name, step in (("loss", 5), ("gradient norm", 900), ("loss", 1005))]
    assert lines[3].startswith("whynan: 4 early warnings: spike of loss 3, spike of gradient norm 1; ")
    assert len(lines) == 4


def test_mild_warnings_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end names no kind that was never said, and its two numbers add up to the lines of the file."""
    journal = Journal(tmp_path)
    journal.warning(spike(5))
    journal.warning(spike(6, "gradient norm"), aloud=False)
    journal.warning(spike(7, "gradient norm"), aloud=False)
    journal.close(2000, Budget())
    assert len(strict_lines(tmp_path / "warnings.jsonl")) == 3
    assert "whynan: 1 early warning: spike of loss 1; with 2 mild ones in " in capsys.readouterr().err


def test_a_run_without_warnings_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file and no line."""
    Journal(tmp_path).close(10, Budget())
    assert not (tmp_path / "warnings.jsonl").exists()
    assert capsys.readouterr().err == ""


def test_a_real_training_with_one_absurd_batch() -> None:
    """A small regression is silent, the batch with a target in the wrong unit is named, and training goes on in silence."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    early, told = EarlyWarning(), []
    for step in range(120):
        data = torch.randn(16, 4)
        goal = data.sum(1, keepdim=True) * (1e6 if step == 80 else 1.0) + 0.1 * torch.randn(16, 1)
        loss = torch.nn.functional.mse_loss(model(data), goal)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        notices = early.numbers(step, loss.item(), norm.item())
        told += [(n.step, n.name) for n in notices]
        if not has_spike(notices):
            optimizer.step()
    assert told == [(80, "loss"), (80, "gradient norm")]
