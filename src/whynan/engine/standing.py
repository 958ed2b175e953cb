"""Silent death in the loop: every number is finite and nothing is learned any more.

Loss, gradient norm and learning rate are there anyway. Every 16 steps it also looks at values that the program carries
from step to step, at averaged models, and at whether weights in half precision still move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

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


class Standing:
    """Tells once when a training has come to a standstill."""

    def __init__(self, session: Session, followers: Followers, tell: Callable[[Still, torch.optim.Optimizer], None]) -> None:
        self.session, self.followers, self.tell = session, followers, tell
        self._curves: weakref.WeakKeyDictionary[torch.optim.Optimizer, Stillness] = weakref.WeakKeyDictionary()
        self._suspects: list[weakref.ref[torch.Tensor]] = []  # values that were bad at the last look
        self._told: set[str] = set()
        self._sample: tuple[int, list[torch.Tensor]] | None = None
        self._turned = 0  # steps in a row that the program itself left
        self._next, self._looks = EVERY - 1, 0
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
        for still, stands in self._waiting:
            self._settle(still, stands)
        self._waiting.clear()
        if self.session.step_count >= self._next:
            self._next, self._looks = self.session.step_count + EVERY, self._looks + 1
            found = self._carried_badly() or self._averaged_badly() or self._rounded_away(optimizer)
            if found is not None and found.detail not in self._told:
                self._told.add(found.detail)
                self.tell(found, optimizer)

    def _settle(self, still: Still, optimizer: torch.optim.Optimizer) -> None:
        bad = min(self._bad_values(), key=lambda b: not b[3], default=None) if still.kind == "gradient" else None
        if still.kind == "rate":
            still = replace(still, since=self._resting_since(still.since))
        if bad is not None and bad[0] in self._told:
            return  # told already: this is what comes of it
        if bad is not None:
            self._told.add(bad[0])
            still = replace(still, detail=bad[0], site=bad[1])
        elif still.loss == 0 and still.kind == "gradient":
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
        """A value that the program made in an earlier step, or keeps writing to, is bad at two looks in a row."""
        found = list(self._bad_values())
        known = [ref() for ref in self._suspects]
        again = next(((words, site) for words, site, tensor, fresh in found if fresh or any(tensor is k for k in known)), None)
        self._suspects = [weakref.ref(tensor) for _, _, tensor, _ in found]
        return None if again is None else Still("average", self.session.step_count, detail=again[0], site=again[1])

    def _bad_values(self) -> Iterator[tuple[str, Site | None, torch.Tensor, bool]]:
        """Yield what is carried and not finite: its description, who reads it, itself, and whether one look is enough."""
        recorder = self.session.recorder
        for entry in recorder.tape:
            for leaf in entry.reads if entry.number > self.session.window_start else ():
                if isinstance(leaf, Outside) and _plain(leaf.tensor):
                    carried = recorder.tape.made_before(leaf.tensor)
                    if (carried or leaf.written) and bool(leaf.tensor.isnan().any()):
                        yield _describe("a value carried from step to step", leaf.tensor), entry.site, leaf.tensor, carried
        for state in recorder.current():
            for name, tensor in state.carried():
                if _plain(tensor) and bool(tensor.isnan().any()):
                    yield _describe(f"`{name}`, which the model carries from step to step,", tensor), None, tensor, True

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
        weights = [p for p in parameters_of(optimizer) if p.requires_grad and p.dtype in _HALF and p.numel()]
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
    rates = [group.get("lr") for group in optimizer.param_groups]
    return max((r for r in rates if isinstance(r, int | float)), default=None) if all(isinstance(r, int | float) for r in rates) else None


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_floating_point() and not tensor.requires_grad and 0 < tensor.numel() <= SMALL


def _describe(what: str, tensor: torch.Tensor) -> str:
    return f"{what} has {int(tensor.isnan().sum())} nan of {tensor.numel()} values (shape {shape_of(tensor)})"


def _same(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    return len(before) == len(now) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, now, strict=True))
