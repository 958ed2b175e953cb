"""Where a function mode stands: on the stack of the thread it belongs to, and off it while a call runs that is recorded whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import current_thread, local, main_thread
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.sites import forget
from whynan.capsule.unseen import leave_out, unseen
from whynan.errors import TrainingStopped

pop = torch._C._pop_torch_function_stack
push = torch._C._push_on_torch_function_stack
modes = torch._C._len_torch_function_stack  # how many are on the stack of this thread
_at = torch._C._get_function_stack_at

ELSEWHERE: Any = object()  # a call that is not to be recorded where it is made

_of_thread = local()


class _ThreadEnd:
    """Takes a mode off the stack of a thread that ends: torch would want the interpreter for that when there may be none any more."""

    def __init__(self, mode: OnStack) -> None:
        self._mode = mode

    def __del__(self) -> None:
        self._mode.take_off()


@unseen
class OnStack(TorchFunctionMode):
    """A mode that is seen only by calls that nothing else of ours is around."""

    moved = False  # to another thread than the one it was started in, on whose stack it still is

    def __init__(self) -> None:
        super().__init__()
        self.thread = current_thread()
        self.running = False
        self.inside = 0  # calls that are recorded as one, or are ours
        self.replaying = False

    def start(self) -> None:
        """Begin to record in this thread."""
        self.thread = current_thread()
        self.running = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def move(self) -> None:
        """Go on in this thread instead; the one before is let alone."""
        self.moved = True
        self.thread = current_thread()
        if all(_at(i) is not self for i in range(modes())):  # else it was here before
            self.__enter__()  # type: ignore[no-untyped-call]
            if self.thread is not main_thread():
                _of_thread.end = _ThreadEnd(self)

    def stop(self) -> None:
        """Stop recording and take the mode off the stack, wherever it is; called again it does no harm."""
        self.running = False
        forget()
        self.take_off()

    def take_off(self) -> None:
        """Take the mode off the stack of this thread."""
        above: list[Any] = []
        held = [_at(i) for i in range(modes())]
        if not any(mode is self for mode in held):
            return  # inside our own handler, or suspended: `suspended` and `resumed` do not put it back any more
        while (mode := pop()) is not self:
            above.append(mode)
        for mode in reversed(above):
            push(mode)

    @property
    def mine(self) -> bool:
        """Whether this is the thread it records in; not by its number, which a later thread may get."""
        return current_thread() is self.thread

    @property
    def replays_here(self) -> bool:
        """Whether a call made now is one of a replay; what other threads do meanwhile is none."""
        return self.replaying and self.mine

    @property
    def here(self) -> bool:
        """Whether a call made now would be recorded: right thread, not inside anything recorded already."""
        return self.running and not self.inside and self.mine

    def suspended(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run something with the mode off the stack."""
        result = self.outermost(functools.partial(call, **kwargs) if kwargs else call, *args)
        return call(*args, **kwargs) if result is ELSEWHERE else result

    def outermost(self, call: Callable[..., Any], *args: Any) -> Any:
        """Do the same where a call made now would be recorded; else nothing is run, and the answer is `ELSEWHERE`.

        Every door asks this. That the mode is on top of this thread's stack says all of `here`, with one call instead of five.
        """
        if self.inside:
            return ELSEWHERE
        top: Any = self
        try:  # a signal handler may raise after any call, also after the next
            try:
                top = pop()
            except RuntimeError:  # nothing on the stack of this thread
                top = None
            if top is self:
                if self.moved and not self.mine:
                    return ELSEWHERE
                self.inside += 1
                try:
                    return call(*args)
                except TrainingStopped as stop:
                    raise stop.with_traceback(None) from None  # the user's traceback is about the user's lines
                finally:
                    self.inside -= 1
        finally:
            if top is not None and (top is not self or self.running):
                push(top)
        return self._below(call, args)

    def _below(self, call: Callable[..., Any], args: Any) -> Any:
        """Inside our own handler, or under a mode of the user's, the mode is not on top."""
        if not self.here:
            return ELSEWHERE
        self.inside += 1
        try:
            return call(*args)
        finally:
            self.inside -= 1

    def opened(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a module with recording on: its call alone, without what stands around it, cannot be made again."""
        outer, self.inside = self.inside, 0
        below = any(_at(i) is self for i in range(modes()))  # a mode of the user's stands above
        try:
            if not below:
                push(self)
            return call(*args, **kwargs)
        finally:
            self.inside = outer
            if not below and self.running and (top := pop()) is not self:  # else `stop` took it off
                push(top)

    def short_way(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's `handle_torch_function`, shortened where this mode is on top: it stands before those of its functions that are written in Python."""

        def handled(public_api: Callable[..., Any], relevant_args: Any, /, *args: Any, **kwargs: Any) -> Any:
            top: Any = self
            try:
                try:
                    top = pop()
                except RuntimeError:  # no mode at all: a tensor of another class
                    top = None
                if top is self:
                    return self.__torch_function__(public_api, (), args, kwargs)
            except BaseException:
                leave_out()
                raise
            finally:
                if top is not None:
                    push(top)
            return handle(public_api, relevant_args, *args, **kwargs)

        return handled
