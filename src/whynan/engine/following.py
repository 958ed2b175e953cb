"""Followers of the steps: schedulers and moving averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whynan.capsule.unseen import unseen
from whynan.engine.recovering import Recovering
from whynan.engine.session import Session
from whynan.engine.waiting import Waiting
from whynan.recovery.followers import Followers


@unseen
class Following:
    """Stands where they are made and where they move."""

    def __init__(self, session: Session, followers: Followers, recovering: Recovering, waiting: Waiting) -> None:
        self.session, self.followers, self.recovering, self.waiting = session, followers, recovering, waiting

    def made(self, follower: Any) -> None:
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
