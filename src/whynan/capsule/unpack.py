"""From a capsule to a program that can be replayed: entries, places, models, in a recorder that records nothing."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from whynan.capsule.names import CapsuleError
from whynan.capsule.read import Capsule
from whynan.capsule.rebuild import Decoder
from whynan.capsule.recorder import Recorder
from whynan.capsule.replay import Program
from whynan.capsule.sites import Site
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.state.modules import ModuleState
from whynan.capsule.statements import find_code
from whynan.capsule.tape.arguments import Rebuild, leaves
from whynan.capsule.tape.entries import Entry, Inner, Outside, Slot
from whynan.capsule.tape.facts import version_of
from whynan.capsule.trusted import TrustedCode, compile_source

_KINDS = ("module", "call", "write", "grad", "backward", "derivative", "clip", "zero", "optimizer", "function")


class LoadedProgram(Program):
    """A program from a capsule: why it is not exact is known from the day it was written."""

    reason = ""

    def inexact(self) -> str:
        return self.reason or super().inexact()


@dataclass(slots=True)
class Loaded:
    """What a capsule gives back."""

    program: LoadedProgram
    optimizer: Any = None
    optimizers: list[Any] = field(default_factory=list)
    scaler: Any = None
    history: list[dict[str, float]] = field(default_factory=list)
    places: dict[str, Site | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    values_in_data: list[str] = field(default_factory=list)
    clip: float | None = None


def load(capsule: Capsule, recorder: Recorder, code: TrustedCode | None) -> Loaded:
    """Build the program of a capsule; `code` runs the user's source, without it none is run."""
    return _Loader(capsule, recorder, code).load()


class _Loader:
    def __init__(self, capsule: Capsule, recorder: Recorder, code: TrustedCode | None) -> None:
        self.capsule, self.recorder, self.code = capsule, recorder, code
        self.document = capsule.program
        self.decoder = Decoder(self.document["objects"], capsule.tensors(), code)
        self.decoder.extra = {"outside": self._outside, "slot": _slot, "inner": _inner, "rebuild": self._rebuild, "kept": self._kept}
        self.places = Places(capsule)

    def load(self) -> Loaded:
        document, decode = self.document, self.decoder.decode
        if self.code is not None:
            self.code.decode = decode
            self.code.finish()
        entries = [self._entry(e) for e in document["entries"]]
        self._fill_uses(entries, document.get("uses"))
        optimizer, scaler = decode(document.get("optimizer")), decode(document.get("scaler"))
        optimizers = [decode(o) for o in document["optimizers"]] or ([optimizer] if optimizer is not None else [])
        roots = [decode(r) for r in document["roots"]] or [e.fn for e in entries]
        given = document.get("leaves")
        ends = self.decoder.items(given) if given is not None else _leaves(entries, optimizers)
        for root in roots:
            if isinstance(root, torch.nn.Module):
                self.recorder.roots.states[id(root)] = (root, ModuleState(root))
        self._mark()
        program = LoadedProgram(self.recorder, entries, ends, self._undo(optimizer))
        notes = self._notes()
        program.reason = "; ".join([str(document.get("inexact") or ""), *notes]).strip("; ")
        places = {str(k): self.places.site(v) for k, v in document["places"].items()}
        values = document.get("values_in_data")
        words = [str(v)[:80] for v in values[:8]] if isinstance(values, list) else []
        clip = document.get("clip")
        norm = float(clip) if isinstance(clip, int | float) else None
        return Loaded(program, optimizer, optimizers, scaler, _history(document.get("history")), places, notes, words, norm)

    def _undo(self, optimizer: Any) -> Any:
        return functools.partial(Snapshot, optimizer) if self.document.get("undo") and isinstance(optimizer, torch.optim.Optimizer) else None

    def _mark(self) -> None:
        for tensor in self.decoder.meant:
            self.recorder.beside.infinities.note(tensor)
        for tensor, place in self.decoder.unwritten:
            self.recorder.blanks.add(tensor.untyped_storage(), self.places.site(place), partly=True)

    def _notes(self) -> list[str]:
        notes = [f"replayed on the CPU, the step ran on {', '.join(sorted(self.decoder.moved))}"] if self.decoder.moved else []
        made_with = str(self.capsule.head.get("torch"))
        if made_with.split("+")[0] != torch.__version__.split("+")[0]:
            notes.append(f"replayed with torch {torch.__version__}, the step ran with {made_with[:40]}")
        return notes

    def _entry(self, node: Any) -> Entry:
        if not isinstance(node, dict) or node.get("kind") not in _KINDS or not isinstance(node.get("number"), int):
            raise CapsuleError("the capsule holds a call that is not one")
        try:
            entry = self._filled(node)
        except (KeyError, TypeError, ValueError) as error:
            raise CapsuleError(f"call {node['number']} of the capsule cannot be read: {type(error).__name__}") from None
        entry.reads = [leaf for leaf in leaves((entry.args, entry.kwargs)) if isinstance(leaf, Slot | Inner | Outside)]
        if node.get("compiled") and isinstance(entry.fn, torch.nn.Module):
            entry.fn.__dict__["_compiled_call_impl"] = entry.fn._call_impl  # played eagerly, known to have been compiled
        return entry

    def _fill_uses(self, entries: list[Entry], uses: Any) -> None:
        """Say of calls recorded whole which models they run."""
        for entry in entries if isinstance(uses, dict) else ():
            if isinstance(named := uses.get(str(entry.number)), list):
                entry.uses = tuple(m for m in self.decoder.items(named) if isinstance(m, torch.nn.Module))

    def _filled(self, node: dict[str, Any]) -> Entry:
        get = self.decoder.decode
        fn = get(node["fn"])
        if not callable(fn):
            raise CapsuleError(f"call {node['number']} of the capsule calls something that cannot be called")
        entry = Entry(
            number=node["number"],
            kind=node["kind"],
            fn=fn,
            args=tuple(get(a) for a in node["args"]),
            kwargs={str(k): get(v) for k, v in node["kwargs"].items()},
            site=self.places.site(node["site"]),
            grad_enabled=bool(node["grad"]),
            autocast=tuple((str(get(d)), bool(on), get({"dtype": t})) for d, on, t in node["autocast"]),
        )
        entry.rng, entry.outputs = self._rng(node["rng"]), int(node["outputs"])
        entry.wanted = {(int(a), int(b)) for a, b in node["wanted"]}
        return entry

    def _rng(self, node: Any) -> Any:
        if node is None:
            return None
        get = self.decoder.decode
        cuda = [get(c) for c in node["cuda"]] if torch.cuda.is_available() else []
        numpy = get(node["numpy"]) if "numpy.random" in sys.modules else None
        return get(node["torch"]), cuda, get(node["python"]), numpy

    def _outside(self, node: dict[str, Any]) -> Outside:
        tensor, saved = self.decoder.decode(node["tensor"]), self.decoder.decode(node["saved"])
        if not isinstance(tensor, torch.Tensor):
            raise CapsuleError("the capsule gives something as a tensor that is none")
        return Outside(tensor, version_of(tensor), saved, bool(node["written"]), handed=bool(node.get("handed")))

    def _rebuild(self, node: dict[str, Any]) -> Rebuild:
        get = self.decoder.decode
        return Rebuild(get(node["rebuild"]), get(node["attributes"]), get(node["items"]))

    def _kept(self, node: dict[str, Any]) -> Any:
        if node["kept"] == "dict":
            return dict(self.decoder.pairs(node["items"]))
        return (tuple if node["kept"] == "tuple" else list)(self.decoder.items(node["items"]))


class Places:
    """Finds places of the carried sources again: the text is compiled, not run."""

    def __init__(self, capsule: Capsule) -> None:
        self.capsule = capsule
        self._codes: dict[int, Any] = {}

    def site(self, node: Any) -> Site | None:
        """Return the instruction at a place; a place in text that is not carried keeps its line."""
        if node is None:
            return None
        try:
            number, at = node["source"], [int(v) for v in node["at"]]
            if number is not None:
                found = self._in_source(int(number), str(node["name"]), int(node["first"]), int(node["lasti"]), at)
                if found is not None:
                    return found
            return _stand_in(str(node["shown"]), at[0])
        except (KeyError, TypeError, ValueError, IndexError):
            raise CapsuleError("the capsule holds a place that is not one") from None

    def _in_source(self, number: int, name: str, first: int, lasti: int, at: list[int]) -> Site | None:
        if number not in self._codes:
            self._codes[number] = compile_source(self.capsule.sources[number])
        code = find_code(self._codes[number], name, first)
        if code is None:
            return None
        where = list(code.co_positions())
        same = [i for i, place in enumerate(where) if [p or 0 for p in place] == at]
        exact = lasti // 2 in same  # another version of Python counts its instructions otherwise
        return Site(code, lasti) if exact else Site(code, 2 * same[0]) if same else None


def _stand_in(file: str, line: int) -> Site:
    """Make a place that knows its file and line, for text that is not there."""
    call = ast.parse("_()").body[0]
    ast.increment_lineno(call, min(max(line, 1), 1 << 20) - 1)
    return Site(compile(ast.Module([call], []), file, "exec"), 0)


def _slot(node: dict[str, Any]) -> Slot:
    entry, index = node["slot"]
    return Slot(int(entry), int(index))


def _inner(node: dict[str, Any]) -> Inner:
    entry, offset, output = node["inner"]
    return Inner(int(entry), int(offset), int(output))


def _leaves(entries: list[Entry], optimizers: list[Any]) -> list[torch.Tensor]:
    """Find what gradients end in, where the list was dropped for its size."""
    found = {id(p): p for e in entries if isinstance(e.fn, torch.nn.Module) for p in e.fn.parameters()}
    found.update((id(leaf.tensor), leaf.tensor) for e in entries for leaf in e.reads if isinstance(leaf, Outside) and leaf.tensor.requires_grad)  # type: ignore[misc]
    for optimizer in optimizers:
        found.update((id(p), p) for group in optimizer.param_groups for p in group["params"])
    return list(found.values())


def _history(rows: Any) -> list[dict[str, float]]:
    if not isinstance(rows, list):
        return []
    return [{str(k): float(v) for k, v in row.items() if isinstance(v, int | float | str)} for row in rows if isinstance(row, dict)]


@contextmanager
def settings(wanted: dict[str, Any]) -> Iterator[None]:
    """Set torch's switches as they were in the run; the number of threads decides the order of sums."""
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    dtype = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
    torch.set_default_dtype(dtype.get(str(wanted.get("default_dtype")), torch.float32))
    threads = wanted.get("threads")
    if isinstance(threads, int) and 0 < threads <= 256:
        torch.set_num_threads(threads)
    if wanted.get("matmul") in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(str(wanted["matmul"]))
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])
        torch.set_float32_matmul_precision(before[2])
