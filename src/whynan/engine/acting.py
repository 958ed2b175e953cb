"""Have a noticed step diagnosed, decide with the budget, and do it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.alone import is_sharded
from whynan.capsule.raised import entry_behind, passed_through
from whynan.capsule.replay import Program
from whynan.capsule.sites import take_site
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.stepped import step_again
from whynan.capsule.tape.entries import Entry, Outside, dependencies
from whynan.capsule.tape.facts import is_leaf, memory_of
from whynan.capsule.tape.needs import needed_for
from whynan.capsule.unseen import unseen
from whynan.capsules import Shelf
from whynan.diagnosis import Case, diagnose
from whynan.engine.apart import on_gradient
from whynan.engine.noticing import Found, Noticing
from whynan.engine.partial import TAKEN, without_bad_terms
from whynan.engine.recovering import Recovering
from whynan.engine.session import Session, Window, parameters_of, rate_of, symptom_of
from whynan.engine.together import Together
from whynan.engine.updating import with_update
from whynan.errors import TrainingStopped
from whynan.records import DAMAGED, Incident, Phase, Symptom, is_of_scale
from whynan.recovery.carried import DroppedStep
from whynan.recovery.followers import Followers
from whynan.recovery.place import rank_here
from whynan.tripwire.checks import gradients, nonfinite
from whynan.tripwire.stillness import Still
from whynan.tripwire.values import Damage, damage_of, damaged

ALIKE = 3  # diagnoses of one place that a program which skips by itself gets, until an update is made
_ENDS = ("backward", "function", "derivative", "clip", "grad", "zero")  # what a step is replayed for


def _only_the_loss(symptom: Symptom, optimizer: Any) -> str:
    """Say that the gradients of a bad loss are finite, where they are: nothing else in the text would."""
    grads = gradients(parameters_of(optimizer)) if symptom.place == "loss" and optimizer is not None else []
    finite = bool(grads) and not any(damaged(grads))
    return f"only the loss is {symptom.kind}: the gradients of this step are finite" if finite else ""


def _damaged_buffers(bad: list[tuple[str, torch.Tensor, Damage]]) -> str:
    """Say what the forward pass of a step that the program leaves has damaged."""
    if not bad:
        return ""
    more = f" and {len(bad) - 1} more are" if len(bad) > 1 else " is"
    return f"the buffer `{bad[0][0]}`{more} {bad[0][2].kind} from here on: the program leaves the update out, not what the forward pass wrote"


def _with_note(incident: Incident, text: str) -> Incident:
    return replace(incident, cause=replace(incident.cause, evidence=(*incident.cause.evidence, text)))


@unseen
class Acting:
    """Carries out what the policy says about a bad step."""

    noticing: Noticing  # given by the guard

    def __init__(self, session: Session, followers: Followers, recovering: Recovering, together: Together, capsules: Shelf) -> None:
        self.session = session
        self.capsules = capsules
        self._beyond_help = False
        self._alike, self._applied = 0, -1  # diagnoses in a row that came to the same place with no update between them
        self._dead: torch.Tensor | None = None  # a weight that was told to be damaged
        self.zeroed_away = False  # the program dropped the gradients of a bad step; if it steps all the same, that is no turning away
        self.stale: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients of a dropped step
        self.together = together
        self.followers = followers
        self.recovering = recovering
        self.places: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # gradients put in place of dropped ones
        self._said: set[str] = set()
        together.diagnosed = self.diagnosed
        self.left_alone: Callable[[], None] = lambda: None  # told of each step that the program itself leaves
        self.drops_terms = False  # a step goes on without the bad terms of its loss
        self.advice: Callable[[str], str] = lambda place: ""  # what a framework in use makes of a bad value

    def act(self, optimizer: Any, scaler: Any = None) -> str:
        """Diagnose the window's symptom, close the incident, and undo what the step has changed so far."""
        session = self.session
        symptom = session.window.symptom
        assert symptom is not None
        session.window.told = True
        if (self._beyond_help and session.budget.streak) or (session.budget.observes and self._still_dead()):
            session.budget.decide()
            session.journal.again()
            self.write_metrics(optimizer)
            return "observed"  # the state is damaged and nobody is to touch it: the next steps are bad for the same reason
        if session.window.apart:
            taken = self._leave_alone(self.case(symptom, optimizer, scaler))
        else:
            taken = session.window.decided or self._decide(symptom, optimizer, scaler, _only_the_loss(symptom, optimizer))
        self.write_metrics(optimizer)
        session.window.taken = taken
        if taken == "skipped":
            self.drop()
        elif taken == "rolled back":
            self._keep_carried()
            self.recovering.roll_back()
        return taken

    def _decide(self, symptom: Symptom, optimizer: Any, scaler: Any, note: str = "") -> str:
        try:
            incident = self.together.diagnose(lambda: self.case(symptom, optimizer, scaler))
            if self.together.left:
                return self._settle(self.together.left)
            return self.close(_with_note(incident, note) if note else incident, self.drops_terms)
        except TrainingStopped:
            self.session.window.told = True
            self.drop()  # what the program saves on its way out is the state before the bad step
            raise

    def _leave_alone(self, case: Case) -> str:
        """Only this rank has a bad value, and the others have made their update by now: tell it at once, wait for nobody."""
        session = self.session
        incident = _with_note(self.together.diagnose_alone(case), f"born on rank {rank_here()}, in averaged gradients: the other ranks do not have it")
        wish = session.budget.decide()
        taken = "observed" if session.budget.observes else "skipped"
        session.journal.incident(incident, session.budget.action(taken))
        if taken == "skipped":
            self.together.apart.left = replace(incident, action=session.budget.action(wish))
        return taken

    def _settle(self, left: dict[int, Incident]) -> str:
        """Ranks have left out an update alone, and all know it now: go on where all of them have, else stop, for their weights are not the same."""
        session, incident = self.session, next(iter(left.values()))
        step, before = session.step_count, incident.step
        everyone = len(left) == self.together.size
        if everyone and all(other.action.taken != "stopped" for other in left.values()):
            session.journal.say(f"whynan: step {step} skipped, too: by its gradients the ranks learned that all had left out step {before}")
            return "skipped"
        if rank_here() not in left:
            self.together.heard(incident)
            session.journal.incident(incident, session.budget.action("stopped"), tell=False)
        who = f"rank{'s' * (len(left) > 1)} {', '.join(map(str, left))} alone left out step {before}, so the weights are not the same on all ranks any more"
        reason = f"stopped at step {step}: {incident.cause.title}, at step {before}" if everyone else f"stopped at step {step}: {who}"
        session.journal.say(f"whynan: {reason}")
        session.stop(reason)
        return "stopped"

    def diagnosed(self, case: Case) -> Incident:
        """Diagnose, and write the capsule while the failing state is still there."""
        incident = with_update(diagnose(case), case.optimizer)
        self.session.tally.learn(case)
        if not any(is_sharded(leaf) for leaf in case.program.leaves):  # safetensors crashes on a distributed tensor
            self.capsules.keep(case, incident, self.session.journal)
        return incident

    def drop(self) -> None:
        """Leave no trace of this step's forward passes."""
        self.session.window.taken = "skipped"
        for state in self.session.recorder.roots.latest_first():
            state.rewind()
        self._put_weights_back()
        self.recovering.hold_averages()
        self._keep_carried()

    def drops_again(self) -> bool:
        """Drop a step whose batch was dropped before a rollback and comes again now; return whether it is one."""
        if not self.recovering.met_before():
            return False
        self.drop()
        return True

    def _keep_carried(self) -> None:
        """Keep what the program carries in tensors of its own from what this step has made of it."""
        session = self.session
        found = None if session.by_hand else session.guarded(lambda: DroppedStep(session.recorder, self._say_carried))  # else nobody knows where a step begins
        if found is not None and found.made:  # else another optimizer of a step that was dropped before
            session.recorder.tape.dropped = found

    def _say_carried(self) -> None:
        self._say_once("carried", "tensors that the loop itself carries from step to step are put back with the dropped step")

    def _say_once(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self.session.journal.say(f"whynan: {words}")

    def _put_weights_back(self) -> None:
        """Undo what the program itself did to weights and buffers that are bad now: set from the first batch, projected or averaged after the last update."""
        for weight, saved in self._made_bad():
            with torch.no_grad():
                weight.copy_(saved)
            what = "weights" if weight.requires_grad else "buffers"
            self._say_once(what, f"{what} that the program itself has made bad are put back to what they were before that")

    def _made_bad(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the weights and buffers that the program itself has made bad in this step, with what they were before."""
        recorder = self.session.recorder
        buffers = {id(b) for root in recorder.roots.modules() for b in root.buffers()}
        for kept in recorder.tape.memory.written(self.session.window_start):
            weight, saved = kept.tensor, kept.saved
            own = (weight.requires_grad and is_leaf(weight) and self.session.trains(weight)) or id(weight) in buffers
            if saved is not None and own and damage_of(weight.detach()) and not damage_of(saved.detach()):
                yield weight, saved

    def _lost_weights(self) -> list[Found]:
        """Return the weights that are bad by what the program did to them, where it is not known what they were before."""
        known = {id(weight) for weight, _ in self._made_bad()}
        trained = {id(p): (n, p) for o in self.session.optimizers for n, p in self.session.names_of(parameters_of(o)) if id(p) not in known}
        return [found for found in nonfinite(trained.values()) if not self.session.recorder.beside.infinities.are_known(found[1])]

    def dropped(self, optimizer: Any) -> None:
        """An optimizer was kept from its step: its gradients, and no other's, are those of what was dropped."""
        if optimizer is not None:
            self.stale += [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]

    def free_stale(self) -> None:
        """A backward pass begins and nobody has zeroed the gradients of the dropped step (some optimizers do it in their step)."""
        for parameter, grad in self.stale:
            if parameter.grad is grad:
                parameter.grad = None
        self.stale.clear()

    def drop_micro_batch(self) -> bool:
        """Drop a bad micro-batch before its backward pass; return whether the step goes on without it."""
        session, window = self.session, self.session.window
        symptom = window.symptom
        assert symptom is not None
        taken = self._decide(symptom, session.optimizers[-1], None)
        if taken != "skipped":
            window.decided = taken  # a rollback is made at the step
            return False
        for state in session.recorder.roots.latest_first(micro_batch=True):
            state.rewind(alone=True)
        session.recorder.tape.entries.pop(window.entry, None)
        window.symptom, window.entry, window.dropped = None, 0, True
        session.window_start = session.recorder.tape.number()  # the program may look at the dropped loss later on
        window.backwards -= 1
        window.losses.pop()
        session.recorder.roots.next_micro_batch()
        self._hold_places()
        return True

    def _hold_places(self) -> None:
        """Clipping and unscaling want gradients: give them some where a dropped micro-batch is all there was.

        Of -0.0, which changes no bit of what is added to it.
        """
        for optimizer in self.session.optimizers:
            parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
            if all(p.grad is None for p in parameters):
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, -0.0)
                self.places += [(p, p.grad) for p in parameters]

    def free_places(self) -> None:
        """A backward pass begins: what it does not reach has no gradient again."""
        for parameter, grad in self.places:
            if parameter.grad is grad:
                parameter.grad = None
        self.places.clear()

    def close(self, incident: Incident, drops_terms: bool = False) -> str:
        """Decide about an incident, write it, and stop where that is the decision."""
        session = self.session
        damaged_before = incident.cause.code in DAMAGED
        lost = self._lost_weights() if incident.origin.phase is Phase.PARAMETER and not damaged_before else []
        if lost:
            incident = replace(incident, symptom=symptom_of("parameter", lost))
        hopeless = bool(lost) or damaged_before or is_of_scale(incident.symptom)  # which no update of the scaler mends
        taken = session.budget.decide(hopeless, self.recovering.possible and self.together.level)
        if taken == "skipped" and drops_terms and (left_out := self._goes_on_without(incident)):
            taken = TAKEN
            incident = _with_note(incident, left_out)
        if taken == "skipped" and session.by_hand and session.step_count and not session.in_place:
            taken = "observed"
            incident = _with_note(incident, "the program makes its new weights itself, as new tensors: this update could not be left out")
        session.journal.incident(incident, session.budget.action(taken), tell=self.together.tells)
        self._advise(incident.symptom)
        self._beyond_help = hopeless and session.budget.observes
        self._mourn(incident)
        if taken == "stopped":
            session.stop(f"stopped at step {incident.step}: {incident.cause.title}")
        return taken

    def _goes_on_without(self, incident: Incident) -> str:
        """Say which bad terms of the loss were left out; the gradients of the good ones are in place then."""
        session, window = self.session, self.session.window
        elsewhere = window.entry < 0 or window.several or window.scaled or window.late or window.inside or session.by_hand or session.function
        if incident.symptom.place not in ("loss", "gradient") or elsewhere:
            return ""
        if any(damage_of(buffer) for root in session.recorder.roots.modules() for buffer in root.buffers()):
            return ""
        entries = self._entries_for(Symptom("gradient", incident.symptom.kind, ""))
        try:
            trained = [p for optimizer in session.optimizers for p in parameters_of(optimizer)]
            return without_bad_terms(Program(session.recorder, entries, session.leaves()), trained)
        except MemoryError:
            return ""

    def _advise(self, symptom: Symptom) -> None:
        """Say once what the framework in use makes of it: its own log may hide it, or be of no use from here on."""
        text = self.advice(symptom.place)
        if text and text not in self._said:
            self._said.add(text)
            self.session.journal.say(text)

    def report(self, scaler: Any = None, note: str = "") -> None:
        """Diagnose and tell without touching anything: the program has already turned away from this step."""
        session = self.session
        symptom = session.window.symptom
        assert symptom is not None
        session.window.told = True
        session.budget.total += 1
        if self._still_dead() or (self._alike >= ALIKE and session.applied == self._applied):
            session.journal.again()  # a program that leaves step after step for one reason is not slowed down by more diagnoses
            return
        incident = self.together.diagnose_alone(self.case(symptom, None, scaler))
        session.journal.incident(_with_note(incident, note) if note else incident, session.budget.action("observed"))
        last = session.journal.incidents[-2:]
        alike = len(last) == 2 and last[0].origin.span == last[1].origin.span and session.applied == self._applied
        self._alike, self._applied = self._alike + 1 if alike else 1, session.applied
        self._mourn(incident)

    def _mourn(self, incident: Incident) -> None:
        """Remember a weight that is dead: it is told once, the steps after it are counted."""
        if incident.cause.code in ("WN601", "WN608"):
            self._dead = next((leaf for leaf in self.session.leaves() if damage_of(leaf.detach())), None)

    def _still_dead(self) -> bool:
        return self._dead is not None and bool(damage_of(self._dead.detach()))

    def stands_still(self, still: Still, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is learned any more: tell it; there is no step to skip."""
        session = self.session
        if self._still_dead():
            return  # the weights are damaged, and that was told
        on_tape = any(e.kind in _ENDS for e in session.recorder.tape)
        kept = None if on_tape else next(iter(session.earlier.before(session.step_count)), None)
        program = None if kept is None else Program(session.recorder, kept.entries, session.leaves())
        case = self.case(Symptom("training", "still", still.kind, still.detail), optimizer, None, program)
        incident = self.together.diagnose_alone(replace(case, still=still))
        shared = still.kind != "average"  # running values are each rank's own
        session.journal.incident(incident, session.budget.action("observed"), tell=not (shared and rank_here()))

    def turned_away(self, zeroed: bool = False) -> None:
        """The program saw the bad value itself and left the step: tell it, and begin anew. One that zeroes the gradients may still step."""
        self.leave_zeroed()
        self.report(note=_damaged_buffers(self.noticing.bad_buffers()))
        self.left_alone()
        self.zeroed_away = zeroed
        if not zeroed:
            self.noticing.markers.leave()
        session = self.session
        session.step_count += 1
        session.window = Window()
        session.recorder.tape.roll()
        session.window_start = session.recorder.tape.number()

    def leave_zeroed(self) -> None:
        """A program that zeroed bad gradients has not stepped on them."""
        if self.zeroed_away:
            self.zeroed_away = False
            self.noticing.markers.leave()

    def steps_on(self) -> bool:
        """Whether the program steps on gradients that it zeroed because they were bad; whether that update is left out.

        It is the step that was told already. Momentum and weight decay would still move the weights.
        """
        session = self.session
        if not self.zeroed_away or session.window.backwards:
            return False
        self.zeroed_away = False
        session.step_count -= 1
        if session.budget.observes:
            session.window.told = True
            return False
        if "steps on" not in self._said:
            self._said.add("steps on")
            session.journal.say("whynan: the program zeroes bad gradients and steps on: momentum and weight decay would still move the weights; left out")
        self.drop()
        return True

    def failed_with(self, error: BaseException) -> None:
        """The program raised: say why if the failing call is one of ours to explain."""
        session = self.session
        symptom = Symptom("exception", type(error).__name__, str(error).splitlines()[0] if str(error) else "")
        before, site = session.window.unfinished
        if session.window.symptom is not None and not session.window.told:
            self.report()
        elif before is not None and passed_through(error, site):
            self._explain_update(before, symptom)
        elif (failed := entry_behind(error, session.recorder)) is not None:
            session.recorder.tape.entries[failed.number] = failed
            session.see(symptom, failed)
            session.window.told = True
            self._tell_of(self.together.diagnose_alone(self.case(symptom, None, None)))

    def look_at_the_end(self) -> None:
        """Tell of weights and moments that are bad when nothing more will be done with them, if that was not told."""
        session = self.session
        told = self._still_dead() or (session.journal.incidents and (session.budget.observes or session.journal.incidents[-1].cause.code in DAMAGED))
        if session.applied and not session.stopped and session.window.symptom is None and not told:
            self.noticing.look_at_the_end()
            if session.window.symptom is not None:
                self.report(note="found when watching ended: no step came after the update that made it")

    def _tell_of(self, incident: Incident) -> None:
        """Tell of an exception, if there is something to say of it."""
        if incident.cause.code != "WN901":
            self.session.journal.incident(incident, self.session.budget.action("observed"))

    def late(self, step: int, symptom: Symptom, entries: dict[int, Entry], optimizer: Any, scaler: Any) -> str:
        """A step that the device has skipped by itself turned out bad: tell it, and put back who followed it."""
        ends = {n for n, e in entries.items() if e.kind in ("backward", "function", "clip", "grad", "zero")}
        program = Program(self.session.recorder, needed_for(entries, ends), self.session.leaves())
        if not self.session.budget.observes:
            self.followers.take_back(optimizer)
            self.session.applied -= 1
        taken = self.close(self.diagnosed(self.case(symptom, optimizer, scaler, program, step)))
        if taken == "rolled back":
            self.recovering.roll_back(late=True)
        return taken

    # -- an update that turned out bad --------------------------------------------------------------------------

    def update(self, call: Callable[[], Any], before: Snapshot) -> Any:
        """Make an update; what there was before one that raises is kept, to tell of it if that ends the program."""
        try:
            return call()
        except Exception as error:
            self.session.window.unfinished = (None if isinstance(error, torch.OutOfMemoryError) else before), take_site()
            raise

    def undo_update(self, optimizer: torch.optim.Optimizer, before: Snapshot) -> str:
        """The optimizer's own arithmetic made the bad value: go back before it, replay it, decide."""
        after = Snapshot(optimizer, gradients=True)
        with self._before_update(before):
            taken = self.act(optimizer)
        if taken == "observed":
            after.restore()
        return taken

    def _explain_update(self, before: Snapshot, symptom: Symptom) -> None:
        """An update raised: replay it from before it, and leave everything as it was found."""
        session, optimizer = self.session, before.optimizer
        if any(p.grad is not None and damage_of(p.grad) for p in parameters_of(optimizer)):
            return  # it wrote to its gradients, which were finite: it cannot be made again
        session.see(symptom)
        session.window.told = True
        with Snapshot(optimizer, gradients=True), self._before_update(before):
            self._tell_of(self.together.diagnose_alone(self.case(symptom, optimizer, None)))

    @contextlib.contextmanager
    def _before_update(self, before: Snapshot) -> Iterator[None]:
        """Go back before an update that is then what is replayed."""
        session, optimizer = self.session, before.optimizer
        before.restore()
        present = [(p, p.grad) for p in parameters_of(optimizer)]
        entry = session.recorder.note("optimizer", functools.partial(step_again, optimizer), tuple(before.given))
        session.function, outer = entry, session.function
        try:
            yield
        finally:
            session.function = outer
            for parameter, grad in present:
                parameter.grad = grad

    # -- the case for a diagnosis -------------------------------------------------------------------------------

    def case(self, symptom: Symptom, optimizer: Any, scaler: Any, program: Program | None = None, step: int | None = None) -> Case:
        """Gather what a diagnosis needs."""
        session = self.session
        if program is None:
            entries = self._entries_for(symptom)
            program = Program(session.recorder, entries, session.leaves(), self._undo(entries, optimizer))
        step = session.step_count if step is None else step
        return Case(
            step=step,
            symptom=symptom,
            program=program,
            optimizers=session.optimizers,
            optimizer=optimizer,
            scaler=scaler,
            clip=session.clip,
            history=self._history(step, optimizer),
            site=take_site(2),
            made_at=session.made_at.get(id(optimizer)),
            rank=rank_here(),
            loss=session.window.loss if step == session.step_count and scaler is None else None,
            backwards=session.window.backwards if step == session.step_count else 0,
            healthy={kept.step: Program(session.recorder, kept.entries, program.leaves) for kept in session.earlier.before(step)},
        )

    def _history(self, step: int, optimizer: Any) -> list[dict[str, float]]:
        """Return the metrics of the training that a step is part of: one that was over before says nothing about it."""
        since = 0 if optimizer is None else self.session.trainings.since(step, optimizer)
        return [row for row in self.session.journal.history() if row["step"] >= since]

    def _undo(self, entries: list[Entry], optimizer: Any) -> Callable[[], Snapshot] | None:
        return functools.partial(Snapshot, optimizer, gradients=True) if any(e.kind == "optimizer" for e in entries) else None

    def _entries_for(self, symptom: Symptom) -> list[Entry]:
        session = self.session
        tape, entry = session.recorder.tape, session.window.entry
        if session.function is not None:
            return [*tape.needed_for(set(dependencies(session.function))), session.function]
        if entry < 0:
            return tape.needed_for({-entry})
        if entry and symptom.place in ("loss", "exception"):
            return tape.needed_for({entry})
        ends = {e.number for e in tape if e.kind in _ENDS or (e.kind == "write" and on_gradient(tape, e))}
        ends -= {n for n in ends if tape.entries[n].kind == "write" and self._from_others(n)}
        if symptom.place == "buffer":  # written by a forward pass that the loss need not depend on
            ends |= {e.number for e in tape if e.kind == "module" and e.number > session.window_start}  # those of the step before are kept for its loss
        return tape.needed_for(ends) if ends else list(tape)

    def _from_others(self, number: int) -> bool:
        """Whether an entry reads what a collective gave: averaged gradients are not this rank's own."""
        recorder = self.session.recorder
        given = recorder.received.places
        reads = (leaf for e in recorder.tape.needed_for({number}) for leaf in e.reads) if given else ()
        return any(isinstance(leaf, Outside) and memory_of(leaf.tensor) in given for leaf in reads)

    def write_metrics(self, optimizer: Any) -> None:
        """Write what the host knows of this step."""
        session = self.session
        window = session.window
        norm = window.norm
        if isinstance(norm, torch.Tensor):
            norm = float(norm) if norm.is_cpu else None
        session.journal.metrics(session.step_count, window.loss, norm, None if optimizer is None else rate_of(optimizer), window.scale)
