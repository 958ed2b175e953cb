"""Parquet and Arrow files, and the folders that Hugging Face `datasets` writes; read by record batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from whynan.forensics.addresses import Place, Unreadable, one_line, read_json
from whynan.forensics.data.tables import BLOCK, Block, Column, Piece, Sort, Table, chained, need

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

_WIDTHS = {"INT64": 8, "DOUBLE": 8, "INT96": 12, "INT32": 4, "FLOAT": 4}  # bytes of a value of parquet
_DEPTH = 6  # lists in lists, structs in structs


def read_parquet(place: Place) -> list[Table]:
    """Open a parquet file. Cost: one row group's pages at a time."""
    parquet = need("pyarrow.parquet", "reading parquet", "pyarrow")
    schema, rows, size, shared = _parquet_head(parquet, place)

    def batches() -> Iterator[Any]:
        step = max(1, min(65536, BLOCK * 2 * rows // max(size, 1)))
        with place.open() as file:
            opened = parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False, read_dictionary=shared)
            yield from opened.iter_batches(batch_size=step)

    return [table_of("", schema, batches, _most_rows(place))]


def _parquet_head(parquet: Any, place: Place) -> tuple[Any, int, int, list[str]]:
    """Return the schema, the rows, their bytes when decoded, and the columns of texts that are stored once and referred to."""
    with place.open() as file:
        try:
            opened = parquet.ParquetFile(file)
            meta = opened.metadata
            chunks = [meta.row_group(g).column(c) for g in range(meta.num_row_groups) for c in range(meta.num_columns)]
            size = sum(max(c.total_uncompressed_size, c.num_values * _WIDTHS.get(c.physical_type, 1)) for c in chunks)
            shared = {c.path_in_schema for c in chunks if c.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in e for e in c.encodings)}
            return opened.schema_arrow, meta.num_rows, size, sorted(shared)
        except Exception as error:
            raise Unreadable(f"not a whole parquet file: {one_line(error)}") from None


def _most_rows(place: Place) -> int:
    """How many rows a file can mean: a run of equal ones takes no room, but no data set is all runs."""
    return 1_000_000 + 1000 * place.size()


def read_arrow(place: Place) -> list[Table]:
    """Open an Arrow IPC file or stream."""
    ipc = need("pyarrow.ipc", "reading arrow", "pyarrow")
    try:
        with place.open() as file:
            schema = _ipc_reader(ipc, file).schema
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(f"not an Arrow file: {one_line(error)}") from None

    def batches() -> Iterator[Any]:
        if place.remote:
            with place.open() as file:
                yield from _record_batches(_ipc_reader(ipc, file))
        else:
            pyarrow = need("pyarrow", "reading arrow")
            with pyarrow.memory_map(place.address) as mapped:
                yield from _record_batches(_ipc_reader(ipc, mapped))

    return [table_of("", schema, batches, _most_rows(place))]


def _ipc_reader(ipc: Any, file: Any) -> Any:
    magic = file.read(6)
    file.seek(0)
    return ipc.open_file(file) if magic == b"ARROW1" else ipc.open_stream(file)


def _record_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from reader


def read_saved_dataset(place: Place) -> list[Table]:
    """Open a folder of `save_to_disk`: one table, or one for every split."""
    if not (place / "dataset_dict.json").exists():
        return [_read_split(place)]
    splits = read_json(place / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not splits:
        raise Unreadable("dataset_dict.json: no splits that are named")
    return [replace(_read_split(place.inside(name)), name=name) for name in splits]


def _read_split(place: Place) -> Table:
    files = read_json(place / "state.json").get("_data_files")
    if not isinstance(files, list) or not all(isinstance(f, dict) and "filename" in f for f in files):
        raise Unreadable("state.json: no _data_files that name files")
    if not files:
        raise Unreadable("a saved data set without rows")
    return chained("", [t for f in files for t in read_arrow(place.inside(f["filename"]))])


def table_of(name: str, schema: Any, batches: Callable[[], Iterator[Any]], most: int = sys.maxsize) -> Table:
    """Return a table from record batches that come in order; more rows than `most` are refused."""
    need("numpy", "reading arrow")
    try:
        columns = [c for f in schema for c in _columns(f.name, f.type, _declared_classes(schema))]
    except UnicodeDecodeError:
        raise Unreadable("damaged: a column's name is not text") from None

    def blocks() -> Iterator[Block]:
        rows = 0
        try:
            for batch in batches():
                rows += batch.num_rows
                if rows > most:
                    raise Unreadable(f"declares {rows} rows, more than a file of its size can mean")
                batch.validate(full=True)  # a damaged offset would otherwise be followed out of the file
                yield from _cut(batch)
        except Unreadable:
            raise
        except Exception as error:  # also arrow's own MemoryError: it asks for what a damaged length declares
            raise Unreadable(f"cannot be read to its end: {one_line(error)}") from None

    return Table(name, tuple(columns), blocks, signature=[(c.name, c.dtype, c.shape) for c in columns])


def _declared_classes(schema: Any) -> dict[str, int]:
    """How many classes `datasets` wrote down for a column, by its name."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {n: len(f["names"]) for n, f in features.items() if isinstance(f, dict) and f.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _cut(batch: Any) -> Iterator[Block]:
    """Slice a batch into blocks by what its rows take when decoded: one batch may be the whole file, one text the value of every row."""
    import numpy as np

    if not batch.num_rows:
        return
    sizes = np.full(batch.num_rows, batch.nbytes / batch.num_rows)
    for column in batch.columns:
        sizes += _hidden(column)
    block = np.floor(np.cumsum(sizes) / (2 * BLOCK))
    starts = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), batch.num_rows]
    for start, end in pairwise(starts):
        part = batch.slice(start, end - start)
        pieces = [p for n in range(part.num_columns) for p in _pieces(part.column(n))]
        yield Block(tuple(pieces), batch.nbytes * part.num_rows // batch.num_rows)


def _hidden(array: Any) -> Any:
    """How many bytes each row takes that are stored once for many: one number for all rows, or one for each."""
    import numpy as np
    import pyarrow as pa

    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _hidden(array.storage)
    if pa.types.is_struct(kind):
        return sum(_hidden(part) for part in array.flatten())
    if _is_list(kind):
        inner = np.max(_hidden(array.values), initial=0) + 8 * _is_list_view(kind)
        return _lengths(array) * inner if inner else 0
    if pa.types.is_run_end_encoded(kind):
        return np.max(_text_lengths(array.values), initial=8)
    if pa.types.is_dictionary(kind):
        indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return np.append(_text_lengths(array.dictionary), 0)[indices]
    return _text_lengths(array) if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind) else 8 * pa.types.is_null(kind)


def _text_lengths(array: Any) -> Array:
    """The bytes of every value: of a text, or of a number."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):  # a view is 16 bytes, of which the first four are its length
        return np.frombuffer(array.buffers()[1], np.int32)[4 * array.offset : 4 * (array.offset + len(array)) : 4].astype(np.int64)
    if _sort(array.type) is not Sort.TEXT:
        return np.full(len(array), 8, np.int64)
    return np.asarray(pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def _columns(name: str, kind: Any, classes: dict[str, int], depth: int = 0) -> list[Column]:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _columns(name, kind.storage_type, classes, depth)
    if pa.types.is_struct(kind) and depth < _DEPTH:
        return [c for f in kind for c in _columns(f"{name}.{f.name}", f.type, classes, depth + 1)]
    leaf, listed = _leaf(kind)
    return [Column(name, str(kind), _sort(leaf), None if listed or _sort(leaf) is Sort.TEXT else (), classes.get(name, 0))]


def _leaf(kind: Any) -> tuple[Any, bool]:
    import pyarrow as pa

    listed = False
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif _is_list(kind):
            kind, listed = kind.value_type, True
        else:
            return kind, listed


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind) or _is_list_view(kind))


def _is_list_view(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _sort(kind: Any) -> Sort:
    import pyarrow as pa

    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return Sort.FLOAT
    if pa.types.is_integer(kind):
        return Sort.INTEGER
    if pa.types.is_boolean(kind):
        return Sort.BOOL
    types = pa.types
    texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary, types.is_binary_view)
    return Sort.TEXT if any(is_text(kind) for is_text in texts) else Sort.OTHER


def _pieces(array: Any, depth: int = 0) -> Iterator[Piece]:
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_struct(array.type) and depth < _DEPTH:
        for part in array.flatten():
            yield from _pieces(part, depth + 1)
        return
    yield _piece(array)


def _piece(array: Any) -> Piece:
    import pyarrow as pa

    missing = _missing(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    elif pa.types.is_run_end_encoded(array.type):
        array = pa.compute.run_end_decode(array)
    if _is_list(array.type):
        return _ragged(array, missing)
    if _sort(array.type) is Sort.TEXT:
        return _text(array, missing)
    return Piece(_numbers(array).reshape(-1, 1), missing=missing)


def _missing(array: Any) -> Array | None:
    import numpy as np

    return np.asarray(array.is_null().to_numpy(zero_copy_only=False), bool) if array.null_count else None


def _numbers(array: Any) -> Array:
    """Values of one leaf; where one is missing, a value that is there stands in."""
    import numpy as np
    import pyarrow as pa

    sort = _sort(array.type)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64(), safe=False)
    if sort is Sort.BOOL:
        array = array.cast(pa.uint8())
    elif sort is Sort.OTHER:
        return _opaque(array)
    if array.null_count:
        given = array.drop_null()
        array = array.fill_null(given[0]) if len(given) else pa.array(np.zeros(len(array)), type=pa.float64()).cast(array.type)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _opaque(array: Any) -> Array:
    """Times and whatever else is only compared: as the whole numbers they are stored as, or the hash of how they print."""
    import numpy as np
    import pyarrow as pa

    if pa.types.is_temporal(array.type) and array.type.bit_width in (32, 64):
        return np.asarray(array.view(pa.int64() if array.type.bit_width == 64 else pa.int32()).fill_null(0).to_numpy(zero_copy_only=False))
    return np.fromiter((hash(str(v)) for v in array), np.int64, len(array))


def _text(array: Any, missing: Array | None) -> Piece:
    import numpy as np
    import pyarrow as pa

    array = array.cast(pa.large_binary()) if array.type != pa.binary() else array  # one layout for all kinds of text
    wide = array.type == pa.large_binary()
    if missing is not None:
        array = array.fill_null(b"")
    _, offsets, held = array.buffers()
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32, len(array) + 1, array.offset * (8 if wide else 4)).astype(np.int64)
    content = np.frombuffer(held, np.uint8)[ends[0] : ends[-1]] if held is not None and ends[-1] > ends[0] else np.zeros(0, np.uint8)
    return Piece(content, np.diff(ends), missing)


def _ragged(array: Any, missing: Array | None) -> Piece:
    """Flatten lists, and lists of lists, to their leaves with a length for every row."""
    import numpy as np
    import pyarrow as pa

    lengths = _lengths(array)
    array = array.flatten()
    while _is_list(array.type) or isinstance(array, pa.ExtensionArray):
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
            continue
        ends = np.append(0, np.cumsum(_lengths(array)))
        bounds = np.append(0, np.cumsum(lengths))
        lengths = np.diff(ends[bounds])
        array = array.flatten()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if _sort(array.type) is Sort.TEXT:
        return _listed_text(array, lengths, missing)
    if pa.types.is_struct(array.type):
        return Piece(np.fromiter((hash(str(v)) for v in array), np.int64, len(array)), lengths, missing)
    return _with_holes(array, lengths, missing)


def _lengths(array: Any) -> Array:
    import numpy as np
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def _listed_text(array: Any, lengths: Array, missing: Array | None) -> Piece:
    import numpy as np

    words = _text(array, _missing(array))
    assert words.lengths is not None
    ends = np.append(0, np.cumsum(words.lengths))
    return Piece(words.values, np.diff(ends[np.append(0, np.cumsum(lengths))]), missing)


def _with_holes(array: Any, lengths: Array, missing: Array | None) -> Piece:
    """A list with a missing element counts as a missing row: it cannot become a tensor."""
    import numpy as np

    values = _numbers(array)
    holes = _missing(array)
    if holes is None:
        return Piece(values, lengths, missing)
    sums, ends = np.append(0, np.cumsum(holes)), np.append(0, np.cumsum(lengths))
    broken = sums[ends[1:]] > sums[ends[:-1]]
    return Piece(values, lengths, broken if missing is None else broken | missing)
