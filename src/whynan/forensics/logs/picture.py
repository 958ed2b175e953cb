"""The curves of a log as a picture: lines, boxes and words on a sheet, which `svg` and `png` write down."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from whynan.forensics.logs.collecting import Log
from whynan.forensics.logs.curve import Stretch
from whynan.forensics.logs.drawing import Axis
from whynan.forensics.logs.names import Role
from whynan.forensics.logs.series import Series
from whynan.forensics.logs.sheet import Box, Line, Sheet, Text
from whynan.records import count, number

_WIDTH, _PANEL = 1000, 300
_LEFT, _RIGHT, _TOP, _BETWEEN, _BOTTOM = 90, 30, 64, 46, 56
_INK, _PALE, _GRID, _RED, _ROSE = "#24292f", "#6e7781", "#e6e8eb", "#c1121f", "#fbe3e4"
_WIDE = 3.0  # highest over lowest from which on an axis is logarithmic
_LETTER = 9.0  # width of a letter, about
_COLOURS = ("#1565c0", "#b35900")


@dataclass(frozen=True, slots=True)
class _Panel:
    """One field of the sheet and how values lie in it."""

    top: float
    axis: Axis
    first: int
    last: int

    def x(self, position: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (position - self.first) / max(1, self.last - self.first)

    def y(self, value: float) -> float:
        return self.top + _PANEL * (1 - self.axis.share(value))


@dataclass(slots=True)
class _Marks:
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


def shapes_of(log: Log, name: str) -> Sheet:
    """Lay out the loss, and the gradient norm below it, over the same steps."""
    shown = _shown(log)
    stretches = [s for series in shown for s in series.curve.stretches]
    first, last = min(s.first for s in stretches), max(s.last for s in stretches)
    marks = _Marks()
    marks.texts.append(Text(_LEFT, 34, name[:70], 20, _INK))
    bottom = 0.0
    for place, series in enumerate(shown):
        panel = _Panel(_TOP + place * (_PANEL + _BETWEEN), _axis(series), first, last)
        _draw(panel, series, _COLOURS[place], marks)
        bottom = panel.top + _PANEL
    _steps(marks, _Panel(bottom - _PANEL, Axis(0, 1, False), first, last))
    return Sheet(_WIDTH, int(bottom + _BOTTOM), (*marks.boxes, *marks.lines, *marks.texts))


def _shown(log: Log) -> list[Series]:
    main = log.main_loss()
    norms = sorted(log.of_role(Role.NORM), key=lambda s: (s.naming.summary, -s.total))
    chosen = [s for s in (main, *norms[:1]) if s is not None]
    return chosen or [max(log.curves, key=lambda s: s.total)]


def _axis(series: Series) -> Axis:
    """Widen the axis a little, so that no curve runs along the frame."""
    axis = Axis.over([s for s in series.curve.stretches if s.finite], _WIDE)
    if axis.log:
        rim = math.exp(0.05 * (math.log(axis.high) - math.log(axis.low)))
        return Axis(axis.low / rim, axis.high * rim, True)
    rim = (axis.high - axis.low) * 0.05
    return Axis(axis.low - rim, axis.high + rim, False) if math.isfinite(rim) else axis


def _draw(panel: _Panel, series: Series, colour: str, marks: _Marks) -> None:
    right = _WIDTH - _RIGHT
    for tick in _ticks(panel.axis):
        y = panel.y(tick)
        marks.lines.append(Line(((_LEFT, y), (right, y)), _GRID, 1))
        marks.texts.append(Text(_LEFT - 8, y + 5, number(float(f"{tick:.3g}")), 13, _PALE, "end"))
    scale = " (log axis)" if panel.axis.log else ""
    marks.texts.append(Text(_LEFT, panel.top - 8, f"{series.name[:60]}{scale}", 15, colour))
    marks.lines.append(Line(((_LEFT, panel.top), (_LEFT, panel.top + _PANEL), (right, panel.top + _PANEL)), _PALE, 1))
    _bad(panel, series.curve.stretches, marks)
    marks.lines += [Line(tuple(part), colour, 1.6) for part in _parts(panel, series.curve.stretches)]
    _first_bad(panel, series, marks)


def _parts(panel: _Panel, stretches: Sequence[Stretch]) -> list[list[tuple[float, float]]]:
    """Return the finite parts of a curve; a resumed run, which goes back, begins a new one."""
    parts: list[list[tuple[float, float]]] = [[]]
    before = -math.inf
    for stretch in stretches:
        if stretch.first < before or not stretch.finite:
            parts.append([])
        before = stretch.first
        if stretch.finite:
            x = panel.x(stretch.first)
            ends = (stretch.high, stretch.low) if parts[-1] and parts[-1][-1][1] < panel.y(stretch.low / 2 + stretch.high / 2) else (stretch.low, stretch.high)
            parts[-1] += [(x, panel.y(v)) for v in dict.fromkeys(ends)]
        if stretch.bad_at is not None:
            parts.append([])
    return [p if len(p) > 1 else [p[0], (p[0][0] + 1.5, p[0][1])] for p in parts if p]


def _bad(panel: _Panel, stretches: Sequence[Stretch], marks: _Marks) -> None:
    """Shade where values are not finite, and mark it above: a single step must be seen in a curve of a million."""
    shaded: list[tuple[float, float]] = []
    for stretch in (s for s in stretches if s.bad_at is not None):
        left = panel.x(stretch.bad_at or 0)
        right = max(left + 1.5, panel.x(stretch.last if not stretch.finite else stretch.bad_at or 0))
        if shaded and 0.0 <= left - shaded[-1][1] < 1.0:
            left = shaded.pop()[0]
        shaded.append((left, right))
    marks.boxes += [Box(left - 0.5, panel.top, right - left + 1, _PANEL, _ROSE) for left, right in shaded]
    last = -math.inf
    for left, right in shaded:
        for x in _spread(left, right):
            if x - last >= _LETTER:
                marks.lines += [Line(((x - 3, panel.top + 9 - slope), (x + 3, panel.top + 9 + slope)), _RED, 1.2) for slope in (-3, 3)]
                last = x


def _spread(left: float, right: float) -> list[float]:
    return [left + 12 * k for k in range(int((right - left) / 12) + 1)]


def _first_bad(panel: _Panel, series: Series, marks: _Marks) -> None:
    if not series.runs:
        return
    run = series.runs[0]
    x = panel.x(run.first.position)
    words = [f"{number(run.value)} at {run.first}", f"{count(series.bad)} of {count(series.total)} values not finite"][: 1 + (series.bad > 1)]
    width = _LETTER * max(map(len, words))
    near_end = x + width + 12 > _WIDTH
    marks.lines.append(Line(((x, panel.top), (x, panel.top + _PANEL)), _RED, 1.2))
    if near_end:
        marks.lines.append(Line(((x - width - 12, panel.top + 19 + 10 * len(words)), (x - 6, panel.top + 19 + 10 * len(words))), "#ffffff", 21.0 * len(words)))
    for row, line in enumerate(words):
        marks.texts.append(Text(x - 10 if near_end else x + 10, panel.top + 34 + 21 * row, line, 14, _RED, "end" if near_end else "start"))


def _ticks(axis: Axis) -> list[float]:
    if axis.log:
        low, high = math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high))
        for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            ticks = sorted({m * 10.0**k for k in range(low - 1, high + 1) for m in steps if axis.low <= m * 10.0**k <= axis.high})
            if len(ticks) > 2:
                return ticks[:: len(ticks) // 8 + 1]
    return _round_steps(axis.low, axis.high, 5)


def _round_steps(low: float, high: float, wanted: int) -> list[float]:
    """Return round numbers between two ends, about as many as wanted."""
    if not 0.0 < high - low < 1e300:
        return [low, high]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    each = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [k * each for k in range(math.ceil(low / each), math.floor(high / each) + 1)]


def _steps(marks: _Marks, panel: _Panel) -> None:
    bottom = panel.top + _PANEL
    for tick in _round_steps(panel.first, panel.last, 7):
        x = panel.x(tick)
        marks.lines.append(Line(((x, bottom), (x, bottom + 5)), _PALE, 1))
        marks.texts.append(Text(x, bottom + 21, count(int(tick)), 13, _PALE, "middle"))
    marks.texts.append(Text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 44, "step", 14, _INK, "middle"))


def _writers() -> dict[str, Callable[[Sheet], bytes]]:
    from whynan.forensics.logs.png import to_png
    from whynan.forensics.logs.svg import to_svg

    return {".svg": to_svg, ".png": to_png}


FORMATS = _writers()
