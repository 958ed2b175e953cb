"""Early warning: what can be said while every number is still finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from whynan.records import Notice, NoticeKind
from whynan.tripwire.headroom import HeadroomWatch
from whynan.tripwire.spikes import Spike, SpikeWatch
from whynan.tripwire.tracking import Heard, Track, Tracker

LEAST = {"loss": 0.5, "gradient norm": 1.0}  # the smallest rise worth a word, as a part of the level: norms double in health


class EarlyWarning:
    """Spikes, head-room and limits of one run; answers with notices and does nothing else.

    >>> early = EarlyWarning()
    >>> [early.numbers(step, 0.05, 1.0) for step in range(3)]
    [[], [], []]
    >>> [str(notice.kind) for notice in early.numbers(3, 4.5e12, 1.0)]
    ['spike']

    Cost: about 8 microseconds a step for the numbers; see `HeadroomWatch` and `Tracker` for the rest.
    """

    def __init__(self, track: Track | None = None, spikes: bool = True, outputs: Heard | None = None) -> None:
        self._tracker = Tracker(track, outputs)
        self._headroom = HeadroomWatch()
        self._spikes = spikes
        self._curves: dict[str, SpikeWatch] = {}
        self.absurd: tuple[str, Spike] | None = None  # of the last numbers, where no healthy curve does that

    def ceilings(self) -> tuple[float, float]:
        """Return the sizes above which a loss and a gradient norm are not put off."""
        lowest = [min((w.ceiling for label, w in self._curves.items() if label.startswith(name)), default=float("inf")) for name in LEAST]
        return lowest[0], lowest[1]

    def keep(self, curves: Iterable[str]) -> None:
        """Forget all curves but these: the others are of trainings that are over."""
        labels = {_label(name, curve) for curve in curves for name in LEAST}
        self._curves = {label: watch for label, watch in self._curves.items() if label in labels}

    @property
    def readings(self) -> dict[str, list[tuple[int, float]]]:
        """The largest values of float16 weights, by step."""
        return self._headroom.readings

    def numbers(
        self,
        step: int,
        loss: float | None,
        norm: float | None,
        curve: str = "",
        loss_dtype: torch.dtype | None = None,
        norm_dtype: torch.dtype | None = None,
    ) -> list[Notice]:
        """Take loss and gradient norm of a step, before its update where they are known by then.

        `curve` keeps trainings apart that take turns, such as the two halves of a GAN.
        """
        notices: list[Notice] = []
        self.absurd = None
        for name, value, dtype in (("loss", loss, loss_dtype), ("gradient norm", norm, norm_dtype)):
            if value is not None:
                label = _label(name, curve)
                self._see(step, name, label, value, notices)
                low = self._headroom.see(step, label, value, dtype) if dtype is not None else None
                notices += [low] if low is not None else []
        if self.absurd is not None and norm is not None and math.isfinite(norm) and not any("norm" in n.name for n in notices):
            self.absurd = None  # a large loss with the usual gradient does no harm
        return notices

    def _see(self, step: int, name: str, label: str, value: float, notices: list[Notice]) -> None:
        if not self._spikes:
            return
        watch = self._curves.get(label)
        if watch is None:
            watch = self._curves[label] = SpikeWatch(LEAST[name])
        spike = watch.see(step, value)
        if spike is not None:
            if spike.absurd and self.absurd is None:
                self.absurd = name, spike
            notices.append(Notice(NoticeKind.SPIKE, step, label, value, spike.text(label), severe=spike.absurd))

    def state(self, step: int, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], wait: bool = False) -> list[Notice]:
        """Look at weights and tracked values; call it once a step, and once with `wait` at the end."""
        with torch.no_grad():
            return self._headroom.look(step, models, wait) + self._tracker.look(step, models, optimizers, wait)


def _label(name: str, curve: str) -> str:
    return f"{name} of {curve}" if curve else name


def has_spike(notices: list[Notice]) -> bool:
    """Whether one of these asks for the spike policy."""
    return any(notice.kind is NoticeKind.SPIKE for notice in notices)
