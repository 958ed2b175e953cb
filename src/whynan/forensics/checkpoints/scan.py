"""Read every tensor of a checkpoint once, and count what is in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import IO

from whynan.forensics.addresses import Unreadable
from whynan.forensics.checkpoints.contents import Contents, Entry, Stream
from whynan.forensics.checkpoints.dtypes import FORMATS, Format
from whynan.forensics.checkpoints.kernels import Kernel, best_kernel
from whynan.forensics.checkpoints.sources import PIECE, Chain, Repeated, Source, Span, cost, whole
from whynan.forensics.checkpoints.tally import Tally, count_piece
from whynan.forensics.wishes import Tick, Wishes
from whynan.records import TensorStats

_TASK = 64 << 20  # a long tensor is divided among the threads in stretches of this
_MOST_TIMES = 2000  # what is packed can be a thousand times its size, and tensors may share their storage; beyond that a small file never ends


@dataclass(frozen=True, slots=True)
class _Task:
    tally: Tally
    form: Format
    stream: Stream


def scan(contents: Contents, wishes: Wishes = Wishes()) -> tuple[TensorStats, ...]:  # noqa: B008 - frozen
    """Count NaN, infinities and zeros of every tensor, with the range of its finite numbers; in the order of the entries.

    Tensors over the same bytes are read once. Names that `wishes.allow` matches are left out. Raises `Unreadable` where the
    file ends early or changes.

    **Cost:** one pass over the file, at about the speed of reading it; one megabyte a thread, whatever the file's size.
    """
    wanted = [e for e in contents.entries if not any(fnmatchcase(e.name, p) for p in wishes.allow)]
    tallies: dict[tuple[str, Stream], Tally] = {}
    for entry in wanted:
        tallies.setdefault((entry.dtype, _core(entry.stream)), Tally())
    if sum(cost(stream) for _, stream in tallies) > _MOST_TIMES * contents.size + _TASK:
        raise Unreadable(f"its tensors overlap: reading them would take more than {_MOST_TIMES} times the file")
    _run(list(_tasks(tallies)), wishes)
    return tuple(_stats(e, tallies[e.dtype, _core(e.stream)]) for e in wanted)


def _core(stream: Stream) -> Stream:
    return stream.inner if isinstance(stream, Repeated) else stream


def _stats(entry: Entry, tally: Tally) -> TensorStats:
    total = Tally()
    total.add(tally, entry.stream.times if isinstance(entry.stream, Repeated) else 1)
    return total.stats(entry.name, entry.dtype, entry.shape)


def _tasks(tallies: dict[tuple[str, Stream], Tally]) -> Iterator[_Task]:
    for (dtype, stream), tally in tallies.items():
        form = FORMATS.get(dtype)
        if form is None:
            continue
        for part in stream.parts if isinstance(stream, Chain) else (stream,):
            if isinstance(part, Span) and part.size > _TASK and not part.size % form.width:
                yield from (_Task(tally, form, part.part(at, min(_TASK, part.size - at))) for at in range(0, part.size, _TASK))
            else:
                yield _Task(tally, form, part)


def _run(tasks: list[_Task], wishes: Wishes) -> None:
    jobs = max(1, min(wishes.jobs, len(tasks), 4 * (os.cpu_count() or 1)))
    queue, lock = iter(tasks), threading.Lock()
    if jobs == 1:
        _Worker(queue, lock, wishes.tick).work()
        return
    with ThreadPoolExecutor(jobs) as pool:
        workers = [pool.submit(_Worker(queue, lock, wishes.tick).work) for _ in range(jobs)]
        try:
            for done in workers:
                done.result()
        except BaseException:  # Ctrl-C comes here: the pool would wait until the whole file was read
            _drop(queue, lock)
            raise


def _drop(queue: Iterator[_Task], lock: threading.Lock) -> None:
    """Take away what is left to do: the other threads need not go on."""
    with lock:
        for _ in queue:
            pass


@dataclass(slots=True)
class _Worker:
    """One thread: its buffer, and the file it has open."""

    queue: Iterator[_Task]
    lock: threading.Lock
    tick: Tick
    kernel: Kernel = field(default_factory=best_kernel)
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(PIECE)))
    source: Source | None = None
    file: IO[bytes] | None = None

    def work(self) -> None:
        try:
            with ExitStack() as files:
                while (task := self._next()) is not None:
                    found = self._count(task, files)
                    with self.lock:
                        task.tally.add(found)
        except BaseException:
            _drop(self.queue, self.lock)
            raise

    def _next(self) -> _Task | None:
        with self.lock:
            return next(self.queue, None)

    def _count(self, task: _Task, files: ExitStack) -> Tally:
        found = Tally()
        try:
            for piece in whole(self._pieces(task.stream, files), task.form.width):
                found.add(count_piece(self.kernel, task.form, piece))
                self.tick(len(piece))
        except OSError as error:
            raise Unreadable((error.strerror or "cannot be read").lower()) from None
        return found

    def _pieces(self, stream: Stream, files: ExitStack) -> Iterator[memoryview]:
        if not isinstance(stream, Span):
            return stream()
        if self.source is not stream.source:
            files.close()
            self.source, self.file = stream.source, files.enter_context(stream.source.open())
        assert self.file is not None
        return stream.pieces(self.file, self.buffer)
