"""Damaged files, missing packages and addresses: one line each, no crash."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets_on_disk import look, only, rng, save, why, write_arrow, write_csv, write_parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data import check_data, recognise
from whynan.forensics.data.recognising import READERS
from whynan.forensics.data.tables import BLOCK
from whynan.forensics.wishes import Wishes

COLUMNS = {"a": [0.5 * i for i in range(40)], "ids": [list(range(i % 5)) for i in range(40)], "s": [f"t{i}" for i in range(40)], "deep": [[[1.0], []]] * 40}
FORMS = ["a.npy", "b.npz", "c.npz", "d.parquet", "e.arrow", "f.arrow", "g.csv", "h.safetensors", "i.pt", "j.pt", "k.npy", "l.png"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("whole")
    x = rng().normal(size=(40, 5))
    save(folder / "a.npy", x)
    np.savez(folder / "b.npz", x=x, y=np.arange(40))
    np.savez_compressed(folder / "c.npz", x=x)
    write_parquet(folder / "d.parquet", COLUMNS)
    write_arrow(folder / "e.arrow", COLUMNS)
    write_arrow(folder / "f.arrow", COLUMNS, stream=True)
    write_csv(folder / "g.csv", [["a", "b"], *[[i * 0.5, f"w {i}"] for i in range(40)]])
    tensors = {"x": torch.from_numpy(x), "y": torch.arange(40)}
    save_file(tensors, folder / "h.safetensors")
    torch.save(tensors, folder / "i.pt")
    torch.save(tensors, folder / "j.pt", _use_new_zipfile_serialization=False)
    save(folder / "k.npy", np.zeros(9, [("a", "f4"), ("b", ">i2", (2,)), ("n", "U3")]))
    image.fromarray((x * 50).astype("u1")).save(folder / "l.png")
    return {name: (folder / name).read_bytes() for name in FORMS}


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FORMS), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255), st.sampled_from(["set", "cut", "grow"])), min_size=1, max_size=6))
def test_a_file_with_any_bytes_changed_is_checked_or_refused_in_one_line(
    whole: dict[str, bytes], tmp_path: Path, name: str, changes: list[tuple[float, int, str]]
) -> None:
    raw = bytearray(whole[name])
    for where, value, how in changes:
        place = int(where * (len(raw) - 1))
        if how == "set":
            raw[place] = value
        elif how == "cut":
            del raw[place : place + value % 30 + 1]
        else:
            raw[place:place] = bytes([value]) * (value % 30)
        raw = raw or bytearray(b"x")
    (tmp_path / name).write_bytes(raw)
    recognise(Place.of(tmp_path / name))
    assert "\n" not in why(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "package", "line"),
    [
        ("d.parquet", "pyarrow.parquet", "reading parquet needs pyarrow; pip install pyarrow"),
        ("l.png", "PIL.Image", "reading images needs pillow; pip install pillow"),
    ],
)
def test_a_missing_package_is_named(whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, line: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(whole[name])
    assert why(tmp_path / name) == line


def test_nothing_heavy_is_imported_before_a_file_is_read() -> None:
    import subprocess

    program = "import sys, whynan.forensics.data; print([m for m in ('numpy', 'torch', 'pyarrow', 'PIL', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", [n for n in FORMS if n != "l.png"])
def test_addresses_of_fsspec_are_read_like_files(whole: dict[str, bytes], name: str) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    fsspec.filesystem("memory").pipe(f"/data/{name}", whole[name])
    checked = check_data(Place.of(f"memory://data/{name}"), Wishes())
    assert checked.facts["rows"] in (9, 40)
    assert not checked.unreadable


def test_a_folder_at_an_address(whole: dict[str, bytes]) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    for i in range(3):
        fsspec.filesystem("memory").pipe(f"/shards/part-{i}.npy", whole["a.npy"])
    assert recognise(Place.of("memory://shards")) == "folder of data files"
    assert check_data(Place.of("memory://shards"), Wishes()).facts["rows"] == 120


def test_an_empty_folder_and_one_of_other_things_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print()")
    (tmp_path / "code" / "logo.svg").write_text("<svg/>")
    for folder in ("empty", "code"):
        assert recognise(Place.of(tmp_path / folder)) is None
        with pytest.raises(Unreadable):
            look(tmp_path / folder)


def test_a_folder_of_checkpoints_is_no_data(tmp_path: Path) -> None:
    save(tmp_path / "predictions.npy", np.arange(9))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert recognise(Place.of(tmp_path)) is None


def test_a_link_to_a_folder_is_not_followed_in_circles(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    save(tmp_path / "d" / "x.npy", rng().random((50, 4)))
    (tmp_path / "d" / "again").symlink_to(tmp_path / "d")
    assert look(tmp_path / "d").facts["rows"] == 50


def test_rows_too_long_to_be_held_are_folded_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whynan.forensics.data.sources._LONGEST_ROW", 1000)
    x = rng().random((3, 10, 20))
    x[1, 4, 7] = np.nan
    checked = look(save(tmp_path / "x.npy", x))
    assert (checked.facts["rows"], only(checked, "not-finite").rows) == (30, (14,))
    assert "taken as [30, 20]" in only(checked, "reading").message
    with pytest.raises(Unreadable, match="too long to be held"):
        look(save(tmp_path / "x.npy", np.asfortranarray(x)))


@pytest.mark.parametrize("shape", [(5, 0), (1, 1), (1, 4), (2, 3), (7,), (3, 0, 2)])
@pytest.mark.parametrize("dtype", ["f4", "i8", "?", "M8[s]", "U3", "c8"])
def test_small_and_empty_shapes_are_read(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    assert look(save(tmp_path / "x.npy", np.ones(shape).astype(dtype))).facts["rows"] == shape[0]


def test_report_values_are_json(tmp_path: Path) -> None:
    import json

    from whynan.records import jsonable

    x = rng().normal(size=(100, 3)) * 1e200
    x[3] = np.nan
    checked = look(save(tmp_path / "x.npy", x))
    text = json.dumps(jsonable(checked), allow_nan=False)
    assert json.loads(text)["facts"]["columns"]["x"]["std"] is None


LONG = 200_000


def _written_once(path: Path, name: str) -> Path:
    """One long value that every row of a small file refers to, in each way a format has for that."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = 600
    if name == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": pa.array(["x" * LONG]).take(pa.array([0] * rows)), "y": pa.array(range(rows))}), path)
        return path
    long = pa.array(["x" * LONG])
    held = {
        "dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), long),
        "list of dictionary": lambda: pa.ListArray.from_arrays(
            pa.array(range(0, rows + 1, 2), pa.int32()), pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), long)
        ),
        "run": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int64()), long),
        "list view": lambda: pa.ListViewArray.from_arrays(
            pa.array([0] * rows, pa.int32()), pa.array([LONG // 8] * rows, pa.int32()), pa.array([1.5] * (LONG // 8))
        ),
    }[name]()
    table = pa.table({"t": held})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["parquet", "dictionary", "list of dictionary", "run", "list view"])
def test_a_value_that_every_row_refers_to_is_never_held_for_all_of_them(tmp_path: Path, name: str) -> None:
    """No block is larger than a few rows' worth, though all rows together would be 120 MB."""
    path = _written_once(tmp_path / ("a.parquet" if name == "parquet" else "a.arrow"), name)
    [table] = READERS["parquet" if name == "parquet" else "arrow"](Place.of(path))
    blocks = [(block.rows, max(p.values.nbytes for p in block.pieces)) for block in table.blocks()]
    assert sum(rows for rows, _ in blocks) == (300 if name == "list of dictionary" else 600)
    assert max(held for _, held in blocks) <= 2 * BLOCK + 2 * LONG


def test_more_rows_than_a_file_can_mean_are_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pa.table({"t": pa.RunEndEncodedArray.from_arrays(pa.array([200_000_000], pa.int64()), pa.array([1.0]))})
    with pa.OSFile(str(tmp_path / "run.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert "declares 200000000 rows" in why(tmp_path / "run.arrow")


def test_a_single_value_too_long_to_be_held_is_refused(tmp_path: Path) -> None:
    import zipfile

    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<U100000000", "fortran_order": False, "shape": (3,)})
    with zipfile.ZipFile(tmp_path / "giant.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w", force_zip64=True) as file:
        file.write(head.getvalue())
        for _ in range(1200):
            file.write(b"a\0\0\0" * 250_000)
    assert "one value has 400000000 bytes" in why(tmp_path / "giant.npz")
