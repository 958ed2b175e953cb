"""Silent death in the loop: every number is finite and nothing is learned any more.

Loss, gradient norm and learning rate are there anyway. Every 16 steps it also looks at values that the program carries
from step to step, at averaged models, and at whether weights in half precision still move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from whynan.capsule.sites import Site
from whynan.capsule.tape import Outside
from whynan.engine.session import Session, parameters_of, shape_of
from whynan.records import Notice, NoticeKind
from whynan.recovery.followers import Followers
from whynan.tripwire.checks import nonfinite
from whynan.tripwire.stillness import STILL, Still, Stillness

EVERY = 16  # steps between two looks at carried values
SMALL = 1 << 20  # elements of a carried value that is looked at
SAMPLES = 8  # weights whose movement is followed, and elements of each
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Value:
    """Something that outlives its step, as it is read in this one."""

    key: object  # who reads it, or its name, and its shape
    words: str
    site: Site | None
    nan: bool


class Standing:
    """Tells once when a training has come to a standstill."""

    def __init__(self, session: Session, followers: Followers, tell: Callable[[Still, torch.optim.Optimizer], None]) -> None:
        self.session, self.followers, self.tell = session, followers, tell
        self._curves: weakref.WeakKeyDictionary[torch.optim.Optimizer, Stillness] = weakref.WeakKeyDictionary()
        self._finite: set[object] = set()  # carried values that were finite at some look
        self._suspects: set[object] = set()  # and were not at the last one
        self._told: set[str] = set()
        self._sample: tuple[int, list[torch.Tensor]] | None = None
        self._turned = 0  # steps in a row that the program itself left
        self._next, self._looks = 1, 0
        self._waiting: list[tuple[Still, torch.optim.Optimizer]] = []

    def numbers(self, step: int, loss: float | None, dead: bool, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of one step, and whether it is known to have no gradient."""
        self._turned = 0
        curve = self._curves.get(optimizer)
        if curve is None:
            curve = self._curves[optimizer] = Stillness()
        still = curve.see(step, loss, dead, _rate(optimizer))
        if still is not None and any(p.requires_grad for p in parameters_of(optimizer)):
            self._waiting.append((still, optimizer))

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell what was noticed; every 16 steps look at what is carried. Call it while the step is still on the tape."""
        self.session.recorder.suspended(self._look, optimizer)  # a gradient scaler looks while loose calls are recorded

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if self.session.step_count >= self._next:
            self._next, self._looks = self.session.step_count + EVERY, self._looks + 1
            found = self._carried_badly() or self._averaged_badly() or self._rounded_away(optimizer)
            if found is not None and found.detail not in self._told:
                self._told.add(found.detail)
                self.tell(found, optimizer)
        self.settle()

    def settle(self) -> None:
        """Tell what the numbers showed."""
        waiting, self._waiting = self._waiting, []
        for still, optimizer in waiting:
            self._settle(still, optimizer)

    def _settle(self, still: Still, optimizer: torch.optim.Optimizer) -> None:
        if still.kind == "rate":
            self.tell(replace(still, since=self._resting_since(still.since)), optimizer)
            return
        bad = next((value for value in self._carried() if value.nan and value.key in self._finite), None)
        if bad is not None and bad.words in self._told:
            return  # told already: this is what comes of it
        if bad is not None:
            self._told.add(bad.words)
            still = replace(still, detail=bad.words, site=bad.site)
        elif still.loss == 0:
            text = f"the loss is 0 and no gradient arrives since step {still.since}: all is learned, or nothing is"
            self.session.journal.warning(Notice(NoticeKind.STILL, self.session.step_count, "loss", 0.0, text, severe=False), aloud=False)
            return
        self.tell(still, optimizer)

    def _resting_since(self, noticed: int) -> int:
        """The rate is looked at now and then; the history has it for every step."""
        rates = {int(row["step"]): row["lr"] for row in self.session.journal.history() if "lr" in row}
        while rates.get(noticed) != 0 and noticed + 1 in rates:
            noticed += 1
        while rates.get(noticed - 1) == 0:
            noticed -= 1
        return noticed

    def turned_away(self) -> None:
        """The program left a step by itself."""
        self._turned += 1
        if self._turned == STILL and self.session.optimizers:
            self.tell(Still("skipped", self.session.step_count - STILL), self.session.optimizers[-1])

    # -- carried values -----------------------------------------------------------------------------------------

    def _carried_badly(self) -> Still | None:
        """A value that was finite when it was looked at before, and is NaN at two looks in a row: no label or table with gaps."""
        values = list(self._carried())
        bad = [v for v in values if v.nan and v.key in self._finite]
        again = next((v for v in bad if v.key in self._suspects), None)
        self._finite |= {v.key for v in values if not v.nan and v.key not in self._suspects}
        self._suspects = {v.key for v in bad}
        return None if again is None else Still("average", self.session.step_count, detail=again.words, site=again.site)

    def _carried(self) -> Iterator[_Value]:
        """Yield what this step reads of the one before, or writes in place, and what a model keeps as plain attributes."""
        recorder = self.session.recorder
        for entry in list(recorder.tape):
            for leaf in entry.reads if entry.number > self.session.window_start else ():
                if isinstance(leaf, Outside) and _plain(leaf.tensor) and (leaf.written or recorder.tape.made_before(leaf.tensor)):
                    yield _value("a value carried from step to step", leaf.tensor, entry.site)
        for state in recorder.current():
            for name, tensor in state.carried():
                if _plain(tensor):
                    yield _value(f"`{name}`, which the model carries from step to step,", tensor, None)

    def _averaged_badly(self) -> Still | None:
        if self._looks % 3:
            return None
        for average in self.followers.averages:
            bad = nonfinite(average.named_parameters())
            if bad:
                words = f"the averaged model is not finite: {bad[0][0]}" + (f" and {len(bad) - 1} more tensors" if len(bad) > 1 else "")
                return Still("average", self.session.step_count, detail=words)
        return None

    # -- weights that do not move -------------------------------------------------------------------------------

    def _rounded_away(self, optimizer: torch.optim.Optimizer) -> Still | None:
        """Weights in half precision that kept every bit over 32 steps although gradients arrive: the updates round away."""
        groups = [g for g in optimizer.param_groups if g.get("lr") != 0]
        weights = [p for g in groups for p in g["params"] if p.requires_grad and p.dtype in _HALF and p.numel()]
        step = self.session.step_count
        if not weights or self.session.has_several or self._looks % 2 == 0:
            return None
        chosen = weights[:: max(1, len(weights) // SAMPLES)][:SAMPLES]
        now = [p.detach().flatten()[:: max(1, p.numel() // SAMPLES)][:SAMPLES].clone().cpu() for p in chosen]
        before, self._sample = self._sample, (step, now)
        if before is None or not _same(before[1], now) or not any(p.grad is not None and bool(p.grad.count_nonzero()) for p in chosen):
            return None
        dtype = str(chosen[0].dtype).removeprefix("torch.")
        return Still("rounding", before[0], detail=f"the weights are {dtype}, and none of {sum(t.numel() for t in now)} looked at has moved")


def _rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Return a learning rate that is not 0 where some group has one."""
    first = optimizer.param_groups[0].get("lr")
    if first != 0 and isinstance(first, float):
        return first
    rates = [rate for group in optimizer.param_groups if isinstance(rate := group.get("lr"), int | float)]
    return max(rates) if len(rates) == len(optimizer.param_groups) else None


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_floating_point() and not tensor.requires_grad and 0 < tensor.numel() <= SMALL


def _value(what: str, tensor: torch.Tensor, site: Site | None) -> _Value:
    bad = int(tensor.isnan().sum())
    shape = shape_of(tensor)
    return _Value((site or what, shape), f"{what} has nan among its {tensor.numel()} values (shape {shape})", site, bool(bad))


def _same(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    return len(before) == len(now) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, now, strict=True))
