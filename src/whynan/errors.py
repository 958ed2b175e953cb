"""The errors whynan raises.

WhynanError
└── UsageError       wrong arguments or unreadable input: one line, exit status 2
BaseException
└── TrainingStopped  the policy stopped the training: exit status 3
"""

from __future__ import annotations


class WhynanError(Exception):
    """Anything whynan raises on purpose."""


class UsageError(WhynanError):
    """What was wrong, with the value; then what to do."""


class TrainingStopped(BaseException):
    """The policy stopped the training; the diagnosis has been printed and written.

    Not an `Exception`: a loop's own `except Exception: continue` must not swallow it.
    """
