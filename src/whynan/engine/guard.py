"""The guard: it makes all that watches a training, opens the doors of torch and closes them, and stays with one thread.

whynan run script.py     one Guard around the whole script
whynan.watch(model, …)   one Guard in the user's loop
@guard.step              the same, with the user's step function as the thing to replay
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable
from threading import Lock, current_thread
from typing import Any, TypeVar

import torch

from whynan.capsule.doors.interception import Interception
from whynan.capsule.doors.optimizers import watch_step_of, watch_step_on
from whynan.capsule.recorder import Recorder
from whynan.capsule.sites import asked_for
from whynan.capsule.state.randomness import take_rng
from whynan.capsule.tape.entries import Entry
from whynan.capsule.unseen import unseen
from whynan.capsules import Shelf
from whynan.engine.acting import Acting
from whynan.engine.byhand import ByHand
from whynan.engine.clipping import Clipping
from whynan.engine.elsewhere import Elsewhere
from whynan.engine.following import Following
from whynan.engine.foreseeing import Foreseeing
from whynan.engine.goingback import GoingBack
from whynan.engine.loading import Loading
from whynan.engine.noticing import Noticing
from whynan.engine.options import Options
from whynan.engine.peers import is_first
from whynan.engine.probes import Probes
from whynan.engine.recovering import Recovering
from whynan.engine.regular import Regular
from whynan.engine.scaling import Scaling
from whynan.engine.session import Session
from whynan.engine.sharing import Sharing
from whynan.engine.standing import Standing
from whynan.engine.stepping import Stepping
from whynan.engine.together import Together
from whynan.engine.tracing import Tracing
from whynan.engine.waiting import Waiting
from whynan.engine.watched import watched
from whynan.engine.wrapped import with_inner
from whynan.engine.zeroing import Zeroing
from whynan.errors import TrainingStopped, let_through
from whynan.recovery.followers import Followers
from whynan.recovery.place import rank_here
from whynan.report.journal import Journal
from whynan.resting import Collections

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
        self.together = Together(self.session, self.options.rank_timeout, self.options.budget())
        self.together.stamp = self.recovering.stamp
        self.session.last_words = lambda: self.together.part(self._finish_files)
        self.acting = Acting(self.session, self.noticing, self.followers, self.recovering, self.together, Shelf(self.options.capsule_limit))
        self.sharing = Sharing(self.session)
        self.clipping = Clipping(self.session)
        standing = Standing(self.session, self.followers, self.acting.telling.stands_still)
        self.acting.drops_terms = self.options.bad_terms == "drop" and not self.options.drop_alone
        self.probes = Probes(self.session)
        self.acting.leaving.left_alone, self.probes.left = standing.turned_away, self.acting.leaving.turned_away
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
        self.loading = Loading(self.session, self.noticing)
        self.zeroing = Zeroing(self.session, self.acting.leaving, self.acting.dropping)
        self.following = Following(self.session, self.followers, self.recovering, self.waiting)
        self.elsewhere = Elsewhere(self.session, self.acting, self.regular, self.steps.finish)
        self.elsewhere.moves_here, self.elsewhere.switch_off = self.moves_here, self._switch_off
        self.going_back = GoingBack(
            self.session,
            self.options,
            self.noticing,
            self.acting,
            self.together,
            self.sharing,
            self.probes,
            self.by_hand,
            self.elsewhere,
            self.steps.finish,
        )
        self.going_back.meet_foreign = self._meet_foreign_optimizers
        self.command: list[str] = []  # that started this process, where it was `whynan run`: another rank is to be started like it
        self.interception = Interception(self)
        self._open = False
        self._met_foreign = False
        self.foreign: Callable[[Interception], bool] = lambda interception: False  # stands at updates that are not torch's, where there are any
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
        if self.recorder.running:
            self._tell_what_is_pending()
        if self.recorder.before_call is not None:
            self.session.guarded(self.recorder.before_call)
        if not self.recorder.running:
            return  # watching has failed: what the program did from there on was not seen, and nothing is said of it
        self.session.guarded(lambda: self.recorder.suspended(self.regular.settle))
        self.session.guarded(self.foreseeing.settle)
        self.session.guarded(lambda: self.recorder.suspended(self.acting.telling.look_at_the_end))
        self.session.guarded(self.foreseeing.standing.settle)
        self.session.guarded(lambda: self.foreseeing.state(wait=True))

    def _tell_what_is_pending(self) -> None:
        try:
            self.waiting.settle()
            self.loading.tell_overrides()
            never = self.scaling.never_stepped() if self.session.window.symptom is None else None
            self.session.window.symptom = never or self.session.window.symptom
            if self.session.window.symptom is not None and not self.session.window.told:
                self.acting.telling.report(self.scaling.current, tell=never is None or is_first(self.session))  # all ranks have skipped alike
        except TrainingStopped:
            pass
        except Exception as error:
            self._internal_error(error)

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
            self.journal.internal_error(error, watching=True)  # which is over by itself

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
            self.acting.telling.failed_with(error)
        except Exception as internal:
            self._internal_error(internal)

    def attach(self, *objects: Any) -> None:
        """Take models and optimizers that were made before watching began, and the optimizers inside optimizers: it may be theirs that step (SAM)."""
        for item in dict.fromkeys(inner for given in objects for inner in with_inner(given)):
            if isinstance(item, torch.optim.Optimizer):
                watch_step_of(self.interception, type(item))
                watch_step_on(self.interception, item)
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
        self._switch_off()

    def _switch_off(self) -> None:
        self.recorder.stop()
        self.interception.remove(lasting=False)

    def _break_off(self) -> None:
        """Something of the program's broke into what is done about a bad step: that step is over, the next ones are none of its."""
        if self.session.window.told:
            self.session.next_step()
        elif self.session.stepping and self.session.window.symptom is None:
            self.recorder.roots.set_aside()  # an update that raised is nothing of the next batch, if there is one

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
        if not self.session.has_several:
            self.recorder.roots.begin_training()

    def _meet_foreign_optimizers(self) -> None:
        if not self._met_foreign:
            self._met_foreign = self.session.guarded(lambda: self.foreign(self.interception)) is not False

    def update_by_hand(self, call: Callable[..., Any], optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An optimizer that is not torch's updates weights: the end of a step that by itself would have none."""
        allowed = self.by_hand.may_update()
        result = call(optimizer, *args, **kwargs) if allowed else None
        self.steps.finish(None, allowed)
        return result

    # -- optimizers ----------------------------------------------------------------------------------------------

    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The user updates the weights."""
        if self.loading.overrides.waiting:
            self.session.guarded(lambda: self.loading.tell_overrides(optimizer))
        if id(optimizer) not in self.session.optimizers_met:  # made in another thread
            self.session.add_optimizer(optimizer)
        self.session.stepping = True
        try:
            return self.steps.step(call, optimizer, args, kwargs)
        except TrainingStopped:
            raise
        except BaseException:  # also Ctrl-C, in a notebook
            self._break_off()
            raise
        finally:
            self.session.stepping = False

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
        self.journal.say_once("whynan: the training is in another thread: watching goes on there")
        return True

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
