"""Checkpoints of every format, as their own libraries write them, are read without running them and counted exactly."""

from __future__ import annotations

import argparse
import builtins
import collections
import dataclasses
import enum
import importlib.util
import itertools
import json
import math
import os
import pathlib
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import checkpoint_files as files
import hostile

import whynan
from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.checkpoints import pickles, walking
from whynan.forensics.checkpoints.contents import Contents, Entry
from whynan.forensics.checkpoints.dtypes import FORMATS
from whynan.forensics.checkpoints.kernels import Kernel, NumpyKernel, PlainKernel, TorchKernel
from whynan.forensics.checkpoints.memory import from_state
from whynan.forensics.checkpoints.opening import open_checkpoint, recognise
from whynan.forensics.checkpoints.scan import scan
from whynan.forensics.checkpoints.sources import Held, Source
from whynan.forensics.checkpoints.tally import Tally, count_piece
from whynan.forensics.wishes import Wishes
from whynan.records import TensorStats
from whynan.tripwire.values import stats

KERNELS = [NumpyKernel(), TorchKernel(), PlainKernel()]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
OTHERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def opened(path: Path) -> Contents:
    return open_checkpoint(Place.of(path))


def counted(path: Path, **wishes: Any) -> dict[str, TensorStats]:
    return {s.name: s for s in scan(opened(path), Wishes(**wishes))}


def saved(path: Path, state: object, **how: Any) -> Path:
    torch.save(state, path, **how)
    return path


def by_torch(name: str, tensor: torch.Tensor) -> TensorStats:
    return stats(name, tensor)


def refusal(path: Path) -> str:
    with pytest.raises(Unreadable) as caught:
        scan(opened(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def special(dtype: torch.dtype, size: int = 1000) -> torch.Tensor:
    """Numbers with NaN, infinities and zeros of both signs among them."""
    torch.manual_seed(1)
    tensor = torch.randn(size)
    tensor[::7], tensor[3::50], tensor[5::60], tensor[11::70], tensor[13::80] = 0.0, -0.0, math.nan, math.inf, -math.inf
    return tensor.to(dtype)


# what is counted


@pytest.mark.parametrize("dtype", FLOATS + OTHERS + COMPLEX, ids=str)
def test_every_dtype_is_counted_as_the_tripwire_counts_it(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = special(torch.float32).abs().nan_to_num(3, 5, 7) if dtype in OTHERS else special(torch.float32)
    tensor = (torch.complex(tensor.double(), tensor.flip(0).double()) if dtype in COMPLEX else tensor).to(dtype)
    assert counted(saved(tmp_path / "a.pt", {"t": tensor}))["t"] == by_torch("t", tensor)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_numpy_torch_and_the_standard_library_count_the_same(kernel: Kernel, name: str) -> None:
    """Random bytes are numbers of every kind: NaN with any payload, subnormal ones, the least and the greatest."""
    data = bytearray(random.Random(name).randbytes(4096) + bytes(64) + b"\x00\x80" * 32 + b"\xff" * 16)
    assert count_piece(kernel, FORMATS[name], memoryview(data)) == count_piece(KERNELS[2], FORMATS[name], memoryview(data))
    assert count_piece(kernel, FORMATS[name], memoryview(bytes(data))) == count_piece(kernel, FORMATS[name], memoryview(data))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(data=st.binary(min_size=8, max_size=400))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bits_are_counted_as_torch_counts_them(dtype: torch.dtype, data: bytes) -> None:
    whole = bytearray(data[: len(data) // 8 * 8])
    expected = by_torch("t", torch.frombuffer(whole, dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    assert count_piece(KERNELS[0], FORMATS[name], memoryview(whole)).stats("t", name, expected.shape) == expected


@pytest.mark.parametrize("values", [[-1.0, -2.0], [1.0, 2.0], [0.0], [-0.0], [-0.0, -3.0], [0.0, 5.0], [math.nan], [math.inf, -math.inf], [-math.inf, 2.0], []])
def test_tensors_of_one_sign_and_of_nothing_finite_have_the_right_range(values: list[float], tmp_path: Path) -> None:
    tensor = torch.tensor(values)
    assert counted(saved(tmp_path / "a.pt", {"t": tensor}))["t"] == by_torch("t", tensor)


def test_packed_four_bit_floats_are_two_numbers_a_byte() -> None:
    tally = count_piece(KERNELS[0], FORMATS["float4_e2m1fn_x2"], memoryview(bytes([0x7F, 0x10])))
    assert (tally.zeros, tally.min, tally.max, tally.nan) == (1, -6.0, 6.0, 0)


def test_a_tensor_larger_than_a_piece_and_than_a_task_is_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whynan.forensics.checkpoints.scan._TASK", 1 << 20)
    tensor = torch.randn(1_500_001)
    tensor[[0, 700_000, 1_500_000]] = torch.tensor([math.nan, math.inf, -math.inf])
    path = saved(tmp_path / "a.pt", {"t": tensor, "u": tensor[:10].clone()})
    assert counted(path, jobs=3) == counted(path) == {"t": by_torch("t", tensor), "u": by_torch("u", tensor[:10])}


def test_progress_adds_up_to_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    seen: list[int] = []
    counted(saved(tmp_path / "a.pt", {"t": torch.randn(300_000), "u": torch.randn(7)}), tick=seen.append, jobs=2)
    assert sum(seen) == 300_007 * 4 and len(seen) > 2


def test_names_that_are_allowed_are_not_looked_at(tmp_path: Path) -> None:
    assert set(counted(saved(tmp_path / "a.pt", {"mask": torch.tensor([math.nan]), "w": torch.ones(2)}), allow=("ma*",))) == {"w"}


def test_tied_tensors_are_read_once_and_both_told(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    seen: list[int] = []
    found = counted(saved(tmp_path / "a.pt", {"a": shared, "b": shared, "c": shared.view(10, 100)}), tick=seen.append)
    assert sum(seen) == 4000 and found["a"].min == found["b"].min == found["c"].min == by_torch("a", shared).min


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {str(i): torch.randn(1 << 20) for i in range(16)})
    counted(path)
    tracemalloc.start()
    counted(path, jobs=2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20 < path.stat().st_size


# views


VIEWS = {
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second column": lambda x: x[:, ::2],
    "a block": lambda x: x[1:4, 3:9],
    "one column": lambda x: x[:, 2],
    "expanded": lambda x: x[0].expand(5, 20),
    "every third of every second": lambda x: x[::2, ::3].t(),
    "three dimensions with gaps": lambda x: x.view(2, 3, 20)[:, 1:, 4:15:3],
    "empty": lambda x: x[:0],
    "a scalar": lambda x: x[2, 3],
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_counted_without_the_values_between(view: Any, dtype: torch.dtype, zipped: bool, tmp_path: Path) -> None:
    whole = special(torch.float32, 120).view(6, 20)
    tensor = view((torch.complex(whole.double(), whole.double() * 2) if dtype.is_complex else whole).to(dtype))
    assert counted(saved(tmp_path / "a.pt", {"t": tensor}, _use_new_zipfile_serialization=zipped))["t"] == by_torch("t", tensor)


def test_a_view_larger_than_a_block_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whynan.forensics.checkpoints.views._BLOCK", 1000)
    whole = special(torch.float32, 20_000)
    views = {
        "a": whole.view(200, 100)[:, 3:10],
        "b": whole.view(20, 10, 100)[:, 2:5, ::7],
        "c": whole[::3],
        "d": whole.view(4, 5, 1000)[:, :, 500:].transpose(0, 2),
    }
    assert counted(saved(tmp_path / "a.pt", views)) == {n: by_torch(n, t) for n, t in views.items()}


def test_a_view_whose_rows_overlap_is_counted_once_and_said(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"t": torch.randn(10).unfold(0, 4, 1)})
    assert "overlap" in opened(path).notes[0] and counted(path)["t"].shape == (7, 4)


# what torch.save writes


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Config:
    lr: float = 0.5
    sizes: tuple[int, ...] = (1, 2)


class Settings(dict):  # type: ignore[type-arg]
    """As Lightning's AttributeDict."""


class Scaler:
    """As DeepSpeed's loss scaler."""

    def __init__(self) -> None:
        self.cur_scale = 65536.0
        self.history = torch.tensor([1.0, math.nan])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_usual_state_is_read_whole(zipped: bool, protocol: int, tmp_path: Path) -> None:
    state = files.usual_state()
    path = saved(tmp_path / "a.pt", state, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    contents = opened(path)
    expected = {f"model.{n}": t for n, t in state["model"].items()}
    expected |= {f"optimizer.state.{i}.{n}": t for i, slots in state["optimizer"]["state"].items() for n, t in slots.items()}
    assert {s.name: s for s in scan(contents)} == {n: by_torch(n, t) for n, t in expected.items()}
    assert contents.values["optimizer.param_groups.0.lr"] == 1e-3 and contents.values["optimizer.param_groups.0.betas.1"] == 0.999
    assert (contents.values["epoch"], contents.values["note"], contents.values["losses.1"]) == (3, "a run", 0.25)
    assert contents.form == ("torch zip" if zipped else "torch legacy") and contents.size == path.stat().st_size and not contents.notes


def test_classes_that_are_not_known_are_read_as_plain_values(tmp_path: Path) -> None:
    state = {
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("/a/b"), colour=Colour.RED),
        "config": Config(),
        "hyper": Settings(width=8),
        "scaler": Scaler(),
        "queue": collections.deque([1.5, 2.5]),
        "table": collections.defaultdict(list, {"k": [1]}),
        "count": collections.Counter("aab"),
        "set": {7},
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
    }
    contents = opened(saved(tmp_path / "a.ckpt", state))
    values = contents.values
    assert (values["args.lr"], values["args.out"], values["args.colour"]) == (0.1, "/a/b", "red")
    assert (values["config.lr"], values["config.sizes.1"], values["hyper.width"], values["scaler.cur_scale"]) == (0.5, 2, 8, 65536.0)
    assert (values["queue.1"], values["table.k.0"], values["count.a"], values["set.0"], values["device"], values["size.1"]) == (2.5, 1, 2, 7, "cpu", 3)
    assert scan(contents)[0].name == "scaler.history" and scan(contents)[0].nan == 1
    assert "argparse.Namespace" in contents.notes[0] and contents.notes[0].endswith("read as plain values")


def test_a_whole_module_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    model = files.trained()[0]
    assert set(counted(saved(tmp_path / "a.pt", model))) == set(model.state_dict())


def test_numpy_arrays_and_scalars_are_looked_at(tmp_path: Path) -> None:
    state = {
        "a": np.array([[1.0, np.nan], [np.inf, 0]], "f4"),
        "b": np.array([1, 2], ">i4"),
        "c": np.float64(2.5),
        "d": np.int64(-3),
        "e": np.asfortranarray(np.ones((2, 3))),
    }
    state |= {"f": np.array([1.5], ">f8"), "g": np.array([{"x": 1.0}], object), "h": np.bool_(True), "i": np.array([1 + 2j]), "j": np.array(4.0)}
    for protocol in (2, 5):
        contents = opened(saved(tmp_path / "a.pt", state, pickle_protocol=protocol))
        found = {s.name: s for s in scan(contents)}
        assert (found["a"].nan, found["a"].posinf, found["a"].zeros, found["a"].shape) == (1, 1, 1, (2, 2))
        assert (found["b"].max, found["f"].max, found["e"].shape, found["i"].max) == (2.0, 1.5, (2, 3), 2.0)
        assert [contents.values[n] for n in ("c", "d", "g.0.x", "h", "j")] == [2.5, -3, 1.0, True, 4.0]


def test_quantised_sparse_nested_and_meta_tensors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "q": torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.5, 3, torch.quint8),
            "c": torch.quantize_per_channel(torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8),
            "coo": torch.tensor([[0.0, math.nan], [2.0, 0.0]]).to_sparse(),
            "csr": torch.tensor([[0.0, math.inf], [2.0, 0.0]]).to_sparse_csr(),
            "meta": torch.empty(3, device="meta"),
            "parameter": torch.nn.Parameter(torch.ones(2)),
        }
        contents = opened(saved(tmp_path / "a.pt", state))
    found = {s.name: s for s in scan(contents)}
    assert (found["q"].dtype, found["q"].min, found["q"].max) == ("quint8", 3.0, 5.0)
    assert contents.values["q.scale"] == 0.5 and contents.values["q.zero_point"] == 3
    assert found["c.scale"].max == pytest.approx(0.2) and found["c.zero_point"].zeros == 2
    assert (found["coo"].nan, found["csr"].posinf, found["parameter"].max) == (1, 1, 1.0)
    assert any("meta device" in note for note in contents.notes)


def test_a_file_of_a_big_endian_machine_is_turned_round(tmp_path: Path) -> None:
    values = np.array([1.0, np.nan, 3.0, -4.0], ">f4").tobytes()
    path = hostile.torch_zip(
        tmp_path / "a.pt", hostile.named(w=hostile.tensor(hostile.storage(), (4,), (1,)), v=hostile.tensor(hostile.storage(), (2,), (2,))), {"0": values}
    )
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "big.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    found = counted(tmp_path / "big.pt")
    assert (found["w"].nan, found["w"].min, found["w"].max, found["v"].max) == (1, -4.0, 3.0, 3.0)


def test_the_tar_of_the_first_versions_is_what_torch_reads(tmp_path: Path) -> None:
    tensor = torch.tensor([[1.0, math.nan], [3.0, 4.0]], dtype=torch.float64)
    files.write_tar(tmp_path / "old", {"w": tensor, "v": tensor.t()[1], "epoch": 7})
    assert torch.equal(torch.load(tmp_path / "old", weights_only=False)["w"].nan_to_num(), tensor.nan_to_num())
    contents = opened(tmp_path / "old")
    assert contents.form == "torch tar" and contents.values == {"epoch": 7}
    assert {s.name: s for s in scan(contents)} == {"w": by_torch("w", tensor), "v": by_torch("v", tensor.t()[1])}


def test_an_archive_that_was_packed_again_is_read_as_it_was(tmp_path: Path) -> None:
    """Somebody unpacked and compressed it; the storages are then streamed through the unpacker."""
    state = {"w": torch.arange(3_000_000.0), "v": torch.arange(100.0)[10:20]}
    with zipfile.ZipFile(saved(tmp_path / "a.pt", state)) as old, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert counted(tmp_path / "b.pt") == {n: by_torch(n, t) for n, t in state.items()}


def test_torchscript_archives_are_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 3)).save(str(tmp_path / "a.pt"))
    assert set(counted(tmp_path / "a.pt")) == {"weight", "bias"} and opened(tmp_path / "a.pt").form == "TorchScript"


def test_a_storage_without_a_tensor_is_looked_at(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = saved(tmp_path / "a.pt", {"s": torch.FloatStorage([1.0, math.nan])})
    assert (counted(path)["s"].nan, counted(path)["s"].shape) == (1, (2,))


def test_long_lists_of_numbers_are_looked_at_like_tensors(tmp_path: Path) -> None:
    found = counted(saved(tmp_path / "a.pt", {"losses": [0.5] * 5000 + [math.nan]}))
    assert (found["losses"].nan, found["losses"].shape) == (1, (5001,))


def test_a_distributed_tensor_is_read_by_its_local_part(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")
    try:
        tensor = distribute_tensor(torch.tensor([1.0, math.nan]), init_device_mesh("cpu", (1,)), [Replicate()])
        path = saved(tmp_path / "a.pt", {"w": tensor})
    finally:
        torch.distributed.destroy_process_group()
    assert [(s.name, s.nan) for s in scan(opened(path)) if s.nonfinite] == [("w", 1)]


# folders


def test_every_format_is_recognised_by_its_content_under_any_name(tmp_path: Path) -> None:
    kinds = {"zip.pt": "torch zip", "legacy.pt": "torch legacy", "old.tar": "torch tar", "model.safetensors": "safetensors"}
    kinds |= {"distributed": "distributed checkpoint", "shards": "shards", "trainer": "Trainer folder", "deepspeed": "DeepSpeed"}
    for path in files.write_all(tmp_path):
        renamed = path.rename(tmp_path / f"{path.stem}_x.txt")
        assert recognise(Place.of(renamed)) == kinds[path.name]
        assert scan(opened(renamed))


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 100, b"PK\x03\x04" + b"\x00" * 40, b"{}", b"\x80\x09."])
def test_what_is_no_checkpoint_is_not_recognised(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    assert recognise(Place.of(tmp_path / "model.pt")) is None
    assert refusal(tmp_path / "model.pt")


def test_other_archives_and_folders_are_left_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    (tmp_path / "checkpoint-500").mkdir()
    files.write_safetensors(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert recognise(Place.of(tmp_path / "a.npz")) is None
    assert recognise(Place.of(tmp_path)) is None, "a Trainer's output with checkpoints in it is a history"
    assert recognise(Place.of(tmp_path / "gone")) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16], ids=str)
def test_safetensors_are_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensor = special(torch.float32).nan_to_num(1, 2, 3).abs().to(dtype) if dtype in OTHERS else special(torch.float32).to(dtype)
    save_file({"w": tensor, "e": torch.empty(0, 4)}, tmp_path / "a", metadata={"step": "5", "config": '{"a": [1, {}]}'})
    assert counted(tmp_path / "a")["w"] == by_torch("w", tensor)
    assert opened(tmp_path / "a").values["__metadata__.config"] == '{"a": [1, {}]}'


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    files.write_shards(tmp_path / "model")
    state = files.trained()[0].state_dict()
    assert counted(tmp_path / "model") == {n: by_torch(n, t) for n, t in state.items()}
    assert opened(tmp_path / "model").form == "safetensors, 2 shards"


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    files.write_shards(tmp_path / "model")
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    assert refusal(tmp_path / "model") == "model-00002-of-00002.safetensors is missing: model.safetensors.index.json names it"


def test_tensors_that_an_index_names_in_vain_are_named(tmp_path: Path) -> None:
    files.write_shards(tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(table))
    assert opened(tmp_path / "model").notes == ("missing: 1 tensor of the index not in model-00001-of-00002.safetensors: head.weight",)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", ""])
def test_an_index_cannot_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    files.write_shards(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    assert "outside the folder" in refusal(tmp_path / "model")


def test_transformers_writes_shards_that_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = math.nan
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    contents = opened(tmp_path / "model")
    found = {s.name: s for s in scan(contents)}
    assert contents.form.startswith("safetensors, ") and not contents.notes
    assert [n for n, s in found.items() if s.nonfinite] == ["transformer.h.1.mlp.c_fc.weight"]
    assert found == {n: by_torch(n, t) for n, t in model.state_dict().items() if n in found} and len(found) >= len(model.state_dict()) - 1


def test_a_trainer_run_is_read_with_everything_it_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    rows = [{"input_ids": torch.arange(8) % 32, "labels": torch.arange(8) % 32} for _ in range(4)]
    arguments = transformers.TrainingArguments(tmp_path / "out", max_steps=2, save_steps=2, use_cpu=True, report_to=[], learning_rate=3e-4, disable_tqdm=True)
    transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows).train()
    contents = opened(tmp_path / "out" / "checkpoint-2")
    names = {s.name for s in scan(contents)}
    assert contents.form.startswith("Trainer folder") and recognise(Place.of(tmp_path / "out")) is None
    assert {"model.transformer.wte.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq", "rng_state.cpu"} <= names
    assert contents.values["trainer_state.global_step"] == 2 and contents.values["training_args.learning_rate"] == 3e-4
    assert "scheduler.last_epoch" in contents.values and "optimizer.param_groups.0.lr" in contents.values
    assert not any(note.startswith("dangerous") for note in contents.notes), contents.notes


def test_an_accelerate_state_is_read(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*files.trained())
    accelerator.save_state(str(tmp_path / "state"))
    contents = opened(tmp_path / "state")
    assert {"model.0.weight", "optimizer.state.0.exp_avg"} <= {s.name for s in scan(contents)}
    assert not any(note.startswith("dangerous") for note in contents.notes), contents.notes


LIGHTNING = """
import sys, pathlib, torch, lightning

class Model(lightning.LightningModule):
    def __init__(self, width=3, where=pathlib.Path("data")):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)

trainer = lightning.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1])
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2))
trainer.save_checkpoint(sys.argv[1] + "/last.ckpt")
"""


def test_a_lightning_checkpoint_is_read(tmp_path: Path) -> None:
    """In a process of its own: Lightning replaces `torch.compile` when it is imported."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    subprocess.run([sys.executable, "-c", LIGHTNING, str(tmp_path)], check=True, capture_output=True, timeout=200)
    contents = opened(tmp_path / "last.ckpt")
    assert {"state_dict.layer.weight", "optimizer_states.0.state.0.exp_avg"} <= {s.name for s in scan(contents)}
    assert contents.values["global_step"] == 2 and contents.values["hyper_parameters.width"] == 3
    assert contents.values["optimizer_states.0.param_groups.0.lr"] == 2e-3
    assert not any(note.startswith("dangerous") for note in contents.notes), contents.notes


def test_deepspeed_folders_are_read_by_the_file_latest_and_alone(tmp_path: Path) -> None:
    files.write_deepspeed(tmp_path / "run")
    for place in (tmp_path / "run", tmp_path / "run" / "global_step100"):
        contents = opened(place)
        assert contents.form.startswith("DeepSpeed") and contents.values["global_steps"] == 100
        names = {s.name for s in scan(contents)}
        assert {"module.0.weight", "zero_pp_rank_0_mp_rank_00_optim_states.optimizer_state_dict.single_partition_of_fp32_groups.0"} <= names


def test_a_distributed_checkpoint_is_read_piece_by_piece(tmp_path: Path) -> None:
    files.write_distributed(tmp_path / "dcp")
    contents = opened(tmp_path / "dcp")
    model, optimizer = files.trained()
    found = {s.name: s for s in scan(contents)}
    assert {n: by_torch(n, t) for n, t in ((f"model.{k}", v) for k, v in model.state_dict().items())}.items() <= found.items()
    assert contents.values["epoch"] == 3 and contents.values["optimizer.param_groups.0.lr"] == 1e-3
    assert contents.form == "distributed checkpoint, 1 file" and found["optimizer.state.0.exp_avg"].shape == optimizer.state_dict()["state"][0]["exp_avg"].shape


def test_a_tensor_over_several_ranks_is_one_tensor(tmp_path: Path) -> None:
    """Two processes save their halves of a DTensor; the check sees the whole."""
    program = tmp_path / "save.py"
    program.write_text(
        "import sys, torch, torch.distributed as d, torch.distributed.checkpoint as c\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "d.init_process_group('gloo')\n"
        "t = torch.arange(10.0).view(5, 2); t[4, 1] = float('nan')\n"
        "c.save({'w': distribute_tensor(t, init_device_mesh('cpu', (2,)), [Shard(0)])}, checkpoint_id=sys.argv[1])\n"
        "d.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29542", str(program), str(tmp_path / "dcp")]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    contents = opened(tmp_path / "dcp")
    (found,) = scan(contents)
    assert contents.form == "distributed checkpoint, 2 files"
    assert (found.name, found.shape, found.nan, found.zeros, found.max) == ("w", (5, 2), 1, 1, 8.0)


def test_a_piece_named_twice_is_refused(tmp_path: Path) -> None:
    """Otherwise a small folder could be opened a million times over."""
    files.write_distributed(tmp_path / "dcp")
    metadata = tmp_path / "dcp" / ".metadata"
    table = pickle.loads(metadata.read_bytes())
    first, second = list(table.storage_data)[:2]
    table.storage_data[second] = table.storage_data[first]
    metadata.write_bytes(pickle.dumps(table))
    assert "same place" in refusal(tmp_path / "dcp")


def test_a_file_that_a_distributed_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    files.write_distributed(tmp_path / "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    assert refusal(tmp_path / "dcp").startswith("__0_0.distcp: ")


# in memory


def test_a_state_in_memory_is_counted_like_a_file(tmp_path: Path) -> None:
    model, optimizer = files.trained()
    state = {"model": model, "optimizer": optimizer, "lr": 0.5, "view": special(torch.bfloat16).view(100, 10)[:, ::2], "c": special(torch.complex64)}
    contents = from_state(state)
    found = {s.name: s for s in scan(contents)}
    assert contents.form == "state in memory" and contents.values["lr"] == 0.5 and contents.values["optimizer.param_groups.0.lr"] == 1e-3
    assert found["model.0.weight"] == by_torch("model.0.weight", model.state_dict()["0.weight"])
    assert found["view"] == by_torch("view", state["view"]) and found["c"] == by_torch("c", state["c"])
    assert "optimizer.state.0.exp_avg" in found


# where torch or numpy is missing


@pytest.mark.parametrize("missing", [("torch",), ("torch", "numpy")])
def test_checkpoints_are_checked_without_torch_and_without_numpy(missing: tuple[str, ...], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {"w": special(torch.float32), "b": special(torch.bfloat16), "q": special(torch.float8_e4m3fn), "i": torch.arange(-3, 4)}
    save_file(state, tmp_path / "a")
    saved(tmp_path / "b", {**state, "n": np.ones(3)})
    program = (
        f"import sys\nfor name in {missing!r}: sys.modules[name] = None\n"
        "from whynan.forensics.addresses import Place\n"
        "from whynan.forensics.checkpoints.opening import open_checkpoint\n"
        "from whynan.forensics.checkpoints.scan import scan\n"
        "from whynan.records import dumps\n"
        "print(dumps([scan(open_checkpoint(Place.of(p))) for p in sys.argv[1:]]))\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a"), str(tmp_path / "b")], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    for answers in json.loads(run.stdout):
        found = {a["name"]: a for a in answers}
        for name, tensor in state.items():
            expected = by_torch(name, tensor)
            assert [found[name][k] for k in ("nan", "posinf", "neginf", "zeros", "min", "max")] == [
                getattr(expected, k) for k in ("nan", "posinf", "neginf", "zeros", "min", "max")
            ]


# hostile files


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls_a_shell_is_told_and_not_run(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "harm"
    data = hostile.pickled({"w": hostile.Runs(f"touch {mark}")}, protocol)
    contents = opened(hostile.torch_zip(tmp_path / "a.pt", data))
    scan(contents)
    assert contents.notes[0] == f"dangerous: loading this file calls {os.system.__module__}.system" and not mark.exists()
    saved(tmp_path / "b.pt", {"w": torch.ones(2), "x": hostile.Runs(f"touch {mark}")}, _use_new_zipfile_serialization=False)
    assert "dangerous: " in opened(tmp_path / "b.pt").notes[0] and counted(tmp_path / "b.pt")["w"].max == 1 and not mark.exists()


CALLS = [
    "builtins\neval",
    "__builtin__\nexec",
    "subprocess\nPopen",
    "nt\nsystem",
    "os\npopen",
    "runpy\nrun_path",
    "importlib\nimport_module",
    "torch\nload",
    "sys\nexit",
]


@pytest.mark.parametrize("call", CALLS)
def test_names_that_run_code_are_dangerous(call: str, tmp_path: Path) -> None:
    opcodes = b"c" + call.encode() + b"\n(" + hostile.text("1") + b"tR"
    path = hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=opcodes))
    assert opened(path).notes[0] == f"dangerous: loading this file calls {call.replace(chr(10), '.')}"


@pytest.mark.parametrize(
    "opcodes", [b"(cos\nsystem\n" + hostile.text("id") + b"o", b"(" + hostile.text("id") + b"ios\nsystem\n", b"cos\nsystem\n(" + hostile.text("id") + b"t\x81"]
)
def test_every_way_to_call_is_seen(opcodes: bytes, tmp_path: Path) -> None:
    assert opened(hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=opcodes))).notes[0] == "dangerous: loading this file calls os.system"


def test_a_name_that_is_only_mentioned_is_told_too(tmp_path: Path) -> None:
    assert "names os.system" in opened(hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=b"cos\nsystem\n"))).notes[0]


def test_nothing_that_a_pickle_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked: list[str] = []
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: asked.append(name) or real(name, *a, **k))
    contents = opened(hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=b"cevil_module\nThing\n)R}" + hostile.text("lr") + b"K\x05sb")))
    assert "evil_module" not in asked and "evil_module" not in sys.modules and contents.values["x.lr"] == 5


@pytest.mark.parametrize("opcode", [b"\x82\x01", b"\x83\x01\x00", b"\x97", b"\x98", b"\xff"])
def test_opcodes_outside_the_list_are_refused(opcode: bytes, tmp_path: Path) -> None:
    assert "is not allowed" in refusal(hostile.torch_zip(tmp_path / "a.pt", b"\x80\x02" + opcode + b"."))


def test_billion_laughs_and_cycles_end(tmp_path: Path) -> None:
    assert "again.0" not in opened(hostile.torch_zip(tmp_path / "a.pt", hostile.laughs(200))).values
    assert not scan(opened(hostile.torch_zip(tmp_path / "b.pt", hostile.cycle())))
    assert "deep" in opened(hostile.torch_zip(tmp_path / "c.pt", hostile.deep(100_000))).notes[0]


@pytest.mark.parametrize("holder", [b"cx\nThing\n)R", hostile.tensor(hostile.storage(), (4,), (1,)), b"ccollections\nOrderedDict\n)R"])
def test_billion_laughs_as_a_state_end_too(holder: bytes, tmp_path: Path) -> None:
    laughing = hostile.laughs(100)[4:-1].removesuffix(b"q\xf0K\x01" + hostile.text("again") + b"h\xf0u")
    path = hostile.torch_zip(tmp_path / "a.pt", b"\x80\x02}" + hostile.text("x") + holder + laughing + b"bs.", {"0": bytes(16)})
    assert opened(path)


def test_long_names_under_long_names_do_not_multiply(tmp_path: Path) -> None:
    state: object = list(range(50)) * 10_000 + [None]
    for _ in range(90):
        state = {"k" * 200: state}
    tracemalloc.start()
    path = saved(tmp_path / "a.pt", state)
    tracemalloc.reset_peak()
    refusal(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 200 << 20


BOMBS = {
    "containers": b"\x80\x02" + b"}" * 200_000 + b".",
    "opcodes": b"\x80\x02" + b"(" * 2_000_000 + b".",
    "memos": b"\x80\x04N" + b"\x94" * 300_000 + b".",
    "a long string": b"\x80\x02\x8d" + (10**10).to_bytes(8, "little") + b"a.",
    "a frame": b"\x80\x04\x95" + (10**10).to_bytes(8, "little") + b".",
    "a long integer": b"\x80\x02\x8b" + (5000).to_bytes(4, "little") + b"\x01" * 5000 + b".",
    "copies of a text": b"\x80\x02" + hostile.text("a" * 3_000_000) + b"q\x00" + b"c_codecs\nencode\nh\x00\x85R" * 100 + b".",
    "an array": hostile.named(
        x=b"cnumpy._core.multiarray\n_reconstruct\n)R(K\x01"
        + hostile.integer(1 << 60)
        + b"\x85cnumpy\ndtype\n"
        + hostile.text("f8")
        + b"\x85R\x89"
        + b"C\x01at"
        + b"b"
    ),
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_pickles_that_would_fill_the_memory_are_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in (("OPCODES", 1_000_000), ("OBJECTS", 100_000), ("MEMOS", 200_000)):
        monkeypatch.setattr(pickles, f"MOST_{limit}", value)  # a tenth of the real ones: the files are smaller, the tests faster
    path = hostile.torch_zip(tmp_path / "a.pt", data)
    tracemalloc.start()
    refusal(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 60 << 20


def test_sizes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    huge = hostile.torch_zip(tmp_path / "a.pt", hostile.named(w=hostile.tensor(hostile.storage(count=10**10), (10**10,), (1,))), {"0": bytes(16)})
    assert "declares 40000000000 bytes, 16 are there" in refusal(huge)
    beyond = hostile.torch_zip(tmp_path / "b.pt", hostile.named(w=hostile.tensor(hostile.storage(), (3,), (2,))), {"0": bytes(16)})
    assert "w: a tensor reaches beyond its storage" in refusal(beyond)
    before = hostile.torch_zip(tmp_path / "c.pt", hostile.named(w=hostile.tensor(hostile.storage(), (2,), (1,), -1)), {"0": bytes(16)})
    assert "described wrongly" in refusal(before)
    endless = hostile.torch_zip(tmp_path / "d.pt", hostile.named(w=hostile.tensor(hostile.storage(), (10**9, 10**9), (0, 0))), {"0": bytes(16)})
    assert counted(endless)["w"].zeros == 10**18


def test_archives_that_lie_are_refused(tmp_path: Path) -> None:
    assert "zip bomb" in refusal(hostile.lie_about_size(tmp_path / "a.pt", 1 << 30))
    assert "overlap" in refusal(hostile.overlapping(tmp_path / "b.pt"))
    (tmp_path / "empty.pt").write_bytes(b"PK\x03\x04" + bytes(30) + b"PK\x05\x06" + bytes(18))
    assert "not a checkpoint" in refusal(tmp_path / "empty.pt")
    assert "is missing from the archive" in refusal(
        hostile.torch_zip(tmp_path / "c.pt", hostile.named(w=hostile.tensor(hostile.storage("../../x"), (4,), (1,))))
    )
    nested = hostile.torch_zip(tmp_path / "d.pt", hostile.named(w=hostile.tensor(hostile.storage(), (4,), (1,))), {"0": (tmp_path / "c.pt").read_bytes()[:16]})
    assert counted(nested)["w"].shape == (4,)


def test_a_small_file_cannot_be_read_for_ever(tmp_path: Path) -> None:
    """Ten thousand views of one storage, each a little shorter, so that none is another."""
    views = {f"v{i}": hostile.tensor(hostile.storage(count=250_000), (250_000 - i,), (1,)) for i in range(10_000)}
    path = hostile.torch_zip(tmp_path / "a.pt", hostile.named(**views), {"0": bytes(1_000_000)}, compress=True)
    assert "overlap" in refusal(path)


@pytest.mark.parametrize("where", ["key", "keys"])
def test_the_name_of_a_storage_is_never_a_tree(where: str, tmp_path: Path) -> None:
    tree = hostile.laughs(100)[4:-1].removesuffix(b"q\xf0K\x01" + hostile.text("again") + b"h\xf0u")
    head = b"".join(hostile.pickled(v) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    key = tree if where == "key" else hostile.text("0")
    stored = b"(" + hostile.text("storage") + b"ctorch\nFloatStorage\n" + key + hostile.text("cpu") + b"K\x01NtQ"
    (tmp_path / "a.pt").write_bytes(head + hostile.named(w=stored) + b"\x80\x02](" + (tree if where == "keys" else hostile.text("0")) + b"e." + bytes(12))
    assert "described wrongly" in refusal(tmp_path / "a.pt")


def test_an_entry_that_would_leave_the_folder_is_only_a_name(tmp_path: Path) -> None:
    path = hostile.torch_zip(tmp_path / "a.pt", hostile.named(w=hostile.tensor(hostile.storage(), (4,), (1,))), {"0": bytes(16), "../../../slip": b"x"})
    assert counted(path)["w"].zeros == 4 and not (tmp_path.parent / "slip").exists()


def test_a_packed_storage_is_streamed_not_held(tmp_path: Path) -> None:
    path = hostile.bomb(tmp_path / "a.pt", 100 << 20)
    tracemalloc.start()
    assert counted(path)["w"].zeros == 25 << 20
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20 and path.stat().st_size < 1 << 20


def one_tensor(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


HEADERS: dict[str, tuple[object, str]] = {
    "beyond the end": (one_tensor(shape=[4], data_offsets=[0, 16]), "cut short"),
    "negative": (one_tensor(data_offsets=[-8, 0]), "described wrongly"),
    "backwards": (one_tensor(data_offsets=[8, 0]), "described wrongly"),
    "a shape that does not fit": (one_tensor(shape=[3]), "declares 12 bytes and has 8"),
    "a huge shape": (one_tensor(shape=[1 << 62, 1 << 62]), "declares"),
    "overlapping": (one_tensor() | {"v": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "overlap"),
    "a hole": (one_tensor(shape=[1], data_offsets=[4, 8]), "belong to no tensor"),
    "not all of it": (one_tensor(shape=[1], data_offsets=[0, 4]), "belong to no tensor"),
    "twice": (b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "is there twice"),
    "a list": (b"[]", "does not begin like a checkpoint"),
    "no end": (b'{"w":{"dtype":"F32"', "no end"),
    "floats": (one_tensor(shape=[2.0]), "described wrongly"),
    "nested": (b'{"w":' * 100_000 + b"1" + b"}" * 100_000, "nested"),
    "nested lists": (b'{"w":{"shape":' + b"[" * 4000 + b"]" * 4000 + b"}}", "described"),
    "many lists": (b'{"w":{"shape":[' + b"[]," * 1_000_000 + b"[]]}}", "is described in"),
    "not text": (b'{"\xff\xfe":1}', "not text"),
    "a number": (b'{"w":1}', "neither"),
}


@pytest.mark.parametrize(("header", "why"), HEADERS.values(), ids=HEADERS)
def test_headers_that_do_not_describe_the_file_are_refused(header: object, why: str, tmp_path: Path) -> None:
    path = hostile.safetensors(tmp_path / "a", header, bytes(8))
    tracemalloc.start()
    assert why in refusal(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 << 20


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    assert "cut short" in refusal(hostile.safetensors(tmp_path / "a", one_tensor(), bytes(8), declared=5000))


def test_bare_pickles_are_read_only_where_they_hold_plain_values(tmp_path: Path) -> None:
    (tmp_path / "plain.pkl").write_bytes(hostile.pickled({"lr": 0.5, "history": np.array([1.0, np.nan])}))
    assert opened(tmp_path / "plain.pkl").values == {"lr": 0.5} and counted(tmp_path / "plain.pkl")["history"].nan == 1
    (tmp_path / "class.pkl").write_bytes(hostile.pickled(Config()))
    assert "a bare pickle that holds" in refusal(tmp_path / "class.pkl")
    (tmp_path / "harm.pkl").write_bytes(hostile.pickled(hostile.Runs("true")))
    assert opened(tmp_path / "harm.pkl").notes[0].startswith("dangerous: ")


# files in a bad state


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95, 0.999])
@pytest.mark.parametrize("name", sorted(files.FILES))
def test_a_file_cut_short_is_refused_and_still_recognised(name: str, share: float, tmp_path: Path) -> None:
    files.FILES[name](tmp_path / name)
    data = (tmp_path / name).read_bytes().rstrip(b"\0")  # a tar ends in padding
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    assert refusal(tmp_path / name)


def test_empty_and_never_written_files_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "b.pt").write_bytes(bytes(10_000))
    assert refusal(tmp_path / "a.pt") == "empty" and "begins with zeros" in refusal(tmp_path / "b.pt")
    assert recognise(Place.of(tmp_path / "a.pt")) is None


def test_links_are_followed_and_pipes_are_not_waited_for(tmp_path: Path) -> None:
    files.write_zip(tmp_path / "a.pt")
    (tmp_path / "link").symlink_to(tmp_path / "a.pt")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    assert counted(tmp_path / "link") == counted(tmp_path / "a.pt")
    assert refusal(tmp_path / "broken") and refusal(tmp_path / "pipe") == "not a regular file"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"w": torch.ones(10)})
    contents = opened(path)
    saved(path, {"w": torch.ones(20)})
    with pytest.raises(Unreadable, match="changed while it was read"):
        scan(contents)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_file_that_shrinks_under_the_reader_is_refused(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.pt", {str(i): torch.ones(500_000) for i in range(8)})
    contents = opened(path)
    once = threading.Event()

    def shrink(size: int) -> None:
        if not once.is_set():
            once.set()
            os.truncate(path, 5000)

    with pytest.raises(Unreadable, match=r"ended early|changed while"):
        scan(contents, Wishes(jobs=jobs, tick=shrink))


def test_a_stream_of_half_numbers_is_refused() -> None:
    odd = Contents("made up", 5, (Entry("w", "float32", (1,), Held(b"12345")),))
    with pytest.raises(Unreadable, match="left over"):
        scan(odd)


def test_names_that_read_the_same_stay_apart(tmp_path: Path) -> None:
    found = counted(saved(tmp_path / "a.pt", {1: torch.ones(1), "1": torch.zeros(1)}))
    assert [(n, s.max) for n, s in found.items()] == [("1", 1.0), ("1#2", 0.0)]


def test_numbers_too_long_to_print_are_refused(tmp_path: Path) -> None:
    long = b"\x8b" + (1000).to_bytes(4, "little") + b"\x7f" * 1000
    shape = b"(" + long * 30 + b"t"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + hostile.storage() + b"K\x00" + shape + shape + b"\x89}tR"
    assert "wrong arguments" in refusal(hostile.torch_zip(tmp_path / "a.pt", hostile.named(w=tensor), {"0": bytes(16)}))
    array = b"cnumpy._core.multiarray\n_reconstruct\n)R(K\x01" + shape + b"cnumpy\ndtype\n" + hostile.text("f8") + b"\x85R\x89C\x01atb"
    assert "damaged" in refusal(hostile.torch_zip(tmp_path / "b.pt", hostile.named(w=array)))
    assert "described wrongly" in refusal(hostile.safetensors(tmp_path / "c", one_tensor(shape=[10**3000] * 1), bytes(8)))
    assert "described wrongly" in refusal(hostile.safetensors(tmp_path / "d", one_tensor(shape=[9] * 1300), bytes(8)))


@pytest.mark.parametrize("shared", ["state", "arguments", "copies"])
def test_one_long_list_in_many_things_is_looked_at_once(shared: str, tmp_path: Path) -> None:
    """Each of 3 000 instances refers to the same 100 000 values: together they would be 300 million."""
    values = b"(" + b"".join(hostile.text(str(i)) + b"NN"[:1] for i in range(50_000))
    long = {"state": values + b"d", "arguments": values + b"t", "copies": values + b"l"}[shared] + b"q\x01"
    one = {"state": b"cx\nThing\n)Rh\x01b", "arguments": b"cx\nThing\nh\x01R", "copies": b"ccollections\ndeque\nh\x01\x85R"}[shared]
    path = hostile.torch_zip(tmp_path / "a.pt", b"\x80\x02](" + long + one * 3000 + b"e.")
    if shared == "copies":
        assert "too much text" in refusal(path)
    else:
        assert len(opened(path).values) < 200_000


def test_there_is_a_limit_to_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walking, "MOST_VALUES", 10)
    contents = opened(saved(tmp_path / "a.pt", {str(i): i for i in range(50)}))
    assert len(contents.values) == 10 and "more than 10 plain values" in contents.notes[0]


def test_tallies_add_up() -> None:
    total = Tally()
    for part in (Tally(nan=1, zeros=2, min=-1.0, max=3.0), Tally(posinf=4), Tally(min=-5.0, max=-2.0)):
        total.add(part, 2)
    assert total == Tally(nan=2, posinf=8, zeros=4, min=-5.0, max=3.0)


def test_a_source_knows_its_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    source = Source.of(Place.of(tmp_path / "a"))
    assert source.read(2, 3) == b"234" and source.part(2, 5).read(1, 2) == b"34"
    for start, size in itertools.product((-1, 8), (3,)):
        with pytest.raises(Unreadable):
            source.read(start, size)


def ordinary() -> dict[str, Any]:
    """What people keep in checkpoints, from modules of which other functions act."""
    import http
    import inspect
    import platform
    import signal
    import urllib.parse

    return {
        "machine": platform.uname(),
        "default": inspect.Parameter.empty,
        "url": urllib.parse.urlparse("https://x.org/a"),
        "signal": signal.SIGTERM,
        "status": http.HTTPStatus.OK,
    }


@pytest.mark.parametrize("key", list(ordinary()))
def test_ordinary_things_of_modules_that_can_act_are_not_dangerous(key: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), key: ordinary()[key]}, tmp_path / "a.pt", pickle_protocol=4)
    assert not any("runs code" in note or note.startswith("dangerous") for note in opened(tmp_path / "a.pt").notes)


@pytest.mark.parametrize("named", ["code.models\nNet", "trace.layers\nBlock", "profile.nets\nUNet"])
def test_a_package_of_ones_own_may_have_any_name(named: str, tmp_path: Path) -> None:
    path = hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=b"c" + named.encode() + b"\n)R"))
    assert not any(note.startswith("dangerous") for note in opened(path).notes)


@pytest.mark.parametrize("named", ["glob\nos.system", "torch\nos.system", "inspect\nbuiltins.eval", "urllib.request\nurlopen", "code\nInteractiveInterpreter"])
def test_functions_that_act_are_dangerous_wherever_they_are_reached_from(named: str, tmp_path: Path) -> None:
    opcodes = b"c" + named.encode() + b"\n(" + hostile.text("1") + b"tR"
    assert (
        opened(hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=opcodes))).notes[0] == f"dangerous: loading this file calls {named.replace(chr(10), '.')}"
    )


def test_a_name_that_is_only_kept_is_a_note_and_the_file_is_healthy(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.randn(2, 2), "opener": open, "loader": torch.load}, tmp_path / "a.pt")
    report = whynan.check(tmp_path / "a.pt")
    assert report.ok and [f.severity for f in report.checked[0].findings] == ["note", "note"]


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cfunctools\npartial\n(cos\nsystem\n" + hostile.text("id") + b"tR",
        b"cbuiltins\nmap\n(cos\nsystem\n](" + hostile.text("id") + b"etR",
        b"cfunctools\npartial\n(cbuiltins\nint\ntR(cos\nsystem\n(" + hostile.text("id") + b"t}Ntb)R",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n(" + hostile.text("id") + b"t}tR",
    ],
)
def test_a_function_handed_to_something_that_is_called_is_dangerous(opcodes: bytes, tmp_path: Path) -> None:
    path = hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=opcodes))
    assert opened(path).notes[0] == "dangerous: loading this file hands os.system to what it calls"
    assert whynan.check(path).findings[0].what == "dangerous-pickle"


def test_a_name_cannot_hide_behind_many_things_that_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither beside a long list nor after so many calls that the rest is not looked through."""
    many = b"](" + b"K\x01" * 5000 + b"e"
    after = b"cbuiltins\nmap\n(cbuiltins\nint\n" + many + b"tR0" + b"cos\nsystem\n0" + b"cbuiltins\nmap\n(cbuiltins\nint\n" + many + b"tR"
    monkeypatch.setattr(pickles, "MOST_HANDED", 1000)
    for opcodes in (b"cbuiltins\nmap\n(cos\nsystem\n" + many + b"tR", b"cbuiltins\nmap\n(" + many + b"cos\nsystem\ntR", after):
        path = hostile.torch_zip(tmp_path / "a.pt", hostile.named(x=opcodes))
        assert opened(path).notes[0] == "dangerous: loading this file hands os.system to what it calls"
