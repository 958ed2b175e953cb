"""whynan: from `loss: nan` to the exact line, the reason, a fix proven on the failing step, and a run that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["TrainingStopped", "WhynanError", "__version__", "check", "explain", "probe", "save", "stable", "watch"]

if TYPE_CHECKING:
    from whynan import stable
    from whynan.errors import TrainingStopped, WhynanError
    from whynan.explaining import explain
    from whynan.forensics.checking import check
    from whynan.probing.api import probe
    from whynan.recovery.keeper import save
    from whynan.watching import watch

_HOMES = {
    "TrainingStopped": "errors",
    "WhynanError": "errors",
    "check": "forensics.checking",
    "explain": "explaining",
    "load_ipython_extension": "integrations.notebook",
    "probe": "probing.api",
    "save": "recovery.keeper",
    "unload_ipython_extension": "integrations.notebook",
    "watch": "watching",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that `whynan explain` starts without torch."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"whynan.{_HOMES[name]}"), name)
    if name == "stable":
        import importlib

        return importlib.import_module("whynan.stable")
    raise AttributeError(f"module 'whynan' has no attribute {name!r}")
