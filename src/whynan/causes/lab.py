"""Experiments on the replay: this step with another expression at that line, in float64, with weights moved a little; what each outcome proves.

A remedy counts as proven only if the replayed step has a finite loss, finite gradients, a gradient that is alive, and a
loss of the size the run had before: making numbers finite is not enough. Where the step is finite in float64 the
gradient must point the same way as there, and the healthy steps before must keep their loss.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from whynan.capsule.replay import Program, Run
from whynan.capsule.sites import Site
from whynan.capsule.tape.entries import Slot
from whynan.causes import made
from whynan.causes.swapping import Put, Swapper
from whynan.causes.widening import BRAIN, LARGEST, SHORT, WIDE, converted, size_of
from whynan.errors import let_through
from whynan.records import FAR_OFF, number
from whynan.trace.jumps import Jump
from whynan.trace.mending import Arbitrary
from whynan.tripwire.checks import total_norm
from whynan.tripwire.values import damage_of, largest_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave."""

    loss: float | None
    norm: float | None
    finite: bool
    error: str = ""
    along: float | None = None  # cosine of the gradient with that of the same step in float64
    reached: frozenset[int] = frozenset()  # places of the leaves that got a gradient other than 0
    cut: str = ""  # what a finite one shows, where that is not the whole step

    def effect(self) -> str:
        """Say it in words."""
        if self.error:
            return f"the replay raised {self.error}"
        if self.cut and self.finite:
            return self.cut
        words = []
        if self.loss is not None:
            words.append(f"loss {number(self.loss)}")
        if self.norm is not None:
            words.append(f"gradient norm {number(self.norm)}")
        return ", ".join(words) or ("everything finite" if self.finite else "not finite")


@dataclass(frozen=True, slots=True)
class Slopes:
    """How steeply a loss rises in a direction, by two accounts."""

    told: float  # by the gradient
    seen: float  # by forward passes beside it

    @property
    def agree(self) -> bool:
        """Whether both are the same, but for what rounding and curvature add."""
        return abs(self.told - self.seen) <= 0.02 * max(abs(self.told), abs(self.seen)) + 1e-9


ALONG = 0.9  # the least cosine with the gradient in float64
TOLERANCE = 0.01  # by how much the loss of a healthy step may move: an epsilon does not come free
UNUSUAL = 20  # how many times what it was before a loss has to be to be called that
NOTHING = 1e-20  # a gradient in float64 that is smaller is 0 in what is trained
ABSURD = 1e8  # a loss or gradient of this size is no remedy where nothing is known of what it was
FEW = 5  # losses from which it is not yet known how far they move
_TRAINS_NOTHING = "this batch then trains nothing, like a skipped one"
_ADDS_NOTHING = "this backward pass, one of several, then adds nothing to the gradient"
NO_MEMORY = Outcome(None, None, False, "MemoryError: there was too little memory for another replay")


class Lab:
    """Runs variations of one failing step."""

    def __init__(
        self,
        program: Program,
        targets: Callable[[Run], list[torch.Tensor]],
        history: list[dict[str, float]],
        scaler: Any = None,
        healthy: dict[int, Program] | None = None,
        jump: Jump | None = None,
        place: str = "",
    ) -> None:
        self.program = program.gone_back() if place == "loss" else program
        self.cut = _cut(program, place)
        self.one_of_several = False  # other backward passes of the step add to the gradient: micro-batches, tasks
        self.jump = jump  # what is to go away where everything is finite
        self.scale = _scale(history, scaler) if self.program is program else 1.0
        self.targets = targets
        self.small, self.quick = size_of(program) <= LARGEST, size_of(program) <= SHORT
        if any(e.kind == "function" for e in program.entries):  # a step function does more than compute: played as seldom as can be
            self.small, healthy = False, {}
        self.healthy = dict(list((healthy or {}).items())[: 2 if self.quick else 1])
        self.truth: dict[int, torch.Tensor] = {}  # the gradients in float64, by their place
        self.wide: Outcome | None = None
        self._steady: float | None = None  # how far the gradient in float64 stays the same where weights move by rounding
        self._excused = False  # what is judged may leave weights without a gradient: the batch has nothing to teach
        self._open: frozenset[int] | None = None  # places of the weights that a gradient can reach, where that was asked
        self._usual: dict[int, Outcome] = {}  # by healthy step: what it gives as it is, with the weights of today
        self.losses = [h["loss"] for h in history if math.isfinite(h.get("loss", math.nan))]
        self.norms = [h["grad_norm"] for h in history if math.isfinite(h.get("grad_norm", math.nan))]
        self.left: float | None = None  # the loss of the step without its bad samples
        self.hit = 0
        self._beside: list[Put] = []  # what is in force whatever else is tried
        self.where: Site | None = None  # the last place where something was put in
        self.places: list[Site | None] = []  # and all of them, in order

    def run(self, put: Put | None = None, around: Any = None, program: Program | None = None, after: Callable[[Program], None] | None = None) -> Outcome:
        """Replay the step (or a healthy one) once, with something else in place of a torch function; do something with the gradients it leaves."""
        program = program or self.program
        mode = Swapper(program, [put, *self._beside]) if put is not None else contextlib.nullcontext()
        made.forget()
        try:
            with program.still():
                with around or contextlib.nullcontext(), mode:
                    run = program.play()
                    outcome = self._outcome(run, program)
                if after is not None and outcome.finite and not outcome.error:
                    after(program)
        except MemoryError:
            outcome = NO_MEMORY
        finally:
            made.forget()  # what was remembered are the tensors of this replay
        self.places = mode.places if isinstance(mode, Swapper) else []
        self.hit, self.where = len(self.places), self.places[-1] if self.places else None
        return outcome

    @contextlib.contextmanager
    def beside(self, put: Put) -> Iterator[None]:
        """Have a change in force at another place while others are tried."""
        self._beside.append(put)
        try:
            yield
        finally:
            self._beside.pop()

    def _outcome(self, run: Run, program: Program) -> Outcome:
        if run.error is not None:
            return Outcome(None, None, False, f"{type(run.error).__name__}: {str(run.error).splitlines()[0] if str(run.error) else ''}")
        failing = program is self.program
        with torch.no_grad():
            losses = [float(t.detach().float().sum()) for t in run.losses]
            placed = _gradients(program, run) if program.undo is None else {}  # of an update they are where it begins
            grads = list(placed.values())
            norm = total_norm([g.detach().to_dense() if g.is_sparse else g for g in grads]) if grads else None
            seen = {id(g) for g in grads} if norm is not None and math.isfinite(float(norm)) else set()  # a finite norm has no bad part
            suspects = [t for t in (self.targets(run) if failing else []) + grads if id(t) not in seen]
            finite = all(map(math.isfinite, losses)) and not any(damage_of(t.detach()) for t in suspects)
            along = self._along(run) if failing and finite and self.truth else None
            reached = _reached(placed)
        scaled = program.entries[-1].kind == "backward" if program.entries else False  # else the scaler has divided already
        size = None if norm is None else float(norm) / (self.scale if scaled else 1.0)
        return Outcome(losses[-1] / self.scale if losses else None, size, finite, along=along, reached=reached, cut=self.cut if failing else "")

    # -- the same step in float64 -------------------------------------------------------------------------------

    def widen(self) -> Outcome | None:
        """Play the step as it is in float64, once; its gradient is kept where it is finite. None: it cannot be compared."""
        if self.wide is None and self.small and self.program.undo is None:
            try:
                self.wide = self._widen()
            except Exception as error:  # a program that cannot run in float64 has no such truth
                self.wide = Outcome(None, None, False, f"{type(error).__name__}: {error}")
        return self.wide if self.wide is not None and not self.wide.error else None

    def _widen(self) -> Outcome:
        program = self.program
        with program.still(), converted(program, WIDE):
            before = _drawn()
            run = program.play()
            outcome = self._outcome(run, program)
            after = _drawn()
            truth = _gradients(program, run) if outcome.finite else {}
        if before != after and not self._draws_like(before, after):
            return Outcome(None, None, False, "it draws other random numbers")
        self.truth = {} if self._beyond(outcome) else truth
        return outcome

    def _beyond(self, outcome: Outcome) -> bool:
        """Whether a spike that is to go away is still there."""
        return self.jump is not None and self.jump.beyond(outcome.loss, outcome.norm)

    def _draws_like(self, before: bytes, after: bytes) -> bool:
        """Whether the step as it is leaves the random generators where the one in float64 left them."""
        with self.program.still():
            if _drawn() != before:
                return False
            self.program.play()
            return _drawn() == after

    def _along(self, run: Run) -> float | None:
        """Return the cosine between the gradient of this replay and the one in float64."""
        grads = {place: _components(g) for place, g in _gradients(self.program, run).items()}
        own = sum(float(g.square().sum()) for g in grads.values())
        true = sum(float(_components(t).square().sum()) for t in self.truth.values())
        dot = sum(float((g * _components(self.truth[place])).sum()) for place, g in grads.items() if place in self.truth)
        return dot / math.sqrt(own * true) if own and true else None

    def _shaken(self) -> float:
        """Return the cosine of the gradient in float64 with itself where the weights are moved by what their own type rounds away.

        A difference that is 0 by rounding is noise in float64, and so is the slope of its root: such a gradient is nothing to hold a remedy against.
        """
        if self._steady is None:
            try:
                self._steady = self._shake()
            except Exception as error:
                let_through(error)
                self._steady = 1.0
        return self._steady

    def _shake(self) -> float:
        program, source = self.program, torch.Generator().manual_seed(0)
        digits = [torch.finfo(leaf.dtype).eps for leaf in program.leaves]
        with program.still(), converted(program, WIDE):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for leaf, digit in zip(program.leaves, digits, strict=True):
                    leaf *= 1 + digit * torch.randn(leaf.shape, generator=source, dtype=torch.float64).to(leaf.device)
            run = program.play()
            outcome = self._outcome(run, program)
        return outcome.along or 0.0

    # -- the slope itself ---------------------------------------------------------------------------------------

    def slopes(self, put: Put | None, program: Program | None = None, off: float = 0.0) -> Slopes | None:
        """Return how steeply the loss rises along a random direction, in float64: by the gradient that a change gives, and by forward passes to both sides.

        For a change in a backward pass that the program wrote itself: nothing else says what its slope should be. `off` is how far from the weights
        it is asked, as a share of their size. None: it cannot be asked, or the loss has no slope there, since nearer passes give another one.
        """
        program = program or self.program
        if not self.small or program.undo is not None or any(leaf.dtype not in WIDE for leaf in program.leaves):
            return None  # the last: what has no stand-in in float64 is the program's own weight, and must not be moved
        try:
            source = torch.Generator().manual_seed(0)
            way = [torch.randn(leaf.shape, generator=source, dtype=torch.float64).to(leaf.device) for leaf in program.leaves]
            size = math.sqrt(sum(float(leaf.detach().double().square().sum()) for leaf in program.leaves))
            whole = max(size, 1e-3) / math.sqrt(sum(float(d.square().sum()) for d in way))
            _, told = self._beside_it(program, put, way, off * whole)
            seen, nearer = (self._risen(program.until_loss(), put, way, off * whole, far * whole) for far in (1e-5, 2e-6))
        except Exception as error:  # it cannot run in float64, or its loss is no number: then nothing is said of it
            let_through(error)
            return None
        found = Slopes(told, seen)
        return found if math.isfinite(told) and math.isfinite(seen) and Slopes(seen, nearer).agree else None

    def is_surrogate(self) -> bool:
        """Whether the program's own gradient is not the slope of its loss where it needs no change: in a healthy step, or in this one beside its weights.

        Spikes and quantisers are trained with the slope of something else.
        """
        asked = [self.slopes(None, program) for program in self.healthy.values()] or [self.slopes(None, off=off) for off in (1e-3, 1e-1)]
        return any(slopes is not None and not slopes.agree for slopes in asked)

    def _risen(self, program: Program, put: Put | None, way: list[torch.Tensor], off: float, far: float) -> float:
        above, below = (self._beside_it(program, put, way, off + side)[0] for side in (far, -far))
        return (above - below) / (2 * far)

    def _beside_it(self, program: Program, put: Put | None, way: list[torch.Tensor], far: float) -> tuple[float, float]:
        """Play a step so far along a direction; return its loss and the slope that its gradient tells."""
        puts = [p for p in (put, *self._beside) if p is not None]
        with program.still(), converted(program, WIDE), Swapper(program, puts):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for leaf, direction in zip(program.leaves, way, strict=True):
                    leaf += far * direction
            run = program.play()
            with torch._C.DisableTorchFunction():
                told = sum(float((leaf.grad.to_dense() * d).sum()) for leaf, d in zip(program.leaves, way, strict=True) if leaf.grad is not None)
                return sum(float(loss.detach()) for loss in run.losses), told

    # -- judgement ----------------------------------------------------------------------------------------------

    def in_bfloat16(self, program: Program | None = None) -> Outcome:
        """Replay the step with bfloat16 in the place of float16. Raises where that cannot be done without a trace."""
        program = program or self.program
        outcome = self.run(around=converted(program, BRAIN), program=program)
        self.hit = 1
        return outcome

    def weigh(self, outcome: Outcome, again: Callable[[Program], Outcome], tolerance: float = TOLERANCE, edge: bool = False) -> tuple[bool, str]:
        """Hold a remedy that made the step finite against float64 and the healthy steps before; say what that gave.

        `again` plays another step with the remedy; `edge`: the bad operation has one, and rounding decides on which side of it an argument lies.
        """
        words = []
        elsewhere = outcome.along is not None and outcome.along < ALONG
        if elsewhere and (not edge or self._shaken() >= ALONG):
            return False, f"finite, but the gradient is not that of the same step in float64 (cosine {outcome.along:.2f}): {outcome.effect()}"
        if outcome.norm:
            words.append("gradient alive" + (f", as in float64 (cosine {outcome.along:.3f})" if outcome.along is not None and not elsewhere else ""))
        if elsewhere:
            words.append(f"not held against float64, whose gradient is noise here: weights moved by their last digit turn it (cosine {self._shaken():.2f})")
        kept: dict[int, float] = {}
        for step, program in self.healthy.items():
            usual = self._usual.get(step) or self.run(program=program)
            self._usual[step] = usual
            changed = again(program) if usual.finite and usual.loss is not None else None
            if changed is None or usual.loss is None or not self.hit:
                continue
            if changed.loss is None or not changed.finite:
                return False, f"it breaks step {step}, which was finite: {changed.effect()}"
            kept[step] = abs(changed.loss - usual.loss) / max(abs(usual.loss), 1e-6)
            if kept[step] > tolerance and not self._truer(program, changed.loss, usual.loss):
                return False, f"finite, but healthy step {step} then has another loss: {number(changed.loss)} where it was {number(usual.loss)}"
        if silent := self._silenced(outcome):
            return False, f"finite, but no gradient reaches {silent} weights any more ({outcome.effect()})"
        if kept:
            steps = ", ".join(map(str, sorted(kept)))
            apart = max(kept.values())
            words.append(f"same loss {f'within {apart:.1g} ' if apart > 1e-5 else ''}on the kept healthy step{'s' * (len(kept) > 1)} ({steps})")
        return True, ", ".join(words)

    def _silenced(self, outcome: Outcome) -> str:
        """Say how many weights a remedy leaves without any gradient, where that is most of those that have one; else nothing.

        What has one is known from float64, from the healthy steps, or from what the bad values would reach if they were numbers, in this order.
        """
        if self.wide is not None and self.wide.finite:
            seen = [self.wide]
        else:
            seen = [o for o in self._usual.values() if o.finite] or [o for o in (self.wide, *self._usual.values()) if o is not None]
        alive = frozenset[int]().union(*(o.reached for o in seen))
        if not outcome.norm or self._excused or not _most_of(alive - outcome.reached, alive):
            return ""
        if self.wide is None or not self.wide.finite:  # another step may train other weights: the other half of a GAN
            alive &= self._reachable()
        lost = alive - outcome.reached
        return f"{len(lost)} of {len(alive)}" if _most_of(lost, alive) else ""

    def _reachable(self) -> frozenset[int]:
        """Return the places of the weights that a gradient reaches where the bad values are arbitrary numbers: a layer of zeros lets none through."""
        if self._open is None:
            outcome = self._arbitrary()
            self._open = frozenset(range(len(self.program.leaves))) if outcome is None or outcome.error else outcome.reached
        return self._open

    def _arbitrary(self) -> Outcome | None:
        """Play the step with arbitrary numbers in the place of the bad values of its backward pass."""
        try:
            return self.run(around=Arbitrary())
        except Exception as error:
            let_through(error)
            return None

    def _truer(self, program: Program, changed: float, usual: float) -> bool:
        """Whether a loss that moved came nearer to that of float64: then the old one was the inaccurate one."""
        if not self.small:
            return False
        wide = self.run(around=converted(program, WIDE), program=program)
        return wide.loss is not None and wide.finite and abs(changed - wide.loss) < 0.1 * abs(usual - wide.loss)

    def judge(self, outcome: Outcome, empty: bool = False, same: float | None = None, low: bool = False, bound: bool = False) -> tuple[bool, str]:
        """Say whether an outcome proves a remedy, and what is wrong with it otherwise.

        `low`: its loss may be as low as it is; `bound`: it keeps an operand off an edge by some number, and another number gives another loss.
        """
        self._excused = empty
        if outcome.error or not outcome.finite:
            return False, outcome.effect() if outcome.error else f"still not finite ({outcome.effect()})"
        if self._beyond(outcome):
            return False, f"still absurd: {outcome.effect()}"
        if outcome.norm is not None and outcome.norm == 0 and empty:
            return True, f"{outcome.effect()}: {_ADDS_NOTHING if self.one_of_several else _TRAINS_NOTHING}"
        if outcome.norm is not None and outcome.norm == 0 and not self._often_still():
            return False, f"finite, but the gradient is dead ({outcome.effect()})"
        if same is not None and outcome.loss is not None and abs(outcome.loss - same) > 1e-3 * max(1.0, abs(same)):
            return False, f"finite, but the loss is another: {outcome.effect()} where it was {number(same)}"
        if self.is_true(outcome):
            return True, outcome.effect()  # large, but so it is in float64
        if outcome.norm is not None and outcome.norm > max([1e4 * n for n in self.norms[-50:]], default=ABSURD):
            return False, f"{FAR_OFF[1]}{outcome.effect()}"
        if outcome.loss is not None and abs(outcome.loss) > self.ceiling():
            return False, f"{FAR_OFF[0]}{outcome.effect()}{self._held_against()}"
        if bound and self._only_moves(outcome):
            largest = number(max(self.norms[-50:]))
            return False, f"finite, but the blow-up is only smaller: {outcome.effect()}{self._held_against()} and a gradient norm of at most {largest}"
        if outcome.loss is not None and outcome.loss < self._floor() and not low:
            return False, f"finite, but it rewards the fault: {outcome.effect()}{self._held_against_lowest()}"
        unusual = self.losses and outcome.loss is not None and abs(outcome.loss) > UNUSUAL * self._usual_loss()
        return True, outcome.effect() + (f" (the steps before had a loss of about {number(self._usual_loss())})" if unusual else "")

    def _only_moves(self, outcome: Outcome) -> bool:
        """Whether both the loss and the gradient are far above all that the steps before had: an epsilon that bounds a pole leaves it a peak.

        Not where the gradient of the rest of the step is as large by itself, with arbitrary numbers in the place of the bad values.
        """
        if not self.losses or not self.norms or outcome.loss is None or outcome.norm is None:
            return False
        if abs(outcome.loss) <= UNUSUAL * self._usual_loss() or outcome.norm <= UNUSUAL * max(self.norms[-50:]):
            return False
        rest = self._arbitrary()
        return rest is None or rest.norm is None or not outcome.norm <= 2 * rest.norm

    def ceiling(self) -> float:
        """Return the largest loss that a remedy may give: by the steps before, else by this one without its bad samples."""
        if self.losses:
            return 1000 * self._usual_loss()
        return 1000 * max(abs(self.left), 1.0) if self.left is not None else ABSURD

    def _floor(self) -> float:
        """Return the lowest loss that a remedy may give, below 0 at any rate: a loss may always vanish.

        By how far the steps before went below their median, and by their size; loosely, where they are few.
        """
        known = self.losses[-50:] or ([] if self.left is None else [self.left])
        if not known:
            return -ABSURD
        lowest, size = min(known), statistics.median(map(abs, known))
        fell = statistics.median(known) - lowest
        return min(lowest, 0.0) - max(3 * fell, size if len(known) >= FEW else 10 * max(size, 1.0))

    def _held_against_lowest(self) -> str:
        return f", the lowest of the steps before was {number(min(self.losses[-50:]))}" if self.losses else self._held_against()

    def _usual_loss(self) -> float:
        return max(statistics.median(map(abs, self.losses)), max(map(abs, self.losses[-20:])), 1e-3)

    def _held_against(self) -> str:
        if self.losses:
            return f", the steps before had about {number(self._usual_loss())}"
        return f", without the bad samples it is {number(self.left)}" if self.left is not None else ""

    def is_true(self, outcome: Outcome) -> bool:
        """Whether a remedy gives the loss and the gradient that the step as it is has in float64."""
        wide = self.wide
        if wide is None or not wide.finite or wide.loss is None or outcome.loss is None or outcome.along is None:
            return False
        return outcome.along >= ALONG and abs(outcome.loss - wide.loss) <= TOLERANCE * abs(wide.loss)

    def _often_still(self) -> bool:
        """Whether steps without any gradient are ordinary in this run: then one more says nothing against a remedy."""
        return len(self.norms) > 2 and statistics.median(self.norms[-20:]) == 0


def _cut(program: Program, place: str) -> str:
    """Say what a change that makes a replay finite shows, where that is not the whole step."""
    if place == "exception" and program.ends_midway:
        return "the call that failed gives a finite result; what follows it was not recorded"
    if any(e.kind == "optimizer" and e.args and (len(e.args) != 2 or e.args[1] is None) for e in program.entries):  # more than one evaluation, which came first
        return "finite weights for the evaluations that were made; what the closure gives for other weights is not known"
    return ""


def _gradients(program: Program, run: Run) -> dict[int, torch.Tensor]:
    """Return the gradients of a replay by their place among the leaves, or what its `torch.autograd.grad` gave, in order, where nothing went to leaves.

    An update that is made of these may be made of others, too: nothing is said of them then.
    """
    kept = {place: leaf.grad for place, leaf in enumerate(program.leaves) if leaf.grad is not None}
    asked = {e.number for e in program.entries if e.kind == "derivative"}
    if kept or program.ends_with_update:
        return kept
    return dict(enumerate(t for slot, t in run.made.items() if isinstance(slot, Slot) and slot.entry in asked))


def _components(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in float64; a complex one as the real numbers it consists of."""
    dense = gradient.detach().to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double()


def _reached(placed: dict[int, torch.Tensor]) -> frozenset[int]:
    """Return the places of gradients that are not 0, or that cannot be looked into; read in one go."""
    sizes = largest_of([g.detach() for g in placed.values()])
    return frozenset(place for place, size in zip(placed, sizes, strict=True) if size is None or not size <= NOTHING)


def _most_of(some: frozenset[int], all_of_them: frozenset[int]) -> bool:
    return 2 * len(some) > len(all_of_them)


def _drawn() -> bytes:
    """Return where the random generators stand."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
    return b"".join(bytes(s.tolist()) for s in states)


def _scale(history: list[dict[str, float]], scaler: Any) -> float:
    """By what a gradient scaler multiplies the loss that is gone back from: the losses of the run are without it."""
    known = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else history[-1].get("scale", 1.0) if history else 1.0
    return known if known > 0 and math.isfinite(known) else 1.0
