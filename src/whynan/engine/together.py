"""Many ranks: all know of a bad step, all take the same action, one tells it.

A bad value that one rank knows of before its backward pass is carried to the others by the gradients themselves: that
rank goes back from NaN. So with DDP, and with `fully_shard` where gradients are clipped, the answer comes with a
collective that is made anyway; only `fully_shard` without clipping, and parameters outside the wrapper, need a small
all-reduce of their own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from threading import Timer
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from whynan.capsule.alone import elsewhere, in_flat_shards, is_of_wrapper, is_sharded, spread_operations, whole
from whynan.capsule.doors.collectives import several
from whynan.capsule.refusing import refused_collectives
from whynan.capsule.replay import Program
from whynan.diagnosis import Case, diagnose
from whynan.engine.apart import Apart
from whynan.engine.diagnosing import Diagnosing, has_failed
from whynan.engine.gathering import gather
from whynan.engine.peers import Peers, peers_of, some_have_ended
from whynan.engine.session import Session, parameters_of
from whynan.errors import TrainingStopped
from whynan.records import NOWHERE, Cause, Confidence, Incident, Origin, Phase, Symptom
from whynan.recovery.place import rank_here
from whynan.recovery.policy import Budget
from whynan.recovery.ranks import Coming, RankLost, Ranks
from whynan.tripwire.checks import nonfinite

T = TypeVar("T")

SPREAD = "the weights are spread over the ranks and only this rank stopped here: one rank alone cannot replay the step"
TENSOR_PARALLEL = "operations of the model run on several ranks (tensor parallel): one rank alone cannot replay the step"
JOINED = "inside Join the ranks do not talk, so which one is not known"
APART = "it does not step together with the others, so which one is not known"
FLAT = "`FullyShardedDataParallel` keeps weights in flat parts, so one rank alone cannot replay the step (of `fully_shard` it can)"
LOOSE = "weights are gathered outside of module calls (`register_fsdp_forward_method`): one rank alone cannot replay the step"
_WORDS = 60.0  # seconds that the last words of a job may take on its slowest rank
_PATIENCE = 10.0  # seconds until a rank that waits says so
_WORD = "whynan/stopped"  # what a rank leaves in the store of the job when it stops without the others
_UNKNOWN = 4  # how likely it is that a value came from elsewhere, where no rank could replay the step
_STRONGEST = ("stopped", "rolled back", "skipped")


class Together:
    """Stands for this rank among the others; does nothing where there are none."""

    diagnosing: Diagnosing  # given by what acts on the answer

    def __init__(self, session: Session, timeout: float, own: Budget) -> None:
        self.session = session
        self.timeout = timeout
        self._budgets = session.budget, own  # of what ranks train together, and of what this one trains beside that
        self.ranks: Ranks | None = None
        self.peers: Peers | None = None  # of the optimizer that steps now
        self.solitary = False  # it has gradients of other ranks, and steps without them
        self.tells = True  # whether this rank writes the incident in hand
        self.stamp: Callable[[], int | None] = lambda: None  # which snapshot a rollback would go to
        self.apart = Apart(session)
        self.left: dict[int, Incident] = {}  # the ranks that have left out an update alone before the bad step in hand, and why
        self.level = True  # whether that is the same on all ranks
        self.left_word = False  # this rank has stopped without the others
        self.left_behind = False  # by another rank, which stopped; what was raised here is of that
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Peers | None] = weakref.WeakKeyDictionary()
        self._coming: weakref.WeakKeyDictionary[torch.optim.Optimizer, Coming] = weakref.WeakKeyDictionary()
        self._joined: dict[tuple[int, ...], Ranks] = {}
        self._world: weakref.ref[Any] | None = None  # the process group that all this is about
        self._alike: list[int] = []
        self._said = False
        self._leveled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def begin(self, optimizer: torch.optim.Optimizer, bad: Callable[[], bool]) -> bool:
        """At a step: say whether it is made together with other ranks, and meet them once it is known that they come. Bad: in gradients that all have."""
        self.peers = self.ranks = None
        self.solitary = False
        if not several():
            return False
        if self._is_remade():
            self.solitary = True
            self._say_alone("the process group was made anew: from here on every rank decides for itself", always=True)
            return False
        if optimizer not in self._known:
            if not any(p.grad is not None for p in parameters_of(optimizer)):
                return False
            found = peers_of(self.session, optimizer)
            self._count_apart(found is None and any(self._known.values()))
            if found is None and bad():
                return False  # of gradients that are all nan nobody can say whether they were averaged: the next step tells
            self._known[optimizer] = found
        peers = self._known[optimizer]
        self._count_apart(peers is None and any(self._known.values()))
        if peers is None or len(peers.members) < 2:
            if not any(self._known.values()):
                self._say_alone("no gradients are shared between the ranks: every rank decides for itself")
            return False
        if some_have_ended(self.session) or not (peers.sharded or self._all_come(optimizer, peers, bad)):
            return False
        self.peers, self.ranks = peers, self._joined.get(peers.members) or self._join(peers, optimizer)
        if optimizer not in self._leveled:
            self._leveled.add(optimizer)
            self._level(optimizer, peers.averaged and all(self._exchange(self.apart.writes())))
        self.apart.wanted = self.peers.averaged
        return True

    def _is_remade(self) -> bool:
        """Whether the program has made its process group anew: ours is gone with the old one, and a new one would meet its addresses in the store."""
        world = dist.group.WORLD
        if self._world is None and world is not None:
            self._world = weakref.ref(world)
        return self._world is not None and self._world() is not world

    def _count_apart(self, apart: bool) -> None:
        """Have the bad steps of an optimizer that shares nothing counted by themselves, where others share theirs."""
        shared, own = self._budgets
        self.session.budget = own if apart else shared
        shared.unsure = own.unsure = shared.unsure or own.unsure
        shared.moved = own.moved = shared.moved or own.moved

    def _all_come(self, optimizer: torch.optim.Optimizer, peers: Peers, bad: Callable[[], bool]) -> bool:
        coming = self._coming.get(optimizer)
        if coming is None:
            coming = self._coming[optimizer] = Coming(self._name_of(optimizer), peers.members)
        come = coming.now(bad)
        self.solitary = not come
        self.session.journal.awaits = coming.all is None
        if coming.all is None and not come and not bad() and self.session.window.symptom is not None:
            self.session.window.alone = True  # its gradients did not carry it
        if coming.all is False:
            self._say_alone(f"rank {rank_here()} does not step together with all others: it decides for itself", always=True)
        return come

    def _name_of(self, optimizer: torch.optim.Optimizer) -> str:
        """Name an optimizer by what it updates, and by its place among those alike: the same on all ranks that have it."""
        shapes = crc32(str([tuple(p.shape) for p in parameters_of(optimizer)]).encode())
        self._alike.append(shapes)
        return f"{shapes}-{self._alike.count(shapes)}"

    def _level(self, optimizer: torch.optim.Optimizer, write: bool) -> None:
        """Ranks that all write to averaged gradients can differ from then on: they ask each other at each step."""
        assert self.peers is not None
        if write:
            self.peers = self._known[optimizer] = replace(self.peers, even=False)

    @property
    def size(self) -> int:
        """How many ranks step together."""
        return 1 if self.ranks is None else self.ranks.size

    def leave(self) -> None:
        """Let go of the groups: one that outlives the program's own is torn down with the interpreter, and may abort it."""
        self.peers = self.ranks = None
        self._count_apart(self.session.budget is self._budgets[1] and bool(self.session.stopped))
        self._joined.clear()

    def part(self, last_words: Callable[[], None]) -> None:
        """At a stop that all ranks make: let nobody go before the words are said. Launchers kill the others once one has ended."""
        if self.ranks is not None and self.session.window.agreed and not self.session.window.alone:
            last_words()
            self.ranks.meet(_WORDS)
        elif self._joined:
            self._leave_word(f"rank {rank_here()} {self.session.stopped}")

    def _say_alone(self, what: str, always: bool = False) -> None:
        if not self._said:
            self._said = True
            self.session.journal.say(f"whynan: {what}", always)

    def _join(self, peers: Peers, optimizer: torch.optim.Optimizer) -> Ranks:
        symptom = self.session.window.symptom
        with nullcontext() if symptom is None else self._patience(peers.members, lambda: gather(self.session, symptom, optimizer, None)):
            try:
                self.ranks = self._joined[peers.members] = Ranks(list(peers.members), self.timeout)
            except RankLost as lost:
                self._lost(lost)
                raise
        journal = self.session.journal
        journal.join(self.ranks.rank, self._exchange(journal.place() if self.ranks.first else None)[0])
        return self.ranks

    def _exchange(self, value: Any) -> list[Any]:
        assert self.ranks is not None
        try:
            return self.ranks.gather(value)
        except RankLost as lost:
            self._lost(lost)
            raise

    def _total(self, numbers: list[float]) -> list[float]:
        assert self.ranks is not None
        try:
            return self.ranks.total(numbers)
        except RankLost as lost:
            self._lost(lost)
            raise

    def _lost(self, lost: RankLost) -> None:
        self.session.journal.say(f"whynan: rank {rank_here()} waited for the others in vain: {lost}", always=True)
        self.ranks = None
        self._leave_word(f"rank {rank_here()} stopped, because not all ranks answered")
        self.session.stop(f"stopped at step {self.session.step_count}: not all ranks answered")

    def _leave_word(self, word: str) -> None:
        if self.left_word:
            return
        self.left_word = True
        with suppress(Exception):
            _store().set(_WORD, word)

    def word(self) -> str:
        """Return what a rank has left behind that stopped without the others; their connections to it break. The store may have ended with it."""
        if not self._joined or self.left_word:
            return ""
        with suppress(Exception):
            if _store().check([_WORD]):
                return str(_store().get(_WORD).decode())
        return self.session.journal.stopped_by_another()

    @contextmanager
    def _patience(self, members: Iterable[int], make: Callable[[], Case], own: Incident | None = None) -> Iterator[None]:
        """While others are waited for: the diagnosis is on the disk, and after a while it is said who waits for whom, and for what."""
        journal, symptom = self.session.journal, self.session.window.symptom
        assert symptom is not None
        others = ", ".join(str(rank) for rank in members if rank != rank_here())
        what = f"{symptom.kind} in {symptom.name or symptom.place}" + (f", {own.cause.code}" if own is not None else "")
        line = f"whynan: rank {rank_here()} waits for ranks {others}, up to {self.timeout:g} s, to settle step {self.session.step_count} with them ({what})"
        if own is not None:
            journal.pending(own)
        timer = Timer(min(_PATIENCE, self.timeout / 2), journal.say, (line, True))
        timer.daemon = True
        timer.start()
        try:
            yield
        except TrainingStopped:
            journal.incident(own or self._unseen(make(), "the other ranks did not answer"), self.session.budget.action("stopped"))
            raise
        finally:
            timer.cancel()
            journal.pending(None)

    # -- one answer for all -------------------------------------------------------------------------------------

    def carry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a backward pass that tells the other ranks of a bad value here."""
        loss = args[0] if args else kwargs.get("tensors")
        given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        if not isinstance(loss, torch.Tensor) or self.session.budget.observes:
            return args, kwargs
        if self.session.window.symptom is not None or self.apart.left is not None:
            start = torch.full_like(loss, math.nan)
        elif given is None and loss.device.type != "cpu" and loss.numel() == 1:
            start = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan).to(loss.dtype)  # not read: no wait
        else:
            return args, kwargs
        if len(args) > 1:
            return (loss, start, *args[2:]), kwargs
        return args, {**kwargs, "grad_tensors": start}

    def agree(self, norm: float | None) -> None:
        """Before an update: make this rank's answer the same as that of all others."""
        assert self.peers is not None
        window = self.session.window
        window.agreed = True
        bad = norm is not None and not math.isfinite(norm)  # the same on all ranks: averaged gradients, or the norm over all shards
        if bad and self.stands_apart():
            return
        if not self.peers.even or (self.peers.sharded and (bad or not window.clipped)):
            bad = self._sum_up(0.0 if bad or norm is None else norm, bad)
        if bad:
            self._receive("gradient")
        elif window.symptom is not None:
            window.alone = True  # the gradients did not carry it: the others go on, so must we

    def stands_apart(self) -> bool:
        """Whether a bad value was born in averaged gradients: the others do not know of it, and do not wait for us."""
        window = self.session.window
        if self.peers is None or not self.peers.averaged or window.symptom is None or not self.apart.were_finite():
            return False
        window.alone, window.apart, window.agreed = True, True, False
        return True

    def _hear_who_left(self, optimizer: torch.optim.Optimizer | None, said: list[Incident | None]) -> None:
        assert self.ranks is not None
        self.apart.left = None
        self.left = {rank: incident for rank, incident in zip(self.ranks.members, said, strict=True) if incident is not None}
        if optimizer is not None:
            self._level(optimizer, bool(self.left))

    def heard(self, incident: Incident) -> None:
        """Note what this rank writes down of an incident of another."""
        self.session.journal.received(_received(incident, rank_here()))

    def all_skip(self) -> bool:
        """Whether a skip of a gradient scaler is one on all ranks. Those that do not skip ask at the same time, by `agree`."""
        if self.ranks is None or not self.uneven:
            return True
        skipping = self._total([0.0, 1.0])[1] == self.ranks.size
        self.session.window.agreed |= not skipping
        return skipping

    @property
    def uneven(self) -> bool:
        """Whether ranks ask each other at each step: their whole gradients may differ."""
        return self.peers is not None and not self.peers.even and not self.peers.sharded

    def _sum_up(self, norm: float, bad: bool) -> bool:
        assert self.peers is not None
        window = self.session.window
        square, found = self._total([norm * norm, float(bad or window.symptom is not None)])
        if found:
            window.norm = math.nan
        elif self.peers.sharded and not window.clipped:
            window.norm = math.sqrt(square)
        else:
            window.widest = math.sqrt(square)
        return bool(found)

    def _receive(self, place: str) -> None:
        if self.session.window.symptom is None:
            self.session.see(Symptom(place, "nan", place))
            self.session.window.received = True

    def any(self, here: bool, place: str = "gradient") -> bool:
        """Whether it holds on any rank, which then has a symptom on all. All ranks ask at the same time."""
        if self.ranks is None:
            return here
        found = bool(self._total([float(here)])[0])
        if found:
            self.session.window.agreed = True
            self._receive(place)
        return found

    def differ(self) -> bool:
        """Whether an update can turn out bad on some of the ranks only."""
        return self.peers is not None and (self.peers.sharded or not self.peers.even)

    def strongest(self, taken: str) -> str:
        """Return the strongest of the actions that the ranks would take. All ranks ask at the same time."""
        if self.ranks is None:
            return taken
        wanted = self._total([float(taken == action) for action in _STRONGEST])
        taken = next((action for action, votes in zip(_STRONGEST, wanted, strict=True) if votes), "")
        self.session.window.agreed |= bool(taken)
        return taken

    # -- one incident for all -----------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[str]:
        """Let every rank replay alone: all of them enter."""
        return whole(self._roots()) if self.peers is not None and not self.flat() else nullcontext("")

    def flat(self) -> bool:
        """Whether weights are spread over the ranks as `FullyShardedDataParallel` does it."""
        return bool(in_flat_shards(m for root in self._roots() for m in root.modules()))

    def _blind(self, program: Program) -> str:
        """Say why no rank can replay the step alone, where that is so."""
        if self.flat():
            return FLAT
        return TENSOR_PARALLEL if spread_operations(self._roots()) else LOOSE if _gathers_loosely(program) else ""

    def _roots(self) -> list[torch.nn.Module]:
        """Return the modules that are called, and those of `fully_shard` that none of them holds."""
        trained = [p for optimizer in self.session.optimizers for p in parameters_of(optimizer)]
        return list(dict.fromkeys([*self.session.recorder.roots.modules(), *elsewhere(trained)]))

    def diagnose(self, make: Callable[[], Case]) -> Incident:
        """Diagnose on every rank where the bad value can be born, and return the one incident of the job."""
        self.tells = self.level = True
        self.left = {}
        if self.ranks is None or not self.session.window.agreed or self.session.window.alone:
            return self.diagnose_alone(make())
        budget = self.session.budget
        if self.peers is not None and self.peers.sharded:
            with self._patience(self.ranks.members, make):
                self._exchange(None)  # what puts weights together would wait for a missing rank without a word
        with self.whole() as note:
            case = make()
            case.note = note
            blind = self._blind(case.program)
            nothing: tuple[Incident | None, int] = (None, 0)
            own, doubt = (self._unseen(case, blind), 0) if blind else self._safely(lambda: self._diagnose_here(case), nothing)
            with self._patience(self.ranks.members, make, own):
                everyone = self._exchange((own, doubt, budget, self.stamp(), self.apart.left))
            self._hear_who_left(case.optimizer, [left for *_, left in everyone])
            averaged = all(incident is None for incident, *_ in everyone) and not self.left
            if averaged:
                failed: Incident | None = None
                last = self._safely(lambda: self.diagnosing.tried(case), failed) or self.diagnosing.unexplained(case.step, case.symptom)
                everyone = [(i, d, *rest) for (i, d), (_, _, *rest) in zip(self._exchange((last, int(self.session.window.received))), everyone, strict=True)]
        budget.level_with([other for _, _, other, *_ in everyone])
        self.level = len({stamp for *_, stamp, _ in everyone}) == 1
        self.tells = self.ranks.first
        if self.left:
            return next(iter(self.left.values()))
        return everyone[0][0] if blind else self._of_all([(i, d) for i, d, *_ in everyone], averaged)

    def _safely(self, action: Callable[[], T], otherwise: T) -> T:
        """Do something of ours on this rank; the others wait for its answer, so a failure is one too."""

        def alone() -> T:
            with refused_collectives():
                return action()

        return self.session.safely(alone, otherwise)

    def _unseen(self, case: Case, why: str) -> Incident:
        case.program, case.note = Program(self.session.recorder, [], []), why
        return self.session.safely(lambda: diagnose(case), None) or self.diagnosing.unexplained(case.step, case.symptom)

    def _diagnose_here(self, case: Case) -> tuple[Incident | None, int]:
        """Diagnose if the value can be born here; the number tells how likely it is that it came from elsewhere."""
        window = self.session.window
        carried = case.symptom.place in ("gradient", "scaler")
        if (window.received and not carried) or (carried and finite(case.program)):
            return None, 0
        incident = self.diagnosing.tried(case)
        if incident is None:
            return None, 0  # the others wait for an answer of this rank, so a failure is one too
        if case.note:
            incident = replace(incident, origin=replace(incident.origin, exact=False, note=case.note))
        received = self.session.recorder.received
        blind = received.refused and not incident.origin.span.known
        return incident, _UNKNOWN if blind else 2 * received.from_others() + carried

    def _of_all(self, everyone: list[tuple[Incident | None, int]], averaged: bool) -> Incident:
        assert self.ranks is not None
        least = min(doubt for incident, doubt in everyone if incident is not None)
        found = {r: i for r, (i, doubt) in zip(self.ranks.members, everyone, strict=True) if i is not None and doubt == least}
        incident = next(iter(found.values()))
        if self.ranks.rank not in found:
            self.session.journal.received(_received(incident, self.ranks.rank))
        if averaged and len(found) == self.ranks.size:
            return next(filter(has_failed, found.values()), None) or _in_between(incident)
        return incident if least == _UNKNOWN else _with_ranks(incident, list(found), self.ranks.size)

    def diagnose_alone(self, case: Case) -> Incident:
        """Diagnose without the others: a model that is spread over them is not replayed."""
        if several() and (self.flat() or any(is_sharded(p) for root in self._roots() for p in root.parameters())):
            return self._unseen(case, SPREAD)
        with refused_collectives():
            incident = self.diagnosing.of(case)
        if incident.cause.code == "WN802" and some_have_ended(self.session):
            self.tells = False
            self.session.journal.received(_received(incident, rank_here(), JOINED))
        elif incident.cause.code == "WN802" and (self.solitary or self.session.recorder.received.from_others()):
            return _received(incident, rank_here(), APART)
        return incident


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _gathers_loosely(program: Program) -> bool:
    """Whether the step itself has hung hooks of `fully_shard` on its tensors: a replay would call them."""
    return any(is_of_wrapper(hook) for hook in program.hooks())


def finite(program: Program) -> bool:
    """Replay once and look at loss and gradients."""
    with program.still():
        run = program.play()
        derived = {e.number for e in program.entries if e.kind == "derivative"}
        grads = [p.grad for p in program.leaves if p.grad is not None] + [t for ref, t in run.made.items() if ref.entry in derived]
        made = [("loss", t) for t in run.losses] + [("gradient", t) for t in grads]
        return run.error is None and not nonfinite(made)


def _received(incident: Incident, rank: int, unknown: str = "") -> Incident:
    """Return what a rank that merely received a bad value writes down; `unknown` says why it does not know whose it is."""
    span = incident.origin.span
    where = f" at {span.file}:{span.line}" if span.known else ""
    maker = unknown or f"rank {incident.rank} made the value{where} ({incident.cause.code})"
    cause = Cause("WN801", "another-rank", "value that came in from another rank", Confidence.SUSPECTED if unknown else Confidence.PROVEN,
                  (f"what this rank made itself was finite; {maker}",))  # fmt: skip
    origin = Origin(Phase.BACKWARD, NOWHERE, exact=False, note=f"born on {'another rank' if unknown else f'rank {incident.rank}{where}'}")
    return replace(incident, rank=rank, origin=origin, cause=cause, remedies=(), experiments=())


def _in_between(incident: Incident) -> Incident:
    """Return what is said where no rank made the value: averaging did, in a communication hook, say, or past the range of a dtype."""
    words = ("every rank replayed the step alone, and loss and gradients were finite",
             "the value came up where gradients are averaged over the ranks: look at communication hooks and their state")  # fmt: skip
    cause = Cause("WN901", "origin-not-observed", "damage whose birth was not seen", Confidence.SUSPECTED, words)
    return replace(incident, cause=cause, remedies=(), experiments=())


def _with_ranks(incident: Incident, born: list[int], size: int) -> Incident:
    if size == len(born):
        words = f"born on all {size} ranks; rank {born[0]} is shown"
    else:
        others = size - len(born)
        words = f"born on rank {born[0]}" if len(born) == 1 else f"born on ranks {', '.join(map(str, born))}; rank {born[0]} is shown"
        words += f"; {'the other rank' if others == 1 else f'the other {others} ranks'} received it"
    return replace(incident, cause=replace(incident.cause, evidence=(*incident.cause.evidence, words)))
