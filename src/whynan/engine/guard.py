"""The doors: what happens when the program goes back, clips, steps, zeroes or loads.

whynan run script.py     one Guard around the whole script
whynan.watch(model, …)   one Guard in the user's loop
@guard.step              the same, with the user's step function as the thing to replay
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from threading import Lock, current_thread
from typing import Any, TypeVar

import torch

from whynan.capsule.collectives import several
from whynan.capsule.intercept import Interception
from whynan.capsule.loaders import Loop
from whynan.capsule.loads import versions_of
from whynan.capsule.recorder import Recorder
from whynan.capsule.sites import asked_for, take_site
from whynan.capsule.state.randomness import take_rng
from whynan.capsule.tape.entries import Entry, Slot
from whynan.capsule.unseen import unseen
from whynan.capsules import Shelf
from whynan.causes import rates
from whynan.engine.acting import Acting
from whynan.engine.byhand import ByHand
from whynan.engine.clipping import Clipping
from whynan.engine.foreseeing import Foreseeing
from whynan.engine.noticing import Noticing
from whynan.engine.options import Options
from whynan.engine.probes import Probes
from whynan.engine.recovering import Recovering
from whynan.engine.regular import Regular
from whynan.engine.scaling import Scaling
from whynan.engine.session import Session, parameters_of, symptom_of
from whynan.engine.sharing import Sharing
from whynan.engine.standing import Standing
from whynan.engine.stepping import Stepping
from whynan.engine.together import Together
from whynan.engine.tracing import Tracing
from whynan.engine.waiting import Waiting
from whynan.engine.watched import watched
from whynan.errors import TrainingStopped, let_through
from whynan.recovery.followers import Followers
from whynan.recovery.place import rank_here
from whynan.report.journal import Journal
from whynan.resting import Collections
from whynan.tripwire.checks import nonfinite
from whynan.tripwire.values import has_values

F = TypeVar("F", bound=Callable[..., Any])

_LOOSE = 1000  # torch calls of a program that trains without our seeing it; one that only computes something makes fewer

_open_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_moving = Lock()


def open_guard() -> Guard | None:
    """Return the guard that watches this thread."""
    return next((guard for guard in list(_open_guards) if guard._open and guard.recorder.mine), None)


def _before_fork() -> None:
    for guard in list(_open_guards):
        guard.journal.flush()


def _in_forked_child() -> None:
    for guard in list(_open_guards):
        guard._leave_to_parent()


def leave_all() -> None:
    """In a forked child: take down the doors of guards that belong to the parent."""
    for guard in list(_open_guards):
        guard._leave_to_parent()
        guard.interception.remove()
        _open_guards.discard(guard)


os.register_at_fork(before=_before_fork, after_in_child=_in_forked_child)


@unseen
class Guard:
    """Watches training in one thread until `close`: the one it is opened in, or under `whynan run` the one that trains. See `whynan.watch`."""

    def __init__(self, options: Options | None = None, journal: Journal | None = None) -> None:
        self.options = options or Options()
        self.journal = journal or Journal(None)
        self.session = Session(self.options.budget(), self.journal)
        self.recorder: Recorder = self.session.recorder
        self.followers = Followers(self.options.wall_steps, lambda: self.session.optimizers)
        self.noticing = Noticing(self.session)
        self.recovering = Recovering(self.session, self.options, self.followers)
        self.regular = Regular(self.session, self.options, self.recovering.everything)
        self.together = Together(self.session, self.options.rank_timeout)
        self.together.stamp = self.recovering.stamp
        self.session.last_words = lambda: self.together.part(self._finish_files)
        self.acting = Acting(self.session, self.followers, self.recovering, self.together, Shelf(self.options.capsule_limit))
        self.sharing = Sharing(self.session)
        self.clipping = Clipping(self.session)
        standing = Standing(self.session, self.followers, self.acting.stands_still)
        self.acting.noticing = self.noticing
        self.acting.drops_terms = self.options.bad_terms == "drop" and not self.options.drop_alone
        self.probes = Probes(self.session)
        self.acting.left_alone, self.probes.left = standing.turned_away, self.acting.turned_away
        self.foreseeing = Foreseeing(self.session, self.options, standing, Tracing(self.session, self.acting).spike)
        self.by_hand = ByHand(self.session, self.noticing, self.acting)
        self.steps = Stepping(
            self.session, self.options, self.noticing, self.acting, self.together, self.sharing, self.followers, self.recovering, self.regular, self.foreseeing
        )
        self.scaling = Scaling(self.session, self.noticing, self.acting, self.together, self.sharing, self.steps.finish)
        self.waiting = Waiting(
            self.session, self.noticing, self.acting, self.followers, self.recovering, self.sharing, self.scaling, self.foreseeing, self.steps.finish
        )
        self.steps.scaling, self.steps.waiting = self.scaling, self.waiting
        self.command: list[str] = []  # that started this process, where it was `whynan run`: another rank is to be started like it
        self.stepping = False  # an optimizer's own step is running
        self.interception = Interception(self)
        self._open = False
        self._in_backward = False
        self._stepped_inside: torch.optim.Optimizer | None = None
        self._met_foreign = False
        self.foreign: Callable[[Interception], bool] = lambda interception: False  # stands at updates that are not torch's, where there are any
        self._said: set[str] = set()
        self._several = False  # asked now and then: a process group is up before the first step
        self._overrides = rates.Overrides()
        self._collections = Collections(lambda: self.recorder.tape.last)

    @property
    def watches(self) -> bool:
        """Whether it is open and has not failed."""
        return self._open and self.recorder.running

    @property
    def stopped(self) -> str:
        """Why the training was stopped, if it was."""
        return self.session.stopped

    # -- life ---------------------------------------------------------------------------------------------------

    def open(self) -> Guard:
        """Begin to watch; a guard still open in this thread ends."""
        for other in list(_open_guards):
            if other.recorder.mine:
                other.journal.say("whynan: watching begins anew; what was watched before is closed")
                other.close()
        self.recovering.begin()
        self.interception.install()
        self.session.broken = self.recorder.faulty = self._internal_error
        self.recorder.seen_probe = self.probes.probed
        self.recorder.seen_write = self.by_hand.may_write
        self.recorder.seen_written = self.by_hand.written if self.session.by_hand else None
        self.recorder.roots.seen = self._met_root
        self.recorder.beside.seen_gradient = self.together.apart.gradient_read
        self.recorder.start()
        self._collections.watch()
        self._open = True
        atexit.register(self.close)
        _open_guards.add(self)
        return self

    def _met_root(self, root: torch.nn.Module) -> None:
        self.recovering.met(root)
        if self.foreseeing.outputs is not None:
            self.foreseeing.outputs.met(root)

    def _leave_to_parent(self) -> None:
        """In a forked child: watch nothing, write nothing."""
        if self._open:
            self._open = False
            self.recorder.stop()
            self._collections.leave()
            self.journal.abandon()

    def close(self) -> None:
        """End watching: settle what is pending, leave torch as it was, finish the files."""
        if not self._open:
            return
        self._open = False
        _open_guards.discard(self)
        atexit.unregister(self.close)
        try:
            self._settle()
        finally:  # also when a signal handler raised
            self.together.leave()
            self.recorder.stop()
            self._collections.leave()
            self.interception.remove()
            self._finish_files()

    def _settle(self) -> None:
        try:
            self.waiting.settle()
            self._tell_overrides()
            if self.session.window.symptom is None:
                self.session.window.symptom = self.scaling.never_stepped()
            if self.session.window.symptom is not None and not self.session.window.told:
                self.acting.report(self.scaling.current)
        except TrainingStopped:
            pass
        except Exception as error:
            self._internal_error(error)
        if self.recorder.before_call is not None:
            self.session.guarded(self.recorder.before_call)
        self.session.guarded(lambda: self.recorder.suspended(self.regular.settle))
        self.session.guarded(self.foreseeing.settle)
        self.session.guarded(lambda: self.recorder.suspended(self.acting.look_at_the_end))
        self.session.guarded(self.foreseeing.standing.settle)
        self.session.guarded(lambda: self.foreseeing.state(wait=True))

    def _finish_files(self) -> None:
        if self.journal.closed:
            return
        for line in self.session.guarded(self.session.tally.lines) or []:
            self.journal.say(line)
        if self.session.by_hand and not self.session.step_count and not self.session.window.backwards and self.recorder.tape.last > _LOOSE:
            self.journal.say("whynan: no backward pass and no optimizer was seen: nothing was watched (training without gradients is not supported)")
        try:
            steps = self.session.step_count + bool(self.session.stopped)  # the one it was stopped in never ended
            self.journal.close(steps, self.session.budget, watched(self.session, self.options, self.foreseeing))
        except Exception as error:
            let_through(error)
            self.journal.internal_error(error)

    def __enter__(self) -> Guard:
        return self if self._open else self.open()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.failed_with(error)
        self.close()

    def failed_with(self, error: BaseException) -> None:
        """The user's program raised: say why if the failing call is one of ours to explain."""
        if isinstance(error, TrainingStopped | SystemExit | KeyboardInterrupt) or not self._open or not self.recorder.running:
            return
        if isinstance(error, RuntimeError) and (word := self.together.word()):
            self.journal.say(f"whynan: rank {rank_here()} ends, too: {word}", always=True)
            self.together.left_behind = True
            return
        try:
            self.acting.failed_with(error)
        except Exception as internal:
            self._internal_error(internal)

    def attach(self, *objects: Any) -> None:
        """Take models and optimizers that were made before watching began."""
        for item in objects:
            if isinstance(item, torch.optim.Optimizer):
                self.interception.watch_step_of(type(item))
                self.interception.watch_step_on(item)
                self.optimizer_made(item)
            elif isinstance(item, torch.nn.Module):
                self.noticing.made_or_loaded(item)
                self.interception.hooks.wrap(item)

    def _internal_error(self, error: BaseException) -> None:
        """Log once, switch the watching off, let the training go on; what a signal handler raised goes on to the program."""
        try:
            let_through(error)
        except BaseException:
            self._break_off()
            raise
        self.journal.internal_error(error)
        self.recorder.stop()
        self.interception.remove(lasting=False)

    def _break_off(self) -> None:
        """Something of the program's broke into what is done about a bad step: that step is over, the next ones are none of its."""
        if self.session.window.told:
            self.session.next_step()

    # -- doors: state -------------------------------------------------------------------------------------------

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """A new optimizer: everything recorded so far was setup, not a step."""
        self.session.add_optimizer(optimizer)
        self.recorder.seen_written = None  # from here on updates are its affair
        self.session.guarded(lambda: self._note_optimizer(optimizer))

    def _note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.session.made_at[id(optimizer)] = asked_for(optimizer)
        self.steps.met(optimizer)
        self.recorder.suspended(self.sharing.met, optimizer)
        self.noticing.made_or_loaded(optimizer)
        if self.session.window.symptom is not None and not self.session.window.told:
            self.session.window.outlived = True  # what was recorded is still to be told of
            return
        self.recorder.suspended(self.recorder.beside.setup.end, self.recorder.tape)
        if not self.session.window.backwards:
            self.recorder.roots.set_aside()
        self.session.earlier.clear()

    def loading(self, owner: Any) -> object:
        """State is about to be loaded: remember the rates the script gave, or which weights are written to."""
        if isinstance(owner, torch.nn.Module):
            return self.session.guarded(lambda: versions_of(owner))
        return self.session.guarded(lambda: rates.before_load(owner))

    def loaded(self, owner: Any, before: object = None) -> None:
        """State was loaded: look at it before the next step."""
        if isinstance(owner, torch.nn.Module | torch.optim.Optimizer):
            self.noticing.made_or_loaded(owner)
        if isinstance(owner, torch.nn.Module) and isinstance(before, dict):
            self.session.guarded(lambda: self.recorder.beside.loads.note(owner, before, take_site(2)))
        if isinstance(before, rates.Rates):
            self.session.guarded(lambda: self._overrides.loaded(owner, before, take_site(2)))

    def _tell_overrides(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for override in self._overrides.due(optimizer):
            self.journal.incident(rates.incident(override, self.session.step_count), self.session.budget.action("observed"), tell=not rank_here())

    def zeroed(self, call: Callable[..., Any], owner: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Gradients are dropped; a pending symptom that was never stepped on is told now."""
        session = self.session
        if self.recorder.tape.last > session.window_start or session.window.symptom is not None or self.acting.stale:
            session.guarded(lambda: self._note_zero(owner))
        call(owner, *args, **kwargs)

    def _note_zero(self, owner: Any) -> None:
        window = self.session.window
        if window.symptom is not None and not window.told and window.backwards:
            self.acting.turned_away(zeroed=True)
        self.acting.stale.clear()
        newest = next(reversed(self.recorder.tape.entries), 0)
        if newest > self.session.window_start:  # else the step has not begun: a replay starts without gradients anyway
            tensors = owner.parameters() if isinstance(owner, torch.nn.Module) else parameters_of(owner)
            entry = self.recorder.note("zero", functools.partial(_drop_gradients, list(tensors)))
            self.recorder.tape.add(entry, None)

    def loop_begun(self, loop: Loop) -> None:
        """The program loops over a loader that knows its position: a snapshot is to know it, too."""
        self.recovering.looped(loop)

    def draw_again(self, loop: Loop) -> None:
        """A batch is about to be drawn: after a rollback, from where the loader was with the snapshot."""
        self.recovering.rewind(loop)

    # -- doors: followers ---------------------------------------------------------------------------------------

    def follower_made(self, follower: Any) -> None:
        """A scheduler or a moving average came to be."""
        self.session.guarded(lambda: self.followers.begin(follower))
        self._know(follower)

    def _know(self, follower: Any) -> None:
        if isinstance(follower, torch.nn.Module):
            self.followers.averages.add(follower)
        self.session.guarded(lambda: self.recovering.met(follower))

    def follow(self, call: Callable[..., Any], follower: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A scheduler steps, a moving average moves: not after a step that was dropped."""
        self._know(follower)
        model = args[0] if args else kwargs.get("model")  # of an average; else a number
        if self.session.guarded(lambda: self.followers.may_move(follower, model)) is False:
            return None
        self.recovering.followed()
        if self.waiting.pending:
            self.session.guarded(lambda: self.followers.about_to_move(follower))
        return call(follower, *args, **kwargs)

    # -- doors: going back --------------------------------------------------------------------------------------

    def scaled(self, scaler: Any, loss: Any) -> None:
        """A gradient scaler multiplies the loss: the unscaled one is what counts."""
        self.session.window.scaled = self.session.window.noted = True
        self.recovering.scalers.add(scaler)
        self.session.guarded(lambda: self.recovering.met(scaler))
        self.session.window.scale = scaler.get_scale() if not torch.cuda.is_initialized() else None
        self.session.guarded(lambda: self.noticing.losses(loss))

    def scaler_step(self, call: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A gradient scaler steps."""
        return self.scaling.step(call, scaler, optimizer, args, kwargs)

    def scaler_update(self, call: Callable[..., Any], scaler: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A gradient scaler moves its scale."""
        return self.scaling.update(call, scaler, args, kwargs)

    def backward(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The user goes back from a loss."""
        loss = args[0] if args else None
        if type(loss) is not torch.Tensor and isinstance(loss, torch.Tensor) and not has_values(loss):
            return call(*args, **kwargs)  # an estimate of memory: no step has it
        if kwargs:
            kwargs = {name: _lasting(value) for name, value in kwargs.items()}
        entry: Entry | None = None
        try:
            entry = self._note_backward(call, args, kwargs)
            if self.options.drop_alone and self._drops_alone() and self.acting.drop_micro_batch():
                return None
            if self.session.window.several:
                args, kwargs = self.together.carry(args, kwargs)
        except TrainingStopped:
            raise
        except Exception as error:
            self._internal_error(error)
        if self.acting.places:
            self.acting.free_places()
        self._in_backward = True
        try:
            result = call(*args, **kwargs)
        except BaseException:
            if entry is not None:
                self.session.guarded(functools.partial(self._raised, entry))
            raise
        finally:
            self._in_backward = False
        if self.session.by_hand:
            self._meet_foreign_optimizers()
            self.recorder.roots.between = True
            self.session.guarded(self.by_hand.check_gradients)
        elif self._stepped_inside:
            self.session.guarded(self._after_hooks)
        elif self.options.drop_alone:
            self.recorder.roots.next_micro_batch()
        return result

    def _finish_by_hand(self, handed: Any = ()) -> None:
        """The next backward pass begins in a program without optimizers: whatever it did about the last one is done."""
        self.session.guarded(lambda: self.by_hand.look_at_new_weights(handed))
        self.steps.finish(None, True)

    def _meet_foreign_optimizers(self) -> None:
        if not self._met_foreign:
            self._met_foreign = self.session.guarded(lambda: self.foreign(self.interception)) is not False

    def update_by_hand(self, call: Callable[..., Any], optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An optimizer that is not torch's updates weights: the end of a step that by itself would have none."""
        allowed = self.by_hand.may_update()
        result = call(optimizer, *args, **kwargs) if allowed else None
        self.steps.finish(None, allowed)
        return result

    def _drops_alone(self) -> bool:
        window, session = self.session.window, self.session
        bad = window.symptom is not None and window.symptom.place == "loss" and not window.decided
        mine = bad and not window.several and not self.stepping  # no rank leaves out a backward pass alone; a closure hands its loss on
        return mine and bool(session.optimizers) and not session.budget.observes

    def _raised(self, entry: Entry) -> None:
        """A backward pass raised, and the program may go on: there was none. A bad loss is one that the program looked at itself."""
        window = self.session.window
        self.recorder.tape.entries.pop(entry.number, None)
        window.backwards -= 1
        del window.losses[-1:]
        if window.symptom is not None and window.entry == entry.number:
            window.entry = -next((leaf.entry for leaf in entry.reads if isinstance(leaf, Slot)), 0)

    def _note_backward(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Entry:
        tensors = args[0] if args else kwargs.get("tensors")
        session = self.session
        if session.by_hand and session.window.backwards:
            self._finish_by_hand()
        window = session.window
        left = not window.told and (self.probes.seen or window.entry < 0) and self.probes.goes_back(tensors)
        if left or (window.outlived and window.entry >= 0 and window.symptom is not None):
            self.acting.turned_away()
            window = session.window
        if session.has_several or self.sharing.fate:
            self.sharing.went_back()
        if self.acting.zeroed_away:
            self.acting.leave_zeroed()
        if self.acting.stale:
            self.acting.free_stale()
        entry = self.recorder.note("backward", call, args, kwargs, ours=5)
        self.recorder.tape.add(entry, None)
        if not window.noted:
            self.noticing.losses(tensors)
        window.noted = False
        window.backwards += 1
        window.norm, window.clipped, window.averaged = None, frozenset(), None  # of the gradients before this pass
        if session.step_count % 64 < 2:
            self._several = several()
        self.noticing.check_loss(entry, wait=self.options.drop_alone and not self._several)
        window.several = self._several
        if window.several and window.symptom is None:  # before the gradients go out: they carry it to the other ranks
            self.noticing.look_at_state(judged=False)
            self.noticing.look_at_buffers()
        return entry

    def grad(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """`torch.autograd.grad`: recorded as a call; in programs without optimizers its outputs are the gradients."""
        args, kwargs = tuple(map(_lasting, args)), {name: _lasting(value) for name, value in kwargs.items()}
        if kwargs.get("create_graph") or (len(args) > 4 and args[4]):
            return self.recorder.opaque("call", call, call, args, kwargs)
        return self._derivative(call, args, kwargs, args[0] if args else kwargs.get("outputs"))

    def derived(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A gradient made by `torch.func`: in programs without optimizers it is what the update is made of."""
        return self._derivative(call, args, kwargs, ())

    def _derivative(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        if not self.session.by_hand:
            return self.recorder.opaque("call", call, call, args, kwargs)
        if self.session.window.backwards:
            self._finish_by_hand((args, kwargs) if isinstance(outputs, tuple) and not outputs else ())
        result = self.recorder.opaque("derivative", call, call, args, kwargs)
        self.recorder.roots.between = True
        self.session.guarded(lambda: self.by_hand.check_derivative(outputs, result))
        return result

    def clip(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The user clips: the norm is there for nothing."""
        return self.clipping.clip(call, args, kwargs)

    # -- doors: steps -------------------------------------------------------------------------------------------

    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The user updates the weights."""
        if self._overrides.waiting:
            self.session.guarded(lambda: self._tell_overrides(optimizer))
        if id(optimizer) not in self.session.optimizers_met:  # made in another thread
            self.session.add_optimizer(optimizer)
        self.stepping = True
        try:
            return self.steps.step(call, optimizer, args, kwargs)
        except TrainingStopped:
            raise
        except BaseException:  # also Ctrl-C, in a notebook
            self._break_off()
            raise
        finally:
            self.stepping = False

    def may_meet(self) -> bool:
        """An optimizer is made in another thread: it is ours if watching moves there, or nothing was trained yet."""
        return self.moves_here() or not (self.session.step_count or self.session.window.backwards)

    def moves_here(self) -> bool:
        """An optimizer is made, or steps, in another thread: under `whynan run`, watch that one where nothing was trained in the old one, or it has ended."""
        with _moving:
            recorder, thread = self.recorder, current_thread()
            if not self.watches or not self.command or recorder.inside or thread.daemon or open_guard() is not None:
                return False  # a daemon can be ended in the midst of it, when Python is gone
            if (self.session.step_count or self.session.window.backwards or recorder.moved) and recorder.thread.is_alive():
                return False
            recorder.move()
        self._say_once("whynan: the training is in another thread: watching goes on there")
        return True

    def step_elsewhere(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """An optimizer steps where nothing is recorded: in a hook of the backward pass, or in another thread."""
        session = self.session
        if not self.recorder.mine:
            return self._step_in_another_thread(call, optimizer, args, kwargs)
        if not self._in_backward:
            if not self.recorder.replaying and not self.regular.keeping:
                self._say_once("whynan: an optimizer steps inside a compiled function or a module; that step is not watched")
            return call(optimizer, *args, **kwargs)
        self._stepped_inside, session.window.inside = optimizer, True
        if session.window.symptom is None:
            bad = session.guarded(lambda: nonfinite(session.named_gradients(optimizer)))
            if bad:
                session.see(symptom_of("gradient", bad))
        if session.window.symptom is not None and not session.budget.observes:
            return None
        return call(optimizer, *args, **kwargs)

    def _step_in_another_thread(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Watch that thread from here on; where another one trains already, watch none: a replay would disturb the other."""
        moved = self.moves_here()
        if torch._C._current_autograd_node() is not None:
            self._say_once("whynan: an optimizer steps in a thread of the backward pass; that step is not watched")
        elif not moved and not self.recorder.replaying:
            self._say_once("whynan: a second thread trains, which is not supported: watching is off, training goes on")
            self.recorder.stop()
            self.interception.remove(lasting=False)
        result = call(optimizer, *args, **kwargs)
        if moved:
            self.session.next_step()
        return result

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.journal.say(text)

    def _after_hooks(self) -> None:
        """Optimizers stepped inside the backward pass: settle that step now."""
        optimizer, self._stepped_inside = self._stepped_inside, None
        window = self.session.window
        if window.symptom is not None and not window.told:
            self.acting.act(optimizer)
        self.steps.finish(optimizer, not window.told)

    def _note_function(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Entry:
        entry = self.recorder.note("function", function, args, kwargs)
        entry.rng = take_rng(others=True)
        self.recorder.beside.generators.find_in(function)
        entry.generators = self.recorder.beside.generators.take()
        return entry

    # -- the third way in ---------------------------------------------------------------------------------------

    def step_function(self, function: F) -> F:
        """See `step`, which is this under its public name on the object `watch` returns."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.recorder.here:
                return function(*args, **kwargs)
            self.session.function = self.session.guarded(lambda: self._note_function(function, args, kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                self.session.function = None

        return watched  # type: ignore[return-value]


def _drop_gradients(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _lasting(value: Any) -> Any:
    """Return what can be gone through again and again: `model.parameters()` can once, and a replay does so too."""
    return tuple(value) if isinstance(value, Iterator) else value
