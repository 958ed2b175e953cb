"""Outputs of modules with limits: growth inside the forward pass is seen coming, and nothing but the warning is different."""

from __future__ import annotations

import copy
import io
import math
import pickle
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Sandbox, Shown, strict_lines
from doc_blocks import compare
from jobs import job
from test_casebook_b import CASES, arguments, case_of, command
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import whynan
from whynan.capsule.doors import outputs as listening
from whynan.commands.run import _limits
from whynan.errors import UsageError
from whynan.tripwire.tracking import Tracker
from whynan.tripwire.values import largest


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The outputs that were looked at, as they come."""
    seen: list[torch.Tensor] = []

    def counted(tensor: torch.Tensor) -> torch.Tensor | None:
        seen.append(tensor)
        return largest(tensor)

    monkeypatch.setattr(listening, "largest", counted)
    return seen


class Block(nn.Module):
    """A layer whose output is as large as its factor says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = x + 0 * self.inner(x).sum() + (self.factor - 1.0) * x
        return grown


class Model(nn.Module):
    """Two blocks and a head; inputs are ones, so a block's output is its factor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def built() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def set_factor(model: Model, factor: float, number: int = 0) -> None:
    block = model.blocks[number]
    assert isinstance(block, Block)
    block.factor = factor


def warnings_of(folder: Path) -> list[tuple[int, str, float | None, str]]:
    return [(row["step"], row["name"], row["value"], row["text"]) for row in strict_lines(folder / "warnings.jsonl") if row["kind"] == "limit"]


def trained(
    folder: Path, track: dict[str, Any], factors: list[float], forward: Callable[[Model, torch.Tensor], torch.Tensor] = lambda m, x: m(x), **options: Any
) -> list[tuple[int, str, float | None, str]]:
    """Train with a factor for each step in the first block; return the warnings about limits."""
    model, optimizer = built()
    with whynan.watch(model, optimizer, run_dir=folder, track=track, spike="off", **options) as guard:
        for factor in factors:
            set_factor(model, factor)
            optimizer.zero_grad()
            (forward(model, torch.ones(2, 4)).square().mean() * 1e-6).backward()
            optimizer.step()
    assert guard.incidents == []
    assert not (folder / "internal-error.txt").exists()
    return warnings_of(folder)


# -- limits and growth --------------------------------------------------------------------------------------------


def test_a_crossing_is_told_once_and_again_after_it_came_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning names module, value, step and limit, in the file and on the terminal."""
    said = trained(tmp_path, {"out:blocks.0": {"below": 5.0, "every": 1}}, [1.0, 7.0, 8.0, 2.0, 9.0])
    assert said == [
        (1, "out:blocks.0", 7.0, "out:blocks.0 is 7 at step 1; it was to stay below 5"),
        (4, "out:blocks.0", 9.0, "out:blocks.0 is 9 at step 4; it was to stay below 5"),
    ]
    assert "whynan: warning: out:blocks.0 is 7 at step 1; it was to stay below 5" in capsys.readouterr().err


def test_the_largest_absolute_value_counts(tmp_path: Path) -> None:
    """A negative output is as large as a positive one; `above` tells of an output that dies."""
    assert trained(tmp_path / "a", {"out:blocks.0": {"below": 5.0, "every": 1}}, [-7.0])[0][2] == 7.0
    said = trained(tmp_path / "b", {"out:blocks.0": {"above": 0.5, "every": 1}}, [-1.0, 0.01])
    assert [(step, text.rpartition("; ")[2]) for step, _, _, text in said] == [(1, "it was to stay above 0.5")]


def test_growth_is_measured_from_the_median_of_the_first_five_looks(tmp_path: Path) -> None:
    """No limit is needed: ten times the level warns, one odd look at the beginning does not move it."""
    factors = [1.0, 900.0, 2.0, 2.0, 3.0, 19.0, 21.0, 22.0, 5.0, 40.0]
    said = trained(tmp_path, {"out:blocks.0": {"grows": 10, "every": 1}}, factors)
    assert [(step, value) for step, _, value, _ in said] == [(6, 21.0), (9, 40.0)]
    assert said[0][3] == "out:blocks.0 is 21 at step 6, 10.5 times the 2 of its first looks; it was to stay below 10 times"


def test_zeros_are_no_level_and_growth_of_weights_is_seen_too() -> None:
    """A layer that begins with zeros has no level yet; a parameter's growth is that of its largest absolute value."""
    model = nn.PReLU(init=0.0)
    tracker = Tracker({"weight": {"grows": 3}})
    said: list[str] = []
    for step, value in enumerate([0.0, 0.0, 1.0, -1.0, 1.0, 1.0, 1.0, 2.9, -3.5]):
        model.weight.data.fill_(value)
        said += [notice.text for notice in tracker.look(step, [model], [])]
    assert said == ["weight is 3.5 at step 8, 3.5 times the 1 of its first looks; it was to stay below 3 times"]


@pytest.mark.parametrize(("every", "due"), [({}, [0, 16, 32]), ({"every": 10}, [0, 10, 20, 30])], ids=["sixteen", "ten"])
def test_nothing_is_computed_in_steps_that_are_not_due(tmp_path: Path, looked: list[torch.Tensor], every: dict[str, int], due: list[int]) -> None:
    """Every 16 steps, or as `every` says; a module that is called twice in a step is heard as often."""
    counts: list[int] = []

    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        before = len(looked)
        y: torch.Tensor = model(x) + model(x)
        counts.append(len(looked) - before)
        return y

    assert trained(tmp_path, {"out:head": {"below": 1e9, **every}}, [1.0] * 40, forward) == []
    assert counts == [2 * (step in due) for step in range(40)]


def test_nested_outputs_and_nothing_but_floating_point(tmp_path: Path) -> None:
    """Tensors in tuples, mappings and records count, whole numbers and complex ones do not."""

    @dataclass
    class Answer:
        scores: dict[str, Any]

    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            numbers = torch.full((3,), 10**6)
            return x, [Answer({"a": (x * 3, numbers), "b": None}), "text"], torch.complex(x, x) * 1e6, torch.empty(0)

    class Whole(Model):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.part(x)[0])

    torch.manual_seed(0)
    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with whynan.watch(model, optimizer, run_dir=tmp_path, track={"out:part": {"below": 2.0}}):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    assert warnings_of(tmp_path) == [(0, "out:part", 3.0, "out:part is 3 at step 0; it was to stay below 2")]


def test_values_that_are_not_finite_are_left_to_the_tripwire(tmp_path: Path) -> None:
    """An infinity crosses no limit."""
    model, optimizer = built()
    with whynan.watch(model, optimizer, run_dir=tmp_path, track={"out:*": {"below": 100.0, "every": 1}}) as guard:
        set_factor(model, math.inf, 1)
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    assert len(guard.incidents) == 1
    assert warnings_of(tmp_path) == []


# -- names --------------------------------------------------------------------------------------------------------


def test_names_of_modules_are_compared_and_similar_ones_offered(tmp_path: Path) -> None:
    """`*` reaches every module, the model itself goes by its class, and a misspelled pattern is said once."""
    said = trained(tmp_path / "a", {"out:*": {"below": 0.0}, "out:hed": {"below": 1.0}}, [1.0] * 3)
    heard = ["out:Model", "out:blocks.0", "out:blocks.0.inner", "out:blocks.1", "out:blocks.1.inner", "out:head"]
    assert [name for _, name, _, _ in said] == ["out:hed", *heard]
    assert said[0][3].startswith("track: no value is named 'out:hed'; similar names: out:head")
    assert {name for _, name, _, _ in trained(tmp_path / "b", {"*": {"below": -1e9}}, [1.0])} >= {"head.weight"}
    assert not [name for _, name, _, _ in trained(tmp_path / "c", {"*": {"below": -1e9}}, [1.0]) if name.startswith("out:")]


@pytest.mark.parametrize("steps", [3, 40])
def test_a_module_that_is_never_called_is_named(tmp_path: Path, steps: int) -> None:
    """A list of modules has no output, nor has a layer whose weight alone is used: said once, at the end of a short run."""
    said = trained(tmp_path, {"out:blocks": {"below": 1e9}}, [1.0] * steps)
    assert [text for _, _, _, text in said] == ["track: 'out:blocks' has seen no output: blocks not called so far, or only inside compiled code or a transform"]


def test_models_that_take_turns_are_all_heard(tmp_path: Path) -> None:
    """Two networks with the same names, each updated in every second step: told apart, and neither is missed."""
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        next(second.parameters()).mul_(1000)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=1e-9)) for m in (first, second)]
    with whynan.watch(*(item for pair in pairs for item in pair), run_dir=tmp_path, spike="off", track={"out:0": {"below": 50.0, "grows": 10}}):
        for step in range(200):
            model, optimizer = pairs[step % 2]
            optimizer.zero_grad()
            model(torch.ones(1, 2)).mean().backward()
            optimizer.step()
    assert [(step, name) for step, name, _, _ in warnings_of(tmp_path)] == [(1, "out:0 of model 2")]


def test_models_made_anew_are_one(tmp_path: Path) -> None:
    """A criterion and a network made in every step go by one name."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with whynan.watch(optimizer, run_dir=tmp_path, track={"out:MSELoss": {"below": 0.0}}):
        for _ in range(200):
            optimizer.zero_grad()
            nn.MSELoss()(weight, torch.zeros(2)).backward()
            optimizer.step()
    assert [name for _, name, _, _ in warnings_of(tmp_path)] == ["out:MSELoss"]


@pytest.mark.parametrize(
    ("track", "words"),
    [
        ({"out:": {"below": 1.0}}, "not 'out:'"),
        ({"out:a": {"every": 2}}, "needs limits"),
        ({"out:a": {"grows": 1.0}}, "a factor above 1, not 1.0"),
        ({"out:a": {"grows": math.inf}}, "a factor above 1"),
        ({"out:a": {"below": 1.0, "grow": 2.0}}, "choose from below, above, grows, every"),
    ],
)
def test_limits_that_make_no_sense_are_usage_errors(track: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        whynan.watch(track=track)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("out:blocks.*<1e4", {"out:blocks.*": {"below": 1e4}}),
        ("out:*<x10", {"out:*": {"grows": 10.0}}),
        ("out:* < x10", None),
        ("*.alpha <x3 every 5", {"*.alpha": {"grows": 3.0, "every": 5}}),
        ("lr>0.5 every 2", {"lr": {"above": 0.5, "every": 2}}),
        ("out:xx<x1e2", {"out:xx": {"grows": 100.0}}),
        ("a<1 every two", None),
        ("a<x", None),
        ("a<ten", None),
        ("a", None),
    ],
)
def test_limits_on_the_command_line(word: str, read: Any) -> None:
    if read is not None:
        assert _limits(None, None, (word,)) == read  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError, match="NAME<xTIMES"):
        _limits(None, None, (word,))  # type: ignore[arg-type]


def test_several_limits_of_one_name_are_held_together() -> None:
    assert _limits(None, None, ("out:a<5", "out:a<x3 every 2", "out:a>1")) == {"out:a": {"below": 5.0, "grows": 3.0, "every": 2, "above": 1.0}}  # type: ignore[arg-type]


# -- nothing else is different ------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Dropout, BatchNorm, a recurrent layer, attention, and a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU())
        self.memory = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.inner(x))
        x, _ = self.memory(x[:, None].expand(-1, 3, -1))
        return self.head(self.attention(x)).mean(1)  # type: ignore[no-any-return]


def plainly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # type: ignore[no-any-return]


def half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)  # type: ignore[no-any-return]


class Checkpointed(Everything):
    """Parts are computed again in the backward pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.inner, x.requires_grad_(), **self.options)
        x, _ = self.memory(x[:, None].expand(-1, 3, -1))
        return self.head(checkpoint(self.attention, x, **self.options)).mean(1)  # type: ignore[no-any-return]


def keep_aminmax(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Every operation that we use is kept: one more of it would be taken for another one."""
    return CheckpointPolicy.MUST_SAVE if op in (torch.ops.aten.aminmax.default, torch.ops.aten.maximum.default) else CheckpointPolicy.PREFER_RECOMPUTE


class Ranged(nn.Module):
    """Uses the reduction that we use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        low, high = torch.aminmax(x)
        return self.last(x * torch.maximum(high, -low).sigmoid())  # type: ignore[no-any-return]


class Selective(nn.Module):
    """Selective checkpointing, which counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ranged = Ranged()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(  # type: ignore[no-any-return]
            self.ranged, x.requires_grad_(), use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_aminmax)
        )


class Copying(Everything):
    """Copies itself inside its forward pass, as self-supervised models do."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[tuple[nn.Module, bytes]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.others.append((copy.deepcopy(self.inner), pickle.dumps(self.attention)))
        return super().forward(x)


BUILDERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "plain": (Everything, plainly),
    "autocast": (Everything, half),
    "twice": (Everything, lambda model, x: model(x) + model(-x)),
    "checkpointed": (partial(Checkpointed, use_reentrant=False), plainly),
    "checkpointed, reentrant": (partial(Checkpointed, use_reentrant=True), plainly),
    "checkpointed, selective": (Selective, plainly),
    "copying": (Copying, plainly),
}


def run_of(kind: str, track: dict[str, Any] | None, watching: bool = True) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor, nn.Module, Any]:
    """Train, validate now and then; return all that can be different."""
    make, forward = BUILDERS[kind]
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    guard = whynan.watch(model, optimizer, files=False, track=track) if watching else None
    for step in range(6):
        loss = forward(model, torch.randn(4, 8)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 2:
            model.eval()
            with torch.no_grad():
                losses.append(float(model(torch.ones(2, 8)).sum()))
            model.train()
    if guard is not None:
        guard.close()
        assert guard.incidents == []
    return losses, model.state_dict(), torch.get_rng_state(), model, guard


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_healthy_run_is_bit_for_bit_the_same(kind: str, looked: list[torch.Tensor]) -> None:
    """Losses, weights, buffers, generator, copies and validation are those of a run without whynan; outputs were looked at."""
    losses, state, generator, plain, _ = run_of(kind, None, watching=False)
    seen, tracked_state, tracked_generator, model, guard = run_of(kind, {"out:*": {"below": 1e9, "grows": 1e9, "every": 1}})
    assert looked
    assert guard._guard.recorder.running is False
    assert seen == losses
    assert all(torch.equal(state[name], tracked_state[name]) for name in state)
    assert torch.equal(generator, tracked_generator)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for (_, ours), (_, theirs) in zip(getattr(model, "others", []), getattr(plain, "others", []), strict=True):
        assert b"whynan" not in ours
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("kind", ["checkpointed", "checkpointed, reentrant"])
def test_what_is_computed_again_is_not_heard_again(kind: str, looked: list[torch.Tensor]) -> None:
    """Each layer inside a checkpoint is looked at once for each call of the program."""
    run_of(kind, {"out:inner.0": {"below": 1e9, "every": 1}})
    assert [tuple(tensor.shape) for tensor in looked] == [(4, 8)] * 6


def test_torch_is_left_as_it_was_and_untracked_runs_have_no_ear() -> None:
    """The door that listens is there only when it was asked for, and gone at close."""
    before = nn.Module.__call__
    model, optimizer = built()
    with whynan.watch(model, optimizer, files=False, track={"head.weight": {"below": 1e9}}):
        assert nn.Module.__call__.__name__ == before.__name__
    with whynan.watch(model, optimizer, files=False, track={"out:head": {"below": 1e9}}):
        assert nn.Module.__call__.__name__ == "heard_call"
    assert nn.Module.__call__ is before


def test_replays_are_not_heard(tmp_path: Path, looked: list[torch.Tensor]) -> None:
    """A bad step is replayed many times; its modules are looked at as often as the program called them."""
    model, optimizer = built()
    with whynan.watch(model, optimizer, run_dir=tmp_path, track={"out:head": {"below": 1e9, "every": 1}}) as guard:
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).square().mean() / (0.0 if step == 2 else 1.0)).backward()
            optimizer.step()
    assert [i.step for i in guard.incidents] == [2]
    assert len(looked) == 4


def test_a_failing_look_does_not_reach_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours is written down once, and the training goes on."""

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        raise KeyError("ours")

    monkeypatch.setattr(listening, "largest", broken)
    model, optimizer = built()
    with whynan.watch(model, optimizer, run_dir=tmp_path, track={"out:*": {"below": 1.0}}):
        for _ in range(3):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
    assert "KeyError" in (tmp_path / "internal-error.txt").read_text()


def test_errors_of_a_model_end_the_listening(tmp_path: Path) -> None:
    """A forward pass that raises leaves nothing behind."""
    model, optimizer = built()
    with whynan.watch(model, optimizer, run_dir=tmp_path, track={"out:*": {"below": 1e9, "every": 1}}) as guard:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        outputs = guard._guard.foreseeing.outputs
        assert outputs is not None
        assert outputs.now == {}
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    torch.save(model, io.BytesIO())


# -- kinds of programs --------------------------------------------------------------------------------------------


def test_stages_hold_outputs_too(tmp_path: Path) -> None:
    """An output has its limits in a stage like any other name."""
    stages = {"stage": {"start": {"until": 2, "out:blocks.0": "< 5"}, "rest": {"out:blocks.0": "< 50"}}}
    model, optimizer = built()
    with whynan.watch(model, optimizer, run_dir=tmp_path, expect=stages, spike="off"):
        for factor in [7.0] + [8.0] * 15 + [60.0]:
            set_factor(model, factor)
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).square().mean() * 1e-6).backward()
            optimizer.step()
    assert [text for _, _, _, text in warnings_of(tmp_path)] == [
        "out:blocks.0 is 7 at step 0; it was to stay below 5 (stage start)",
        "out:blocks.0 is 60 at step 16; it was to stay below 50 (stage rest)",
    ]


DISTRIBUTED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_under_ddp_names_begin_with_module(box: Sandbox) -> None:
    """As those of its parameters do; the first rank speaks."""
    program = box.write(DISTRIBUTED, "ddp.py")
    done = job(box, 2, {}, "--track", "out:module.0<0.001", "--track", "out:*.1<0.001", "--track", "module.0.weight<-9", program=program)
    assert done.status == [0, 0], done.text
    assert done.text.count("out:module.0 is ") == 1
    assert done.text.count("out:module.1 is ") == 1
    assert done.text.count("module.0.weight is ") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device_nothing_is_waited_for(tmp_path: Path) -> None:
    """With torch raising at every wait the steps that are looked at go through; the crossing is told with its own step."""
    model, _ = built()
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    x = torch.ones(2, 4, device="cuda")

    def step(factor: float) -> None:
        set_factor(model, factor)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean() * 1e-6
        loss.backward()
        optimizer.step()

    with whynan.watch(model, optimizer, run_dir=tmp_path, spike="off", track={"out:*": {"below": 50.0, "grows": 1e6, "every": 1}}):
        step(1.0)
        outputs, calls = listening.Outputs, []
        plain = outputs.hear

        def strict(self: Any, module: nn.Module, result: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                plain(self, module, result)
                calls.append(1)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        outputs.hear = strict  # type: ignore[method-assign]
        try:
            for factor in (1.0, 100.0, 1.0):
                step(factor)
        finally:
            outputs.hear = plain  # type: ignore[method-assign]
    assert calls
    assert not (tmp_path / "internal-error.txt").exists()
    assert (2, "out:blocks.0") in [(step, name) for step, name, _, _ in warnings_of(tmp_path)]


# -- the case -----------------------------------------------------------------------------------------------------


def test_growth_in_the_hyper_connections_is_seen_before_the_exponential_overflows(tmp_path: Path, shown: Shown) -> None:
    """The gates outgrow their first looks well before exp leaves the range; what the blocks return does not grow, and nothing is said of it."""
    folder, case, out = CASES / "hyper_connections", case_of("hyper_connections"), tmp_path / "run"
    assert command(*arguments(case, "before", out), folder=folder).returncode == 0
    line, told = shown("docs/casebook/hyper_connections.md")
    assert line.startswith("whynan run --track ")
    words = [word.replace("run/", f"{out}/") if word != "run" else str(out) for word in shlex.split(line)[2:]]
    done = command("-m", "whynan", "run", "--run-dir", tmp_path / "w", *words, folder=folder)
    compare(told, done.stderr)
    warned = warnings_of(tmp_path / "w")
    born = min(row["step"] for row in strict_lines(tmp_path / "w" / "incidents.jsonl") if row["cause"]["code"] == "WN201")
    grown = {name: step for step, name, _, _ in warned if name.endswith(".alpha")}
    assert grown.keys() == {"blocks.0.alpha", "blocks.1.alpha"} and max(grown.values()) < born - 15
    assert not [name for _, name, _, _ in warned if name.startswith("out:")]
