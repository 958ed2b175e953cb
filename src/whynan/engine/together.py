"""Many ranks: all know of a bad step, all take the same action, one tells it.

A bad value that one rank knows of before its backward pass is carried to the others by the gradients themselves: that
rank goes back from NaN. So with DDP, and with `fully_shard` where gradients are clipped, the answer comes with a
collective that is made anyway; only `fully_shard` without clipping needs a small all-reduce of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.alone import is_sharded, whole
from whynan.capsule.replay import Program
from whynan.diagnosis import Case
from whynan.engine.session import Session, parameters_of
from whynan.records import NOWHERE, Cause, Confidence, Incident, Origin, Phase, Symptom
from whynan.recovery.ranks import RankLost, Ranks, several
from whynan.tripwire.checks import nonfinite


class Together:
    """Stands for this rank among the others; does nothing where there are none."""

    def __init__(self, session: Session, timeout: float) -> None:
        self.session = session
        self.timeout = timeout
        self.ranks: Ranks | None = None
        self.sharded = False
        self._looked = False
        self.received: Incident | None = None  # what this rank writes down of an incident born on another

    def begin(self, optimizer: torch.optim.Optimizer) -> bool:
        """At a step: join the others if the model is data parallel; return whether there are others."""
        if self.ranks is None and not self._looked and several():
            self._looked = True
            self.sharded = any(is_sharded(p) for p in parameters_of(optimizer))
            if self.sharded or self.replicated():
                self._join()
            else:
                self.session.journal.say("whynan: the model is neither DistributedDataParallel nor fully_shard: every rank decides for itself")
        return self.ranks is not None

    def replicated(self) -> bool:
        """Whether a model in use averages its gradients over the ranks."""
        return any(isinstance(root, torch.nn.parallel.DistributedDataParallel) for root in self.session.recorder.roots())

    def _join(self) -> None:
        self.ranks = Ranks(self.timeout)
        journal = self.session.journal
        journal.join(self.ranks.rank, self._exchange(journal.place() if self.ranks.rank == 0 else None)[0])

    def _exchange(self, value: Any) -> list[Any]:
        assert self.ranks is not None
        try:
            return self.ranks.gather(value)
        except RankLost as lost:
            self._lost(lost)
            raise

    def _lost(self, lost: RankLost) -> None:
        self.session.journal.say(f"whynan: rank {self.ranks.rank if self.ranks else 0} waited for the others in vain: {lost}", always=True)
        self.session.stop(f"stopped at step {self.session.step_count}: not all ranks answered")

    # -- one answer for all -------------------------------------------------------------------------------------

    def carry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a backward pass that tells the other ranks of a bad value here."""
        loss = args[0] if args else kwargs.get("tensors")
        given = (args[1] if len(args) > 1 else None) or kwargs.get("grad_tensors")
        if not isinstance(loss, torch.Tensor) or given is not None or loss.numel() != 1 or self.session.budget.observes:
            return args, kwargs
        if self.session.window.symptom is not None:
            start = torch.full_like(loss, math.nan)
        elif loss.device.type != "cpu":
            start = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan).to(loss.dtype)  # not read: no wait
        else:
            return args, kwargs
        return (loss, start, *args[2:]) if args else args, kwargs if args else {**kwargs, "grad_tensors": start}

    def agree(self, norm: float | None) -> None:
        """Before an update: make this rank's answer the same as that of all others."""
        window = self.session.window
        bad = norm is not None and not math.isfinite(norm)  # the same on all ranks: averaged gradients, or the norm over all shards
        if self.sharded and (bad or not window.clipped):
            bad = self._sum_up(0.0 if bad or norm is None else norm)
        if bad and window.symptom is None and self.sharded:
            self.session.see(Symptom("gradient", "nan", "gradient"))
        elif not bad and window.symptom is not None:
            window.alone = True  # the gradients did not carry it: the others go on, so must we

    def _sum_up(self, norm: float) -> bool:
        assert self.ranks is not None
        window = self.session.window
        try:
            square, bad = self.ranks.total([norm**2, float(window.symptom is not None)])
        except RankLost as lost:
            self._lost(lost)
            raise
        window.norm = math.sqrt(square) if not bad else math.nan
        return bool(bad)

    def any(self, here: bool) -> bool:
        """Whether it holds on any rank. All ranks ask at the same time."""
        return any(self._exchange(here)) if self.ranks is not None else here

    # -- one incident for all -----------------------------------------------------------------------------------

    def diagnose(self, make: Callable[[], Case], diagnose: Callable[[Case], Incident]) -> Incident:
        """Diagnose on every rank where the bad value can be born, and return the one incident of the job."""
        self.received = None
        if self.ranks is None or self.session.window.alone:
            return diagnose(make())
        roots = self.session.recorder.roots()
        with whole(roots) as note:
            case = make()
            case.rank = self.ranks.rank
            case.note = note
            own = diagnose(case) if self._bad_here(case) else None
            everyone = self._exchange((own, self.session.budget.total, self.session.budget.streak))
            born = [rank for rank, (incident, _, _) in enumerate(everyone) if incident is not None]
            if not born:
                everyone = [(i, t, s) for i, (_, t, s) in zip(self._exchange(diagnose(case)), everyone, strict=True)]
        self.session.budget.total = max(total for _, total, _ in everyone)
        self.session.budget.streak = max(streak for _, _, streak in everyone)
        first = born[0] if born else 0
        incident: Incident = everyone[first][0]
        self._note_received(incident, born)
        return _with_ranks(incident, born, self.ranks.size)

    def _bad_here(self, case: Case) -> bool:
        return case.symptom.place not in ("gradient", "scaler") or not finite(case.program)

    def _note_received(self, incident: Incident, born: list[int]) -> None:
        """On a rank that merely received it: keep what goes into its own file."""
        assert self.ranks is not None
        if self.ranks.rank in born or not born:
            return
        span = incident.origin.span
        where = f" at {span.file}:{span.line}" if span.known else ""
        cause = Cause("WN801", "another-rank", "value that came in from another rank", Confidence.PROVEN,
                      (f"this rank's own loss and gradients were finite; rank {incident.rank} made the value{where} ({incident.cause.code})",))  # fmt: skip
        origin = Origin(Phase.BACKWARD, NOWHERE, exact=False, note=f"born on rank {incident.rank}{where}")
        self.received = replace(incident, rank=self.ranks.rank, origin=origin, cause=cause, remedies=(), experiments=())


def finite(program: Program) -> bool:
    """Replay once and look at loss and gradients."""
    with program.still():
        run = program.play()
        made = [("loss", t) for t in run.losses] + [("gradient", p.grad) for p in program.leaves if p.grad is not None]
        return run.error is None and not nonfinite(made)


def _with_ranks(incident: Incident, born: list[int], size: int) -> Incident:
    if size < 2 or not born:
        return incident
    others = size - len(born)
    words = f"born on rank {born[0]}" if len(born) == 1 else f"born on ranks {', '.join(map(str, born))}; rank {born[0]} is shown"
    received = f"; {'the other rank' if others == 1 else f'the other {others} ranks'} received it" if others else ""
    return replace(incident, cause=replace(incident.cause, evidence=(*incident.cause.evidence, words + received)))
