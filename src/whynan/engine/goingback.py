"""The program goes back: by a backward pass, or by asking for gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whynan.capsule.doors.collectives import several
from whynan.capsule.tape.entries import Entry, Slot
from whynan.capsule.unseen import unseen
from whynan.engine.acting import Acting
from whynan.engine.byhand import ByHand
from whynan.engine.elsewhere import Elsewhere
from whynan.engine.noticing import Noticing
from whynan.engine.options import Options
from whynan.engine.probes import Probes
from whynan.engine.session import Session
from whynan.engine.sharing import Sharing
from whynan.engine.together import Together
from whynan.errors import TrainingStopped
from whynan.tripwire.values import has_values


@unseen
class GoingBack:
    """Stands at `backward`, `torch.autograd.grad` and the derivatives of `torch.func`."""

    def __init__(
        self,
        session: Session,
        options: Options,
        noticing: Noticing,
        acting: Acting,
        together: Together,
        sharing: Sharing,
        probes: Probes,
        by_hand: ByHand,
        elsewhere: Elsewhere,
        finish: Callable[[Any, bool], None],
    ) -> None:
        self.session, self.recorder, self.options, self.noticing, self.acting = session, session.recorder, options, noticing, acting
        self.dropping, self.leaving = acting.dropping, acting.leaving
        self.together, self.sharing, self.probes, self.by_hand, self.elsewhere, self.finish = together, sharing, probes, by_hand, elsewhere, finish
        self.meet_foreign: Callable[[], None] = lambda: None  # optimizers that are not torch's, where a program has no others
        self._several = False  # asked now and then: a process group is up before the first step

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
            self.session.broken(error)
        if self.dropping.places:
            self.dropping.free_places()
        self.elsewhere.in_backward = True
        try:
            result = call(*args, **kwargs)
        except BaseException:
            if entry is not None:
                self.session.guarded(functools.partial(self._raised, entry))
            raise
        finally:
            self.elsewhere.in_backward = False
        if self.session.by_hand:
            self.meet_foreign()
            self.recorder.roots.between = True
            self.session.guarded(self.by_hand.check_gradients)
        elif self.elsewhere.stepped:
            self.session.guarded(self.elsewhere.settle)
        elif self.options.drop_alone:
            self.recorder.roots.next_micro_batch()
        return result

    def _finish_by_hand(self, handed: Any = ()) -> None:
        """The next backward pass begins in a program without optimizers: whatever it did about the last one is done."""
        self.session.guarded(lambda: self.by_hand.look_at_new_weights(handed))
        self.finish(None, True)

    def _drops_alone(self) -> bool:
        window, session = self.session.window, self.session
        bad = window.symptom is not None and window.symptom.place == "loss" and not window.decided
        mine = bad and not window.several and not session.stepping  # no rank leaves out a backward pass alone; a closure hands its loss on
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
            self.leaving.turned_away()
            window = session.window
        if session.has_several or self.sharing.fate:
            self.sharing.went_back()
        if self.leaving.zeroed_away:
            self.leaving.leave_zeroed()
        if self.dropping.stale:
            self.dropping.free_stale()
        entry = self.recorder.note("backward", call, args, kwargs, ours=5)
        self.recorder.tape.add(entry, None)
        if not window.backwards:
            self.recorder.received.forget_sums()
        if not window.noted:
            self.noticing.losses(tensors)
        window.noted = False
        window.backwards += 1
        window.norm, window.clipped, window.averaged = None, frozenset(), None  # of the gradients before this pass
        self._ask_whether_several()
        self.noticing.check_loss(entry, wait=self.options.drop_alone and not window.several)
        self.dropping.before = {}
        if window.symptom is not None and window.backwards == 1 and not session.budget.observes:
            self.dropping.keep_gradients()
        if window.several and window.symptom is None:  # before the gradients go out: they carry it to the other ranks
            self.noticing.look_at_state(judged=False)
            self.noticing.look_at_buffers()
        return entry

    def _ask_whether_several(self) -> None:
        if self.session.step_count % 64 < 2:
            self._several = several()
        self.session.window.several = self._several

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
            self._ask_whether_several()
            return self.recorder.opaque("call", call, call, args, kwargs)
        if self.session.window.backwards:
            self._finish_by_hand((args, kwargs) if isinstance(outputs, tuple) and not outputs else ())
        result = self.recorder.opaque("derivative", call, call, args, kwargs)
        self.recorder.roots.between = True
        self.session.guarded(lambda: self.by_hand.check_derivative(outputs, result))
        return result


def _lasting(value: Any) -> Any:
    """Return what can be gone through again and again: `model.parameters()` can once, and a replay does so too."""
    return tuple(value) if isinstance(value, Iterator) else value
