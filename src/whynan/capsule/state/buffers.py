"""The tensors that calls of a module write to in place: buffers, and weights that are moved without gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from whynan.capsule.state.holdings import write_back
from whynan.capsule.state.prints import equal
from whynan.tripwire.values import damage_of

Copies = dict[int, tuple[torch.Tensor, torch.Tensor, int]]  # id(buffer): buffer, copy, version


class Buffers:
    """Keeps a copy of each from the beginning of a step.

    Cost: a version check for each, and one fused copy of those that really change.
    """

    def __init__(self) -> None:
        self.copies: Copies = {}
        self.silent: set[int] = set()  # those that a kernel writes without moving their version counter
        self.moving: list[torch.Tensor] = []  # parameters without gradients that calls write to: a momentum encoder
        self.changing = False  # some were seen to be written to
        self._spare: dict[int, tuple[torch.Tensor, int]] = {}  # copies and versions from before calls that came to nothing, or room for such
        self._stands_aside = False  # they are of this step
        self._outdated = False  # put back without a move of the version counters, perhaps to before its own beginning: the copies say nothing

    def take(self, buffers: list[torch.Tensor]) -> None:
        """Copy these, and no others but the weights that move."""
        self.copies = {}
        with torch.no_grad():
            self.add((*buffers, *self.moving))
        self.silent = {id(p) for p in self.moving}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy more of them."""
        self.copies.update((id(b), (b, b.detach().clone(), b._version)) for b in tensors)

    def add_moving(self, weights: list[torch.Tensor]) -> None:
        """Copy weights that a call has written to: of this step it is what they are after it, of the next what they are before."""
        self.moving += weights
        self.add(weights)
        self.silent.update(map(id, weights))

    def drop(self, keys: Iterable[int]) -> None:
        """Keep some of them no longer."""
        for key in keys:
            self.copies.pop(key, None)

    def cloned(self) -> Copies:
        """Return what they were, to be kept beside what they are at a further micro-batch."""
        return {k: (buffer, copy.clone(), -1) for k, (buffer, copy, _) in self.copies.items()}

    def take_anew(self) -> None:
        """Copy those that were written to since they were copied."""
        stale_buffers, stale_copies = [], []
        for key, (buffer, copy, version) in self.copies.items():
            if buffer._version != version or key in self.silent or self._outdated:
                if buffer.shape != copy.shape:  # resized in place, as observers of quantisation do
                    copy = buffer.detach().clone()
                stale_buffers.append(buffer)
                stale_copies.append(copy)
                self.copies[key] = (buffer, copy, buffer._version)
        if stale_buffers:
            self.changing = self.changing or not self._outdated
            self._outdated = False
            with torch.no_grad():
                torch._foreach_copy_(stale_copies, stale_buffers)

    def learn_silent(self) -> None:
        """Find those that the first steps wrote through `.data`, which no version counter tells (a codebook, a running mean written so)."""
        for key, (buffer, copy, version) in self.copies.items():
            if key not in self.silent and buffer._version == version and not equal(buffer, copy):
                self.silent.add(key)

    def set_aside(self, aside: bool) -> None:
        """Take them once more in a step, after calls that came to nothing: what they were before is kept too, in case these have damaged any."""
        if not aside:
            self._stands_aside = False
        elif not self._stands_aside:
            room, self._stands_aside = self._spare, True
            self._spare = {key: (copy, version) for key, (_, copy, version) in self.copies.items()}
            fresh = {key: room[key][0] if key in room and room[key][0].shape == copy.shape else copy.clone() for key, (_, copy, _) in self.copies.items()}
            self.copies = {key: (buffer, fresh[key], -2) for key, (buffer, _, _) in self.copies.items()}

    def take_older(self) -> None:
        """Have the copies be what was before the calls that came to nothing, where one of these has damaged any."""
        held = {key: self._spare[key][0] for key in self.copies if key in self._spare} if self._stands_aside else {}
        if any(damage_of(self.copies[key][1]) and not damage_of(copy) for key, copy in held.items()):
            self._spare = {key: (self.copies[key][1], -2) for key in held}
            self.copies.update((key, (self.copies[key][0], copy, -2)) for key, copy in held.items())
            self._stands_aside = False

    def written(self) -> dict[int, torch.Tensor]:
        """Return the floating-point buffers that were written to since the step began, also by calls that came to nothing."""
        weights = {id(p) for p in self.moving}
        written = {
            k: b for k, (b, _, version) in self.copies.items() if (k in self.silent or b._version != version) and b.is_floating_point() and k not in weights
        }
        if self._stands_aside:
            older = {k: b for k, (b, _, _) in self.copies.items() if k in self._spare and b._version != self._spare[k][1]}
            written.update((k, b) for k, b in older.items() if b.is_floating_point() and k not in weights)
        return written

    def are_damaged(self) -> bool:
        """Whether one of them is bad now."""
        return any(damage_of(buffer.detach()) for buffer, _, _ in self.copies.values())

    def put_back(self) -> None:
        """Give them back what they were; a graph that is still to be gone back from may hold them."""
        self._outdated = True
        with torch.no_grad():
            for key, (buffer, copy, version) in self.copies.items():
                if buffer._version != version or key in self.silent or damage_of(buffer.detach()):
                    with torch.autograd._unsafe_preserve_version_counter(buffer):  # type: ignore[attr-defined]
                        write_back(copy, buffer)
                    self.copies[key] = (buffer, copy, buffer._version)

    def load(self) -> None:
        """Do the same for a replay: what is there now is known to the caller."""
        with torch.no_grad():
            for key, (buffer, copy, version) in self.copies.items():
                if buffer._version != version or key in self.silent:
                    write_back(copy, buffer)
