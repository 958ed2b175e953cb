"""Rollback: back to the last good state, with the data where the loader can."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import whynan
from whynan.engine.noticing import Noticing
from whynan.errors import UsageError
from whynan.recovery.policy import Budget, parse
from whynan.tripwire.late import LateFlag, Reading


def build(dropout: float = 0.2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with state of every kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int, bad: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Batches of 8; those in `bad` hold a NaN."""
    made = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    for index in bad:
        made[index][0, 0] = torch.nan
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Any]) -> list[float]:
    """Return the losses of a plain loop."""
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that outlives a step."""
    return [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("where", ["host", "device"])
def test_state_and_random_state_are_the_snapshots(where: str) -> None:
    """After a rollback the run goes on as one that never drew the batches since the snapshot, dropout included."""
    data = batches(12, bad=(6,))
    reference = build()
    train(*reference, data[:4] + data[7:])
    rolled = build()
    with whynan.watch(*rolled, files=False, policy="rollback", snapshots=where, snapshot_every=4) as guard:
        train(*rolled, data)
    assert [(i.step, i.action.taken) for i in guard.incidents] == [(6, "rolled back")]
    assert same(state(*reference), state(*rolled))


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set with one bad row in its seventh batch of 8."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return row * torch.nan if index == 50 else row


def loader(workers: int = 0) -> Any:
    """A loader that knows its position."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return stateful.StatefulDataLoader(Rows(), batch_size=8, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_goes_back_too(workers: int) -> None:
    """A loader that can is taken back to the snapshot's batch; the bad batch is dropped when it comes again."""
    plain = [torch.stack([Rows()[i] for i in range(b, b + 8)]) for b in range(0, 80, 8)]
    reference = build(dropout=0.0)
    train(*reference, plain[:6] + plain[7:])
    rolled = build(dropout=0.0)
    with whynan.watch(*rolled, files=False, policy="rollback", snapshot_every=4) as guard:
        losses = train(*rolled, loader(workers))
    assert [(i.step, i.action.taken) for i in guard.incidents] == [(6, "rolled back")]
    assert len(losses) == 7 + 6  # batches 4 to 9 were drawn again
    assert same(state(*reference)[:2], state(*rolled)[:2])


def test_batches_in_between_are_skipped_on_request() -> None:
    """With rewind_data=False the loader goes on with the next batch."""
    model, optimizer = build()
    with whynan.watch(model, optimizer, files=False, policy="rollback", snapshot_every=4, rewind_data=False):
        losses = train(model, optimizer, loader())
    assert len(losses) == 10
    assert optimizer.state_dict()["state"][0]["step"] == 4 + 3


def test_damaged_weights_are_rolled_back() -> None:
    """Skipping cannot help where a weight is not finite: the chain goes straight to the rollback."""
    model, optimizer = build()
    data = batches(8)
    with whynan.watch(model, optimizer, files=False, policy="skip:3,rollback", snapshot_every=2) as guard:
        train(model, optimizer, data[:5])
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
        train(model, optimizer, data[5:])
    assert [i.action.taken for i in guard.incidents] == ["rolled back"]
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Averaging(nn.Module):
    """Binds its running average anew in every forward pass, as many written-by-hand layers do, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("average", torch.zeros(()))
        self.calls = 0
        self.counts = np.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean()
        self.calls += 1
        self.counts += (x > 0).sum(0).numpy()
        return self.layer(x)


def test_buffers_bound_anew_and_plain_attributes_go_back() -> None:
    """A buffer that the forward pass replaces, a counter and an array on the module are those of the snapshot."""
    data = batches(8, bad=(5,))
    ends = []
    for policy, drawn in (("observe", data[:4] + data[6:]), ("rollback", data)):
        torch.manual_seed(0)
        model = Averaging()
        with whynan.watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), files=False, policy=policy, snapshot_every=4):
            train(model, optimizer, drawn)
        ends.append((model.average, model.calls, model.counts.tolist(), model.layer.weight.detach()))
    assert same(ends[0], ends[1])


def test_rates_are_lowered_only_when_asked_for() -> None:
    """lr_after_rollback scales the rates and the schedulers' base rates; by default they are the snapshot's."""
    for factor, expected in ((1.0, 1e-2), (0.5, 5e-3)):
        model, optimizer = build()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        with whynan.watch(model, optimizer, files=False, policy="rollback", snapshot_every=2, lr_after_rollback=factor):
            for x in batches(6, bad=(4,)):
                train(model, optimizer, [x])
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_gradients_are_clipped_tighter_only_when_asked_for() -> None:
    """clip_after_rollback bounds the updates after a rollback, not before it."""
    moved = []
    for limit in (None, 1e-6):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with whynan.watch(model, optimizer, files=False, policy="rollback", snapshot_every=1, clip_after_rollback=limit):
            train(model, optimizer, batches(3, bad=(2,)))
            before = model.weight.detach().clone()
            train(model, optimizer, batches(5)[4:])
        moved.append(float((model.weight - before).norm()))
    assert moved[0] > 1e-3
    assert moved[1] <= 1.1e-6


def test_no_snapshot_no_rollback() -> None:
    """With snapshots off there is nothing to go back to: the training stops."""
    model, optimizer = build()
    with pytest.raises(whynan.TrainingStopped), whynan.watch(model, optimizer, files=False, policy="rollback", snapshots="off"):
        train(model, optimizer, batches(4, bad=(2,)))


def test_memory_of_the_snapshot_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    """The first snapshot says where it is kept, how large it is and how often it is renewed."""
    model, optimizer = build()
    with whynan.watch(model, optimizer, files=False, policy="rollback", snapshot_every=7):
        train(model, optimizer, batches(2))
    assert "the last good state is kept on the host: 0.0 MB, renewed every 7 updates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chain", "bad", "taken"),
    [
        ("skip:2,rollback,stop", "bbbb", ["skipped", "skipped", "rolled back", "stopped"]),
        ("skip:1,rollback:2", "bbbb", ["skipped", "rolled back", "rolled back", "stopped"]),
        ("skip:1,rollback", "bbgbb", ["skipped", "rolled back", "skipped", "rolled back"]),
        ("rollback", "bgb", ["rolled back", "rolled back"]),
        ("stop", "b", ["stopped"]),
    ],
)
def test_chains(chain: str, bad: str, taken: list[str]) -> None:
    """A chain uses each policy up in a row of bad steps; a good step begins it anew."""
    budget = Budget(parse(chain), in_total=10)
    found = []
    for letter in bad:
        if letter == "g":
            budget.healthy()
        else:
            found.append(budget.decide(can_roll_back=True))
    assert found == taken


@pytest.mark.parametrize("wrong", ["skip:x", "stop,skip", "observe,skip", "", "skip:-1", "skip,,stop"])
def test_chains_that_make_no_sense(wrong: str) -> None:
    """Each is a UsageError that shows the text."""
    with pytest.raises(UsageError, match=r"polic"):
        parse(wrong)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, data: Iterable[torch.Tensor]) -> None:
    """A loop with a gradient scaler."""
    for x in data:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("init", [64.0, 1e38])
def test_a_batch_that_comes_again_is_dropped_again_under_a_scaler(init: float) -> None:
    """No new incident, and the scale moves as without that batch; an overflow that the scaler had skipped by itself comes again, too."""
    plain = [torch.stack([Rows()[i] for i in range(b, b + 8)]) for b in range(0, 80, 8)]
    ends = []
    for policy in ("observe", "rollback"):
        model, optimizer = build(dropout=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=3, backoff_factor=1e-3)
        with whynan.watch(model, optimizer, files=False, policy=policy, snapshot_every=4) as guard:
            scaled(model, optimizer, scaler, plain[:6] + plain[7:] if policy == "observe" else loader())
        ends.append((*state(model, optimizer)[:2], scaler.state_dict()))
    assert [(i.step, i.action.taken) for i in guard.incidents] == [(6, "rolled back")]
    assert same(*ends)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """48 healthy rows."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def numbers(shuffle: bool = True, own: bool = False) -> Any:
    """A loader that knows its position, with a generator of its own or without."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    generator = torch.Generator().manual_seed(5) if own else None
    return stateful.StatefulDataLoader(Numbers(), batch_size=8, shuffle=shuffle, generator=generator)


def epochs(bad: int, policy: str, own: bool = False, validates: bool = False) -> tuple[Any, list[int], list[Any]]:
    """Three passes over six shuffled batches of which one is left out, or is bad whenever it comes."""
    model, optimizer = build(dropout=0.0)
    data, held_out = numbers(own=own), numbers(shuffle=False)
    drawn, sizes = [], []
    with whynan.watch(model, optimizer, files=False, policy=policy, snapshot_every=9) as guard:
        for _ in range(3):
            for x in data:
                drawn.append(x.sum().item())
                if len(drawn) - 1 == bad and policy == "observe":
                    continue
                if len(drawn) - 1 == bad or (len(drawn) > bad + 1 and drawn[-1] == drawn[bad]):
                    x[0, 0] = torch.nan
                train(model, optimizer, [x])
            if validates:
                model.eval()
                with torch.no_grad():
                    sizes.append(sum(len(model(x)) for x in held_out))
                model.train()
    return state(model, optimizer)[: 2 if validates else 3], sizes, [(i.step, i.action.taken) for i in guard.incidents]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bad", [0, 2, 5, 7])
def test_the_first_snapshot_knows_where_the_data_began(bad: int, own: bool) -> None:
    """Before a snapshot was renewed the data go back to their beginning, from a later pass too, with all random numbers as they were."""
    expected, _, _ = epochs(bad, "observe", own)
    rolled, _, incidents = epochs(bad, "rollback", own)
    assert incidents == [(bad, "rolled back")]
    assert same(expected, rolled)


def test_a_validation_that_is_over_is_not_drawn_again() -> None:
    """Only loops that are going on go back: the next validation sees each of its batches once."""
    expected, _, _ = epochs(7, "observe", validates=True)
    rolled, sizes, _ = epochs(7, "rollback", validates=True)
    assert sizes == [48, 48, 48]
    assert same(expected, rolled)


def test_a_loader_that_is_met_later_goes_back_to_its_beginning() -> None:
    """Two loaders are drawn in turn: one that was first looped over after the snapshot is back at its first batch."""
    model, optimizer = build(dropout=0.0)
    drawn = []
    with whynan.watch(model, optimizer, files=False, policy="rollback", snapshot_every=50):
        first = iter(numbers(shuffle=False))
        for _ in range(2):
            train(model, optimizer, [next(first)])
        second = iter(numbers(shuffle=False))
        for step in range(4):
            drawn.append((next(first)[0, 0].item(), next(second)[0, 0].item()))
            train(model, optimizer, [torch.full((8, 4), torch.nan if step == 1 else 1.0)])
    begins = [Numbers()[i][0].item() for i in range(0, 48, 8)]
    assert drawn == [(begins[2], begins[0]), (begins[3], begins[1]), (begins[0], begins[0]), (begins[1], begins[1])]


class Late(LateFlag):
    """The flag of a device that is a CPU: read one step late all the same."""

    def arm(self, losses: list[torch.Tensor], norm: torch.Tensor | None, step: int, context: object, found: torch.Tensor | None = None) -> None:
        """Hold the numbers back until the next step."""
        assert norm is not None and found is None
        both = torch.stack([losses[-1].detach(), norm.reshape(())])
        self.flag = (~torch.isfinite(both).all()).float()
        self._pending = Reading(both, SimpleNamespace(synchronize=lambda: None), step, context)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["slope", "spike"])
def test_what_is_known_one_step_late_is_dropped_when_it_comes_again(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bad step and not the one in which it became known; then the run goes on."""
    monkeypatch.setattr("whynan.engine.waiting.LateFlag", Late)
    monkeypatch.setattr("whynan.engine.waiting.can_wait", lambda optimizer: True)
    norm_of = Noticing.norm_of
    monkeypatch.setattr(Noticing, "norm_of", lambda self, optimizer: torch.as_tensor(norm_of(self, optimizer)))
    ends = []
    for policy in ("observe", "rollback"):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        count = 0
        watched = {"policy": policy} if damage == "slope" else {"spike": "rollback" if policy == "rollback" else "warn"}
        with whynan.watch(model, optimizer, files=False, snapshot_every=100, **watched) as guard:
            for x in numbers(shuffle=False):
                count += 1
                bad = bool(x[0, 0] == Numbers()[16][0])
                if bad and policy == "observe":
                    continue
                optimizer.zero_grad()
                loss = model(x * (1e9 if bad and damage == "spike" else 1)).square().mean()
                if bad and damage == "slope":
                    loss = loss + (0 * model.weight).abs().sqrt().sum()
                loss.backward()
                optimizer.step()
        ends.append(state(model, optimizer)[:2])
    assert count == 6 + 4
    assert [i.action.taken for i in guard.incidents] == (["rolled back"] if damage == "slope" else [])
    assert same(*ends)
