"""A folder of checkpoints as a history: the order, the last healthy one, what went bad first; moving bad ones aside; what changed between two."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import (
    Hostile,
    Training,
    collapsed_scaler,
    cut,
    dead,
    inf_weight,
    nan_mean,
    nan_moment,
    nan_weight,
    negative_moment,
    negative_variance,
    save_series,
)
from safetensors.torch import save_file

import whynan
from whynan.forensics.checkpoints import quarantine
from whynan.forensics.checkpoints.comparing import pieces
from whynan.forensics.checkpoints.steps import series_of, step_in_name, step_inside
from whynan.forensics.findings import History, Report


def history(path: object, **options: Any) -> History:
    """The one history of a folder."""
    report = whynan.check(path, **options)
    assert len(report.histories) == 1, report
    return report.histories[0]


def names(told: History) -> list[str]:
    return [Path(m.path).name for m in told.members]


def bad(told: History) -> list[str]:
    return [Path(m.path).name for m in told.members if not m.healthy]


def save(path: Path, step: int, **more: Any) -> Path:
    """One small healthy checkpoint."""
    torch.manual_seed(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"fc.weight": torch.randn(4, 4)}, "step": step} | more, path)
    return path


def test_forty_checkpoints_of_which_seven_are_bad_in_seven_ways(tmp_path: Path) -> None:
    """The last healthy one is named, and every bad one with its own reason."""
    breaks = {9: nan_moment, 14: negative_moment, 35: nan_weight, 36: inf_weight, 38: negative_variance, 39: dead}
    folder = save_series(tmp_path / "run", 40, breaks)
    cut(folder / "step-00037.pt")
    torch.save({"model": {"w.weight": torch.randn(3, 3)}, "x": Hostile(tmp_path / "witness")}, folder / "step-00040.pt")
    told = history(folder)
    assert len(told.members) == 40
    assert told.last_healthy == str(folder / "step-00034.pt")
    assert told.first_bad == str(folder / "step-00009.pt")
    reasons = {int(m.path[-8:-3]): m.unreadable or (m.findings[0].what, m.findings[0].code) for m in told.members if not m.healthy}
    cut_off = reasons.pop(37)
    assert isinstance(cut_off, str) and "cut" in cut_off
    assert reasons == {
        9: ("not-finite", "WN603"),
        14: ("negative-second-moment", "WN603"),
        35: ("not-finite", "WN601"),
        36: ("not-finite", "WN601"),
        38: ("negative-variance", "WN602"),
        39: ("all-zero", ""),
        40: ("dangerous-pickle", ""),
    }
    assert not (tmp_path / "witness").exists()


def test_forty_checkpoints_with_other_damage(tmp_path: Path) -> None:
    """A collapsed scaler, poisoned running statistics, an empty and a zeroed file."""
    folder = save_series(tmp_path / "run", 40, {20: collapsed_scaler, 21: nan_mean, 38: nan_weight, 39: nan_weight})
    (folder / "step-00022.pt").write_bytes(b"")
    (folder / "step-00023.pt").write_bytes(bytes(5000))
    (folder / "step-00040.pt").write_bytes(b"\x00\x01 this is not a checkpoint at all")
    told = history(folder)
    assert Path(told.last_healthy).name == "step-00037.pt"
    assert bad(told) == [f"step-000{n}.pt" for n in (20, 21, 22, 23, 38, 39, 40)]
    assert names(told) == sorted(names(told))


def test_what_went_bad_first_is_said_with_the_last_healthy_before(tmp_path: Path) -> None:
    """The tensor that was still healthy in the one before is named."""
    told = history(save_series(tmp_path, 6, {4: nan_moment, 5: nan_weight, 6: nan_weight}))
    assert told.story[0] == "step-00004.pt: optimizer.state.0.exp_avg: 27 nan of 216 values (healthy until step-00003.pt)"
    assert told.story[1] == "step-00004.pt: the weights in it are finite; what is bad is kept beside them"


def test_where_values_went_bad_is_told_beside_a_file_that_is_only_cut(tmp_path: Path) -> None:
    """A truncated file early on is not the story of the run."""
    save_series(tmp_path, 6, {5: nan_weight, 6: nan_weight})
    cut(tmp_path / "step-00002.pt")
    told = history(tmp_path)
    assert [line.split(":")[0] for line in told.story] == ["step-00002.pt", "step-00005.pt"]
    assert Path(told.last_healthy).name == "step-00004.pt"


def test_growth_before_the_first_bad_one_is_told(tmp_path: Path) -> None:
    """A weight that grew steadily is named with its factor and since when."""
    for step in range(1, 9):
        weight = torch.ones(4, 4) * (12.0 ** max(0, step - 4)) + torch.arange(16.0).view(4, 4) / 100
        save(tmp_path / f"step-{step}.pt", step, model={"grows.weight": weight, "calm.weight": torch.randn(4, 4)})
    save(tmp_path / "step-9.pt", 9, model={"grows.weight": torch.full((4, 4), torch.inf), "calm.weight": torch.randn(4, 4)})
    told = history(tmp_path)
    assert told.growth[0] == "model.grows.weight grew 12x a checkpoint since step 4 (1.15 to 2.074e+04)"
    assert not any("calm" in line for line in told.growth)


def test_the_step_inside_decides_not_the_name(tmp_path: Path) -> None:
    """Names may be anything."""
    for name, step in (("a.pt", 30), ("b.pt", 10), ("c.pt", 20)):
        save(tmp_path / name, step)
    assert names(history(tmp_path)) == ["b.pt", "c.pt", "a.pt"]


def test_numbers_in_names_are_numbers(tmp_path: Path) -> None:
    """ckpt_9 comes before ckpt_10 where nothing inside says so."""
    for number in (10, 9, 100):
        save_file({"fc.weight": torch.randn(4, 4)}, tmp_path / f"ckpt_{number}.safetensors")
    assert names(history(tmp_path)) == ["ckpt_9.safetensors", "ckpt_10.safetensors", "ckpt_100.safetensors"]


def test_without_any_number_the_time_decides(tmp_path: Path) -> None:
    """The modification time is the last resort."""
    for i, name in enumerate(("z", "m", "a")):
        save_file({"fc.weight": torch.randn(4, 4)}, tmp_path / f"{name}.safetensors")
        os.utime(tmp_path / f"{name}.safetensors", (1000 + i, 1000 + i))
    assert names(history(tmp_path)) == ["z.safetensors", "m.safetensors", "a.safetensors"]


def test_one_that_cannot_be_asked_is_placed_by_its_name(tmp_path: Path) -> None:
    """Steps inside that are a hundred times the numbers in the names do not confuse a truncated one."""
    for epoch in range(1, 6):
        save(tmp_path / f"epoch_{epoch}.pt", epoch * 100)
    cut(tmp_path / "epoch_3.pt")
    told = history(tmp_path)
    assert names(told) == [f"epoch_{n}.pt" for n in range(1, 6)]
    assert Path(told.last_healthy).name == "epoch_5.pt"


def test_other_files_are_passed_over_and_counted(tmp_path: Path) -> None:
    """Configs, logs and vocabularies are not checkpoints."""
    for step in (1, 2):
        save(tmp_path / f"step-{step}.pt", step)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("a model")
    (tmp_path / "merges.bin").write_bytes(b"\x01\x02\x03")
    report = whynan.check(tmp_path, kind="checkpoint")
    assert names(report.histories[0]) == ["step-1.pt", "step-2.pt"]
    assert report.ok
    assert report.notes == (f"{tmp_path}: passed over 3 other files (README.md, config.json, merges.bin)",)


def test_files_of_one_step_are_one_checkpoint(tmp_path: Path) -> None:
    """An optimizer's file belongs to the model's file with its number; damage in it makes the pair bad."""
    for step in (1, 2, 3):
        state = Training().run(step).state()
        if step == 3:
            nan_moment(state)
        torch.save(state["model"], tmp_path / f"model_{step}.pt")
        torch.save(state["optimizer"], tmp_path / f"optimizer_{step}.pt")
    told = history(tmp_path)
    assert names(told) == ["model_1.pt", "model_2.pt", "model_3.pt"]
    assert bad(told) == ["model_3.pt"]
    assert told.members[2].findings[0].place == "optimizer_3.pt: state.0.exp_avg"


def trainer_folder(folder: Path, step: int, broken: bool = False) -> None:
    """A folder as the Trainer of transformers writes it."""
    folder.mkdir(parents=True)
    state = Training().run(2).state()
    if broken:
        nan_moment(state)
    save_file(state["model"], folder / "model.safetensors")
    torch.save(state["optimizer"], folder / "optimizer.pt")
    torch.save(state["scheduler"], folder / "scheduler.pt")
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": step / 100}))


def test_checkpoint_folders_are_members(tmp_path: Path) -> None:
    """checkpoint-500/ is one checkpoint, sorted by its trainer_state."""
    for step in (1000, 500, 1500):
        trainer_folder(tmp_path / f"checkpoint-{step}", step, broken=step == 1500)
    told = history(tmp_path)
    assert names(told) == ["checkpoint-500", "checkpoint-1000", "checkpoint-1500"]
    assert [m.step for m in told.members] == [500, 1000, 1500]
    assert Path(told.last_healthy).name == "checkpoint-1000"


def test_a_folder_of_files_with_a_step_in_its_name_is_one_checkpoint(tmp_path: Path) -> None:
    """Files of own names in step_10/ belong together."""
    for step in (10, 20):
        save(tmp_path / f"step_{step}" / "weights.pt", step)
        save(tmp_path / f"step_{step}" / "ema.pt", step)
    told = history(tmp_path)
    assert names(told) == ["step_10", "step_20"]


def test_runs_beside_each_other_are_histories_of_their_own(tmp_path: Path) -> None:
    """Two runs in one folder are not mixed."""
    for run in ("a", "b"):
        for step in (1, 2):
            save(tmp_path / run / f"step-{step}.pt", step)
    report = whynan.check(tmp_path)
    assert [Path(h.folder).name for h in report.histories] == ["a", "b"]
    assert [len(h.members) for h in report.histories] == [2, 2]


def test_a_link_and_a_copy_of_another_are_said_and_not_counted(tmp_path: Path) -> None:
    """`last` may be a link or a copy."""
    save_series(tmp_path, 3)
    (tmp_path / "last.pt").symlink_to("step-00003.pt")
    for copy in ("best.pt", "last-v1.pt"):
        shutil.copy(tmp_path / "step-00003.pt", tmp_path / copy)
    told = history(tmp_path)
    assert names(told) == ["step-00001.pt", "step-00002.pt", "step-00003.pt"]
    assert set(told.notes) == {
        "last.pt is a link to step-00003.pt",
        "best.pt holds the same as step-00003.pt",
        "last-v1.pt holds the same as step-00003.pt",
    }


def test_broken_links_and_loops_take_a_line_each(tmp_path: Path) -> None:
    """Neither a hang nor an error."""
    save_series(tmp_path, 2)
    (tmp_path / "gone.pt").symlink_to("nowhere.pt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self.pt").symlink_to("self.pt")
    told = history(tmp_path)
    assert names(told) == ["step-00001.pt", "step-00002.pt"]
    report = whynan.check(tmp_path)
    said = " ".join((*report.notes, *report.histories[0].notes))
    assert "gone.pt" in said and "self.pt" in said and "loop" in said


def test_none_healthy_is_said(tmp_path: Path) -> None:
    """There is then nothing to resume from."""
    told = history(save_series(tmp_path, 2, {1: nan_weight, 2: nan_weight}))
    assert told.last_healthy == ""
    assert "none of the 2 checkpoints" in repr(Report((), (told,)))


@pytest.fixture
def broken_series(tmp_path: Path) -> Path:
    return save_series(tmp_path / "run", 4, {3: nan_weight, 4: inf_weight})


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_quarantine_moves_the_bad_ones_and_nothing_else(broken_series: Path, tmp_path: Path) -> None:
    """The bytes are the same, the healthy ones stay."""
    before = (broken_series / "step-00003.pt").read_bytes()
    told = history(broken_series, quarantine=tmp_path / "aside")
    assert listing(broken_series) == ["step-00001.pt", "step-00002.pt"]
    assert listing(tmp_path / "aside") == ["step-00003.pt", "step-00004.pt"]
    assert (tmp_path / "aside" / "step-00003.pt").read_bytes() == before
    assert [Path(b).name for _, b in told.moved] == ["step-00003.pt", "step-00004.pt"]


def test_a_dry_run_moves_nothing_and_says_the_same(broken_series: Path, tmp_path: Path) -> None:
    """What would be moved is what is moved."""
    said = history(broken_series, quarantine=tmp_path / "aside", dry_run=True)
    assert len(listing(broken_series)) == 4 and not (tmp_path / "aside").exists()
    assert history(broken_series, quarantine=tmp_path / "aside").moved == said.moved


def test_a_name_that_is_taken_gets_a_number(broken_series: Path, tmp_path: Path) -> None:
    """Nothing in the folder is overwritten."""
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "step-00003.pt").write_text("mine")
    history(broken_series, quarantine=tmp_path / "aside")
    assert listing(tmp_path / "aside") == ["step-00003.2.pt", "step-00003.pt", "step-00004.pt"]
    assert (tmp_path / "aside" / "step-00003.pt").read_text() == "mine"


def test_quarantine_inside_the_folder_is_not_looked_at_again(broken_series: Path) -> None:
    """A second check with the same folder finds only the healthy ones."""
    history(broken_series, quarantine=broken_series / "bad")
    told = history(broken_series, quarantine=broken_series / "bad")
    assert bad(told) == [] and told.moved == ()


def test_whole_folders_are_moved(tmp_path: Path) -> None:
    """A checkpoint folder moves with all that is in it."""
    for step in (1, 2, 3):
        trainer_folder(tmp_path / "run" / f"checkpoint-{step}", step, broken=step == 3)
    inside = listing(tmp_path / "run" / "checkpoint-3")
    history(tmp_path / "run", quarantine=tmp_path / "aside")
    assert listing(tmp_path / "aside") == ["checkpoint-3"]
    assert listing(tmp_path / "aside" / "checkpoint-3") == inside
    assert listing(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


def test_all_files_of_one_checkpoint_are_moved(tmp_path: Path) -> None:
    """A bad optimizer takes its model with it: half a checkpoint is none."""
    for step in (1, 2):
        state = Training().run(step).state()
        if step == 2:
            nan_moment(state)
        (tmp_path / "run").mkdir(exist_ok=True)
        torch.save(state["model"], tmp_path / "run" / f"model_{step}.pt")
        torch.save(state["optimizer"], tmp_path / "run" / f"optimizer_{step}.pt")
    history(tmp_path / "run", quarantine=tmp_path / "aside")
    assert listing(tmp_path / "aside") == ["model_2.pt", "optimizer_2.pt"]


def another_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every move by name fail as it does between two file systems; names beside each other still work."""
    link, rename = os.link, Path.rename

    def no_link(source: Any, target: Any, **options: Any) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, "another file system")
        link(source, target, **options)

    def no_rename(self: Path, target: Any) -> Path:
        if self.parent != Path(target).parent:
            raise OSError(errno.EXDEV, "another file system")
        return rename(self, target)

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(Path, "rename", no_rename)


def test_to_another_file_system_it_is_copied_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders arrive whole, and only then the source goes."""
    another_file_system(monkeypatch)
    trainer_folder(tmp_path / "checkpoint-3", 3)
    file = save(tmp_path / "a.pt", 1)
    content = file.read_bytes()
    inside = {p.name: p.read_bytes() for p in (tmp_path / "checkpoint-3").iterdir()}
    assert quarantine.move(file, tmp_path / "aside").read_bytes() == content
    moved = quarantine.move(tmp_path / "checkpoint-3", tmp_path / "aside")
    assert {p.name: p.read_bytes() for p in moved.iterdir()} == inside
    assert listing(tmp_path) == ["aside"] and listing(tmp_path / "aside") == ["a.pt", "checkpoint-3"]


def test_a_copy_that_differs_is_thrown_away_and_the_source_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that swallows bytes does not cost the checkpoint."""
    another_file_system(monkeypatch)
    file = save(tmp_path / "a.pt", 1)
    content = file.read_bytes()
    copy = shutil.copy2

    def lossy(source: Any, target: Any, **options: Any) -> Any:
        copy(source, target, **options)
        os.truncate(target, 10)

    monkeypatch.setattr(shutil, "copy2", lossy)
    with pytest.raises(whynan.WhynanError, match="not the same"):
        quarantine.move(file, tmp_path / "aside")
    assert file.read_bytes() == content and listing(tmp_path / "aside") == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev, reason="needs a second file system at /dev/shm")
def test_a_real_second_file_system(broken_series: Path) -> None:
    """As between a disk and a mounted one."""
    aside = Path("/dev/shm") / f"whynan-test-{os.getpid()}"
    content = (broken_series / "step-00003.pt").read_bytes()
    try:
        history(broken_series, quarantine=aside)
        assert (aside / "step-00003.pt").read_bytes() == content
        assert listing(aside) == ["step-00003.pt", "step-00004.pt"] and len(listing(broken_series)) == 2
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def test_a_link_is_moved_as_a_link(tmp_path: Path) -> None:
    """It still leads to the same file, which stays where it is."""
    target = save_series(tmp_path / "store", 1, {1: nan_weight}) / "step-00001.pt"
    save(tmp_path / "run" / "b.pt", 2)
    (tmp_path / "run" / "a.pt").symlink_to("../store/step-00001.pt")
    history(tmp_path / "run", quarantine=tmp_path / "aside")
    assert (tmp_path / "aside" / "a.pt").is_symlink() and (tmp_path / "aside" / "a.pt").resolve() == target.resolve()
    assert target.exists() and listing(tmp_path / "run") == ["b.pt"]


def test_what_still_names_a_moved_one_is_said(broken_series: Path, tmp_path: Path) -> None:
    """A link, DeepSpeed's `latest` and an index are not left dangling in silence."""
    (broken_series / "last.pt").symlink_to("step-00004.pt")
    (broken_series / "latest").write_text("step-00003.pt\n")
    notes = history(broken_series, quarantine=tmp_path / "aside").notes
    assert "last.pt is a link to step-00004.pt, which is no longer there" in notes
    assert "latest still names step-00003.pt" in notes


def test_a_bad_file_named_directly_is_moved_too(broken_series: Path, tmp_path: Path) -> None:
    """And the report says where to."""
    report = whynan.check(broken_series / "step-00003.pt", quarantine=tmp_path / "aside")
    assert report.notes == (f"{broken_series / 'step-00003.pt'} moved to {tmp_path / 'aside' / 'step-00003.pt'}",)
    assert whynan.check(broken_series / "step-00001.pt", quarantine=tmp_path / "aside").notes == ()


def test_a_folder_is_not_moved_into_itself(tmp_path: Path) -> None:
    """It is said and left."""
    trainer_folder(tmp_path / "checkpoint-3", 3, broken=True)
    report = whynan.check(tmp_path / "checkpoint-3", quarantine=tmp_path / "checkpoint-3" / "aside")
    assert "was not moved" in report.notes[0] and (tmp_path / "checkpoint-3" / "model.safetensors").exists()


def test_what_changed_between_two_is_measured_per_tensor(tmp_path: Path) -> None:
    """Ratio of norms, the largest change, what stayed, came, went and changed its shape or dtype."""
    old = {"a.weight": torch.full((10, 10), 2.0), "frozen.weight": torch.ones(3, 3), "gone.weight": torch.ones(2), "wide.weight": torch.ones(2, 2)}
    new = {"a.weight": old["a.weight"] * 1.5, "frozen.weight": torch.ones(3, 3), "new.weight": torch.ones(2), "wide.weight": torch.ones(2, 3)}
    new["a.weight"][0, 0] = 8.0
    save_file(old, tmp_path / "old.safetensors")
    torch.save(new, tmp_path / "new.pt")
    told = whynan.check(tmp_path / "new.pt", against=tmp_path / "old.safetensors").comparisons[0]
    changes = {c.name: c for c in told.changes}
    expected = torch.linalg.vector_norm(new["a.weight"] - old["a.weight"]) / torch.linalg.vector_norm(old["a.weight"])
    assert changes["a.weight"].ratio == pytest.approx(float(expected)) and changes["a.weight"].largest == 6.0
    assert changes["frozen.weight"].unchanged and not changes["a.weight"].unchanged
    assert changes["wide.weight"].note == "shape [2, 2] to [2, 3]"
    assert (told.appeared, told.vanished) == (("new.weight",), ("gone.weight",))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int32])
def test_every_dtype_is_compared_with_its_own_kind_and_with_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """The pieces of two dtypes hold the same values; more values than fit into one piece."""
    old = torch.arange(600_000).remainder(7).add(1).to(torch.float32)
    new = old.clone()
    new[-1] += 4
    torch.save({"a.weight": old.to(dtype)}, tmp_path / "old.pt")
    torch.save({"a.weight": new.to(dtype)}, tmp_path / "new.pt")
    change = whynan.check(tmp_path / "new.pt", against=tmp_path / "old.pt").comparisons[0].changes[0]
    assert change.largest == 4.0 and change.ratio == pytest.approx(4.0 / float(old.norm()))
    if dtype is not torch.complex64:
        torch.save({"a.weight": old}, tmp_path / "old.pt")
        change = whynan.check(tmp_path / "new.pt", against=tmp_path / "old.pt").comparisons[0].changes[0]
        assert change.largest == 4.0 and change.note == f"dtype float32 to {str(dtype)[6:]}"


def test_names_with_and_without_a_wrapper_are_the_same(tmp_path: Path) -> None:
    """DataParallel, torch.compile and a `state_dict` around it do not hide a tensor."""
    weight = torch.randn(3, 3)
    torch.save({"fc.weight": weight}, tmp_path / "plain.pt")
    for i, wrapped in enumerate(({"module.fc.weight": weight}, {"_orig_mod.fc.weight": weight}, {"state_dict": {"fc.weight": weight}})):
        torch.save(wrapped, tmp_path / f"wrapped{i}.pt")
        told = whynan.check(tmp_path / f"wrapped{i}.pt", against=tmp_path / "plain.pt").comparisons[0]
        assert [c.unchanged for c in told.changes] == [True] and not told.appeared and not told.vanished


def test_values_that_are_not_finite_are_left_out_of_a_comparison(tmp_path: Path) -> None:
    """The rest is still compared, and the number left out is said."""
    torch.save({"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, tmp_path / "old.pt")
    torch.save({"a.weight": torch.tensor([[1.0, float("nan")], [3.0, 5.0]])}, tmp_path / "new.pt")
    change = whynan.check(tmp_path / "new.pt", against=tmp_path / "old.pt").comparisons[0].changes[0]
    assert (change.largest, change.note) == (1.0, "1 values that are not finite left out")


def test_against_a_folder_compares_each_with_the_one_before(tmp_path: Path) -> None:
    """Where the updates began to grow is said."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8)
    for step in range(1, 8):
        weight = weight + torch.randn(8, 8) * (0.01 if step < 5 else 0.5)
        torch.save({"a.weight": weight, "step": step}, tmp_path / f"step-{step}.pt")
    report = whynan.check(tmp_path, against=tmp_path)
    assert [(Path(c.against).name, Path(c.path).name) for c in report.comparisons] == [(f"step-{n}.pt", f"step-{n + 1}.pt") for n in range(1, 7)]
    assert "a.weight: updates grew from step-5.pt on" in repr(report)


def test_a_comparison_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """One side is cut off."""
    save(tmp_path / "a.pt", 1)
    cut(save(tmp_path / "b.pt", 2))
    report = whynan.check(tmp_path / "a.pt", against=tmp_path / "b.pt")
    assert report.comparisons[0].unreadable and report.status == 2


def test_pieces_are_the_same_whatever_a_stream_gives() -> None:
    """Joined and cut, nothing is lost."""
    data = bytes(range(256)) * 3
    for width in (1, 7, 256, 1000):
        views = [memoryview(data)[i : i + width] for i in range(0, len(data), width)]
        assert b"".join(bytes(p) for p in pieces(lambda views=views: iter(views), 100)) == data  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=2000.ckpt", 2000),
        ("checkpoint-500", 500),
        ("global_step1200", 1200),
        ("iter_0005000", 5000),
        ("model_12.safetensors", 12),
        ("last.ckpt", None),
    ],
)
def test_names_of_libraries_tell_the_step(name: str, step: int | None) -> None:
    """Lightning, Trainer, DeepSpeed, Megatron."""
    assert step_in_name(name) == step
    assert "#" in series_of(name) or step is None


def test_counters_inside_tell_the_step() -> None:
    """The outermost counter, else the optimizer's."""
    assert step_inside({"global_step": 7, "epoch": 1, "optimizer_states.0.state.0.step": 6.0}) == 7
    assert step_inside({"optimizer_states.0.state.0.step": 6.0, "x.step": 3}) == 6
    assert step_inside({"step": float("nan")}) is None
    assert step_inside({"step": True}) is None


def remote_series(system: Any, root: str, tmp_path: Path) -> None:
    """Put a small broken series where only fsspec can reach it."""
    folder = save_series(tmp_path / "local", 3, {3: nan_weight})
    for file in folder.iterdir():
        system.pipe(f"{root}/{file.name}", file.read_bytes())


def check_remote(address: str) -> None:
    told = history(address)
    assert names(told) == ["step-00001.pt", "step-00002.pt", "step-00003.pt"]
    assert told.last_healthy == f"{address}/step-00002.pt" and bad(told) == ["step-00003.pt"]
    assert whynan.check(f"{address}/step-00003.pt").findings[0].code == "WN601"
    assert whynan.check(f"{address}/step-00002.pt", against=f"{address}/step-00001.pt").comparisons[0].changes


def test_a_folder_in_memory_is_a_history(tmp_path: Path) -> None:
    """fsspec's memory:// works as a folder; moving is for local files."""
    fsspec = pytest.importorskip("fsspec", reason="addresses need fsspec")
    remote_series(fsspec.filesystem("memory"), "/whynan-run", tmp_path)
    check_remote("memory://whynan-run")
    notes = history("memory://whynan-run", quarantine=tmp_path / "aside").notes
    assert notes == ("memory://whynan-run/step-00003.pt was not moved: only local files are moved",)


def test_a_folder_in_an_object_store_is_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3:// against a server on this machine."""
    server_module = pytest.importorskip("moto.server", reason="the object store needs moto[server]")
    s3fs = pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "x"),
            ("AWS_SECRET_ACCESS_KEY", "x"),
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        system = s3fs.S3FileSystem()
        system.mkdir("bucket")
        remote_series(system, "bucket/run", tmp_path)
        check_remote("s3://bucket/run")
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def test_shards_without_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    """Three files of one model are not three steps."""
    for shard in (1, 2, 3):
        save_file({f"l{shard}.weight": torch.randn(3, 3)}, tmp_path / f"model-0000{shard}-of-00003.safetensors")
    report = whynan.check(tmp_path)
    assert not report.histories and [len(c.tensors) for c in report.checked] == [3]


def test_a_folder_that_is_a_checkpoint_and_holds_others_is_a_history(tmp_path: Path) -> None:
    """DeepSpeed names the last of several in `latest`; all of them are checked, and none moves the others with it."""
    for step in (100, 200):
        folder = tmp_path / "run" / f"global_step{step}"
        folder.mkdir(parents=True)
        weight = torch.randn(3, 3) if step == 100 else torch.full((3, 3), float("nan"))
        torch.save({"module": {"fc.weight": weight}, "global_steps": step}, folder / "mp_rank_00_model_states.pt")
    (tmp_path / "run" / "latest").write_text("global_step200")
    told = history(tmp_path / "run")
    assert names(told) == ["global_step100", "global_step200"] and Path(told.last_healthy).name == "global_step100"
    told = history(tmp_path / "run", quarantine=tmp_path / "aside")
    assert listing(tmp_path / "run") == ["global_step100", "latest"] and "latest still names global_step200" in told.notes


def test_a_checkpoint_is_not_moved_to_where_it_is(broken_series: Path) -> None:
    """Nothing gets a new name for nothing."""
    told = history(broken_series, quarantine=broken_series)
    assert told.moved == () and len(listing(broken_series)) == 4


def test_a_tensor_that_lies_otherwise_in_memory_is_not_compared_wrongly(tmp_path: Path) -> None:
    """channels_last against channels_last is compared; against the usual order, and against an expanded view, it is said that it is not."""
    weight = torch.randn(4, 3, 2, 2)
    turned = weight.to(memory_format=torch.channels_last)
    row = torch.randn(1, 6)
    torch.save({"c.weight": weight, "e.weight": row.repeat(5, 1)}, tmp_path / "usual.pt")
    torch.save({"c.weight": turned, "e.weight": row.expand(5, 6)}, tmp_path / "turned.pt")
    told = {c.name: c for c in whynan.check(tmp_path / "turned.pt", against=tmp_path / "usual.pt").comparisons[0].changes}
    assert told["c.weight"].note == "not compared: it lies in memory in another order" and told["c.weight"].ratio is None
    assert told["e.weight"].note == "not compared: one of the two is a view that repeats its values"
    torch.save({"c.weight": turned * 2}, tmp_path / "other.pt")
    assert whynan.check(tmp_path / "other.pt", against=tmp_path / "turned.pt").comparisons[0].changes[0].ratio == pytest.approx(1.0)


def test_a_file_written_while_its_copy_is_compared_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two file systems the comparison may take minutes, and the training goes on."""
    another_file_system(monkeypatch)
    trainer_folder(tmp_path / "checkpoint-3", 3)
    compare = quarantine._compare

    def slowly(source: Path, copy: Path) -> None:
        compare(source, copy)
        (source / "late.pt").write_bytes(b"never copied")

    monkeypatch.setattr(quarantine, "_compare", slowly)
    with pytest.raises(whynan.WhynanError, match="changed while"):
        quarantine.move(tmp_path / "checkpoint-3", tmp_path / "aside")
    assert (tmp_path / "checkpoint-3" / "late.pt").exists() and listing(tmp_path / "aside") == []


def test_a_file_written_after_the_last_look_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was copied and compared is taken away."""
    another_file_system(monkeypatch)
    trainer_folder(tmp_path / "checkpoint-3", 3)
    (tmp_path / "checkpoint-3" / "deep").mkdir()
    (tmp_path / "checkpoint-3" / "deep" / "a.txt").write_text("a")
    take_name = quarantine._take_name

    def slowly(stand_in: Path, target: Path) -> None:
        take_name(stand_in, target)
        (tmp_path / "checkpoint-3" / "late.pt").write_bytes(b"never copied")
        (tmp_path / "checkpoint-3" / "config.json").write_text("changed")

    monkeypatch.setattr(quarantine, "_take_name", slowly)
    with pytest.raises(whynan.WhynanError, match="that stays"):
        quarantine.move(tmp_path / "checkpoint-3", tmp_path / "aside")
    assert listing(tmp_path / "checkpoint-3") == ["config.json", "late.pt"]
    assert (tmp_path / "aside" / "checkpoint-3" / "deep" / "a.txt").read_text() == "a"


def test_text_called_like_a_checkpoint_is_none(tmp_path: Path) -> None:
    """train.pt beside train.en is Portuguese: it is no bad checkpoint, and is never moved."""
    for name in ("train.en", "train.pt", "valid.pt"):
        (tmp_path / "corpus" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_text("bom dia, mundo\n")
    save(tmp_path / "corpus" / "step_1.pt", 1)
    report = whynan.check(tmp_path / "corpus", quarantine=tmp_path / "aside")
    assert report.status == 0 and not (tmp_path / "aside").exists()
    assert len(listing(tmp_path / "corpus")) == 4


def test_a_file_beyond_our_own_limits_is_neither_healthy_nor_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be whole: it is told, it is not the last healthy one, and it stays where it is."""
    from whynan.forensics.checkpoints import pickles

    save(tmp_path / "run" / "step_1.pt", 1)
    save(tmp_path / "run" / "step_2.pt", 2, names=[[str(i)] for i in range(3000)])
    monkeypatch.setattr(pickles, "MOST_OBJECTS", 2000)
    told = history(tmp_path / "run", quarantine=tmp_path / "aside")
    assert [(m.healthy, m.bad) for m in told.members] == [(True, False), (False, False)]
    assert Path(told.last_healthy).name == "step_1.pt" and told.first_bad == "" and told.moved == ()
    said = repr(whynan.check(tmp_path / "run"))
    assert "checkpoints, 0 bad, 1 not read" in said and "unread" in said and "the newest" not in said


@pytest.mark.parametrize("failure", [errno.EACCES, errno.EIO])
def test_a_file_that_the_system_does_not_give_is_not_moved(failure: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions and failing disks say nothing of what is in it."""
    for step in (1, 2):
        save(tmp_path / "run" / f"step_{step}.pt", step)
    there = io.open

    def failing(path: Any, *rest: Any, **options: Any) -> Any:
        if str(path).endswith("step_2.pt"):
            raise OSError(failure, os.strerror(failure))
        return there(path, *rest, **options)

    monkeypatch.setattr("whynan.forensics.addresses.io.open", failing)
    told = history(tmp_path / "run", quarantine=tmp_path / "aside")
    assert told.moved == () and told.members[1].unreadable == os.strerror(failure).lower() and not told.members[1].bad


def test_a_pointer_of_git_lfs_is_told_and_not_moved(tmp_path: Path) -> None:
    """A clone without its files is no damage."""
    for step in (1, 2):
        save(tmp_path / "run" / f"step_{step}.pt", step)
    (tmp_path / "run" / "step_3.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    told = history(tmp_path / "run", quarantine=tmp_path / "aside")
    assert "git lfs pull" in told.members[2].unreadable and told.moved == ()


def test_a_shard_that_is_missing_is_damage(tmp_path: Path) -> None:
    """What an index names in vain was lost: the checkpoint is bad."""
    import torch.distributed.checkpoint as dcp

    for step in (1, 2):
        dcp.save({"w.weight": torch.randn(4, 4)}, checkpoint_id=tmp_path / f"step_{step}", no_dist=True)
    next((tmp_path / "step_2").glob("*.distcp")).unlink()
    assert [m.bad for m in history(tmp_path).members] == [False, True]


def test_steps_that_start_again_each_epoch_are_ordered_by_the_epoch_first(tmp_path: Path) -> None:
    """{epoch: 1, step: 500} comes after {epoch: 0, step: 1000}."""
    for epoch in (0, 1):
        for step in (500, 1000):
            weight = torch.full((4, 4), float("nan")) if (epoch, step) == (1, 500) else torch.randn(4, 4)
            save(tmp_path / f"e{epoch}_s{step}.pt", step, epoch=epoch, model={"fc.weight": weight})
    told = history(tmp_path)
    assert names(told) == ["e0_s500.pt", "e0_s1000.pt", "e1_s500.pt", "e1_s1000.pt"]
    assert Path(told.first_bad).name == "e1_s500.pt" and "healthy until e0_s1000.pt" in told.story[0]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("weights.04-0.30.pt", 4),
        ("vit16-300.pt", 300),
        ("unit8_12.pt", 12),
        ("it_40.pt", 40),
        ("ep12.pt", 12),
        ("epoch=3-val_loss=0.42.ckpt", 3),
        ("sd1.5.ckpt", None),
    ],
)
def test_what_looks_like_a_step_and_is_none(name: str, step: int | None) -> None:
    """Losses and versions, and words that end in `it`."""
    assert step_in_name(name) == step


def test_a_log_in_a_step_folder_is_looked_at(tmp_path: Path) -> None:
    """And what is none of ours there is passed over and counted."""
    for step in (1, 2):
        save(tmp_path / f"step-{step}" / "weights.pt", step)
        lines = [json.dumps({"step": i, "loss": 1.0 / (i + 1) if i < 6 else float("nan")}) for i in range(10)]
        (tmp_path / f"step-{step}" / "metrics.jsonl").write_text("\n".join(lines))
        (tmp_path / f"step-{step}" / "note.xyz").write_bytes(b"\0\1")
    report = whynan.check(tmp_path)
    assert names(report.histories[0]) == ["step-1", "step-2"]
    assert [(c.name, c.bad) for c in report.checked] == [("metrics.jsonl", True)] * 2
    assert any("passed over 2 other files" in note for note in report.notes)


def test_the_losses_in_a_trainer_state_are_looked_at_through_the_folder(tmp_path: Path) -> None:
    """Named itself, or among others: there the newest holds what the older ones do."""
    for step in (100, 200, 300):
        trainer_folder(tmp_path / f"checkpoint-{step}", step)
        told = [{"step": s, "epoch": s / 100, "loss": 2.0 - s / 200 if s < 250 else float("nan")} for s in range(10, step + 1, 10)]
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": told}))
    report = whynan.check(tmp_path)
    assert [c.path for c in report.checked] == [str(tmp_path / "checkpoint-300" / "trainer_state.json")] and report.status == 1
    assert [c.name for c in whynan.check(tmp_path / "checkpoint-300").checked] == ["checkpoint-300", "trainer_state.json"]
    assert whynan.check(tmp_path / "checkpoint-200").ok
    assert whynan.check(tmp_path, kind="checkpoint").ok


def test_a_companion_without_a_number_is_not_joined_beside_a_series(tmp_path: Path) -> None:
    """optimizer.pt beside step_100.pt and best.pt may belong to any of them: bad state in it does not make best.pt bad."""
    for name in ("best.pt", "step_100.pt", "step_200.pt"):
        save(tmp_path / name, 1)
    torch.save({"state": {0: {"exp_avg": torch.tensor([[float("nan")]])}}, "param_groups": [{"lr": 0.1}]}, tmp_path / "optimizer.pt")
    assert bad(history(tmp_path)) == ["optimizer.pt"]
    for name in ("step_100.pt", "step_200.pt"):
        (tmp_path / name).unlink()
    assert [c.name for c in whynan.check(tmp_path).checked] == ["best.pt"]


def test_a_dry_run_names_no_target_twice(tmp_path: Path) -> None:
    """Two runs with the same names."""
    for run in ("a", "b"):
        save_series(tmp_path / run, 2, {2: nan_weight})
    said = [b for h in whynan.check(tmp_path, quarantine=tmp_path / "aside", dry_run=True).histories for _, b in h.moved]
    done = [b for h in whynan.check(tmp_path, quarantine=tmp_path / "aside").histories for _, b in h.moved]
    assert [Path(b).name for b in said] == ["step-00002.pt", "step-00002.2.pt"] and said == done


def test_a_link_reached_through_a_link_still_leads_to_its_file(tmp_path: Path) -> None:
    """`..` in it is taken from where it really lies."""
    target = save_series(tmp_path / "deep" / "store", 1, {1: nan_weight}) / "step-00001.pt"
    save(tmp_path / "deep" / "run" / "b.pt", 2)
    (tmp_path / "deep" / "run" / "a.pt").symlink_to("../store/step-00001.pt")
    (tmp_path / "short").symlink_to("deep/run")
    history(tmp_path / "short", quarantine=tmp_path / "aside")
    assert (tmp_path / "aside" / "a.pt").resolve() == target.resolve()


def test_a_remote_system_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One path that fails in the middle ends neither the folder nor the run, and is no fault of ours."""
    fsspec = pytest.importorskip("fsspec", reason="addresses need fsspec")
    system = fsspec.filesystem("memory")
    remote_series(system, "/whynan-flaky", tmp_path)
    there = type(system).isdir

    def flaky(self: Any, path: str) -> bool:
        if path.endswith("step-00002.pt"):
            raise TimeoutError("the bucket does not answer")
        return bool(there(self, path))

    monkeypatch.setattr(type(system), "isdir", flaky)
    told = history("memory://whynan-flaky")
    assert names(told) == ["step-00001.pt", "step-00003.pt"] and "step-00002.pt: the bucket does not answer" in told.notes
    report = whynan.check("memory://whynan-flaky/step-00002.pt")
    assert report.checked[0].unreadable == "the bucket does not answer" and report.status == 2


def test_where_updates_grew_is_in_the_report_itself(tmp_path: Path) -> None:
    """Also for programs that read the JSON."""
    weight = torch.ones(4, 4)
    for step in range(1, 6):
        weight = weight + (0.01 if step < 4 else 5.0)
        torch.save({"a.weight": weight, "step": step}, tmp_path / f"step-{step}.pt")
    report = whynan.check(tmp_path, against=tmp_path)
    assert report.growth and report.growth[0].startswith("a.weight: updates grew from step-4.pt on")
    assert report.to_json()["growth"] == list(report.growth) and report.growth[0].split(":")[0] in repr(report)


def test_a_folder_that_deepspeed_wrote_is_a_history() -> None:
    """Files of the library itself, kept in tests/files: the step before the NaN is the last healthy one."""
    folder = Path(__file__).parent / "files" / "deepspeed"
    [history] = whynan.check(folder).histories
    assert [m.form.split(",")[0] for m in history.members] == ["DeepSpeed", "DeepSpeed"]
    assert history.last_healthy.endswith("global_step3")
    assert [(f.place, f.code) for f in history.members[1].findings if f.severity == "bad"] == [("module.0.weight", "WN601")]
    assert {t.name for t in history.members[0].tensors} >= {"module.0.weight", "module.2.bias"}


def test_moments_of_the_first_steps_grow_by_nature(tmp_path: Path) -> None:
    """Adam's averages start at zero: that they grow says nothing of a divergence."""
    for step in range(1, 7):
        save(tmp_path / f"step-{step}.pt", step, optimizer={"state": {0: {"exp_avg_sq": torch.full((4, 4), 2.0**step)}}}, model={"a.weight": torch.randn(4, 4)})
    save(tmp_path / "step-7.pt", 7, model={"a.weight": torch.full((4, 4), torch.nan)})
    told = history(tmp_path)
    assert told.first_bad.endswith("step-7.pt") and not told.growth
