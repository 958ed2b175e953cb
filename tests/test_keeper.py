"""The checkpoint keeper: what is saved is whole and finite, what is loaded is healthy, and a good one is never lost."""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Sandbox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import whynan
from whynan.errors import UsageError
from whynan.recovery import atomic, marks, series
from whynan.recovery.health import Role, describe, examine, roles_of
from whynan.recovery.keeper import Keeper, save
from whynan.recovery.reading import Loaded

NAN, INF = math.nan, math.inf


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden files too."""
    return sorted(p.name for p in folder.iterdir())


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


# -- what is fit to be kept -------------------------------------------------------------------------------------


def test_nested_state_is_looked_at_everywhere() -> None:
    """A NaN is found in dicts, lists, tuples and modules, and named by its way there."""
    model, _ = trained()
    with torch.no_grad():
        model[0].weight[0, :2] = NAN
    state = {"a": [torch.ones(2), {"b": (torch.tensor([INF, -INF, NAN]),)}], "net": model, "n": 3, "text": "nan"}
    assert [str(h) for h in examine(state)] == ["a.1.b.0 1 nan, 2 inf", "net.0.weight 2 nan"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_every_floating_dtype_is_looked_at(dtype: torch.dtype) -> None:
    """Damage is seen in every dtype that can hold it, integers cannot."""
    bad = torch.tensor([1.0, NAN]).to(dtype)
    assert examine([bad]) and not examine([torch.tensor([1.0, 2.0]).to(dtype)])
    assert examine([torch.tensor([2**62, -1]), torch.tensor([True])]) == ()


def test_subclasses_and_layouts_are_looked_into() -> None:
    """Sparse values, tensor subclasses and what they consist of count."""

    class Mine(torch.Tensor):
        pass

    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, NAN]), (4,), check_invariants=True)
    assert [h.name for h in examine({"s": sparse, "m": torch.tensor([INF, 1.0]).as_subclass(Mine), "p": nn.Parameter(torch.ones(1))})] == ["s", "m"]


def test_masks_are_not_damage_in_a_bare_state() -> None:
    """A buffer of -inf and 0 is meant; +inf, NaN and -inf among other values are not."""
    mask = torch.full((4, 4), -INF).triu(1)
    assert examine({"mask": mask}) == ()
    assert len(examine({"a": torch.full((2,), INF), "b": torch.tensor([-INF, 1.0, 2.0]), "c": torch.tensor([-INF, NAN])})) == 3


def test_role_decides_which_infinities_are_meant() -> None:
    """A minimum that was never updated is a buffer's right; for a weight any infinity is damage, mask-like or not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([-INF]))
            self.register_buffer("low", torch.tensor(INF))
            self.register_buffer("mask", torch.tensor([0.0, -INF]))

    net = Net()
    assert [h.name for h in examine({"m": net.state_dict()}, roles_of("m", net))] == ["m.scale"]
    assert roles_of("o", torch.optim.SGD(net.parameters())) == {"o.": Role.TRAINED}


def test_tensors_without_values_are_named() -> None:
    """A lazy parameter and a tensor on the meta device cannot be kept: nothing is there."""
    lazy = nn.LazyLinear(2).state_dict()
    found = examine({"lazy": lazy, "meta": torch.empty(2, device="meta")})
    assert [str(h) for h in found] == ["lazy.weight not initialised yet", "lazy.bias not initialised yet", "meta on the meta device"]
    assert describe(found).startswith("3 tensors without values: ")


def test_a_container_in_itself_ends() -> None:
    """A state that contains itself is looked at once."""
    state: dict[str, Any] = {"w": torch.tensor(NAN)}
    state["self"] = state
    assert [h.name for h in examine(state)] == ["w"]


@given(st.recursive(st.floats(width=32), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8))
def test_examine_finds_exactly_the_bad_leaves(tree: Any) -> None:
    """In any nesting of dicts and lists the number of tensors found is the number that are NaN or +inf."""
    leaves: list[float] = []

    def build(node: Any) -> Any:
        if isinstance(node, float):
            leaves.append(node)
            return torch.tensor(node)
        return {k: build(v) for k, v in node.items()} if isinstance(node, dict) else [build(v) for v in node]

    state = build(tree)
    assert len(examine(state)) == sum(math.isnan(v) or v == INF for v in leaves)


# -- save and load ----------------------------------------------------------------------------------------------


def test_parts_come_back(tmp_path: Path) -> None:
    """Model, optimizer, scheduler and scaler are restored bit for bit, plain values are in the answer."""
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    keeper = Keeper()
    saved = keeper.save(tmp_path / "step-7.pt", model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, step=7, best=INF)
    assert saved and saved.path == tmp_path / "step-7.pt"
    again, other = trained()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    loaded = keeper.load(tmp_path, model=again, optimizer=other, scheduler=torch.optim.lr_scheduler.StepLR(other, 9))
    assert (loaded.step, loaded.state["best"], loaded.passed) == (7, INF, ())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    state, wanted = other.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(torch.equal(state[i][k], wanted[i][k]) for i in wanted for k in wanted[i])


def test_loaded_optimizer_state_does_not_live_in_the_file(tmp_path: Path) -> None:
    """After loading, the file may be overwritten in place: nothing that trains refers to it."""
    model, optimizer = trained()
    keeper = Keeper()
    path = keeper.save(tmp_path / "a.pt", model=model, optimizer=optimizer).path
    keeper.load(path, model=model, optimizer=optimizer)
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)


def test_file_is_an_ordinary_one(tmp_path: Path) -> None:
    """Whoever has no whynan reads the file with `torch.load(weights_only=True)`, mapped or not."""
    save({"w": torch.arange(3.0), "step": 4}, tmp_path / "x.pt")
    for mmap in (False, True):
        held = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
        assert torch.equal(held["w"], torch.arange(3.0)) and held["step"] == 4


def test_directory_gets_a_name_by_step(tmp_path: Path) -> None:
    """Saving into a directory names the file by its step; without a step that is a mistake of the caller."""
    assert Keeper().save(tmp_path, model=nn.Linear(1, 1), step=12).path.name == "step-00000012.pt"
    with pytest.raises(UsageError, match="is a directory"):
        Keeper().save(tmp_path, model=nn.Linear(1, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda k, p: k.save(p),
        lambda k, p: k.save(p, {"a": 1}, model=nn.Linear(1, 1)),
        lambda k, p: k.load(p, step=3),
        lambda k, p: Keeper(keep=-1),
        lambda k, p: save({}, sys.stdout.buffer),  # type: ignore[arg-type]
        lambda k, p: k.load(p),
    ],
)
def test_misuse_is_said_in_one_line(call: Callable[[Keeper, Path], object], tmp_path: Path) -> None:
    """Wrong arguments raise `UsageError` with one line."""
    with pytest.raises(UsageError) as caught:
        call(Keeper(), tmp_path / "x.pt")
    assert "\n" not in str(caught.value)


def test_unpicklable_state_raises_as_torch_save_does(tmp_path: Path) -> None:
    """What `torch.save` refuses raises its error and leaves nothing behind."""
    with pytest.raises(Exception, match=r"lambda|pickle"):
        Keeper().save(tmp_path / "x.pt", {"f": lambda: 0})
    assert names(tmp_path) == []


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_regular_file_is_left_alone(linked: bool, sharded: bool, tmp_path: Path) -> None:
    """A pipe or a device (`/dev/null`) is neither renamed nor replaced, also behind a link: one line says so."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = tmp_path / "link.pt" if linked else pipe
    if linked:
        path.symlink_to(pipe)
    before = (pipe.lstat(), path.lstat())
    keeper = Keeper(keep_bad=True)
    for step, value in enumerate((1.0, NAN)):
        with pytest.raises(UsageError, match="is no regular file") as caught:
            (keeper.save_sharded if sharded else keeper.save)(path, w=torch.tensor(value), step=step)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="is no regular file"):
        save({"w": torch.ones(1)}, path)
    assert names(tmp_path) == sorted({"pipe", path.name})
    assert [(s.st_ino, s.st_mode) for s in before] == [(s.st_ino, s.st_mode) for s in (pipe.lstat(), path.lstat())]


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_a_state_that_is_nested_too_deeply_is_not_saved(wrap: Callable[[Any], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That is said in a line and the training goes on; the last good one stays."""
    path = tmp_path / "a.pt"
    assert Keeper().save(path, w=torch.ones(1), step=1)
    state: Any = torch.ones(1)
    for _ in range(20_000):
        state = wrap(state)
    saved = Keeper().save(path, w=state, step=2)
    assert not saved and "nested too deeply" in saved.reason
    assert "nested too deeply to be written; the last good one is a.pt; training goes on" in capsys.readouterr().err
    assert names(tmp_path) == ["a.pt"] and Keeper().load(path).step == 1


# -- bad states -------------------------------------------------------------------------------------------------


def test_bad_state_is_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A state with NaN is not written, the last good one stays as it was, tensors and counts are told, nothing raises."""
    model, optimizer = trained()
    keeper = Keeper()
    path = tmp_path / "last.pt"
    keeper.save(path, model=model, optimizer=optimizer, step=1)
    good = path.read_bytes()
    with torch.no_grad():
        model[0].weight[0] = NAN
    saved = keeper.save(path, model=model, optimizer=optimizer, step=2)
    assert not saved and [(h.name, h.nan) for h in saved.bad] == [("model.0.weight", 4)]
    assert path.read_bytes() == good and names(tmp_path) == ["last.pt"]
    said = capsys.readouterr().err
    assert "not saved: last.pt: 1 tensor not finite: model.0.weight 4 nan" in said and "the last good one is last.pt" in said


def test_bad_state_never_pushes_out_a_good_one(tmp_path: Path) -> None:
    """However many bad states come after it, a good one is not rotated away, and is what is loaded."""
    keeper = Keeper(keep=1, keep_bad=True)
    keeper.save(tmp_path / "step-1.pt", w=torch.ones(2), step=1)
    for step in range(2, 8):
        keeper.save(tmp_path / f"step-{step}.pt", w=torch.tensor([NAN, 1.0]), step=step)
    assert (tmp_path / "step-1.pt").exists()
    assert keeper.load(tmp_path).step == 1


def test_bad_state_is_written_beside_only_if_asked(tmp_path: Path) -> None:
    """With `keep_bad` the refused state is at `<name>.bad`, readable, and never taken for a checkpoint."""
    keeper = Keeper(keep_bad=True)
    assert not keeper.save(tmp_path / "a.pt", {"w": torch.tensor(NAN)})
    assert names(tmp_path) == ["a.pt.bad"]
    assert torch.load(tmp_path / "a.pt.bad", weights_only=True)["w"].isnan()
    with pytest.raises(UsageError, match="was not finite when it was saved"):
        keeper.load(tmp_path)


def test_meant_values_can_be_allowed(tmp_path: Path) -> None:
    """NaN placeholders named in `allow` are saved and loaded; others still count."""
    keeper = Keeper(allow=["*.placeholder"])
    assert keeper.save(tmp_path / "a.pt", {"m": {"placeholder": torch.tensor(NAN)}})
    assert keeper.load(tmp_path / "a.pt").state["m"]["placeholder"].isnan()
    assert not keeper.save(tmp_path / "a.pt", {"m": {"other": torch.tensor(NAN)}})


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.0, np.nan]),
        np.array([[1.0, np.inf]], np.float16),
        np.array([1.0, np.nan], np.longdouble),
        np.array([1.0, np.nan], ">f8")[::-1],
        np.array([complex(0, np.nan)]),
    ],
    ids=str,
)
def test_arrays_are_looked_at_like_tensors(array: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A numpy array that is not finite is damage too, whatever its kind and whether it can be written; others are none."""
    array.flags.writeable = False
    saved = Keeper().save(tmp_path / "a.pt", {"ema": [array], "ids": np.arange(3), "names": np.array(["a"], object), "fine": np.ones(2)[::-1]})
    assert [(h.name, h.nan + h.inf) for h in saved.bad] == [("ema.0", 1)]
    assert not names(tmp_path) and "ema.0" in capsys.readouterr().err
    assert Keeper(allow=["ema.*"]).save(tmp_path / "a.pt", {"ema": [array]})


# -- rotation ---------------------------------------------------------------------------------------------------


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    """Of a numbered series the newest N stay, across keepers (a restarted program)."""
    for step in range(6):
        Keeper(keep=3).save(tmp_path / f"step-{step}.pt", w=torch.ones(1), step=step)
    assert names(tmp_path) == ["step-3.pt", "step-4.pt", "step-5.pt"]


def test_newest_is_by_time_of_saving(tmp_path: Path) -> None:
    """After going back to an earlier step, what is saved then is newer than what has a higher number."""
    keeper = Keeper(keep=2)
    for step in (100, 200, 50):
        keeper.save(tmp_path / f"step-{step}.pt", w=torch.ones(1), step=step)
    assert keeper.load(tmp_path).step == 50
    assert names(tmp_path) == ["step-200.pt", "step-50.pt"]


def test_clock_going_back_does_not_reorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint saved after the clock was set back is still the newest."""
    keeper = Keeper()
    keeper.save(tmp_path / "step-1.pt", w=torch.ones(1), step=1)
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    keeper.save(tmp_path / "step-2.pt", w=torch.ones(1), step=2)
    assert keeper.load(tmp_path).step == 2


def test_fixed_name_keeps_earlier_ones(tmp_path: Path) -> None:
    """Saving under one name keeps N-1 earlier ones beside it, and a damaged one falls back on them."""
    keeper = Keeper(keep=3)
    for step in range(5):
        keeper.save(tmp_path / "last.pt", w=torch.full((2,), float(step)), step=step)
    assert len(names(tmp_path)) == 3
    flip(tmp_path / "last.pt", 300)
    loaded = keeper.load(tmp_path / "last.pt")
    assert loaded.step == 3 and [str(p) for p in loaded.passed] == ["last.pt: checksum differs"]


def test_drop_in_replaces_and_removes_nothing(tmp_path: Path) -> None:
    """`save` is `torch.save`: one file under the name, other files stay."""
    for step in range(5):
        assert save({"step": step}, tmp_path / "last.pt")
        assert save({"step": step}, tmp_path / f"step-{step}.pt")
    assert names(tmp_path) == ["last.pt", *(f"step-{s}.pt" for s in range(5))]
    assert torch.load(tmp_path / "last.pt", weights_only=True) == {"step": 4}


def test_only_own_files_are_removed(tmp_path: Path) -> None:
    """Copies, renamed ones, files of plain `torch.save` and other series survive any number of saves."""
    keeper = Keeper(keep=1)
    keeper.save(tmp_path / "step-1.pt", w=torch.ones(1))
    shutil.copy(tmp_path / "step-1.pt", tmp_path / "step-01.pt")
    shutil.copy(tmp_path / "step-1.pt", tmp_path / "best.pt")
    torch.save({"w": 1}, tmp_path / "step-0.pt")
    (tmp_path / "notes-1.txt").write_text("mine")
    keeper.save(tmp_path / "ema-1.pt", w=torch.ones(1))
    for step in range(2, 5):
        keeper.save(tmp_path / f"step-{step}.pt", w=torch.ones(1))
    assert names(tmp_path) == ["best.pt", "ema-1.pt", "notes-1.txt", "step-0.pt", "step-01.pt", "step-4.pt"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=8), st.integers(1, 3))
def test_any_order_of_good_and_bad_saves(tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, bool]], keep: int) -> None:
    """After any sequence of good and bad saves under any names, the last good one is what is loaded."""
    folder = tmp_path_factory.mktemp("any")
    keeper = Keeper(keep=keep, say=lambda text: None)
    last = None
    for number, (name, good) in enumerate(saves):
        saved = keeper.save(folder / f"s-{name}.pt", value=torch.tensor(float(number) if good else NAN))
        assert bool(saved) == good
        last = number if good else last
        assert len(names(folder)) <= keep
    if last is None:
        with pytest.raises(UsageError):
            keeper.load(folder)
    else:
        assert keeper.load(folder).state["value"] == last


# -- damaged files ----------------------------------------------------------------------------------------------


def three(folder: Path) -> Keeper:
    """A keeper with three checkpoints."""
    keeper = Keeper()
    for step in (1, 2, 3):
        keeper.save(folder / f"step-{step}.pt", w=torch.full((400,), float(step)), step=step)
    return keeper


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_flipped_byte_is_passed_over(share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One changed byte anywhere in the archive is noticed, told, and the next older one is loaded."""
    keeper = three(tmp_path)
    mark = marks.read_mark(tmp_path / "step-3.pt")
    assert mark is not None
    flip(tmp_path / "step-3.pt", int(mark.size * share))
    assert keeper.load(tmp_path).step == 2
    assert "passed over step-3.pt: checksum differs" in capsys.readouterr().err


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True))
def test_truncated_file_is_passed_over(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    """A file cut off anywhere in its archive, also to nothing, is passed over."""
    folder = tmp_path_factory.mktemp("cut")
    keeper = three(folder)
    path = folder / "step-3.pt"
    mark = marks.read_mark(path)
    assert mark is not None
    os.truncate(path, int(mark.size * share))
    loaded = keeper.load(folder)
    assert loaded.step == 2
    assert [p.path.name for p in loaded.passed] == ["step-3.pt"]


def marked(folder: Path) -> tuple[Keeper, Path, int]:
    """A keeper with three checkpoints, the newest, and where its mark begins."""
    keeper = three(folder)
    path = folder / "step-3.pt"
    mark = marks.read_mark(path)
    assert mark is not None
    return keeper, path, mark.size


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flipped_bit_in_the_mark_is_passed_over(tmp_path_factory: pytest.TempPathFactory, share: float, bit: int) -> None:
    """The checksum has one of its own: a mark that is not as it was written is told, and is not that of a foreign file."""
    keeper, path, begin = marked(tmp_path_factory.mktemp("flip"))
    data = bytearray(path.read_bytes())
    data[begin + int((len(data) - begin) * share)] ^= 1 << bit
    path.write_bytes(data)
    loaded = keeper.load(path.parent)
    assert loaded.step == 2 and loaded.passed[0].why.startswith("checksum differs")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data, begin: data[:-1], "truncated: 1 bytes of its end are missing"),
        (lambda data, begin: data[:-10], "truncated: 10 bytes of its end are missing"),
        (lambda data, begin: data[:begin], "truncated: "),
        (lambda data, begin: data + b"junk" * 50, "checksum differs: 200 bytes follow its end"),
    ],
)
def test_an_end_that_is_not_as_it_was_is_passed_over(change: Callable[[bytes, int], bytes], why: str, tmp_path: Path) -> None:
    """A file cut off inside its mark, or with bytes behind it, is told, also by its name alone."""
    keeper, path, begin = marked(tmp_path)
    path.write_bytes(change(path.read_bytes(), begin))
    loaded = keeper.load(tmp_path)
    assert loaded.step == 2 and loaded.passed[0].why.startswith(why)
    with pytest.raises(UsageError, match=why):
        keeper.load(path, exact=True)


def test_a_mark_without_a_seal_is_read(tmp_path: Path) -> None:
    """Files of the first versions stay good."""
    keeper, path, begin = marked(tmp_path)
    data = path.read_bytes()
    comment = re.sub(rb', "seal": \d+', b"", data[begin:])
    path.write_bytes(data[: begin - 2] + struct.pack("<H", len(comment)) + comment)
    assert keeper.load(tmp_path).step == 3 and not keeper.load(tmp_path).passed


def _moments_of_another() -> dict[str, Any]:
    """The state of an optimizer of another model, of as many weights."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor, torch.optim.ASGD, torch.optim.LBFGS])
def test_moments_of_every_shape_that_torch_makes_fit(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    """Numbers, moments as large as their weight, and factors of them: nothing of an optimizer's own is refused."""
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    optimizer.step(lambda: (loss := model(torch.randn(5, 4)).square().sum(), loss.backward())[0])  # type: ignore[arg-type]
    keeper = Keeper()
    keeper.save(tmp_path / "step-1.pt", optimizer=optimizer)
    assert not keeper.load(tmp_path, optimizer=optimizer).passed


def others() -> dict[str, dict[str, Any]]:
    """States that are healthy and belong to something else."""
    model, optimizer = trained()
    fewer = torch.optim.AdamW(list(model.parameters())[:2]).state_dict()
    return {
        "shapes": {"model": nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).state_dict(), "optimizer": optimizer.state_dict()},
        "keys": {"model": nn.Linear(2, 1).state_dict(), "optimizer": optimizer.state_dict()},
        "groups": {"model": {k: v + 1 for k, v in model.state_dict().items()}, "optimizer": fewer},
        "moments": {"model": model.state_dict(), "optimizer": _moments_of_another()},
        "none": {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": []}},
        "scheduler": {"model": {k: v + 1 for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict(), "scheduler": 3},
        "text": {"model": "text", "optimizer": optimizer.state_dict()},
    }


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("shapes", "'model' does not fit: 0.weight is [3, 5] in the file and [3, 4] here"),
        ("keys", "'model' does not fit: the file has no 0.weight"),
        ("groups", "'optimizer' does not fit: its groups hold [2] parameters in the file and [6] here"),
        ("moments", "'optimizer' does not fit: exp_avg of parameter 0 is [3, 5] in the file, and the parameter [3, 4] here"),
        ("none", "'optimizer' does not fit: its groups hold [] parameters in the file and [6] here"),
        ("scheduler", "'scheduler' does not fit: "),
        ("text", "'model' does not fit: "),
    ],
)
def test_what_does_not_fit_is_passed_over_and_changes_nothing(which: str, why: str, tmp_path: Path) -> None:
    """A newer file of another model: no part of it is handed out, and the newest that fits is loaded."""
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    keeper, parts = Keeper(), {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    other = {"scheduler": scheduler.state_dict(), **others()[which]}
    keeper.save(tmp_path / "alone" / "step-9.pt", other)
    before = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
    with pytest.raises(UsageError, match=re.escape(why)):
        keeper.load(tmp_path / "alone", **parts)
    assert str({name: part.state_dict() for name, part in parts.items()}) == str(before)
    keeper.save(tmp_path / "both" / "step-1.pt", **parts)
    keeper.save(tmp_path / "both" / "step-9.pt", other)
    loaded = keeper.load(tmp_path / "both", **parts)
    assert loaded.path.name == "step-1.pt" and why in str(loaded.passed[0])


def test_names_that_a_hook_translates_fit(tmp_path: Path) -> None:
    """What the names say is no verdict where the model itself knows better."""

    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], *rest: Any) -> None:
            state["weight"] = state.pop("old", state.get("weight"))
            super()._load_from_state_dict(state, *rest)

    model = Renamed(2, 1, bias=False)
    Keeper().save(tmp_path / "x.pt", model={"old": torch.full((1, 2), 5.0)})
    Keeper().load(tmp_path / "x.pt", model=model)
    assert model.weight.tolist() == [[5.0, 5.0]]


def test_a_name_that_is_too_long_is_a_failure_of_the_disk(tmp_path: Path) -> None:
    """`save` answers false with the reason, `load` finds nothing there."""
    model, _ = trained()
    path = tmp_path / ("x" * 300 + ".pt")
    assert "too long" in Keeper().save(path, model=model).reason
    assert "too long" in Keeper().save_sharded(path, model=model).reason
    with pytest.raises(UsageError, match="no checkpoint in"):
        Keeper().load(path, model=model)


def test_truncated_file_by_name_is_told(tmp_path: Path) -> None:
    """A file asked for by name that cannot be read is told, and the newest of its series is taken instead."""
    keeper = three(tmp_path)
    os.truncate(tmp_path / "step-3.pt", 500)
    loaded = keeper.load(tmp_path / "step-3.pt")
    assert loaded.step == 2 and "cannot be read" in loaded.passed[0].why
    with pytest.raises(UsageError, match="no healthy checkpoint"):
        keeper.load(tmp_path / "step-3.pt", exact=True)


def test_older_one_asked_for_by_name_is_taken(tmp_path: Path) -> None:
    """A healthy file asked for by name is the one that is loaded, and nothing newer replaces it if it is damaged."""
    keeper = three(tmp_path)
    assert keeper.load(tmp_path / "step-2.pt").step == 2
    flip(tmp_path / "step-2.pt", 300)
    assert keeper.load(tmp_path / "step-2.pt").step == 1


def test_nothing_healthy_is_one_line(tmp_path: Path) -> None:
    """If every one is damaged the error names the newest and why."""
    keeper = three(tmp_path)
    for path in list(tmp_path.iterdir()):
        flip(path, 300)
    with pytest.raises(UsageError, match=r"no healthy checkpoint in .*: step-3.pt: checksum differs"):
        keeper.load(tmp_path)


def test_missing_part_is_passed_over(tmp_path: Path) -> None:
    """A checkpoint without a part that is asked for is not the one to resume from."""
    model, optimizer = trained()
    keeper = Keeper()
    keeper.save(tmp_path / "full-1.pt", model=model, optimizer=optimizer, step=1)
    keeper.save(tmp_path / "weights.pt", model=model)
    loaded = keeper.load(tmp_path, model=model, optimizer=optimizer)
    assert loaded.path.name == "full-1.pt" and loaded.passed[0].why == "has no part named 'optimizer'"


def test_plain_files_are_read_and_judged(tmp_path: Path) -> None:
    """Files of plain `torch.save` are loaded if readable and finite, newest by modification; a bare state dict fits its model."""
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    bad = OrderedDict((k, torch.full_like(v, NAN) if v.is_floating_point() else v) for k, v in model.state_dict().items())
    torch.save(bad, tmp_path / "b.pt")
    torch.save(argparse.Namespace(x=1), tmp_path / "c.pt")
    (tmp_path / "config.json").write_text("{}")
    for number, name in enumerate("abc"):
        os.utime(tmp_path / f"{name}.pt", (number, number))
    loaded = Keeper().load(tmp_path, model=model)
    assert loaded.path.name == "a.pt"
    assert "argparse.Namespace" in loaded.passed[0].why and "tensors not finite: model.0.weight 12 nan" in loaded.passed[1].why


def test_legacy_format_is_read(tmp_path: Path) -> None:
    """The format before torch 1.6 cannot be mapped into memory but is read."""
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert torch.equal(Keeper().load(tmp_path / "old.pth").state["w"], torch.ones(2))


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    """A pickle that runs code is passed over without running it."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="without running code"):
        Keeper().load(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_state_that_needs_code_is_saved_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object that only unpickling reads is written as `torch.save` would, told, and pushes no readable one out."""
    keeper = Keeper(keep=1)
    keeper.save(tmp_path / "step-1.pt", w=torch.ones(1), step=1)
    assert keeper.save(tmp_path / "step-2.pt", args=argparse.Namespace(lr=1), step=2)
    assert "can only be read by running code in it: holds argparse.Namespace" in capsys.readouterr().err
    assert keeper.load(tmp_path).step == 1


@given(st.binary(max_size=40))
def test_foreign_comments_are_no_marks(comment: bytes) -> None:
    """A zip comment by somebody else, or garbage, is not taken for ours."""
    assert marks.parse(comment) is None


def test_mark_is_found_behind_what_looks_like_an_end(tmp_path: Path) -> None:
    """The end record's signature inside tensor data does not mislead the reader of marks."""
    data = torch.frombuffer(bytearray(b"PK\x05\x06" + bytes(16) + struct.pack("<H", 4) + b"none"), dtype=torch.uint8)
    path = Keeper().save(tmp_path / "x.pt", data=data).path
    mark = marks.read_mark(path)
    assert mark is not None and marks.intact(path, mark) == ""


# -- killed, full, left over ------------------------------------------------------------------------------------


def forked(work: Callable[[], object]) -> int:
    """Run something in a forked child and return its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def big(step: int) -> dict[str, Any]:
    """A state of several megabytes that shows its step in every value."""
    return {"step": step, "a": torch.full((300_000,), float(step)), "b": [torch.full((200, 500), float(step)), torch.full((7,), step)]}


def belongs(loaded: Loaded) -> bool:
    """Whether a state is exactly the one saved at its step."""
    state = loaded.state
    return all(bool((t == state["step"]).all()) for t in (state["a"], *state["b"]))


@pytest.mark.parametrize("name", ["step-{step}.pt", "last.pt"])
def test_killed_at_random_moments(name: str, tmp_path: Path) -> None:
    """A program killed 100 times while it saves loses nothing: what is loaded is whole and the last completed save, or newer."""
    draw = random.Random(name)
    keeper = Keeper(keep=2, say=lambda text: None)
    keeper.save(tmp_path / name.format(step=0), big(0))
    done, lost = 0, 0
    for _ in range(100):
        reader, writer = os.pipe()

        def work(first: int = done + 1, out: int = writer) -> None:
            for step in range(first, first + 1000):
                keeper.save(tmp_path / name.format(step=step), big(step))
                os.write(out, struct.pack("q", step))

        pid = forked(work)
        os.close(writer)
        os.read(reader, 8)  # it is in its stride
        time.sleep(draw.uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        acknowledged = struct.unpack("q", rest[-8:])[0] if (rest := _drain(reader)) else done + 1
        loaded = keeper.load(tmp_path)
        lost += not belongs(loaded) or loaded.state["step"] < acknowledged or bool(loaded.passed)
        done = loaded.state["step"]
    assert lost == 0 and done > 100
    keeper.save(tmp_path / name.format(step=done + 1), big(done + 1))
    assert not [n for n in names(tmp_path) if n.startswith(".")]
    assert len(names(tmp_path)) == 2


def test_second_names_of_killed_saves_are_removed_by_the_next(tmp_path: Path) -> None:
    """A program killed between giving the last save its second name and replacing it leaves two names of one file: the next save keeps one of them."""
    keeper = Keeper(keep=2)
    for step in range(3):
        keeper.save(tmp_path / "last.pt", step=step)
    for _ in range(2):
        series.keep_previous(tmp_path / "last.pt")  # and killed here
    assert len(names(tmp_path)) == 4
    keeper.save(tmp_path / "last.pt", step=3)
    assert len(names(tmp_path)) == 2
    assert sorted(torch.load(path)["step"] for path in tmp_path.iterdir()) == [2, 3]


def _drain(reader: int) -> bytes:
    data = b""
    while chunk := os.read(reader, 1 << 16):
        data += chunk
    os.close(reader)
    return data


def test_full_disk_keeps_the_last_good_one(box: Sandbox) -> None:
    """If the file cannot be written to its end, the last good one stays, the temporary goes, training goes on."""
    keeper = Keeper()
    keeper.save(box.folder / "kept" / "step-1.pt", big(1))

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        saved = keeper.save(box.folder / "kept" / "step-2.pt", big(2))
        again = keeper.save(box.folder / "kept" / "step-3.pt", {"small": torch.ones(3)})
        return 0 if not saved and again and "the disk is full" in saved.reason else 9

    ended = box.in_child(work)
    assert ended.status == 0, ended.err
    assert "not saved: step-2.pt: the disk is full (File too large); the last good one is step-1.pt; training goes on" in ended.err
    assert names(box.folder / "kept") == ["step-1.pt", "step-3.pt"]


@pytest.mark.parametrize("at", ["fsync", "replace", "link"])
def test_failing_system_calls(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call fails, the earlier checkpoint is intact and no temporary stays; without hard links saving goes on."""
    keeper = Keeper(say=lambda text: None)
    keeper.save(tmp_path / "last.pt", big(1))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, at, fail)
        saved = keeper.save(tmp_path / "last.pt", big(2))
    assert bool(saved) == (at == "link")
    loaded = keeper.load(tmp_path / "last.pt")
    assert belongs(loaded) and loaded.state["step"] == (2 if at == "link" else 1)
    assert not [n for n in names(tmp_path) if n.startswith(".")]


def test_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a save is raised, the temporary is gone, the earlier checkpoint stays."""
    keeper = three(tmp_path)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keeper.save(tmp_path / "step-4.pt", w=torch.ones(1))
    assert names(tmp_path) == ["step-1.pt", "step-2.pt", "step-3.pt"]


def test_leftovers_of_the_dead_are_cleaned(tmp_path: Path) -> None:
    """What a killed save left goes at the next save; what a living one writes stays, and so do files of others."""
    dead, alive = atomic.temporary_beside(tmp_path / "a.pt"), atomic.temporary_beside(tmp_path / "b.pt")
    for path in (dead, alive, tmp_path / ".other.tmp"):
        path.write_bytes(b"half")
    folder = atomic.temporary_beside(tmp_path / "c")
    folder.mkdir()
    (folder / "shard").write_bytes(b"half")
    reader, writer = os.pipe()
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, str(alive)], stdin=reader, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        Keeper().save(tmp_path / "a.pt", w=torch.ones(1))
        assert names(tmp_path) == sorted([alive.name, ".other.tmp", "a.pt"])
        os.close(writer)
    os.close(reader)
    Keeper().save(tmp_path / "a.pt", w=torch.ones(1))
    assert alive.name not in names(tmp_path)


def test_temporaries_are_never_loaded(tmp_path: Path) -> None:
    """A whole file under a temporary name was never published: it is not a checkpoint."""
    path = Keeper().save(tmp_path / "a.pt", w=torch.ones(1)).path
    path.rename(atomic.temporary_beside(path))
    with pytest.raises(UsageError, match="no checkpoint in"):
        Keeper().load(tmp_path)


# -- series -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_names_of_a_series_differ_in_the_last_number(a: int, b: int) -> None:
    """The last number is the counter; numbers before it tell series apart."""
    assert series.series_of(Path(f"run-{a}.pt")) == series.series_of(Path(f"run-{b}.pt"))
    assert (series.series_of(Path(f"fold{a}-{b}.pt")) == series.series_of(Path(f"fold{b}-{a}.pt"))) == (a == b)


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------


def test_sharded_directory_comes_back(tmp_path: Path) -> None:
    """One process: model, optimizer (also into a fresh one), scheduler and plain values come back; N directories stay."""
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    keeper = Keeper(keep=2)
    for step in range(4):
        assert keeper.save_sharded(tmp_path / f"step-{step}", model=model, optimizer=optimizer, scheduler=scheduler, step=step)
    assert names(tmp_path) == ["step-2", "step-3"]
    fresh = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    other = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    loaded = keeper.load(tmp_path, model=fresh, optimizer=other)
    assert (loaded.step, loaded.state["step"]) == (3, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_damaged_shards_are_passed_over(tmp_path: Path) -> None:
    """A changed byte, a missing shard and a cut one are told, and the last healthy directory is loaded."""
    keeper = Keeper(keep=4, say=lambda text: None)
    for step in range(4):
        keeper.save_sharded(tmp_path / f"step-{step}", w=torch.full((50,), float(step)), step=step)
    flip(tmp_path / "step-3" / "__0_0.distcp", 200)
    (tmp_path / "step-2" / "__0_0.distcp").unlink()
    os.truncate(tmp_path / "step-1" / "__0_0.distcp", 100)
    loaded = keeper.load(tmp_path)
    assert (loaded.step, float(loaded.state["w"][0])) == (0, 0.0)
    assert [p.why for p in loaded.passed] == ["checksum of __0_0.distcp differs", "__0_0.distcp: No such file or directory", "__0_0.distcp is truncated"]


def test_a_damaged_manifest_and_another_model_are_passed_over_in_shards(tmp_path: Path) -> None:
    """The same in directories: what the keeper wrote about one is sealed, and one that does not fit changes nothing."""
    model, optimizer = trained()
    keeper = Keeper()
    for step in (1, 2):
        assert keeper.save_sharded(tmp_path / f"dcp-{step}", model=model, optimizer=optimizer, step=step)
    flip(tmp_path / "dcp-2" / ".whynan.json", 40)
    keeper.save_sharded(tmp_path / "dcp-3", model=nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), step=3)
    before = copy.deepcopy(model.state_dict())
    loaded = keeper.load(tmp_path, model=model)
    assert loaded.path.name == "dcp-1"
    assert [p.why for p in loaded.passed] == [
        "'model' does not fit: model.0.weight is [3, 5] in the files and [3, 4] here",
        "checksum differs: that of .whynan.json",
    ]
    assert str(model.state_dict()) == str(before)


def test_state_that_torch_makes_for_a_save_is_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch makes an untouched optimizer's state by a step of rate 0: nothing is said of it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with whynan.watch(model, optimizer, files=False) as guard:
        assert guard.save_sharded(tmp_path / "dcp-1", model=model, optimizer=optimizer)
    assert capsys.readouterr().err == ""


def test_bad_shard_is_refused(tmp_path: Path) -> None:
    """A state that is not finite makes no directory; the same name saved twice keeps the earlier one aside."""
    keeper = Keeper(say=lambda text: None)
    assert keeper.save_sharded(tmp_path / "last", w=torch.ones(2), step=1)
    assert not keeper.save_sharded(tmp_path / "last", w=torch.tensor([NAN, 1.0]), step=2)
    assert keeper.load(tmp_path / "last").step == 1
    assert keeper.save_sharded(tmp_path / "last", w=torch.ones(2), step=3)
    assert names(tmp_path) == ["last", "last.previous-1"]
    assert keeper.load(tmp_path / "last").step == 3


def test_plain_directories_are_read_and_judged(tmp_path: Path) -> None:
    """Directories of plain `dcp.save` are loaded if finite, and nothing in their metadata is executed."""
    import pickle

    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    for number, value in enumerate((1.0, NAN)):
        save_shards({"w": torch.full((2,), value), "n": number}, checkpoint_id=tmp_path / f"d{number}", no_dist=True)
        os.utime(tmp_path / f"d{number}", (number, number))
    loaded = Keeper(say=lambda text: None).load(tmp_path)
    assert loaded.path.name == "d0" and loaded.state["n"] == 0 and loaded.passed[0].why == "1 tensor not finite: w 2 nan"
    (tmp_path / "d0" / ".metadata").write_bytes(pickle.dumps(_Makes(str(tmp_path / "owned"))))
    with pytest.raises(UsageError):
        Keeper(say=lambda text: None).load(tmp_path)
    assert not (tmp_path / "owned").exists()


class _Makes:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_optimizer_needs_its_model_in_shards(tmp_path: Path) -> None:
    """An optimizer's shards are named by its model's weights: without the model that is a mistake of the caller."""
    _, optimizer = trained()
    with pytest.raises(UsageError, match="together with its model"):
        Keeper().save_sharded(tmp_path / "x", optimizer=optimizer)


def test_full_disk_leaves_the_last_directory(box: Sandbox) -> None:
    """Shards that cannot be written leave the last good directory and no temporary."""
    keeper = Keeper()
    keeper.save_sharded(box.folder / "kept" / "step-1", big(1))

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        return 0 if not keeper.save_sharded(box.folder / "kept" / "step-2", big(2)) else 9

    ended = box.in_child(work)
    assert ended.status == 0, ended.err
    assert "not saved: step-2" in ended.err and names(box.folder / "kept") == ["step-1"]


def ranks(folder: Path, work: Callable[[int], None], world: int = 2) -> list[int]:
    """Run something in several processes of one gloo group; return their exit statuses."""
    import torch.distributed as dist

    def start(rank: int) -> None:
        signal.alarm(100)  # a rank that waits for ever is killed, and the test fails
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        try:
            work(rank)
        except BaseException:
            import traceback

            (folder / f"error-{rank}").write_text(traceback.format_exc())
            raise
        dist.destroy_process_group()

    children = [forked(lambda rank=rank: start(rank)) for rank in range(world)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def test_two_ranks_agree(tmp_path: Path) -> None:
    """Two ranks with sharded tensors: saved together, refused together if one shard is bad, loaded together past a damaged one."""
    home = tmp_path / "kept"
    said = tmp_path / "said"

    def work(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        keeper = Keeper(keep=2, say=lambda text: said.open("a").write(f"{rank} {text}\n"))

        def state(step: int, bad: bool = False) -> Any:
            whole = torch.arange(8.0) + step
            shards = distribute_tensor(whole, mesh, [Shard(0)])
            if bad and rank == 1:
                shards.to_local()[0] = NAN
            return shards

        for step in range(3):
            assert keeper.save_sharded(home / f"step-{step}", w=state(step), step=step)
        refused = keeper.save_sharded(home / "step-3", w=state(3, bad=True), step=3)
        assert not refused and [(h.name, h.nan) for h in refused.bad] == [("rank 1: w", 1)]
        if rank == 0:
            flip(home / "step-2" / "__1_0.distcp", 300)
        torch.distributed.barrier()
        loaded = keeper.load(home)
        assert loaded.step == 1 and torch.equal(loaded.state["w"], torch.arange(8.0) + 1)
        assert [p.why for p in loaded.passed] == ["checksum of __1_0.distcp differs"]

    ended = ranks(tmp_path, work)
    errors = [p.read_text() for p in sorted(tmp_path.glob("error-*"))]
    assert ended == [0, 0], "\n".join(errors)
    assert names(home) == ["step-1", "step-2"]
    assert {line.split()[0] for line in said.read_text().splitlines()} == {"0"}


def test_killed_while_saving_shards(tmp_path: Path) -> None:
    """A program killed 20 times while it saves directories finds the last completed one, or a newer."""
    draw = random.Random(5)
    keeper = Keeper(keep=2, say=lambda text: None)
    keeper.save_sharded(tmp_path / "last", big(0))
    done = 0
    for _ in range(20):
        reader, writer = os.pipe()

        def work(first: int = done + 1, out: int = writer) -> None:
            for step in range(first, first + 1000):
                keeper.save_sharded(tmp_path / "last", big(step))
                os.write(out, struct.pack("q", step))

        pid = forked(work)
        os.close(writer)
        os.read(reader, 8)
        time.sleep(draw.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        acknowledged = struct.unpack("q", rest[-8:])[0] if (rest := _drain(reader)) else done + 1
        loaded = keeper.load(tmp_path / "last")
        assert belongs(loaded) and loaded.state["step"] >= acknowledged
        done = loaded.state["step"]
    assert done >= 20
