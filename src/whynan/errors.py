"""The errors whynan raises.

WhynanError
└── UsageError       wrong arguments or unreadable input: one line, exit status 2
BaseException
└── TrainingStopped  the policy stopped the training: exit status 3
"""

from __future__ import annotations

from inspect import CO_VARARGS
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any


class WhynanError(Exception):
    """Anything whynan raises on purpose."""


class UsageError(WhynanError):
    """What was wrong, with the value; then what to do."""


class TrainingStopped(BaseException):
    """The policy stopped the training; the diagnosis has been printed and written.

    Not an `Exception`: a loop's own `except Exception: continue` must not swallow it.
    """


def one_line(error: BaseException, most: int = 160) -> str:
    r"""Return an exception as one line: its kind, and the beginning of what it says.

    >>> one_line(ValueError("no such group\nof parameters"))
    'ValueError: no such group'
    """
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:most]}"


def let_through(error: BaseException) -> None:
    """Raise an exception again that a signal handler of the program raised while our code ran: it is the program's, no failure of ours.

    Called wherever failures of ours are caught. A handler is known by what it is given: the number of the signal and the
    frame it interrupted, which is the one before its own in the traceback.
    """
    trace = error.__traceback__
    while trace is not None:
        if is_interrupted(trace):
            raise error
        trace = trace.tb_next


def is_interrupted(trace: TracebackType) -> bool:
    """Whether a signal handler was called in the midst of a frame, and raised."""
    following = trace.tb_next
    return following is not None and any(type(number) is int and frame is trace.tb_frame for number, frame in pairwise(_given(following.tb_frame)))


def _given(frame: FrameType) -> list[Any]:
    """Return the positional arguments of a call, those of `*args` too."""
    code, held = frame.f_code, frame.f_locals
    given = [held.get(name) for name in code.co_varnames[: code.co_argcount]]
    more = held.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) if code.co_flags & CO_VARARGS else ()
    return given + list(more) if isinstance(more, tuple) else given
