"""Silent death in the loop: every number is finite and nothing is learned any more.

Loss, gradient norm and learning rate are there anyway. Every 16 steps it also looks at values that the program carries
from step to step, at averaged models, and at whether weights in half precision still move.

What is meant is no death: an optimizer that rests while another one learns, a schedule that will raise its rate again, a
table in which NaN marks what is not known yet.
"""

from __future__ import annotations

import contextlib
import io
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from whynan.capsule.sites import Site
from whynan.capsule.state.randomness import put_rng, take_rng
from whynan.capsule.tape.entries import Outside
from whynan.engine.carrying import Flow, is_plain
from whynan.engine.session import Session, parameters_of, shape_of
from whynan.records import Notice, NoticeKind
from whynan.recovery.followers import Followers, Moved
from whynan.tripwire.checks import nonfinite
from whynan.tripwire.stillness import STILL, Still, Stillness, Unmoved

EVERY = 16  # steps between two looks at carried values
AHEAD = 1024  # calls of a schedule that are tried, to know whether its rate of 0 is the last


@dataclass(frozen=True, slots=True)
class _Value:
    """Something that outlives its step, as it is read in this one."""

    key: object  # who reads it, or its name, and its shape
    words: str
    site: Site | None
    gaps: torch.Tensor  # where it is NaN
    nan: bool
    tensor: torch.Tensor


class Standing:
    """Tells once when a training has come to a standstill."""

    def __init__(self, session: Session, followers: Followers, tell: Callable[[Still, torch.optim.Optimizer], None]) -> None:
        self.session, self.followers, self.tell = session, followers, tell
        self._curves: weakref.WeakKeyDictionary[torch.optim.Optimizer, Stillness] = weakref.WeakKeyDictionary()
        self._finite: set[object] = set()  # carried values that were finite at some look
        self._suspects: dict[object, torch.Tensor] = {}  # and were not at the last one, and where
        self._markers: set[object] = set()  # those whose NaN come and go
        self._told: set[str] = set()
        self._unmoved: weakref.WeakKeyDictionary[torch.optim.Optimizer, Unmoved] = weakref.WeakKeyDictionary()
        self._rates: tuple[int, dict[int, float]] = (-1, {})  # by step, as known at a step
        self._turned = 0  # steps in a row that the program itself left
        self._next, self._looks = 1, 0
        self._waiting: list[tuple[Still, torch.optim.Optimizer]] = []

    def numbers(self, step: int, loss: float | None, dead: bool, optimizer: torch.optim.Optimizer) -> None:
        """Take the numbers of one step, and whether it is known to have no gradient."""
        self._turned = 0
        curve = self._curves.get(optimizer)
        if curve is None:
            curve = self._curves[optimizer] = Stillness()
        still = curve.see(step, loss, dead, self._rate_at(step, optimizer))
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
        self.settle(optimizer)

    def settle(self, steps: torch.optim.Optimizer | None = None) -> None:
        """Tell what the numbers showed, in a step of this optimizer."""
        waiting, self._waiting = self._waiting, []
        for still, optimizer in waiting:
            self._settle(replace(still, elsewhere=self.session.has_several and steps is not optimizer), optimizer)

    def _settle(self, still: Still, optimizer: torch.optim.Optimizer) -> None:
        others = any(o is not optimizer and c.learns and c.last >= still.since for o, c in self._curves.items())
        if still.kind == "rate":
            self._settle_rate(still, optimizer, others)
            return
        if others and not (still.same and still.loss is not None):  # one that is trained later, or not by this loss
            self._note(still, optimizer, f"no gradient arrives at the weights of one optimizer since step {still.since}; another one learns")
            return
        still = replace(still, apart=others)
        bad = next((value for value in self._carried() if self._is_bad(value) and self._feeds_itself(value)), None)
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

    # -- rates --------------------------------------------------------------------------------------------------

    def _settle_rate(self, still: Still, optimizer: torch.optim.Optimizer, others: bool) -> None:
        """Tell a rate of 0 that nothing in sight will end."""
        if others:
            self._note(still, optimizer, f"the learning rate of one optimizer is 0 since step {still.since}; another one learns")
            return
        schedulers = _driving(self.followers.schedulers, optimizer)
        begun = any(getattr(s, "_step_count", 2) > 1 for s in schedulers)
        calls = self.session.recorder.suspended(_calls_until_it_rises, schedulers, optimizer) if begun else None
        if calls is not None:
            self._note(still, optimizer, f"the learning rate is 0 since step {still.since}; its schedule raises it in {calls} steps")
            return
        scheduled = schedulers or hasattr(optimizer.step, "_wrapped_by_lr_sched")  # one that was made before the watch
        self.tell(replace(still, detail="there is a scheduler, and it is not stepped") if scheduled and not begun else still, optimizer)

    def _note(self, still: Still, optimizer: torch.optim.Optimizer, text: str) -> None:
        """Write down once what may be meant, and ask again later."""
        self._curves[optimizer].ask_again(still.kind)
        key = f"{still.kind} {id(optimizer)} {still.since}"
        if key not in self._told:
            self._told.add(key)
            name, value = ("lr", 0.0) if still.kind == "rate" else ("grad_norm", 0.0)
            self.session.journal.warning(Notice(NoticeKind.STILL, self.session.step_count, name, value, text, severe=False), aloud=False)

    def _rate_at(self, step: int, optimizer: torch.optim.Optimizer) -> float | None:
        """Steps are looked at some time later: where the rate is 0 now, the history has that of the step."""
        rate = _rate(optimizer)
        if rate != 0:
            return rate
        now = self.session.step_count
        if self._rates[0] != now:
            self._rates = now, {int(row["step"]): row["lr"] for row in self.session.journal.history() if "lr" in row}
        return self._rates[1].get(step, rate)

    def turned_away(self) -> None:
        """The program left a step by itself."""
        self._turned += 1
        if self._turned == STILL and self.session.optimizers:
            self.tell(Still("skipped", self.session.step_count - STILL), self.session.optimizers[-1])

    # -- carried values -----------------------------------------------------------------------------------------

    def _carried_badly(self) -> Still | None:
        """A value that was finite when it was looked at before, and is NaN at two looks in a row: no label or table with gaps."""
        values = list(self._carried())
        for value in values:
            before = self._suspects.get(value.key)
            if before is not None and value.nan and bool((before & ~value.gaps).any()):
                self._markers.add(value.key)  # a NaN has become finite again, others have not: they mark something
        bad = [v for v in values if self._is_bad(v)]
        again = next((v for v in bad if v.key in self._suspects and self._feeds_itself(v)), None)
        self._finite |= {v.key for v in values if not v.nan and v.key not in self._suspects}
        self._suspects = {v.key: v.gaps for v in bad}
        return None if again is None else Still("average", self.session.step_count, detail=again.words, site=again.site)

    def _is_bad(self, value: _Value) -> bool:
        return value.nan and value.key in self._finite and value.key not in self._markers

    def _feeds_itself(self, value: _Value) -> bool:
        """Whether the next value is computed from this one, and it meets something that is trained; inside a module that is taken for granted."""
        entries = [e for e in self.session.recorder.tape if e.number > self.session.window_start]
        flow = Flow(self.session.recorder.tape, value.tensor)
        return (flow.returns(entries) and flow.trains(entries)) or (value.site is None and not flow.met)

    def _carried(self) -> Iterator[_Value]:
        """Yield what this step reads of the one before, or writes in place, and what a model keeps as plain attributes."""
        recorder = self.session.recorder
        seen: set[tuple[Site | None, int]] = set()
        count: Counter[object] = Counter()  # several values may be read at one line
        for entry in list(recorder.tape):
            for leaf in entry.reads if entry.number > self.session.window_start else ():
                known = isinstance(leaf, Outside) and (entry.site, id(leaf.tensor)) in seen
                if isinstance(leaf, Outside) and not known and is_plain(leaf.tensor) and (leaf.written or recorder.tape.made_before(leaf.tensor)):
                    seen.add((entry.site, id(leaf.tensor)))
                    yield _value("a value carried from step to step", leaf.tensor, entry.site, count)
        for state in recorder.roots.current():
            for name, tensor in state.carried():
                if is_plain(tensor):
                    yield _value(f"`{name}`, which the model carries from step to step,", tensor, None, count)

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
        """Weights in half precision that keep every bit although gradients arrive: the updates round away."""
        if self.session.has_several or self.session.window.loss == 0:  # there is nothing left to learn
            return None
        return self._unmoved.setdefault(optimizer, Unmoved()).see(self.session.step_count, optimizer)


def _driving(schedulers: list[Any], optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the schedulers of an optimizer that no other scheduler calls."""
    own = [s for s in schedulers if getattr(getattr(s, "optimizer", None), "param_groups", None) is optimizer.param_groups]
    inner = {id(i) for s in own for i in getattr(s, "_schedulers", None) or ()}
    return [s for s in own if id(s) not in inner]


def _calls_until_it_rises(schedulers: list[Any], optimizer: torch.optim.Optimizer) -> int | None:
    """Try what a schedule does next, and put everything back; nothing where its rate stays 0. Cost: at most 1024 calls of it."""
    saved, rng = [Moved(s) for s in schedulers], take_rng(others=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for calls in range(1, AHEAD + 1):
                for scheduler in schedulers:
                    scheduler.step()
                if _rate(optimizer) != 0:
                    return calls
    except Exception:  # one that wants a number of the program's, or is past its end
        return None
    finally:
        for moved in reversed(saved):
            moved.restore()
        put_rng(rng)
    return None


def _rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Return a learning rate that is not 0 where some group has one."""
    first = optimizer.param_groups[0].get("lr")
    if isinstance(first, float) and first != 0:
        return first
    rates = [rate for group in optimizer.param_groups if isinstance(rate := group.get("lr"), int | float)]
    return max(rates) if len(rates) == len(optimizer.param_groups) else None


def _value(what: str, tensor: torch.Tensor, site: Site | None, count: Counter[object]) -> _Value:
    gaps = tensor.detach().isnan()
    shape = shape_of(tensor)
    place = (site or what, shape)
    count[place] += 1
    words = f"{what} has nan among its {tensor.numel()} values (shape {shape})"
    return _Value((place, count[place]), words, site, gaps, bool(gaps.any()), tensor)
