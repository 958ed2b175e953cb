"""Which call of `load_state_dict` gave a weight the bad values it has: known from its version, which every write moves on."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from whynan.capsule.sites import Site
from whynan.capsule.tape.facts import version_of

Versions = dict[int, int]  # of weights, by their id


class Loads:
    """Remembers the loads of modules until their weights are looked at; then of bad ones where they came from. Reads no values."""

    def __init__(self) -> None:
        self._waiting = WeakTensorKeyDictionary()  # weight: its version after a load, and where it was loaded
        self._brought = WeakTensorKeyDictionary()

    def note(self, module: torch.nn.Module, before: Versions, site: Site | None) -> None:
        """A module was loaded: remember those weights that were written to."""
        for weight in module.parameters():
            if before.get(id(weight)) != version_of(weight):
                self._waiting[weight] = (version_of(weight), site)

    def look(self, bad: list[torch.Tensor]) -> None:
        """The weights were looked at: of the bad ones, those that nobody has written to since a load came in with it."""
        for weight in bad:
            version, site = self._waiting.get(weight, (None, None))
            if version == version_of(weight) and site is not None:
                self._brought[weight] = site
        self._waiting = WeakTensorKeyDictionary()

    def site_of(self, weight: torch.Tensor) -> Site | None:
        """Return the call that brought the bad values of a weight in."""
        found: Site | None = self._brought.get(weight)
        return found


def versions_of(module: torch.nn.Module) -> Versions:
    """Return the versions of a module's weights."""
    return {id(weight): version_of(weight) for weight in module.parameters()}
