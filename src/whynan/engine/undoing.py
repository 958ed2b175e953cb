"""Updates that may turn out bad: what there was before one, and the way back to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whynan.capsule.sites import take_site
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.stepped import step_again
from whynan.capsule.unseen import unseen
from whynan.engine.session import Session, parameters_of


@unseen
def make_update(session: Session, call: Callable[[], Any], before: Snapshot) -> Any:
    """Make an update; what there was before one that raises is kept, to tell of it if that ends the program."""
    try:
        return call()
    except Exception as error:
        session.window.unfinished = (None if isinstance(error, torch.OutOfMemoryError) else before), take_site()
        raise


@contextlib.contextmanager
def before_update(session: Session, before: Snapshot) -> Iterator[None]:
    """Go back before an update that is then what is replayed."""
    optimizer = before.optimizer
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
