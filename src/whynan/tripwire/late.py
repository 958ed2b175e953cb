"""The flag that is read one step late, so that the device is never waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def can_wait(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update can be skipped on the device (`found_inf`), so that the host may look later."""
    return False


class LateFlag:
    """To be filled in."""

    def read(self, tripped: Callable[[float, float], None]) -> None: ...
    def arm(self, *args: Any) -> None: ...
