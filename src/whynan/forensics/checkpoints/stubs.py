"""What a pickle turns into here: inert records. Nothing is imported, called or hashed.

Dictionaries are lists of pairs: to hash a nested tuple that shares its parts takes exponential time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """The name of a class or function; what it names is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Pairs:
    """A dictionary."""

    items: list[tuple[object, object]] = field(default_factory=list)
    attributes: Sequence[object] = ()

    def get(self, wanted: str) -> object:
        """The value under a key that is text, or None; only the first few are looked at, so that asking often stays cheap."""
        return next((v for k, v in self.items[:16] if isinstance(k, str) and k == wanted), None)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        return iter(self.items)


@dataclass(slots=True, eq=False)
class Thing:
    """An instance of a class that is not known here, with everything that was to be put into it."""

    kind: object
    arguments: object = ()
    states: list[object] = field(default_factory=list)
    elements: list[object] = field(default_factory=list)
    items: list[tuple[object, object]] = field(default_factory=list)

    def attribute(self, wanted: str) -> object:
        """The value of an attribute set from a state, or None."""
        found = (state.get(wanted) for state in reversed(self.states) if isinstance(state, Pairs))
        return next((value for value in found if value is not None), None)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The values of one or more tensors, somewhere in the file."""

    key: str
    dtype: str
    count: int  # elements
    location: str = ""
    start: int = 0  # elements of another storage that this one is a view of


@dataclass(slots=True, eq=False)
class TensorStub:
    """A tensor: a view of a storage, and whatever hangs on it."""

    storage: Storage | None  # None: it has no values (meta device)
    dtype: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    beside: list[tuple[str, object]] = field(default_factory=list)  # scales, indices, attributes


@dataclass(frozen=True, slots=True, eq=False)
class NamedType:
    """A dtype or layout, by its name."""

    name: str


@dataclass(slots=True, eq=False)
class NumpyType:
    """A dtype of numpy: `<f4`."""

    code: str
    order: str = "="


@dataclass(slots=True, eq=False)
class Array:
    """An array of numpy whose bytes stand in the pickle itself."""

    kind: NumpyType | None = None
    shape: tuple[int, ...] = ()
    data: bytes | bytearray | None = None
    others: object = None  # the elements of an array of objects

    @property
    def code(self) -> str:
        """`f4`."""
        return self.kind.code.lstrip("<>=|") if self.kind else ""

    @property
    def order(self) -> str:
        """`<` or `>`."""
        return ">" if self.kind and ">" in (self.kind.order, self.kind.code[:1]) else "<"
