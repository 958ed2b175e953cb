"""Read a capsule from disk without believing it: sizes, names and shapes are checked before anything is used."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from whynan.capsule.names import CapsuleError, first_line

SCHEMA = 1
_HEAD_LIMIT, _PROGRAM_LIMIT, _SOURCE_LIMIT = 64 << 20, 1 << 30, 8 << 20
_SOURCE_NAME = re.compile(r"source/[\w\-. /]+\.py")


@dataclass(frozen=True, slots=True)
class Text:
    """One carried source file."""

    path: str
    shown: str
    text: str
    module: str
    package: str
    main: bool
    runs: bool
    sha256: str


@dataclass(frozen=True, slots=True)
class Capsule:
    """What the files say."""

    folder: Path
    head: dict[str, Any]
    program: dict[str, Any]
    sources: list[Text]

    def lacks(self) -> str:
        """Say what the capsule is known not to carry, to end a sentence with."""
        lost = self.head.get("lost")
        return "; not carried: " + ", ".join(str(what)[:120] for what in lost[:3]) if isinstance(lost, list) and lost else ""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the tensors."""
        path = _file(self.folder, "tensors.safetensors")
        try:
            return dict(safetensors.torch.load_file(path))
        except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CapsuleError(f"{path} cannot be read: {first_line(error)}") from None


def read(folder: Path) -> Capsule:
    """Read the JSON and the texts of a capsule; nothing is run."""
    head = _json(folder, "capsule.json", _HEAD_LIMIT)
    if head.get("schema") != SCHEMA:
        raise CapsuleError(f"{folder} has schema {str(head.get('schema'))[:20]}, this version reads schema {SCHEMA}")
    program = _json(folder, "program.json", _PROGRAM_LIMIT)
    for name, kind in (("objects", list), ("entries", list), ("globals", list), ("settings", dict), ("roots", list), ("optimizers", list), ("places", dict)):
        if not isinstance(program.get(name), kind):
            raise CapsuleError(f"{folder / 'program.json'} has no proper {name!r}")
    sources = head.get("sources", [])
    if not isinstance(sources, list) or len(sources) > 2000 or not isinstance(head.get("incident"), dict):
        raise CapsuleError(f"{folder / 'capsule.json'} is not the head of a capsule")
    return Capsule(folder, head, program, [_source(folder, item) for item in sources])


def _json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    path = _file(folder, name)
    if path.stat().st_size > limit:
        raise CapsuleError(f"{path} is larger than {limit >> 20} MB; this is not a capsule of whynan")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise CapsuleError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise CapsuleError(f"{path} does not hold a JSON object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"bare {name} is not JSON")


def _file(folder: Path, name: str) -> Path:
    """Return a file of the capsule; a name or link that leads out of it is refused."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CapsuleError(f"the capsule names a file outside itself: {name[:80]!r}")
    if not path.is_file():
        raise CapsuleError(f"{folder} is not a whole capsule: {name} is missing")
    return path


def _source(folder: Path, item: Any) -> Text:
    fields = {"path": str, "shown": str, "module": str, "package": str, "main": bool, "runs": bool, "sha256": str}
    if not isinstance(item, dict) or any(not isinstance(item.get(k), kind) for k, kind in fields.items()):
        raise CapsuleError(f"{folder / 'capsule.json'} describes a source file wrongly")
    if _SOURCE_NAME.fullmatch(item["path"]) is None or ".." in item["path"].split("/"):
        raise CapsuleError(f"the capsule names a file outside itself: {item['path'][:80]!r}")
    path = _file(folder, item["path"])
    if path.stat().st_size > _SOURCE_LIMIT:
        raise CapsuleError(f"{path} is larger than {_SOURCE_LIMIT >> 20} MB")
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != item["sha256"]:
        raise CapsuleError(f"{path} was changed since the capsule was written")
    return Text(text=raw.decode("utf-8", errors="replace"), **{k: item[k] for k in fields})
