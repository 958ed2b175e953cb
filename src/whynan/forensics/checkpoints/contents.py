"""What every reader of a checkpoint gives: tensors that can be streamed, and the plain values between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Scalar = bool | int | float | str | None
BARE = "tensor"  # the name of a tensor that was saved alone


class Stream(Protocol):
    """The bytes of one tensor, in pieces; the memory of a piece is used again for the next one."""

    def __call__(self) -> Iterator[memoryview]: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: its dotted name (`optimizer.state.0.exp_avg`), and how to read it."""

    name: str
    dtype: str  # as torch names it, without "torch.": float32, bfloat16, float8_e4m3fn, quint8, complex64
    shape: tuple[int, ...]
    stream: Stream  # contiguous, or the whole storage where a view of it cannot be told apart
    layout: tuple[int, ...] = ()  # the dimensions from the outermost in memory to the innermost, where that is not their own order


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint that was opened; no tensor has been read yet."""

    form: str  # "torch zip", "torch legacy", "safetensors", "safetensors, 3 shards", "distributed checkpoint, 4 files" …
    size: int
    entries: tuple[Entry, ...]
    values: Mapping[str, Scalar] = field(default_factory=dict)  # every other leaf by its dotted name: optimizer.param_groups.0.lr, epoch, scheduler.base_lrs.0
    notes: tuple[str, ...] = ()  # what was not looked into, and why: "holds argparse.Namespace, read as plain values"
