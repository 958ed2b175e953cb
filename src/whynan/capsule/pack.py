"""Put one step on disk: what the program of a replay holds, as JSON, safetensors and the user's source as text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import safetensors.torch
import torch

from whynan import __version__
from whynan.capsule import repro
from whynan.capsule.objects import Encoder
from whynan.capsule.replay import Program, eager, is_compiled
from whynan.capsule.sites import Site
from whynan.capsule.sources import Sources
from whynan.capsule.tape.arguments import Rebuild
from whynan.capsule.tape.entries import Entry, Inner, Outside, Slot
from whynan.capsule.tape.facts import is_leaf
from whynan.capsule.tensors import Need, Tensors
from whynan.ends import off_standard_streams
from whynan.records import Json, jsonable
from whynan.tripwire.values import stats

SCHEMA = 1
LIMIT = 2 << 30  # bytes


@dataclass(slots=True)
class Contents:
    """What goes into a capsule besides the program itself."""

    step: int
    program: Program
    incident: dict[str, Json]
    optimizer: Any = None
    optimizers: list[Any] = field(default_factory=list)
    scaler: Any = None
    history: list[dict[str, float]] = field(default_factory=list)
    places: dict[str, Site | None] = field(default_factory=dict)
    clip: float | None = None
    values_in_data: list[str] = field(default_factory=list)  # what the data set's line had to compute with


@off_standard_streams()
def write(contents: Contents, directory: Path, limit: int = LIMIT) -> Path | str:
    """Write a capsule into a new directory, whole or not at all; return it, or the reason why there is none.

    Cost: one copy of the step's weights and batch to the disk, at most `limit` bytes.
    """
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _fill(contents, partial, limit)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    except (OSError, MemoryError, safetensors.SafetensorError, torch.OutOfMemoryError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.parent.rmdir()  # only if nothing else is in it
        return getattr(error, "strerror", None) or str(error).splitlines()[0] or type(error).__name__
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def _fill(contents: Contents, folder: Path, limit: int) -> None:
    packer = Packer(contents)
    with contents.program.still():
        program = packer.program()
        dropped, kept = packer.choose(limit)
        tensors = packer.tensors.take(kept) if kept is not None else {}
    _drop(program, kept)
    safetensors.torch.save_file(tensors, folder / "tensors.safetensors")
    for source in packer.sources.listed():
        path = folder / source.stored
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.text, encoding="utf-8")
    _write_json(folder / "program.json", program)
    if kept is not None and not packer.trouble:
        repro.write(folder, program, contents.incident)
    _write_json(folder / "capsule.json", packer.head(program, dropped, kept is not None, folder))


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, allow_nan=False, indent=1 if path.name == "capsule.json" else None), encoding="utf-8")


def _drop(program: dict[str, Json], kept: Need | None) -> None:
    if kept is None or kept < Need.OTHERS:
        program["optimizers"], program["roots"], program["leaves"] = [], [], None
    if kept is None or kept < Need.STATE:
        program["optimizer"] = program["scaler"] = None


class Packer:
    """Encodes one program, the most needed things first."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.tensors, self.sources = Tensors(), Sources()
        recorder = contents.program.recorder
        self.tensors.unwritten, self.tensors.meant = recorder.blanks.has, recorder.beside.infinities.are_known
        self.tensors.made_at = lambda tensor: self.sources.site(recorder.blanks.made_at(tensor))
        self.objects = Encoder(self.tensors, self.sources)
        self.trouble: list[str] = []
        self._done: dict[tuple[str, str], Json] = {}  # file in the capsule and name of a global variable
        self._states: dict[str, Json] = {}  # digest of a generator's state
        self._outsides: dict[int, Json] = {}

    def program(self) -> dict[str, Json]:
        """Return the content of program.json."""
        contents, program = self.contents, self.contents.program
        document: dict[str, Json] = {"schema": SCHEMA, "settings": _settings(), "undo": program.undo is not None}
        self.tensors.with_gradients = program.undo is not None
        document["entries"] = [self._entry(e) for e in program.entries]
        document["globals"] = self._globals()
        self.tensors.need = Need.STATE
        document["optimizer"] = self.objects.encode(contents.optimizer, "optimizer")
        document["scaler"] = self.objects.encode(contents.scaler, "scaler")
        self.tensors.need = Need.OTHERS
        document["leaves"] = [self.objects.encode(t) for t in program.leaves]
        document["optimizers"] = [self.objects.encode(o, "optimizer") for o in contents.optimizers]
        document["roots"] = [self.objects.encode(eager(r), "model") for r in program.roots]
        document["places"] = {name: self.sources.site(site) for name, site in contents.places.items()}
        document["clip"] = contents.clip
        document["values_in_data"] = list(contents.values_in_data)
        document["history"] = [dict(row) for row in _finite(contents.history)]
        document["globals"] = self._globals()
        document["inexact"] = "; ".join(dict.fromkeys([*filter(None, [program.inexact()]), *self.objects.doubts]))
        document["objects"] = self.objects.nodes
        return document

    def _globals(self) -> list[Json]:
        """Encode the global variables the carried functions read; encoding may bring more files and more names."""
        done = self._done
        self.sources.settle()
        while todo := [(s, n) for s in self.sources.listed() for n in s.globals if (s.stored, n) not in done]:
            for source, name in todo:
                kept = done[source.stored, name] = self.objects.encode(source.globals[name], f"global {name}")
                if _is_lost(kept) and self.sources.is_brought(source, name):
                    self.objects.lost = [what for what in self.objects.lost if what != kept["lost"]]
            self.sources.settle()
        return [[[n, v] for (f, n), v in done.items() if f == s.stored and not _is_lost(v)] for s in self.sources.listed()]

    def _entry(self, entry: Entry) -> Json:
        label = f"call {entry.number}"
        compiled = is_compiled(entry.fn)
        fn = self._callable(entry)
        args: list[Json] = [self._kept(a, f"{label} argument {i}") for i, a in enumerate(entry.args)]
        kwargs: dict[str, Json] = {k: self._kept(v, f"{label} argument {k}") for k, v in entry.kwargs.items()}
        lost = [part["lost"] for part in (fn, *args, *kwargs.values()) if _is_lost(part)]
        self.trouble += [f"not carried: {str(what).removeprefix('a value: ')}" for what in (*lost, *self.objects.parts)]
        self.objects.parts.clear()
        if any(not self._is_held(entry, table) for table, *_ in entry.given):
            self.trouble.append("an attribute that the loop sets before it calls a module is not carried")
        return {
            "number": entry.number, "kind": entry.kind, "fn": fn, "args": args, "kwargs": kwargs, "site": self.sources.site(entry.site),
            "grad": entry.grad_enabled, "autocast": [[d, on, str(t).removeprefix("torch.")] for d, on, t in entry.autocast],
            "rng": self._rng(entry.rng), "wanted": [list(w) for w in sorted(entry.wanted)], "outputs": entry.outputs, "compiled": compiled,
        }  # fmt: skip

    def _is_held(self, entry: Entry, table: dict[str, Any]) -> bool:
        """Whether what the loop set are buffers that a module has when the step begins: they are carried with it."""
        first = next((e for e in self.contents.program.entries if e.fn is entry.fn), None)
        return first is entry and isinstance(entry.fn, torch.nn.Module) and any(m._buffers is table for m in entry.fn.modules())

    def _callable(self, entry: Entry) -> Json:
        fn = eager(entry.fn)
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return {"apply": self.objects.class_of(owner)}
        if entry.kind == "optimizer":
            return {"own": "optimizer_step", "of": self.objects.encode(fn.args[0], "optimizer")}
        return self.objects.callable(fn)

    def _rng(self, rng: Any) -> Json:
        if rng is None:
            return None
        torch_state, cuda, python, numpy = rng
        plain = None if numpy is None else (numpy[0], tuple(numpy[1].tolist()), *numpy[2:])
        states = {"python": self.objects.same(python), "numpy": self.objects.same(plain)}
        return {"torch": self._bytes(torch_state), "cuda": [self._bytes(c) for c in cuda], **states}

    def _bytes(self, state: torch.Tensor) -> Json:
        """Encode a state of torch's generator once, however many calls began with it."""
        digest = hashlib.sha256(bytes(state.tolist())).hexdigest()
        if digest not in self._states:
            self._states[digest] = self.objects.encode(state)
        return self._states[digest]

    def _kept(self, value: Any, path: str) -> Json:
        if isinstance(value, Slot):
            return {"slot": [value.entry, value.index]}
        if isinstance(value, Inner):
            return {"inner": [value.entry, value.offset, value.output_nr]}
        if isinstance(value, Outside):
            return self._outside(value, path)
        if isinstance(value, Rebuild):
            return {"rebuild": self.objects.encode(value.value, path), "attributes": self._kept(value.attributes, path), "items": self._kept(value.items, path)}
        if type(value) is list or type(value) is tuple:
            return {"kept": type(value).__name__, "items": [self._kept(v, path) for v in value]}
        if type(value) is dict:
            return {"kept": "dict", "items": [[self.objects.encode(k), self._kept(v, path)] for k, v in value.items()]}
        return self.objects.callable(value) if callable(value) and not isinstance(value, type | torch.nn.Module) else self.objects.encode(value, path)

    def _outside(self, value: Outside, path: str) -> Json:
        if id(value) in self._outsides:
            return self._outsides[id(value)]
        leaf = value.tensor.requires_grad and is_leaf(value.tensor)
        tensor = self.objects.encode(value.tensor if leaf else value.value(), path)
        if isinstance(tensor, dict) and "lost" in tensor:
            return tensor
        saved = self.objects.encode(value.saved) if leaf and value.saved is not None else None
        index, reference = self.objects.fresh(value)
        handed = leaf and not self.contents.program.recorder.beside.is_trained(value.tensor)
        self.objects.nodes[index] = {"is": "outside", "tensor": tensor, "saved": saved, "written": value.written, "handed": handed}
        self._outsides[id(value)] = reference
        return reference

    def choose(self, limit: int) -> tuple[list[str], Need | None]:
        """Say what has to go to stay within the limit, and the least needed that stays."""
        words = {Need.OTHERS: "models and optimizers that the step does not touch", Need.STATE: "the state of the optimizer"}
        dropped: list[str] = []
        for need in reversed(Need):
            if self.tensors.size(need) <= limit:
                return dropped, need
            if need is not Need.STEP:
                dropped.append(f"{words[need]} ({self.tensors.size(need) - self.tensors.size(Need(need - 1))} bytes)")
        return [*dropped, f"the batch and weights of the step ({self.tensors.size(Need.STEP)} bytes, the limit is {limit})"], None

    def head(self, program: dict[str, Json], dropped: list[str], stored: bool, folder: Path) -> dict[str, Json]:
        """Return the content of capsule.json: what a person, or a program that runs nothing, wants to know."""
        notes = [str(program["inexact"])] if program["inexact"] else []
        why_not = list(dict.fromkeys(self.trouble)) + ([] if stored else ["the step is larger than the size limit; only its JSON was written"])
        return {
            "schema": SCHEMA, "whynan": __version__, "torch": str(torch.__version__), "python": platform.python_version(), "device": _device(self.tensors),
            "step": self.contents.step, "incident": self.contents.incident, "replayable": not why_not, "why_not": list(why_not),
            "exact": not notes and not why_not, "notes": list(notes), "lost": self._lost(), "dropped": list(dropped),
            "sources": [s.to_json() for s in self.sources.listed()], "packages": dict(self.sources.packages), "imports": [*sorted(self.sources.imports)],
            "calls": len(self.contents.program.entries), "files": _files(folder),
            "tensors": [] if stored else _statistics(self.tensors),
        }  # fmt: skip

    def _lost(self) -> list[Json]:
        return list(dict.fromkeys([*self.objects.lost, *self.sources.lost]))


def _is_lost(value: Json) -> TypeGuard[dict[str, Json]]:
    return isinstance(value, dict) and "lost" in value


def _files(folder: Path) -> dict[str, Json]:
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _statistics(tensors: Tensors) -> list[Json]:
    return [jsonable(stats(key, stored.value)) for key, stored in tensors.stored.items() if stored.value.is_floating_point()]


def _finite(rows: list[dict[str, float]]) -> Iterator[dict[str, Json]]:
    for row in rows:
        yield jsonable(row)  # type: ignore[misc]


def _device(tensors: Tensors) -> str:
    kinds = {s.value.device.type for s in tensors.stored.values()}
    return f"cuda ({torch.cuda.get_device_name()})" if "cuda" in kinds else ", ".join(sorted(kinds)) or "cpu"


def _settings() -> dict[str, Json]:
    """Switches of torch that change results and are no part of any call."""
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
