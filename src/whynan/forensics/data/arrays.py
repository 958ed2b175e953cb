"""numpy's own files: `.npy` and `.npz`, read as a stream; pickles inside are refused."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from whynan.forensics.addresses import Place, Unreadable, fill, one_line
from whynan.forensics.data.sources import LARGEST_TURNED, Reader, Source, from_file, tables_of
from whynan.forensics.data.tables import Table, Trouble, need

if TYPE_CHECKING:
    import numpy as np

    from whynan.forensics.data.tables import Array


class _Pickled(Unreadable):
    """An array of Python objects."""


def read_npy(place: Place) -> list[Table]:
    """Open a `.npy` file."""
    return tables_of([npy_source(place)])


def npy_source(place: Place) -> Source:
    """Return the array of a `.npy` file, named after the file; its header has been checked against its length."""
    need("numpy", "reading arrays")
    path = "" if place.remote else place.address
    with place.open() as file:
        source, length = _source(file, place.name.rsplit(".", 1)[0], place.open, path)
    held = place.size()
    if held < length:
        raise Unreadable(f"truncated: its header declares {length} bytes, the file has {held}")
    return source


def read_npz(place: Place) -> list[Table]:
    """Open a `.npz` file, compressed or not."""
    need("numpy", "reading arrays")
    try:
        archive = zipfile.ZipFile(place.open())
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Unreadable(f"damaged zip: {error}") from None
    if not members:
        raise Unreadable("a zip without arrays")
    refused: list[str] = []
    sources = [s for m in members if (s := _member(archive, m, refused)) is not None]
    if not sources:
        raise Unreadable(refused[0] if refused else "every array in it is a single value; rows are needed")
    tables = tables_of(sources)
    tables[0].troubles.extend(Trouble("pickle-inside", why, "", bad=False, count=1) for why in refused)
    return tables


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, refused: list[str]) -> Source | None:
    name = member.filename.removesuffix(".npy")

    def begin_at(offset: int) -> IO[bytes]:
        file = archive.open(member)
        fill(file, memoryview(bytearray(offset)))
        return file

    try:
        with archive.open(member) as file:
            source, length = _source(file, name, begin_at, "", single=True)
    except _Pickled as why:
        refused.append(str(why))
        return None
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
        raise Unreadable(f"{name}: {one_line(error)}") from None
    if member.file_size < length:
        raise Unreadable(f"{name}: truncated: its header declares {length} bytes, the archive {member.file_size}")
    return source if source.shape else None


def _source(file: IO[bytes], name: str, opener: Callable[..., IO[bytes]], path: str, single: bool = False) -> tuple[Source, int]:
    dtype, shape, turned = _header(file, name if single else "")
    offset = file.tell()
    if not shape and not single:
        raise Unreadable("a single value (0-d array); rows are needed")
    length = offset + math.prod(shape) * dtype.itemsize
    if turned and len(shape) > 1:
        begin = _turned(path, offset, dtype, shape, opener, single)
    elif single:
        begin = from_file(lambda: opener(offset), offset, dtype)
    else:
        begin = from_file(opener, offset, dtype)
    return Source(name, dtype, shape, begin, foldable=not turned), length


def _header(file: IO[bytes], name: str) -> tuple[np.dtype, tuple[int, ...], bool]:
    from numpy.lib import format as npy

    where = f"{name}: " if name else ""
    try:
        version = npy.read_magic(file)
        read: Any = (
            npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0 if version == (2, 0) else getattr(npy, "_read_array_header", None)
        )
        shape, turned, dtype = read(file) if version in ((1, 0), (2, 0)) else read(file, version)
    except Exception as error:
        raise Unreadable(f"{where}not a numpy header: {one_line(error)}") from None
    if dtype.hasobject:
        raise _Pickled(f"{where}holds Python objects, which are a pickle: never opened")
    if dtype.itemsize == 0 or any(s < 0 for s in shape):
        raise Unreadable(f"{where}declares values of no size or a negative shape")
    return dtype, shape, turned


def _turned(path: str, offset: int, dtype: np.dtype, shape: tuple[int, ...], opener: Callable[..., IO[bytes]], single: bool) -> Callable[[int], Reader]:
    """Rows of a Fortran-ordered array lie apart: map the file where there is one, else hold the array."""

    def begin(width: int) -> Reader:
        import numpy as np

        if path:
            whole: Array = np.memmap(path, dtype, "r", offset, shape, "F")
        else:
            size = math.prod(shape) * dtype.itemsize
            if size > LARGEST_TURNED:
                raise Unreadable(f"Fortran order, {size} bytes, not in a local .npy: it cannot be read by rows")
            file = opener(offset) if single else opener()
            if not single:
                file.seek(offset, io.SEEK_SET)
            held = bytearray(size)
            fill(file, memoryview(held))
            whole = np.frombuffer(held, dtype).reshape(shape, order="F")
        done = 0

        def read(rows: int) -> Array:
            nonlocal done
            done += rows
            return np.ascontiguousarray(whole[done - rows : done]).reshape(rows, width)

        return read

    return begin
