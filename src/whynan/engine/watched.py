"""What was watched in a run, said once at its end for the report."""

from __future__ import annotations

import torch

from whynan.engine.foreseeing import Foreseeing
from whynan.engine.options import Options
from whynan.engine.session import Session
from whynan.records import Json, jsonable

_READINGS = 200  # float16 tensors whose readings are written


def watched(session: Session, options: Options, foreseeing: Foreseeing) -> dict[str, Json]:
    """Return the facts of a run that its report tells: what was seen, with which options."""
    loss, norm = foreseeing.dtypes
    readings = sorted(foreseeing.early.readings.items(), key=lambda item: -max(v for _, v in item[1]))
    return {
        "models": [_model(root) for root in session.recorder.roots.modules()],
        "optimizers": list(session.optimizers_met.values()),
        "by_hand": session.by_hand,
        "loss_dtype": _name(loss),
        "norm_dtype": _name(norm),
        "policy": ",".join(str(link.policy) for link in session.budget.chain),
        "spike": str(foreseeing.policy),
        "track": jsonable(sorted(options.track or {})),
        "stages": jsonable(foreseeing.staging.watch.said if foreseeing.staging is not None else []),
        "readings": jsonable(dict(readings[:_READINGS])),
        "unsure": session.budget.unsure,
        "stopped": session.stopped,
        "updates": session.applied,
    }


def _model(root: torch.nn.Module) -> dict[str, Json]:
    weights = list(root.parameters())
    kinds: dict[str, int] = {}
    for weight in weights:
        kinds[_name(weight.dtype)] = kinds.get(_name(weight.dtype), 0) + weight.numel()
    places = sorted({weight.device.type for weight in weights})
    return {
        "kind": type(root).__name__,
        "parameters": sum(kinds.values()),
        "dtypes": jsonable(sorted(kinds, key=kinds.__getitem__, reverse=True)),
        "devices": jsonable(places),
    }


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
