"""Small checkpoints of every format, written by the libraries that write them in real life; for the tests and for `fuzz_check.py`."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import warnings
from pathlib import Path
from typing import Any

import torch


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model after one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def usual_state() -> dict[str, Any]:
    """What a training script saves."""
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": 0.25, "note": "a run", "losses": [0.5, 0.25]}


def write_zip(path: Path) -> None:
    """`torch.save` of today."""
    torch.save(usual_state(), path)


def write_legacy(path: Path) -> None:
    """`torch.save` before 1.6."""
    torch.save(usual_state(), path, _use_new_zipfile_serialization=False)


def write_safetensors(path: Path) -> None:
    """A state dict as safetensors."""
    from safetensors.torch import save_file

    save_file({n: t.contiguous() for n, t in trained()[0].state_dict().items()}, path, metadata={"format": "pt"})


class _TarPickler(pickle.Pickler):
    """Puts references where the first versions of torch put them."""

    def __init__(self, file: io.BytesIO, tensors: dict[int, torch.Tensor]) -> None:
        super().__init__(file, protocol=2)
        self.tensors = tensors

    def persistent_id(self, thing: object) -> str | None:
        if not isinstance(thing, torch.Tensor):
            return None
        self.tensors[id(thing)] = thing
        return str(id(thing))


def write_tar(path: Path, state: dict[str, Any] | None = None) -> None:
    """The tar of the first versions, by what `torch.load` reads: nothing writes it any more."""
    tensors: dict[int, torch.Tensor] = {}
    inner = io.BytesIO()
    _TarPickler(inner, tensors).dump(state if state is not None else {"weight": torch.arange(6.0).view(2, 3), "epoch": 7})
    storages, described = io.BytesIO(), io.BytesIO()
    pickle.dump(len(tensors), storages, protocol=2)
    pickle.dump(len(tensors), described, protocol=2)
    for key, tensor in tensors.items():
        pickle.dump((key, "cpu", _class_of(tensor.dtype)), storages, protocol=2)
        storages.write(struct.pack("<q", tensor.untyped_storage().nbytes() // tensor.element_size()))
        storages.write(bytes(tensor.untyped_storage().tolist()))
        pickle.dump((key, key, torch.FloatTensor), described, protocol=2)
        described.write(struct.pack(f"<i4x{tensor.dim()}q{tensor.dim()}qq", tensor.dim(), *tensor.shape, *tensor.stride(), tensor.storage_offset()))
    pickle.dump([], storages, protocol=2)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, part in (("storages", storages), ("tensors", described), ("pickle", inner)):
            info = tarfile.TarInfo(name)
            info.size = len(part.getvalue())
            tar.addfile(info, io.BytesIO(part.getvalue()))


def _class_of(dtype: torch.dtype) -> type:
    names = {torch.float32: "FloatStorage", torch.float64: "DoubleStorage", torch.float16: "HalfStorage", torch.int64: "LongStorage"}
    found: type = getattr(torch, names[dtype])
    return found


def write_distributed(folder: Path) -> None:
    """`torch.distributed.checkpoint.save`, in one process."""
    import torch.distributed.checkpoint as distributed

    model, optimizer = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, checkpoint_id=folder)


def write_shards(folder: Path) -> None:
    """Two safetensors files and the index that `save_pretrained` writes beside them."""
    from safetensors.torch import save_file

    folder.mkdir()
    state = {n: t.contiguous() for n, t in trained()[0].state_dict().items()}
    names = list(state)
    table: dict[str, str] = {}
    for i, part in enumerate((names[:4], names[4:]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({n: state[n] for n in part}, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))


def write_trainer(folder: Path) -> None:
    """The files of a Trainer checkpoint."""
    folder.mkdir()
    optimizer = trained()[1]
    write_safetensors(folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 10).state_dict(), folder / "scheduler.pt")
    torch.save({"python": (3, (1, 2, 3), None), "cpu": torch.get_rng_state()[:64].clone()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 500, "epoch": 1.5, "log_history": [{"loss": 0.5, "step": 500}]}))


def write_deepspeed(folder: Path) -> None:
    """The layout of a DeepSpeed ZeRO-2 checkpoint, written with torch: DeepSpeed itself is too large to install here."""
    step = folder / "global_step100"
    step.mkdir(parents=True)
    model, optimizer = trained()
    torch.save({"module": model.state_dict(), "global_steps": 100, "skipped_steps": 2, "ds_version": "0.14.0"}, step / "mp_rank_00_model_states.pt")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    zero = {
        "optimizer_state_dict": {
            "loss_scaler": {"cur_scale": 65536.0},
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": optimizer.state_dict(),
        }
    }
    torch.save(zero, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step100")


FILES = {"zip.pt": write_zip, "legacy.pt": write_legacy, "old.tar": write_tar, "model.safetensors": write_safetensors}
FOLDERS = {"distributed": write_distributed, "shards": write_shards, "trainer": write_trainer, "deepspeed": write_deepspeed}


def write_all(folder: Path) -> list[Path]:
    """Write one of each; returns what can be checked."""
    found = []
    for name, write in (FILES | FOLDERS).items():
        write(folder / name)
        found.append(folder / name)
    return found
