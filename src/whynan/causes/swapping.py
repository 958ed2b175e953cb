"""Another computation in place of a torch function, while a step is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from whynan.capsule.replay import Program, call_entry
from whynan.capsule.sites import Site, live_site
from whynan.causes import made
from whynan.causes.fixes import plain_name

Swap = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Sites = frozenset[Site] | None  # None: wherever it fits
_FLOOR = call_entry.__code__


@dataclass(frozen=True, slots=True)
class Put:
    """Another computation in place of a torch function."""

    swap: Swap
    sites: Sites
    name: str = ""  # of the only function it takes the place of, where that is known


class Swapper(TorchFunctionMode):
    """Puts other computations in place of the torch functions called at some sites, wherever they are called from there; the first is counted."""

    def __init__(self, program: Program, puts: Sequence[Put]) -> None:
        super().__init__()
        self.recorder = program.recorder
        self.puts = puts
        self.places: list[Site | None] = []
        self._wanted: dict[Any, list[Put]] = {}  # by function: those that may take its place. To walk the stack for each call takes long

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = self._wanted.get(func)
        if wanted is None:
            wanted = self._wanted[func] = [put for put in self.puts if put.name in ("", plain_name(func))]
        site = (live_site(_FLOOR, 2) or (self.recorder.playing.site if self.recorder.playing is not None else None)) if wanted else None
        for put in wanted:
            result = put.swap(func, args, kwargs or {}) if put.sites is None or site in put.sites else NotImplemented
            if result is not NotImplemented:
                if put is self.puts[0]:
                    self.places.append(site)
                return result
        result = func(*args, **(kwargs or {}))
        made.remember(func, args, kwargs or {}, result)
        return result
