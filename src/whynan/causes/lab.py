"""Experiments on the replay: this step with another expression at that line, without these samples, twice in a row.

A remedy counts as proven only if the replayed step has a finite loss, finite gradients, a gradient that is alive, and a
loss of the size the run had before: making numbers finite is not enough.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.replay import Program, Run, call_entry
from whynan.capsule.sites import Site, live_site
from whynan.capsule.tape import Entry, Outside
from whynan.causes import patterns
from whynan.records import number
from whynan.tripwire.checks import total_norm
from whynan.tripwire.values import damage_of

Swap = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_FLOOR = call_entry.__code__


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave."""

    loss: float | None
    norm: float | None
    finite: bool
    error: str = ""

    def effect(self) -> str:
        """Say it in words."""
        if self.error:
            return f"the replay raised {self.error}"
        words = []
        if self.loss is not None:
            words.append(f"loss {number(self.loss)}")
        if self.norm is not None:
            words.append(f"gradient norm {number(self.norm)}")
        return ", ".join(words) or ("everything finite" if self.finite else "not finite")


NO_MEMORY = Outcome(None, None, False, "MemoryError: there was too little memory for another replay")


class Lab:
    """Runs variations of one failing step."""

    def __init__(self, program: Program, targets: Callable[[Run], list[torch.Tensor]], history: list[dict[str, float]], scaler: Any = None) -> None:
        self.program = program
        self.scale = _scale(history, scaler)
        self.targets = targets
        self.losses = [h["loss"] for h in history if math.isfinite(h.get("loss", math.nan))]
        self.norms = [h["grad_norm"] for h in history if math.isfinite(h.get("grad_norm", math.nan))]
        self.hit = 0

    def run(self, swap: Swap | None = None, sites: frozenset[Site] = frozenset(), around: Any = None) -> Outcome:
        """Replay the step once, with `swap` in place of the torch function called at `sites`."""
        mode = Swapper(swap, sites) if swap is not None else contextlib.nullcontext()
        patterns.forget()
        try:
            with self.program.still(), around or contextlib.nullcontext(), mode:
                run = self.program.play(mode if isinstance(mode, Swapper) else None)
                outcome = self._outcome(run)
        except MemoryError:
            outcome = NO_MEMORY
        finally:
            patterns.forget()  # what was remembered are the tensors of this replay
        self.hit = mode.hits if isinstance(mode, Swapper) else 0
        return outcome

    def _outcome(self, run: Run) -> Outcome:
        if run.error is not None:
            return Outcome(None, None, False, f"{type(run.error).__name__}: {str(run.error).splitlines()[0] if str(run.error) else ''}")
        with torch.no_grad():
            losses = [float(t.detach().float().sum()) for t in run.losses]
            grads = [p.grad for p in self.program.leaves if p.grad is not None]
            norm = total_norm([g.detach().to_dense() if g.is_sparse else g for g in grads]) if grads else None
            finite = all(map(math.isfinite, losses)) and not any(damage_of(t.detach()) for t in self.targets(run) + grads)
        scaled = self.program.entries[-1].kind == "backward" if self.program.entries else False  # else the scaler has divided already
        size = None if norm is None else float(norm) / (self.scale if scaled else 1.0)
        return Outcome(losses[-1] / self.scale if losses else None, size, finite)

    def judge(self, outcome: Outcome, empty: bool = False, same: float | None = None) -> tuple[bool, str]:
        """Say whether an outcome proves a remedy, and what is wrong with it otherwise."""
        if outcome.error or not outcome.finite:
            return False, outcome.effect() if outcome.error else f"still not finite ({outcome.effect()})"
        if outcome.norm is not None and outcome.norm == 0 and empty:
            return True, f"{outcome.effect()}: this batch then trains nothing, like a skipped one"
        if outcome.norm is not None and outcome.norm == 0 and not self._often_still():
            return False, f"finite, but the gradient is dead ({outcome.effect()})"
        if same is not None and outcome.loss is not None and abs(outcome.loss - same) > 1e-3 * max(1.0, abs(same)):
            return False, f"finite, but the loss is another: {outcome.effect()} where it was {number(same)}"
        if outcome.norm is not None and outcome.norm > max([1e4 * n for n in self.norms[-50:]], default=1e8):
            return False, f"finite, but the gradient is absurd: {outcome.effect()}"
        if self.losses and outcome.loss is not None:
            usual = max(statistics.median(map(abs, self.losses)), max(map(abs, self.losses[-20:])), 1e-3)
            if abs(outcome.loss) > 1000 * usual:
                return False, f"finite, but absurd: {outcome.effect()}, the steps before had about {number(usual)}"
        return True, outcome.effect()

    def _often_still(self) -> bool:
        """Whether steps without any gradient are ordinary in this run: then one more says nothing against a remedy."""
        return len(self.norms) > 2 and statistics.median(self.norms[-20:]) == 0


def _scale(history: list[dict[str, float]], scaler: Any) -> float:
    """By what a gradient scaler multiplies the loss that is gone back from: the losses of the run are without it."""
    known = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else history[-1].get("scale", 1.0) if history else 1.0
    return known if known > 0 and math.isfinite(known) else 1.0


class Swapper(TorchFunctionMode):
    """Puts another computation in place of the torch function called at one site, wherever it is called from there."""

    def __init__(self, swap: Swap, sites: frozenset[Site]) -> None:
        super().__init__()
        self.swap, self.sites, self.hits = swap, sites, 0
        self.entry: Entry | None = None

    def entering(self, entry: Entry) -> None:
        """A tape entry begins."""
        self.entry = entry

    def leaving(self, entry: Entry) -> None:
        """A tape entry ended."""
        self.entry = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        site = live_site(_FLOOR, 2) or (self.entry.site if self.entry else None)
        if site in self.sites:
            result = self.swap(func, args, kwargs or {})
            if result is not NotImplemented:
                self.hits += 1
                return result
        result = func(*args, **(kwargs or {}))
        patterns.remember(func, args, kwargs or {}, result)
        return result


@contextlib.contextmanager
def without_rows(program: Program, rows: list[int], size: int) -> Iterator[None]:
    """Leave samples out: every outside tensor with that first dimension loses these rows for the time being."""
    keep = [i for i in range(size) if i not in set(rows)]
    found = {id(leaf): leaf for entry in program.entries for leaf in entry.reads if isinstance(leaf, Outside)}
    batched = [leaf for leaf in found.values() if leaf.tensor.dim() and leaf.tensor.shape[0] == size and not leaf.tensor.requires_grad]
    indexed = [(entry, entry.fn) for entry in program.entries if getattr(entry.fn, "__name__", "") in _BY_NUMBER]
    before = [(leaf, leaf.saved) for leaf in batched]
    try:
        for leaf in batched:
            leaf.saved = leaf.value()[keep]
        for entry, function in indexed:
            entry.fn = functools.partial(_BY_NUMBER[function.__name__], keep, size)
        yield
    finally:
        for leaf, saved in before:
            leaf.saved = saved
        for entry, function in indexed:
            entry.fn = function


def _write_kept(keep: list[int], size: int, target: torch.Tensor, index: Any, value: Any) -> None:
    """Write to rows by their old numbers: `x[3] = 0` must not hit the row that moved to place 3."""
    if not target.dim() or target.shape[0] != len(keep):
        target[index] = value
        return
    full = target.new_zeros(size, *target.shape[1:])
    full[keep] = target
    full[index] = value
    target.copy_(full[keep])


def _read_kept(keep: list[int], size: int, target: torch.Tensor, index: Any) -> Any:
    """Read a row by its old number; a row that was left out is not there."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    if target.dim() and target.shape[0] == len(keep) and isinstance(first, int) and not isinstance(first, bool):
        return target[(keep.index(first % size), *rest)]
    return target[index]


_BY_NUMBER: dict[str, Callable[..., Any]] = {"__setitem__": _write_kept, "__getitem__": _read_kept}
