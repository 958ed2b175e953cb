"""Every format is read as the library that wrote it would, whatever its layout, and bad files give one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_on_disk import absent, arrow_table, counted, look, noise, only, people, rng, save, why, write_arrow, write_csv, write_images, write_parquet

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data import check_data, recognise
from whynan.forensics.findings import Kind, Severity
from whynan.forensics.kinds import kind_of
from whynan.forensics.wishes import Wishes


def spoiled(rows: int = 300, width: int = 12) -> np.ndarray:
    x = rng().normal(size=(rows, width))
    x[7, 5] = np.nan
    return x


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4", ">f8", "<c8", ">c16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_float_type_and_order(tmp_path: Path, dtype: str, order: Any) -> None:
    path = save(tmp_path / "x.npy", np.asarray(spoiled(), dtype=dtype, order=order))
    assert recognise(Place.of(path)) == "npy"
    found = only(look(path), "not-finite")
    assert (found.rows, found.row_count) == ((7,), 1)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_npz_has_one_table_for_arrays_with_the_same_rows(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "d.npz", x_train=spoiled(), y_train=np.arange(300) % 5, x_test=np.asfortranarray(spoiled(50)), seed=np.int64(3))
    checked = look(tmp_path / "d.npz")
    assert checked.form == "npz"
    assert checked.facts["rows"] == 350
    assert [(f.place, f.rows) for f in checked.findings if f.what == "not-finite"] == [("x_train", (7,)), ("x_test", (7,))]


def test_structured_arrays_have_a_column_for_every_field(tmp_path: Path) -> None:
    held = np.zeros(100, [("mass", "<f4"), ("charge", ">i4"), ("place", "<f8", (3,)), ("name", "U8")])
    held["mass"], held["place"], held["charge"] = rng().random(100), rng().random((100, 3)), np.arange(100)
    held["mass"][4], held["place"][9, 1] = np.nan, np.inf
    checked = look(save(tmp_path / "p.npy", held))
    assert only(checked, "not-finite", "p.mass").rows == (4,)
    assert only(checked, "not-finite", "p.place").rows == (9,)


def test_times_that_are_missing_are_a_note(tmp_path: Path) -> None:
    times = np.arange(100).astype("M8[s]")
    times[5] = "NaT"
    checked = look(save(tmp_path / "t.npy", times))
    assert (only(checked, "missing").rows, only(checked, "missing").severity) == ((5,), Severity.NOTE)


def test_strings_that_are_empty_are_a_note(tmp_path: Path) -> None:
    words = np.array([f"word {i}" if i != 3 else "" for i in range(50)])
    assert only(look(save(tmp_path / "w.npy", words)), "empty-text").rows == (3,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e5m2"])
@pytest.mark.parametrize("form", ["pt", "safetensors", "legacy.pt"])
def test_tensors_on_disk(tmp_path: Path, dtype: str, form: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    if form == "legacy.pt" and "float8" in dtype:
        pytest.skip("torch itself cannot read float8 back from its old format")
    held = {"x": torch.from_numpy(spoiled()).to(getattr(torch, dtype)), "labels": torch.arange(300) % 7}
    path = tmp_path / f"train.{form}"
    if form == "safetensors":
        save_file(held, path)
    else:
        torch.save(held, path, _use_new_zipfile_serialization=form == "pt")
    assert kind_of(Place.of(path)) is Kind.DATA
    checked = look(path)
    assert only(checked, "not-finite", "x").rows == (7,)
    assert checked.facts["columns"]["x"]["dtype"] == dtype  # type: ignore[index, call-overload]


def test_a_single_tensor_that_is_not_contiguous(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.save(torch.from_numpy(spoiled(12, 300)).t()[:, 1::2], tmp_path / "features.pt")
    assert only(look(tmp_path / "features.pt"), "not-finite").rows == (5,)


def test_nothing_of_torch_opens_a_file_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a file is nor what is in it is found by torch.load, which holds all of it and unpacks whatever it declares."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.save({"x": torch.from_numpy(spoiled()), "labels": torch.arange(300) % 7}, tmp_path / "train.pt")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load"))
    assert kind_of(Place.of(tmp_path / "train.pt")) is Kind.DATA
    assert only(look(tmp_path / "train.pt"), "not-finite", "x").rows == (7,)


def test_rows_that_lie_in_another_order_are_read_in_their_own(tmp_path: Path) -> None:
    """Pictures with their channels last, a turned table, and one with both: the same values as torch gives."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.from_numpy(rng().normal(size=(50, 3, 4, 5)).astype("f4"))
    x[13, 1, 2, 3] = float("nan")
    for name, held in {"last": x.to(memory_format=torch.channels_last), "turned": x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)}.items():
        torch.save(held, tmp_path / f"{name}.pt")
        checked = look(tmp_path / f"{name}.pt")
        assert only(checked, "not-finite", name).rows == (13,)
        torch.save(torch.arange(24).reshape(2, 12).t(), tmp_path / "ids.pt")
        assert (checked.facts["rows"], checked.facts["columns"][name]["shape"]) == (50, [3, 4, 5])  # type: ignore[index, call-overload]
    assert look(tmp_path / "ids.pt").facts["rows"] == 12


def test_tensors_that_show_a_number_more_than_once_are_said(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.save({"x": torch.from_numpy(spoiled()), "y": torch.zeros(1).expand(300)}, tmp_path / "train.pt")
    checked = look(tmp_path / "train.pt")
    assert only(checked, "not-finite", "x").rows == (7,)
    assert "y: shows its numbers more than once" in only(checked, "reading").message


def test_tensors_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    held = {
        "sparse": torch.eye(3).to_sparse(),
        "x": torch.from_numpy(spoiled(20)).to(torch.complex64),
        "flags": torch.ones(20, dtype=torch.bool),
        "n": 3,
        "note": "hi",
    }
    torch.save({**held, "meta": torch.empty(20, device="meta"), "small": torch.arange(20).to(torch.uint16)}, tmp_path / "data.pt")
    checked = look(tmp_path / "data.pt")
    assert only(checked, "not-finite", "x").rows == (7,)
    assert set(checked.facts["columns"]) == {"x", "flags", "small"}  # type: ignore[arg-type]


def test_weights_are_not_taken_for_data(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "b.ckpt")
    save_file(model.state_dict(), tmp_path / "c.safetensors")
    assert [kind_of(Place.of(tmp_path / n)) for n in ("a.pt", "b.ckpt", "c.safetensors")] == [Kind.CHECKPOINT] * 3


def test_a_training_log_is_not_taken_for_data(tmp_path: Path) -> None:
    write_csv(tmp_path / "metrics.csv", [["epoch", "step", "train_loss"], [0, 10, 0.5], [0, 20, 0.4]])
    assert kind_of(Place.of(tmp_path / "metrics.csv")) is Kind.LOG
    (tmp_path / "notes.txt").write_text("hello\n")
    assert recognise(Place.of(tmp_path / "notes.txt")) is None


LISTS = {"ids": [[1, 2], [], None, [3, 4, 5]] * 10, "deep": [[[0.5], [1.0, float("nan")]], [[2.0]], [], [[3.0], []]] * 10, "text": ["a", "", None, "b"] * 10}


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_lists_texts_and_nulls_of_arrow(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"d.{form if form != 'stream' else 'arrow'}"
    if form == "parquet":
        write_parquet(path, LISTS, row_group_size=7)
    else:
        write_arrow(path, LISTS, stream=form == "stream")
    checked = look(path)
    assert checked.facts["rows"] == 40
    assert only(checked, "not-finite", "deep").rows == tuple(range(0, 32, 4))
    assert only(checked, "empty-rows", "ids").rows[:2] == (1, 5)
    assert only(checked, "missing", "ids").rows[:2] == (2, 6)
    assert only(checked, "empty-text", "text").rows[:2] == (1, 5)
    assert only(checked, "missing", "text").severity is Severity.NOTE


def test_nulls_in_numbers_are_suspect_and_not_zeros(tmp_path: Path) -> None:
    values = [float(i) + 5 for i in range(200)]
    held: list[float | None] = [None if i in (3, 77) else v for i, v in enumerate(values)]
    checked = look(write_parquet(tmp_path / "d.parquet", {"a": held, "label": [None if i == 9 else i % 3 for i in range(200)]}))
    found = only(checked, "missing", "a")
    assert (found.severity, found.code, found.rows) == (Severity.SUSPECT, "WN701", (3, 77))
    assert only(checked, "missing", "label").code == "WN702"
    assert checked.facts["columns"]["a"]["min"] == 5.0  # type: ignore[index, call-overload]


def test_structs_dictionaries_decimals_and_fixed_lists(tmp_path: Path) -> None:
    import decimal

    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    columns = {
        "who": [{"name": f"n{i}", "score": float("inf") if i == 4 else i * 0.5} for i in range(60)],
        "kind": pyarrow.array(["x", "y", None] * 20).dictionary_encode(),
        "price": [decimal.Decimal(i) / 8 for i in range(60)],
        "vector": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.where(np.arange(240) == 41, np.nan, np.arange(240.0))), 4),
        "half": pyarrow.array(np.arange(60, dtype=np.float16)),
    }
    checked = look(write_parquet(tmp_path / "d.parquet", columns))
    assert only(checked, "not-finite", "who.score").rows == (4,)
    assert only(checked, "not-finite", "vector").rows == (10,)
    assert only(checked, "missing", "kind").row_count == 20
    assert checked.facts["columns"]["price"]["max"] == 59 / 8  # type: ignore[index, call-overload]


def test_views_and_run_ends_of_arrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    columns = {
        "text": pyarrow.array([f"word {i}" if i != 3 else "" for i in range(30)], pyarrow.string_view()),
        "lists": pyarrow.array([[1.5, float("nan") if i == 8 else 2.0] for i in range(30)], pyarrow.list_view(pyarrow.float64())),
        "runs": pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([10, 30], pyarrow.int32()), pyarrow.array([1.0, float("inf")])),
    }
    checked = look(write_arrow(tmp_path / "v.arrow", columns))
    assert only(checked, "empty-text", "text").rows == (3,)
    assert only(checked, "not-finite", "lists").rows == (8,)
    assert only(checked, "not-finite", "runs").row_count == 20


def test_slices_of_arrow_arrays_are_read_from_where_they_begin(tmp_path: Path) -> None:
    ipc = pytest.importorskip("pyarrow.ipc", reason="pyarrow is not installed")
    table = arrow_table(
        {"t": [f"word{i}" if i != 30 else "" for i in range(90)], "v": [[float(i)] * (i % 4) if i != 33 else [float("nan")] for i in range(90)]}
    ).slice(20, 50)
    with ipc.new_file(tmp_path / "s.arrow", table.schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)
    checked = look(tmp_path / "s.arrow")
    assert (only(checked, "empty-text").rows, only(checked, "not-finite").rows) == ((10,), (13,))


def test_a_saved_dataset_with_splits_and_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    train = datasets.Dataset.from_dict({"x": [float("nan") if i == 90 else i * 0.5 for i in range(100)], "label": [i % 2 for i in range(100)]})
    datasets.DatasetDict({"train": train, "test": train.select(range(20))}).save_to_disk(tmp_path / "d", num_shards={"train": 3, "test": 1})
    assert recognise(Place.of(tmp_path / "d")) == "saved dataset"
    checked = look(tmp_path / "d")
    assert checked.facts["rows"] == 120
    assert only(checked, "not-finite", "train.x").rows == (90,)


def test_a_saved_dataset_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../../etc/passwd"}]}))
    assert "outside the folder" in why(tmp_path)


def test_shards_of_arrays_are_one_array_and_their_rows_go_on(tmp_path: Path) -> None:
    whole = spoiled(300)
    whole[205, 1] = np.inf
    for i, part in enumerate(np.split(whole, [100, 130])):
        save(tmp_path / f"shard-{i}.npy", part)
    assert recognise(Place.of(tmp_path)) == "folder of data files"
    checked = look(tmp_path)
    assert checked.facts["rows"] == 300
    assert only(checked, "not-finite").rows == (7, 205)


def test_samples_of_different_lengths_are_rows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "spectra").mkdir()
    for i in range(20):
        save(tmp_path / "spectra" / f"s{i}.npy", np.full((8, 40 + i), np.nan if i == 11 else i, "f4"))
    checked = look(tmp_path / "spectra")
    assert (checked.facts["rows"], only(checked, "not-finite").rows) == (20, (11,))
    torch.save([torch.arange(3 + i % 5) if i != 6 else torch.tensor([-4, 2]) for i in range(30)], tmp_path / "tokens.pt")
    assert kind_of(Place.of(tmp_path / "tokens.pt")) is Kind.DATA
    checked = look(tmp_path / "tokens.pt")
    assert (checked.facts["rows"], only(checked, "negative-id").rows) == (30, (6,))


def test_shards_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for i in range(12):
        save(tmp_path / f"part_{i}.npy", np.full((5, 4), np.nan if i == 10 else i) + rng(i).random((5, 4)))
    assert only(look(tmp_path), "not-finite").rows[0] == 50


def test_arrays_side_by_side_in_a_folder_belong_together(tmp_path: Path) -> None:
    x, y = spoiled(300), rng().normal(size=300)
    y[3] = np.nan
    save(tmp_path / "x.npy", x)
    save(tmp_path / "y.npy", y)
    checked = look(tmp_path)
    assert (only(checked, "not-finite", "x").code, only(checked, "not-finite", "y").code) == ("WN701", "WN702")


def test_a_broken_shard_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / f"s{i}.npy", rng(i).random((50, 4)))
    (tmp_path / "s1.npy").write_bytes((tmp_path / "s1.npy").read_bytes()[:500])
    checked = look(tmp_path)
    assert checked.facts["rows"] == 100
    assert only(checked, "unreadable-file").message.startswith("s1.npy: truncated")


def test_parquet_shards_as_the_hub_has_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(2):
        write_parquet(
            tmp_path / "data" / f"train-0000{i}-of-00002.parquet",
            {"text": [f"t{i} {j}" for j in range(20)], "v": [float(j) if i + j else float("nan") for j in range(20)]},
        )
    checked = look(tmp_path)
    assert checked.facts["rows"] == 40
    assert only(checked, "not-finite").rows == (0,)


def test_lines_of_csv_shards_are_said_with_their_file(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"part{i}.csv").write_text("a,b\n" + "".join(f"{j}.5,{j + i}\n" for j in range(20)) + ("1.5\n" if i else ""))
    checked = look(tmp_path)
    assert checked.facts["rows"] == 41
    assert "in part1.csv: 1, line 22" in only(checked, "ragged-line").message
    assert only(checked, "missing").rows == (40,)


CSV = [["a", "b", "c"], *[[f"{i / 7:.3f}", i * 3 % 7, f"w{i}"] for i in range(40)]]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
def test_csv_in_any_usual_dress(tmp_path: Path, delimiter: str, encoding: str) -> None:
    rows = [row[:] for row in CSV]
    rows[3][2], rows[6][0], rows[9][1] = "Zürich; «é», 5", "nan", ""
    checked = look(write_csv(tmp_path / "d.csv", rows, encoding, delimiter=delimiter))
    assert checked.facts["rows"] == 40
    assert list(checked.facts["columns"]) == ["a", "b", "c"]  # type: ignore[arg-type]
    assert (only(checked, "not-finite").rows, only(checked, "not-finite").line) == ((5,), 7)
    assert (only(checked, "missing").rows, only(checked, "missing").severity) == ((8,), Severity.SUSPECT)


def test_csv_without_a_header_and_with_words_for_infinity(tmp_path: Path) -> None:
    rows = [[f"{i / 3:.4f}", i, "-inf" if i == 6 else f"{i * 2.5}"] for i in range(30)]
    checked = look(write_csv(tmp_path / "d.csv", rows))
    assert checked.facts["rows"] == 30
    assert (only(checked, "not-finite").place, only(checked, "not-finite").rows, only(checked, "not-finite").line) == ("2", (6,), 7)


@pytest.mark.parametrize("word", ["NA", "N/A", "null", "None", "", "?", "<NA>"])
def test_words_for_a_missing_cell(tmp_path: Path, word: str) -> None:
    rows = [row[:] for row in CSV]
    rows[5][0] = word
    checked = look(write_csv(tmp_path / "d.csv", rows))
    assert only(checked, "missing").rows == (4,)
    absent(checked, "not-a-number")


def test_csv_of_pandas_with_its_index(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({"x": [0.5, None, 2.5] * 10, "y": [1, 0, 1] * 10, "when": pandas.date_range("2024", periods=30)})
    frame.to_csv(tmp_path / "d.csv")
    checked = look(tmp_path / "d.csv")
    assert only(checked, "missing", "x").row_count == 10
    assert [f.what for f in checked.findings if f.severity is not Severity.NOTE] == ["missing"]


def test_quoted_cells_with_line_breaks_do_not_shift_the_lines(tmp_path: Path) -> None:
    rows = [row[:] for row in CSV]
    rows[2][2], rows[8][0] = 'two\nlines, and "quotes"', "nan"
    checked = look(write_csv(tmp_path / "d.csv", rows))
    assert (only(checked, "not-finite").rows, only(checked, "not-finite").line) == ((7,), 10)


def test_ragged_lines_and_words_among_numbers_are_named_by_line(tmp_path: Path) -> None:
    lines = ["a,b,c"] + [f"{i}.5,{i},{i}" for i in range(40)]
    lines[4], lines[11], lines[20] = "1.5,2", "1,2,3,4", "1.5,oops,3"
    (tmp_path / "d.csv").write_text("\n".join(lines) + "\n")
    checked = look(tmp_path / "d.csv")
    assert "lines 5, 12" in only(checked, "ragged-line").message
    assert (only(checked, "not-a-number").line, only(checked, "not-a-number").severity) == (21, Severity.SUSPECT)


def test_a_quote_that_is_never_closed_is_said(tmp_path: Path) -> None:
    """Otherwise a file of a thousand lines would pass for one of two healthy rows."""
    (tmp_path / "d.csv").write_text('a,b\n1,x\n2,"y\n' + "3,z\n" * 1000)
    found = only(look(tmp_path / "d.csv"), "unclosed-quote")
    assert (found.severity, found.line) == (Severity.BAD, 3)
    (tmp_path / "d.csv").write_text('a,b\n1,x\n2,"y\n\n"\n')
    absent(look(tmp_path / "d.csv"), "unclosed-quote")


def test_the_header_of_savetxt(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "d.csv", spoiled(40, 8), delimiter=",", header=",".join("abcdefgh"))
    assert (only(look(tmp_path / "d.csv"), "not-finite").place, next(iter(look(tmp_path / "d.csv").facts["columns"]))) == ("f", "a")  # type: ignore[arg-type]


def test_decimal_commas(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a;b\n" + "".join(f"{i},5;{i}\n" for i in range(20)))
    facts = look(tmp_path / "d.csv").facts["columns"]
    assert facts["a"]["max"] == 19.5  # type: ignore[index, call-overload]


def test_a_csv_column_that_is_text_further_down_is_still_read(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,b\n" + "".join(f"{i},{i}\n" for i in range(30_000)) + "x,y\n" * 100)
    assert only(look(tmp_path / "d.csv"), "not-a-number").row_count == 200


def test_images(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "p", noise, number=12)
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    (folder / "class0" / "000.png").write_bytes((folder / "class0" / "000.png").read_bytes()[:200])
    (folder / "class1" / "001.png").write_text("not an image at all")
    image.new("RGB", (16, 16), (9, 9, 9)).save(folder / "class2" / "002.png")
    spoilt = rng().random((8, 8)).astype("f4")
    spoilt[2, 2] = np.nan
    image.fromarray(spoilt).save(folder / "class2" / "zz.tiff")
    (folder / "class2" / "aa.png").write_bytes((folder / "class2" / "005.png").read_bytes())
    assert recognise(Place.of(folder)) == "image folder"
    checked = look(folder)
    assert checked.facts["rows"] == 14
    damaged = only(checked, "damaged-image")
    assert (damaged.severity, damaged.row_count) == (Severity.BAD, 2)
    assert "class0/000.png" in damaged.message
    assert "class1/001.png: not an image" in damaged.message
    assert "zz.tiff" in only(checked, "not-finite").message
    assert "002.png" in only(checked, "one-colour").message
    assert "aa.png" in str(only(checked, "duplicate-rows").values)


def test_a_folder_of_images_may_hold_a_note_and_frames(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    folder = write_images(tmp_path / "p", noise, number=6)
    (folder / "README.txt").write_text("six pictures")
    frames = [image.fromarray(rng(i).random((8, 8)).astype("f4") * (np.nan if i == 1 else 1)) for i in range(3)]
    frames[0].save(folder / "stack.tiff", save_all=True, append_images=frames[1:])
    assert recognise(Place.of(folder)) == "image folder"
    assert "stack.tiff" in only(look(folder), "not-finite").message


def test_a_picture_that_promises_more_than_its_file_can_hold(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    image.fromarray(rng().random((20, 30)).astype("f4")).save(tmp_path / "a.tiff")
    raw = (tmp_path / "a.tiff").read_bytes()
    width, height = (
        raw.index(struct.pack("<HHI", tag, 4, 1)) if struct.pack("<HHI", tag, 4, 1) in raw else raw.index(struct.pack("<HHI", tag, 3, 1)) for tag in (256, 257)
    )
    changed = bytearray(raw)
    for place in (width, height):
        changed[place : place + 12] = raw[place : place + 2] + struct.pack("<HII", 4, 1, 9000)
    (tmp_path / "a.tiff").write_bytes(changed)
    assert "declares 9000 x 9000 pixels" in only(look(tmp_path / "a.tiff"), "damaged-image").message


def test_masks_of_one_class_are_no_fault(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    folder = write_images(tmp_path / "p", noise, number=3)
    (folder / "masks").mkdir()
    image.new("L", (20, 16)).save(folder / "masks" / "0.png")
    assert counted(look(folder)) == []


def test_a_picture_of_too_many_pixels_is_one_line(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    write_images(tmp_path / "p", noise, number=3)
    image.new("1", (20_000, 20_000)).save(tmp_path / "p" / "bomb.png")
    assert "more pixels than Pillow allows" in only(look(tmp_path / "p"), "damaged-image").message


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hacked",)


def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    np.save(tmp_path / "o.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "o.npz", x=np.arange(3), bad=np.array([Evil()], dtype=object))
    torch.save({"x": torch.ones(3), "e": Evil()}, tmp_path / "o.pt")
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Evil()))
    assert "pickle" in why("o.npy")
    assert "bad: holds Python objects, which are a pickle: never opened" in only(look("o.npz"), "pickle-inside").message
    assert "loading this file calls posix.system" in why("o.pt")
    assert "not a numpy header" in why("raw.npy")
    assert not (tmp_path / "hacked").exists()


def header_of(shape: str, descr: str = "<f4") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(118 - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header_of("(100000000000, 1000)"), "truncated"),
        (header_of("(-3, 4)"), "negative"),
        (header_of("()") + b"\x00" * 4, "single value"),
        (header_of("(0, 4)"), "no rows"),
        (header_of("(3, 4)", "|V0"), "no size"),
        (header_of("(10, 4)") + b"\x00" * 100, "truncated"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "not a numpy header"),
        (b"\x93NUM", "not a numpy header"),
        (b"", "not a numpy header"),
    ],
)
def test_hostile_and_half_written_npy(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    assert reason in why(tmp_path / "x.npy")


def test_files_cut_short_or_empty_are_one_line_each(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", spoiled())
    np.savez_compressed(tmp_path / "b.npz", x=spoiled())
    write_parquet(tmp_path / "c.parquet", {"x": [1.0, 2.0] * 500})
    write_arrow(tmp_path / "d.arrow", {"x": [1.0, 2.0] * 500})
    write_arrow(tmp_path / "e.arrow", {"x": [1.0, 2.0] * 500}, stream=True)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for length in (0, 1, 10, len(whole) // 2, len(whole) - 5):
            path.write_bytes(whole[:length])
            reason = why(path)
            assert reason or path.name == "e.arrow", (path.name, length)  # a stream without its end mark is whole
            assert "\n" not in reason


def test_a_damaged_zip_says_where(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "b.npz", x=rng().random((1000, 50)))
    raw = bytearray((tmp_path / "b.npz").read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    (tmp_path / "b.npz").write_bytes(raw)
    assert "cannot be read to its end" in why(tmp_path / "b.npz")


def test_a_zip_that_is_no_npz(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "without arrays" in why(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "no rows"), (b"\n\n\n", "no rows"), (b"a,b,c\n", "no rows"), (bytes(range(256)) * 20, "binary"), (b'a,b\n1,"2\n' + b"x" * 1000, "")],
)
def test_csv_that_is_none(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "d.csv").write_bytes(content)
    assert reason in why(tmp_path / "d.csv")


@pytest.mark.parametrize("header", [b"{}", b"[]", b'{"x": 3}', b'{"x": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 4]}}', b"{" * 5000])
def test_hostile_safetensors(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\x00" * 16)
    assert why(tmp_path / "x.safetensors")


def test_what_is_no_data_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x01\x02")
    with pytest.raises(Unreadable, match="not a data set"):
        check_data(Place.of(tmp_path / "a.bin"), Wishes())


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """400 MB are checked in a process that may not have more than 200 MB on top of what its imports took."""
    with (tmp_path / "x.npy").open("wb") as file:
        text = io.BytesIO()
        np.lib.format.write_array_header_1_0(text, {"descr": "<f4", "fortran_order": False, "shape": (400_000, 256)})
        file.write(text.getvalue())
        for i in range(40):
            file.write(rng(i).standard_normal((10_000, 256), dtype="f4").tobytes())
    program = (
        "import resource, sys, numpy; from whynan.forensics.data import check_data; from whynan.forensics.addresses import Place; "
        "from whynan.forensics.wishes import Wishes; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "checked = check_data(Place.of(sys.argv[1]), Wishes()); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, checked.facts['rows'])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "x.npy")], capture_output=True, text=True, check=True)
    grown, rows = map(int, done.stdout.split())
    assert rows == 400_000
    assert grown < 200_000  # kilobytes


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    assert why(tmp_path / "x.npy")


def test_findings_of_a_healthy_part_are_kept_when_the_end_cannot_be_read(tmp_path: Path) -> None:
    write_arrow(tmp_path / "d.arrow", {"x": [float("nan") if i == 3 else i * 0.5 for i in range(5000)]}, stream=True)
    raw = (tmp_path / "d.arrow").read_bytes()
    (tmp_path / "d.arrow").write_bytes(raw[: len(raw) // 2])
    checked = look(tmp_path / "d.arrow")
    assert checked.unreadable
    assert not checked.healthy
    assert only(checked, "not-finite").rows == (3,)


def test_people_stay_silent_in_every_encoding(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-16", "latin-1"):
        assert counted(look(write_csv(tmp_path / f"{encoding}.csv", people(), encoding))) == []
