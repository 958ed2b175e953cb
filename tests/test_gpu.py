"""What only a GPU can show: no host sync, skipping on the device, CUDA autocast, the fp16 scaler, compiled models."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.cudagraph_trees
from torch import nn

import whynan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


if torch.cuda.is_available():
    # the first compilation of a process patches optimizers itself; do it before anything is compared
    import torch._dynamo.eval_frame

    torch._dynamo.eval_frame.TorchPatcher.patch()


def build(fused: bool = True, norm: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model on the GPU."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(64) if norm else nn.LayerNorm(64)
    model = nn.Sequential(nn.Linear(16, 64), middle, nn.GELU(), nn.Linear(64, 4)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], clip: bool = True) -> None:
    """A loop whose loss divides by the spread of the batch: a batch of equal rows is not finite."""
    for x in batches:
        optimizer.zero_grad(set_to_none=True)
        y = model(x)
        spread = x.var(0).sum()
        loss = y.square().mean() / spread  # the division of the failing batch
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def batches(bad: tuple[int, ...] = (), count: int = 8) -> list[torch.Tensor]:
    """Batches of 32; those in `bad` hold one row 32 times."""
    made = [torch.randn(32, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for i in range(count)]
    for index in bad:
        made[index] = made[index][:1].expand(32, 16).contiguous()
    return made


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything that outlives a step."""
    moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone().cpu() for t in [*model.parameters(), *model.buffers(), *moments]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_watching_changes_nothing(fused: bool, clip: bool) -> None:
    """A healthy run ends in the same bits with and without watching."""
    plain = build(fused)
    train(*plain, batches(), clip)
    watched = build(fused)
    with whynan.watch(*watched, files=False) as guard:
        train(*watched, batches(), clip)
    assert guard.incidents == []
    assert same(state(*plain), state(*watched))


@pytest.mark.parametrize("clip", [True, False])
def test_no_host_sync_while_nothing_is_wrong(clip: bool) -> None:
    """With a fused optimizer the host never waits for the device."""
    model, optimizer = build()
    data = batches(count=12)
    with whynan.watch(model, optimizer, files=False):
        train(model, optimizer, data[:4], clip)
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(model, optimizer, data[4:], clip)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_a_bad_batch_is_skipped_bit_for_bit(fused: bool, norm: bool) -> None:
    """After a skipped step the state is that of a run without the batch; the incident names step and line."""
    data = batches(bad=(3,))
    without = build(fused, norm)
    train(*without, data[:3] + data[4:])
    skipped = build(fused, norm)
    with whynan.watch(*skipped, files=False) as guard:
        train(*skipped, data)
    assert [i.step for i in guard.incidents] == [3]
    origin = guard.incidents[0].origin
    assert "y.square().mean() / spread" in origin.span.code
    assert guard.incidents[0].cause.code == "WN404"
    assert same(state(*without), state(*skipped))


@pytest.mark.parametrize("fused", [True, False])
def test_a_recurrent_state_is_that_of_a_run_without_the_bad_batch(fused: bool) -> None:
    """A program that carries something is not read late: by the next step its state would be bad."""

    def run(made: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        cell = nn.GRUCell(16, 8).cuda()
        optimizer = torch.optim.AdamW(cell.parameters(), lr=1e-2, fused=fused)
        carried = torch.zeros(32, 8, device="cuda")
        with whynan.watch(cell, optimizer, files=False) as guard:
            for x in made:
                carried = cell(x / x.var(0).sum(), carried.detach())
                optimizer.zero_grad()
                carried.square().mean().backward()
                optimizer.step()
        return [*state(cell, optimizer), carried.detach().cpu()], len(guard.incidents)

    made = batches(bad=(4,))
    expected, none = run(made[:4] + made[5:])
    found, one = run(made)
    assert (none, one) == (0, 1)
    assert same(found, expected)


def test_scaler_overflows_are_normal_life() -> None:
    """A gradient scaler's first overflows under fp16 autocast are not incidents."""
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    with whynan.watch(model, optimizer, files=False) as guard:
        for x in batches(count=40):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert guard.incidents == []


def train_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor], scaler: Any) -> None:
    """A loop in fp16 autocast with a gradient scaler; a batch of equal rows is not finite."""
    for x in data:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            y = model(x).float()
        loss = y.square().mean() / x.var(0).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [True, False])
def test_fault_under_a_scaler(fused: bool) -> None:
    """A bad batch under a gradient scaler is an incident, and leaves weights, moments and the scale as a run without it."""
    data = batches(bad=(3,))
    without = build(fused)
    plain = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
    train_scaled(*without, data[:3] + data[4:], plain)
    skipped = build(fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
    with whynan.watch(*skipped, files=False) as guard:
        train_scaled(*skipped, data, scaler)
    assert [(i.step, i.cause.code) for i in guard.incidents] == [(3, "WN404")]
    assert same(state(*without), state(*skipped))
    assert scaler.state_dict() == plain.state_dict()


def test_scale_that_collapses() -> None:
    """A run in which no scaled step is ever taken is an incident."""
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    with whynan.watch(model, optimizer, files=False) as guard:
        for x in batches(count=12):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                y = model(x)
            scaler.scale((y.float() * 1e9).mean()).backward()  # the gradient of y does not fit float16 at any scale
            scaler.step(optimizer)
            scaler.update()
    assert [i.cause.code for i in guard.incidents][:1] == ["WN606"]


def test_scheduler_follows_updates_read_late() -> None:
    """A step skipped on the device does not move the scheduler, though the host learns of it one step later."""

    def run(built: tuple[nn.Module, torch.optim.Optimizer], data: list[torch.Tensor]) -> dict[str, Any]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(built[1], 0.1, total_steps=20)
        for x in data:
            train(*built, [x])
            scheduler.step()
        return dict(scheduler.state_dict())

    data = batches(bad=(3,))
    without = build()
    expected = run(without, data[:3] + data[4:])
    skipped = build()
    with whynan.watch(*skipped, files=False) as guard:
        found = run(skipped, data)
    assert [i.step for i in guard.incidents] == [3]
    assert found == expected
    assert same(state(*without), state(*skipped))


@pytest.mark.parametrize("look", [lambda loss: loss.item(), lambda loss: float(loss.detach())])
@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_that_the_program_reads_and_turns_away_from_is_told(fused: bool, look: Callable[[torch.Tensor], float]) -> None:
    """The number came to the host anyway: its step is told as observed, and the weights are those of the program's own guard."""

    def guarded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x in batches(bad=(3,)):
            optimizer.zero_grad(set_to_none=True)
            loss = model(x).square().mean() / x.var(0).sum()
            if not math.isfinite(look(loss)):
                continue
            loss.backward()
            optimizer.step()

    plain, watched = build(fused), build(fused)
    guarded(*plain)
    with whynan.watch(*watched, files=False) as guard:
        guarded(*watched)
    (incident,) = guard.incidents
    assert (incident.step, incident.action.taken, incident.cause.code) == (3, "observed", "WN404")
    assert same(state(*plain), state(*watched))


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
def test_rollback(where: str, fused: bool) -> None:
    """A rollback brings weights and moments back to the snapshot; what was drawn since is left out."""
    data = batches(bad=(5,), count=10)
    reference = build(fused)
    late = 1 if fused else 0  # read one step late: the step in between is computed on the state that is left, and dropped
    train(*reference, data[:4] + data[6 + late :])
    rolled = build(fused)
    with whynan.watch(*rolled, files=False, policy="rollback", snapshots=where, snapshot_every=4) as guard:
        train(*rolled, data)
    assert [(i.step, i.action.taken) for i in guard.incidents] == [(5, "rolled back")]
    assert same(state(*reference), state(*rolled))


def test_backward_birth_under_cuda_autocast() -> None:
    """A slope of sqrt at 0 is joined to its forward line, in a backward pass of the CUDA engine."""
    model, optimizer = build()
    with whynan.watch(model, optimizer, files=False) as guard:
        for number, x in enumerate(batches(count=5)):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                y = model(x).float()
                target = y.detach() if number == 2 else torch.zeros_like(y)
                distance = torch.sqrt((y - target).pow(2).sum(-1))  # the slope of this root
                loss = distance.mean()
            loss.backward()
            optimizer.step()
    assert [i.cause.code for i in guard.incidents] == ["WN501"]
    assert "the slope of this root" in guard.incidents[0].origin.span.code


def test_compiled_model_is_replayed_eagerly() -> None:
    """A compiled model trips as usual and is explained by its eager original; watching causes no recompilation."""
    model, optimizer = build()
    compiled = torch.compile(model)
    counts: list[int] = []
    for watching in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if watching:
            with whynan.watch(model, optimizer, files=False) as guard:
                train(compiled, optimizer, batches(bad=(3,)))
            assert [i.cause.code for i in guard.incidents] == ["WN404"]
        else:
            train(copy.deepcopy(compiled), optimizer, batches()[:2])
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("place", "code"), [("loss", "WN404"), ("gradient", "WN501")])
def test_time_from_trip_to_diagnosis(place: str, code: str, capsys: Any) -> None:
    """Print how many step times a diagnosis takes on a GPT-2 sized step; the figure goes into docs/benchmarks.md."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(16, 768), nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Linear(768, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y = y.float()
        loss = y.square().mean()
        distance = torch.sqrt((y - y[:, :1]).square().sum((1, 2)))
        loss = loss / x.var() if place == "loss" else loss + 0.01 * distance.mean()
        loss.backward()
        optimizer.step()

    good = torch.randn(16, 1024, 16, device="cuda")
    with whynan.watch(model, optimizer, files=False) as guard:
        for _ in range(5):
            step(good)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            step(good)
        torch.cuda.synchronize()
        usual = (time.perf_counter() - begin) / 5
        step(torch.ones_like(good))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(good)
        torch.cuda.synchronize()
        taken = time.perf_counter() - begin - usual
    assert [(i.cause.code, i.remedies[0].result) for i in guard.incidents] == [(code, "proven")]
    with capsys.disabled():
        print(f"\nfrom trip to diagnosis, {place}: {taken / usual:.1f} step times")


@pytest.mark.parametrize("begin", [0, 4], ids=["watched from the first step", "watched when the graphs are there"])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with hooks"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_watching_adds_no_graph_and_no_capture_to_compiled_steps(mode: str, hooked: bool, begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and loss compiled, CUDA graphs included: the same graphs with and without watching, and the bad batch is found."""
    counted: list[tuple[int, int, int, int]] = []
    recorded: list[object] = []
    node = torch._inductor.cudagraph_trees.CUDAGraphNode
    record = node._record
    monkeypatch.setattr(node, "_record", lambda self, *args: recorded.append(self) or record(self, *args))
    for watching in (False, True):
        recorded.clear()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, optimizer = build()
        if hooked:
            list(model.children())[2].register_forward_hook(lambda module, inputs, out: out * 1.0)
            model.register_forward_pre_hook(lambda module, inputs: inputs)
        compiled = torch.compile(model, mode=mode)
        loss_of = torch.compile(lambda y, x: y.square().mean() / x.var(0).sum(), mode=mode)
        guard = None
        made = batches(count=10)
        if watching:
            made[7] = torch.zeros_like(made[7])
        for number, x in enumerate(made):
            if watching and number == begin:
                guard = whynan.watch(model, optimizer, files=False)
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad(set_to_none=True)
            loss_of(compiled(x), x).backward()
            optimizer.step()
        if guard is not None:
            guard.close()
            assert [i.step for i in guard.incidents] == [7 - begin]
        found = torch._dynamo.utils.counters
        counted.append((found["stats"]["unique_graphs"], sum(found["graph_break"].values()), found["inductor"]["cudagraph_skips"], len(recorded)))
    assert counted[0] == counted[1]
    assert mode == "default" or counted[0][3] > 0
