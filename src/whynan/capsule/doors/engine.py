"""What the engine does at the doors: of which a room before it only knows the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from whynan.capsule.doors.loaders import Loop
from whynan.capsule.recorder import Recorder


class GoingBack(Protocol):
    """The program goes back."""

    def backward(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...
    def grad(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...
    def derived(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...


class Clipping(Protocol):
    """It clips."""

    def clip(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...


class Zeroing(Protocol):
    """It drops gradients."""

    def zeroed(self, call: Callable[..., Any], owner: Any, args: Any, kwargs: dict[str, Any]) -> None: ...


class Loading(Protocol):
    """It loads state."""

    def loading(self, owner: Any) -> object: ...
    def loaded(self, owner: Any, before: object = None) -> None: ...


class Scaling(Protocol):
    """It scales the loss."""

    def scaled(self, scaler: Any, loss: Any) -> None: ...
    def step(self, call: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...
    def update(self, call: Callable[..., Any], scaler: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...


class Following(Protocol):
    """A scheduler or a moving average follows its steps."""

    def made(self, follower: Any) -> None: ...
    def follow(self, call: Callable[..., Any], follower: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...


class Elsewhere(Protocol):
    """An optimizer steps where nothing is recorded."""

    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any: ...


class Recovering(Protocol):
    """It draws a batch."""

    def looped(self, loop: Loop) -> None: ...
    def rewind(self, loop: Loop) -> None: ...


class Session(Protocol):
    """The run."""

    stepping: bool


class Doors(Protocol):
    """All of them."""

    @property
    def recorder(self) -> Recorder: ...
    @property
    def session(self) -> Session: ...
    @property
    def going_back(self) -> GoingBack: ...
    @property
    def clipping(self) -> Clipping: ...
    @property
    def zeroing(self) -> Zeroing: ...
    @property
    def loading(self) -> Loading: ...
    @property
    def scaling(self) -> Scaling: ...
    @property
    def following(self) -> Following: ...
    @property
    def elsewhere(self) -> Elsewhere: ...
    @property
    def recovering(self) -> Recovering: ...
    def may_meet(self) -> bool: ...
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None: ...
    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any: ...
    def update_by_hand(self, call: Callable[..., Any], optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...
