"""Checkpoints that are folders: Hugging Face shards, Trainer and Accelerate output, DeepSpeed ZeRO."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from whynan.forensics.addresses import NotLookedAt, Place, Unreadable, read_json
from whynan.forensics.checkpoints.contents import Contents, Scalar

OpenFile = Callable[[Place], Contents]

_WEIGHTS = re.compile(r"(model|pytorch_model|diffusion_pytorch_model|adapter_model)([-_]\d+(-of-\d+)?)?\.(safetensors|bin)$")
_BESIDE = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|random_states|training_args|custom_checkpoint)[\w.-]*\.(pt|bin|pth|pkl|safetensors)$"
)
_DEEPSPEED = re.compile(r".*_(model|optim)_states\.pt$")
_INNER = re.compile(r"(pytorch_model|optimizer|model)(_fsdp)?_\d+$")  # what FSDP writes: a distributed checkpoint each
_HOLDS_TENSORS = re.compile(r"\.(safetensors|bin|pth?|ckpt|h5|msgpack|gguf|index\.json)$|^(pytorch_model|model)")
_LATER = re.compile(r"checkpoint-\d+$")


def kind_of_folder(folder: Place) -> str | None:
    """Say what kind of checkpoint a folder is by what lies in it, or None."""
    names = {child.name for child in folder.children()}
    if ".metadata" in names and not (folder / ".metadata").is_dir():
        return "distributed checkpoint"
    if any(_LATER.fullmatch(n) for n in names):
        return None  # a history of checkpoints
    if "trainer_state.json" in names:
        return "Trainer folder"
    if any(_DEEPSPEED.fullmatch(n) for n in names) or _tagged(folder, names):
        return "DeepSpeed"
    if any(n.endswith((".safetensors.index.json", ".bin.index.json")) for n in names):
        return "shards"
    if any(_WEIGHTS.fullmatch(n) for n in names) and (names & {"config.json", "adapter_config.json"} or any(_BESIDE.fullmatch(n) for n in names)):
        return "model folder"
    return None


def _tagged(folder: Place, names: Iterable[str]) -> Place | None:
    """The folder that DeepSpeed's file `latest` names."""
    if "latest" not in names:
        return None
    with (folder / "latest").open() as file:
        tag = file.read(200).decode("utf-8", "replace").strip()
    if not tag or "/" in tag or "\\" in tag or tag.startswith("."):
        return None
    inner = folder / tag
    return inner if inner.is_dir() and any(_DEEPSPEED.fullmatch(c.name) for c in inner.children()) else None


def open_shards(folder: Place, open_file: OpenFile) -> Contents:
    """Open the shards an index names; raises `Unreadable` where one is missing."""
    index = next(c for c in folder.children() if c.name.endswith((".safetensors.index.json", ".bin.index.json")))
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise Unreadable(f"{index.name}: no weight_map that names files")
    wanted: dict[str, list[str]] = {}
    for tensor, file in table.items():
        wanted.setdefault(str(file), []).append(tensor)
    opened = [(name, _open_shard(folder, name, index.name, open_file)) for name in sorted(wanted)]
    notes = [n for name, shard in opened for n in _absent(name, wanted[name], shard)]
    form = "safetensors" if index.name.endswith(".safetensors.index.json") else "torch"
    return _joined(f"{form}, {len(opened)} shard{'s' * (len(opened) != 1)}", [("", shard) for _, shard in opened], notes)


def _open_shard(folder: Place, name: str, index: str, open_file: OpenFile) -> Contents:
    place = folder.inside(name)
    if not place.exists():
        raise Unreadable(f"{name[:100]} is missing: {index} names it")
    return _open_named(place, open_file)


def _open_named(place: Place, open_file: OpenFile) -> Contents:
    try:
        return open_file(place)
    except Unreadable as why:
        raise type(why)(f"{place.name[:100]}: {why}") from None


def _absent(file: str, wanted: list[str], shard: Contents) -> list[str]:
    there = {e.name for e in shard.entries}
    gone = [n for n in wanted if n not in there]
    if not gone:
        return []
    shown = ", ".join(n[:100] for n in gone[:3])
    return [f"missing: {len(gone)} tensor{'s' * (len(gone) != 1)} of the index not in {file}: {shown}{', …' * (len(gone) > 3)}"]


def open_parts(folder: Place, kind: str, open_file: OpenFile, open_folder: OpenFile) -> Contents:
    """Open everything of a Trainer, Accelerate or DeepSpeed checkpoint, each file under its own name."""
    children = list(folder.children())
    names = {c.name for c in children}
    found: list[tuple[str, Contents]] = []
    values: dict[str, Scalar] = {}
    if any(n.endswith(".index.json") for n in names):
        found.append(("model.", open_shards(folder, open_file)))
    for child in children:
        if child.name == "trainer_state.json":
            values = {f"trainer_state.{k}": v for k, v in read_json(child).items() if v is None or isinstance(v, bool | int | float | str)}
        elif _DEEPSPEED.fullmatch(child.name) or _BESIDE.fullmatch(child.name):
            found.append((_prefix(child.name, names), _open_named(child, open_file)))
        elif _WEIGHTS.fullmatch(child.name) and not any(n.endswith(".index.json") for n in names):
            found.append(("model.", _open_named(child, open_file)))
        elif _INNER.fullmatch(child.name) and child.is_dir():
            found.append((f"{child.name.split('_')[0]}.", _open_named(child, open_folder)))
    tagged = _tagged(folder, names)
    if tagged is not None:
        found.append(("", _open_named(tagged, open_folder)))
    if not found:
        raise NotLookedAt("a checkpoint folder without any weights or state in it")
    notes = [] if kind != "Trainer folder" or _has_weights(children) or tagged is not None else ["missing: no weights beside the trainer's state"]
    contents = _joined(f"{kind}, {len(found)} file{'s' * (len(found) != 1)}", found, notes)
    return replace(contents, values=values | dict(contents.values))


def _has_weights(children: Iterable[Place]) -> bool:
    """Whether anything may hold weights, under whatever name: what a trainer keeps beside them has names of its own."""
    return any(_INNER.fullmatch(c.name) or _DEEPSPEED.fullmatch(c.name) or (_HOLDS_TENSORS.search(c.name) and not _BESIDE.fullmatch(c.name)) for c in children)


def _prefix(name: str, names: set[str]) -> str:
    """What stands before the names of a file's tensors."""
    if name.endswith("_model_states.pt") and sum(n.endswith("_model_states.pt") for n in names) == 1:
        return ""
    return f"{name.rsplit('.', 1)[0]}."


def _joined(form: str, parts: list[tuple[str, Contents]], notes: list[str]) -> Contents:
    entries = tuple(replace(e, name=f"{p}{e.name}") for p, c in parts for e in c.entries)
    values = {f"{p}{n}": v for p, c in parts for n, v in c.values.items()}
    all_notes = dict.fromkeys([*notes, *(n for _, c in parts for n in c.notes)])
    return Contents(form, sum(c.size for _, c in parts), entries, values, tuple(all_notes))
