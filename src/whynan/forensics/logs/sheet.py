"""What a picture is made of, whatever it is written as. Coordinates in pixels from the top left; text by its base line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A line through several points."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float


@dataclass(frozen=True, slots=True)
class Box:
    """A filled box."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Text:
    """A few words."""

    x: float
    y: float
    words: str
    size: int
    colour: str
    anchor: str = "start"  # or "middle", "end"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture: shapes in the order in which they are drawn, on white."""

    width: int
    height: int
    shapes: tuple[Line | Box | Text, ...]
