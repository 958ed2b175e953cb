"""A copy of weights and optimizer state from before an update, to undo it bit for bit."""

from __future__ import annotations

from typing import Any

import torch


class Snapshot:
    """Weights and state of one optimizer. Memory: one copy of both."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [(p, p.detach().clone()) for g in optimizer.param_groups for p in g["params"]]
        self.state = {p: _copy(s) for p, s in optimizer.state.items()}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Write everything back in place."""
        with torch.no_grad():
            for parameter, copy in self.parameters:
                parameter.copy_(copy)
        live = self.optimizer.state
        for key in [k for k in live if k not in self.state]:
            del live[key]
        for key, saved in self.state.items():
            live[key] = _merge(live.get(key), saved)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy(v) for v in value]
    return value


def _merge(live: Any, saved: Any) -> Any:
    """Write saved tensors into the live ones, so that whoever holds a reference sees the old value again."""
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor) and live.shape == saved.shape and live.dtype == saved.dtype:
        with torch.no_grad():
            live.copy_(saved)
        return live
    if isinstance(saved, dict) and isinstance(live, dict):
        for key in [k for k in live if k not in saved]:
            del live[key]
        for key, value in saved.items():
            live[key] = _merge(live.get(key), value)
        return live
    return _copy(saved)
