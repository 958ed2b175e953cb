"""What is found in data that is not healthy, with its rows, and what it would do to a batch."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from datasets_on_disk import absent, counted, digits, look, only, padded_tokens, people, rng, save, write_csv, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st

import whynan
from whynan.forensics.addresses import Place
from whynan.forensics.data import recognise
from whynan.forensics.data.marks import Marks, filled_when_shuffled, met_when_shuffled
from whynan.forensics.data.roles import Role, role_of
from whynan.forensics.data.tables import Column, Sort
from whynan.forensics.findings import Severity


def normal(rows: int = 1000, width: int = 16, seed: int = 0) -> np.ndarray:
    return rng(seed).normal(size=(rows, width)).astype("f4")


def test_rows_with_nan_and_inf_are_named_and_counted_by_batch(tmp_path: Path) -> None:
    x = normal()
    x[5, 3], x[6, 3], x[700, 0] = np.nan, -np.inf, np.inf
    found = only(look(save(tmp_path / "x.npy", x)), "not-finite")
    assert (found.severity, found.code, found.rows, found.row_count) == (Severity.BAD, "WN701", (5, 6, 700), 3)
    assert "1 nan, 1 inf, 1 -inf" in found.message
    assert "2 of 16 batches of 64 in file order, about 2.8 when shuffled" in found.message


def test_a_bad_label_has_the_code_of_a_target(tmp_path: Path) -> None:
    y = rng().normal(size=1000)
    y[9] = np.nan
    np.savez(tmp_path / "d.npz", x=normal(), y=y)
    assert only(look(tmp_path / "d.npz"), "not-finite", "y").code == "WN702"


def test_only_the_first_rows_are_named_but_all_are_counted(tmp_path: Path) -> None:
    x = normal()
    x[100:400, 2] = np.nan
    found = only(look(save(tmp_path / "x.npy", x)), "not-finite")
    assert (found.rows, found.row_count) == (tuple(range(100, 108)), 300)


def test_a_column_that_never_changes_is_suspect(tmp_path: Path) -> None:
    x = normal()
    x[:, 4] = 2.5
    found = only(look(save(tmp_path / "x.npy", x)), "constant-column")
    assert (found.severity, found.values["columns"]) == (Severity.SUSPECT, [4])


def test_a_column_of_whole_numbers_that_never_changes(tmp_path: Path) -> None:
    x = rng().integers(0, 90, (500, 8))
    x[:, 3] = 7
    assert only(look(save(tmp_path / "x.npy", x)), "constant-column").severity is Severity.SUSPECT
    ids = rng().integers(0, 90, (500, 8))
    ids[:, 0] = 1
    assert only(look(save(tmp_path / "x.npy", ids)), "constant-column").severity is Severity.NOTE


def test_a_dead_dimension_of_an_embedding_is_suspect(tmp_path: Path) -> None:
    x = normal(width=384)
    x[:, 17] = 0
    assert only(look(save(tmp_path / "embeddings.npy", x)), "constant-column").severity is Severity.SUSPECT


def test_a_column_that_changes_in_the_last_row_only_is_not_constant(tmp_path: Path) -> None:
    x = normal(100_000, 16)
    x[:, 4] = 2.5
    x[-1, 4] = 2.25
    absent(look(save(tmp_path / "x.npy", x)), "constant-column")


def test_repeated_rows_are_named_with_the_rows_they_repeat(tmp_path: Path) -> None:
    x = normal()
    x[300:310] = x[20:30]
    found = only(look(save(tmp_path / "x.npy", x)), "duplicate-rows")
    assert (found.severity, found.row_count, found.rows[:2], found.values["repeat"][:2]) == (Severity.SUSPECT, 10, (300, 301), [20, 21])  # type: ignore[index]


@pytest.mark.parametrize("width", [3, 7, 16, 100, 257, 3001])
@pytest.mark.parametrize("kind", ["f4", "f8", "u1", "i8"])
def test_rows_that_differ_in_one_place_only_do_not_repeat(tmp_path: Path, width: int, kind: str) -> None:
    x = np.tile(rng().integers(0, 200, width), (400, 1)).astype(kind)
    x[np.arange(400), rng(1).integers(0, width, 400)] += np.arange(1, 401).astype(kind)
    x[9] = x[7]
    expected = 400 - len(np.unique(x, axis=0))
    assert only(look(save(tmp_path / "x.npy", x)), "duplicate-rows").row_count == expected


def test_floats_that_are_small_whole_numbers_are_told_apart(tmp_path: Path) -> None:
    """Their bits differ at the top of a word only, where a careless hash loses them."""
    x = rng().integers(0, 50, (20_000, 12)).astype("f8")
    expected = len(x) - len(np.unique(x, axis=0))
    assert expected == 0
    absent(look(save(tmp_path / "x.npy", x)), "duplicate-rows")


def test_the_same_rows_with_other_labels_or_numbers_are_seen_through_a_numbering(tmp_path: Path) -> None:
    rows = people(100)
    again = [[100 + i, *row[1:]] for i, row in enumerate(rows[1:31])]
    found = only(look(write_csv(tmp_path / "people.csv", [*rows, *again])), "duplicate-rows")
    assert (found.severity, found.row_count, found.rows[0]) == (Severity.SUSPECT, 30, 100)


def test_beyond_the_bound_duplicates_are_estimated_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whynan.forensics.data.sameness._MOST", 5000)
    x = normal(40_000, 8)
    x[20_000:] = x[:20_000]
    found = only(look(save(tmp_path / "x.npy", x)), "duplicate-rows")
    assert "one row in" in found.message
    assert 15_000 < found.row_count < 25_000


def test_batches_of_one_row_again_and_again_are_constant(tmp_path: Path) -> None:
    x = normal(6400)
    x[640:704], x[1280:1344] = x[640], x[1280]
    found = only(look(save(tmp_path / "x.npy", x)), "constant-batch")
    assert (found.code, found.rows[0]) == ("WN404", 640)
    assert found.message.startswith("2 of 100 batches of 64 would be constant in file order (the first: rows 640 to 703)")


def test_a_constant_stretch_across_a_batch_border_fills_no_batch(tmp_path: Path) -> None:
    x = normal(6400)
    x[650:730] = x[650]
    absent(look(save(tmp_path / "x.npy", x)), "constant-batch")
    assert only(look(save(tmp_path / "x.npy", x), batch=16), "constant-batch").values["batches"] == 4


def test_rows_that_agree_where_they_are_sampled_are_compared_whole(tmp_path: Path) -> None:
    """Two values differ in a row of ten thousand: no sample can be trusted to see it."""
    x = np.ones((128, 10_000), "f4")
    x[np.arange(128), np.arange(128) * 70] = 2
    checked = look(save(tmp_path / "x.npy", x))
    absent(checked, "constant-batch")
    absent(checked, "duplicate-rows")


def test_the_label_does_not_make_a_batch_less_constant(tmp_path: Path) -> None:
    x = normal(640)
    x[:64] = 1.5
    np.savez(tmp_path / "d.npz", x=x, y=rng().integers(0, 10, 640))
    assert only(look(tmp_path / "d.npz"), "constant-batch").values["batches"] == 1


def test_ids_outside_the_range_given(tmp_path: Path) -> None:
    ids = padded_tokens()
    ids[3, 2], ids[400, 1] = 151_644, -1
    path = save(tmp_path / "tokens.npy", ids)
    found = only(look(path, ranges={"tokens": (0, 151_643)}), "out-of-range")
    assert (found.severity, found.code, found.rows) == (Severity.BAD, "WN703", (3, 400))
    assert "151644" in found.message


def test_both_ends_of_a_range_belong_to_it(tmp_path: Path) -> None:
    assert counted(look(save(tmp_path / "tokens.npy", np.arange(500)), ranges={"tokens": (0, 499)})) == []
    assert only(look(tmp_path / "tokens.npy", ranges={"tokens": (0, 498)}), "out-of-range").rows == (499,)


def test_a_range_for_a_column_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "no column" in only(look(save(tmp_path / "x.npy", normal()), ranges={"tokns": (0, 1)}), "no-such-column").message


@pytest.mark.parametrize(("name", "severity"), [("input_ids", Severity.BAD), ("sequence", Severity.SUSPECT)])
def test_a_negative_id_is_found_without_being_told(tmp_path: Path, name: str, severity: Severity) -> None:
    ids = padded_tokens()
    ids[7, 2] = -7
    found = only(look(save(tmp_path / f"{name}.npy", ids)), "negative-id")
    assert (found.severity, found.rows, found.code) == (severity, (7,), "WN703")


def test_ids_kept_as_floats(tmp_path: Path) -> None:
    ids = padded_tokens().astype("f4")
    assert only(look(save(tmp_path / "input_ids.npy", ids)), "float-ids").severity is Severity.NOTE
    assert only(look(save(tmp_path / "input_ids.npy", ids + 0.5)), "float-ids").severity is Severity.SUSPECT
    assert "rounds" in only(look(save(tmp_path / "input_ids.npy", ids + 2**25)), "float-ids").message


def test_rows_of_padding_are_suspect_when_told_and_a_note_when_guessed(tmp_path: Path) -> None:
    ids = padded_tokens()
    ids[64:128] = 0
    path = save(tmp_path / "input_ids.npy", ids)
    told = only(look(path, padding=0), "all-padding")
    assert (told.severity, told.code, told.row_count) == (Severity.SUSPECT, "WN402", 64)
    assert "1 of 8 batches of 64 would hold nothing else in file order" in told.message
    guessed = only(look(path), "all-padding")
    assert guessed.severity is Severity.NOTE
    assert "a guess" in guessed.message


def test_an_attention_mask_without_a_token_is_suspect(tmp_path: Path) -> None:
    ids = padded_tokens()
    mask = (ids != 0).astype("i8")
    mask[11] = 0
    np.savez(tmp_path / "d.npz", input_ids=ids, attention_mask=mask)
    found = only(look(tmp_path / "d.npz"), "all-padding", "attention_mask")
    assert (found.severity, found.rows) == (Severity.SUSPECT, (11,))


def test_a_batch_of_ignored_labels_is_bad(tmp_path: Path) -> None:
    labels = padded_tokens()
    labels[64:192] = -100
    found = look(save(tmp_path / "labels.npy", labels))
    assert (only(found, "all-ignored-batch").severity, only(found, "all-ignored-batch").code) == (Severity.BAD, "WN402")
    assert "2 of 8 batches of 64 would have only ignored labels in file order, none when shuffled" in only(found, "all-ignored-batch").message
    assert only(found, "all-ignored").row_count == 128


def test_another_ignore_index(tmp_path: Path) -> None:
    labels = rng().integers(0, 5, 640)
    labels[:64] = 255
    path = save(tmp_path / "y.npy", labels)
    absent(look(path), "all-ignored-batch")
    assert only(look(path, ignored=255), "all-ignored-batch").rows[0] == 0


def test_labels_below_zero_and_classes_nobody_has(tmp_path: Path) -> None:
    labels = rng().integers(0, 9, 640)
    labels[labels == 4] = 5
    labels[77] = -1
    checked = look(save(tmp_path / "y.npy", labels))
    assert (only(checked, "label-out-of-range").severity, only(checked, "label-out-of-range").rows) == (Severity.BAD, (77,))
    assert (only(checked, "class-gaps").severity, "no row has 4" in only(checked, "class-gaps").message) == (Severity.NOTE, True)


@pytest.mark.parametrize(("value", "severity"), [(-1, Severity.SUSPECT), (-5, Severity.BAD)])
def test_a_negative_label_of_a_token_that_is_not_the_ignored_one(tmp_path: Path, value: int, severity: Severity) -> None:
    labels = padded_tokens()
    labels[:, 40:], labels[9, 2] = -100, value
    path = save(tmp_path / "labels.npy", labels)
    found = only(look(path), "label-out-of-range")
    assert (found.severity, found.rows, found.code) == (severity, (9,), "WN703")
    labels[:, 40:] = value
    absent(look(save(path, labels), ignored=value), "label-out-of-range")


def test_a_label_outside_the_classes_the_file_declares(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(num_classes=3)})
    table = write_parquet(tmp_path / "a.parquet", {"x": [0.5] * 9 + [0.25], "label": [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]})
    import pyarrow.parquet as parquet

    parquet.write_table(parquet.read_table(table).cast(features.arrow_schema), table)
    assert only(look(table), "label-out-of-range").code == "WN703"


def test_zero_rows_are_a_note_and_no_duplicates(tmp_path: Path) -> None:
    x = normal()
    x[50:60] = 0
    checked = look(save(tmp_path / "x.npy", x))
    assert (only(checked, "all-zero-rows").severity, only(checked, "all-zero-rows").row_count) == (Severity.NOTE, 10)
    absent(checked, "duplicate-rows")


def test_black_pictures_among_digits_are_a_note(tmp_path: Path) -> None:
    pictures = digits()
    pictures[[3, 9]] = 0
    checked = look(save(tmp_path / "x.npy", pictures))
    assert only(checked, "all-zero-rows").rows == (3, 9)
    assert counted(checked) == []


def test_float64_values_that_overflow_as_float32(tmp_path: Path) -> None:
    x = normal().astype("f8")
    x[3, 3] = 1e39
    assert "inf as float32" in only(look(save(tmp_path / "x.npy", x)), "too-large").message


def test_columns_that_are_allowed_are_not_looked_at(tmp_path: Path) -> None:
    x = normal()
    x[3] = np.nan
    np.savez(tmp_path / "d.npz", raw=x, x=normal(seed=2))
    assert counted(look(tmp_path / "d.npz", allow=("raw*",))) == []


def test_facts_are_those_of_numpy(tmp_path: Path) -> None:
    x = rng().normal(3, 2, (3000, 7)).astype("f4")
    facts = look(save(tmp_path / "x.npy", x)).facts
    column = facts["columns"]["x"]  # type: ignore[index, call-overload]
    assert facts["rows"] == 3000
    assert column["dtype"] == "float32"
    assert [column[k] for k in ("min", "max")] == [float(x.min()), float(x.max())]
    assert [column["mean"], column["std"]] == pytest.approx([float(x.astype("f8").mean()), float(x.astype("f8").std())], rel=1e-4)


def test_every_byte_read_is_ticked(tmp_path: Path) -> None:
    told: list[int] = []
    x = normal(100_000)
    look(save(tmp_path / "x.npy", x), tick=told.append)
    assert sum(told) == x.nbytes
    assert len(told) > 1


def test_the_same_fault_in_many_columns_is_said_once(tmp_path: Path) -> None:
    rows = [[f"c{i}" for i in range(2000)], *[[("" if r == 4 else r * 0.5 + i) for i in range(2000)] for r in range(20)]]
    checked = look(write_csv(tmp_path / "wide.csv", rows))
    found = only(checked, "missing")
    assert "2 000 columns (c0, c1" in found.message
    assert found.rows == (4,)


@settings(max_examples=200)
@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 20))
def test_marks_count_batches_as_a_plain_loop_does(flags: list[bool], batch: int, step: int) -> None:
    marks = Marks(batch)
    for start in range(0, len(flags), step):
        marks.add(np.flatnonzero(flags[start : start + step]) + start)
    batches = [flags[i : i + batch] for i in range(0, len(flags), batch)]
    assert marks.count == sum(flags)
    assert marks.met == sum(map(any, batches))
    assert marks.filled(len(flags)) == sum(map(all, batches))


def test_chances_are_those_of_drawing_batches() -> None:
    draw, rows, marked, batch = rng(), 60, 25, 4
    flags = np.arange(rows) < marked
    drawn = [draw.permutation(flags).reshape(-1, batch) for _ in range(4000)]
    assert met_when_shuffled(rows, marked, batch) == pytest.approx(np.mean([d.any(1).sum() for d in drawn]), rel=0.02)
    assert filled_when_shuffled(rows, marked, batch) == pytest.approx(np.mean([d.all(1).sum() for d in drawn]), rel=0.15)


def test_what_shuffling_does_is_said_only_where_it_was_counted(tmp_path: Path) -> None:
    """Rows that are equal but for their labels, or blank, are in no group that was counted: no word on them is better than a wrong one."""
    x = np.ones((640, 8))
    x[600:] = normal(40)[:, :8]
    assert only(look(save(tmp_path / "x.npy", x)), "constant-batch").message.endswith("about 0.1 when shuffled")
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(640) % 64)
    found = only(look(tmp_path / "d.npz"), "constant-batch")
    assert "shuffled" not in found.message and found.values["shuffled"] is None
    blank = normal(640)
    blank[:128] = 0
    assert "shuffled" not in only(look(save(tmp_path / "x.npy", blank)), "constant-batch").message


def test_whole_numbers_of_a_regression_are_not_called_bad(tmp_path: Path) -> None:
    """Temperatures: a tenth of them is below zero, so that they are no classes with a few wrong ones among them."""
    target = rng().integers(-2, 31, 900)
    assert only(look(save(tmp_path / "target.npy", target)), "label-out-of-range").severity is Severity.SUSPECT


def test_long_ids_of_a_csv_are_told_apart(tmp_path: Path) -> None:
    """Nineteen digits are more than a float holds; a cell without a value does not change that."""
    rows = [[str(1234567890123456700 + i) if i != 200 else "", 0] for i in range(400)]
    checked = look(write_csv(tmp_path / "ids.csv", [["tweet_id", "retweets"], *rows]))
    absent(checked, "duplicate-rows")
    assert only(checked, "missing", "tweet_id").rows == (200,)
    rows[300] = rows[20]
    assert only(look(write_csv(tmp_path / "ids.csv", [["tweet_id", "retweets"], *rows])), "duplicate-rows").rows == (300,)


def test_numbers_beyond_64_bits_are_still_numbers(tmp_path: Path) -> None:
    checked = look(write_csv(tmp_path / "big.csv", [["a", "b"], *[[10**30 + i, i * 0.5] for i in range(50)]]))
    assert checked.facts["columns"]["a"]["max"] == pytest.approx(1e30)  # type: ignore[index, call-overload]


def test_a_rate_of_tokens_is_no_token(tmp_path: Path) -> None:
    rates = [[i, 40.25 + i, 3.5 * i] for i in range(60)]
    checked = look(write_csv(tmp_path / "speed.csv", [["prompt", "tokens_per_second", "tokens"], *rates]))
    absent(checked, "float-ids")
    names = {"tokens": Sort.INTEGER, "input_ids": Sort.INTEGER, "tokens_per_second": Sort.INTEGER, "token_cost": Sort.FLOAT}
    assert [role_of(Column(n, "", s)) is Role.TOKENS for n, s in names.items()] == [True, True, False, False]
    assert role_of(Column("token_list", "", Sort.INTEGER, None)) is Role.TOKENS


def test_zeros_are_counted(tmp_path: Path) -> None:
    x = rng().integers(0, 3, (500, 7)).astype("f4")
    x[3, 3] = np.nan
    [stats] = look(save(tmp_path / "x.npy", x)).tensors
    assert stats.zeros == int((x == 0).sum())


def test_a_first_cell_longer_than_python_reads_by_itself(tmp_path: Path) -> None:
    """A hundred and fifty thousand letters in the first cell: read as a row, and csv's own limit is put back."""
    before = csv.field_size_limit()
    path = write_csv(tmp_path / "wide.csv", [["a" * 150_000, 1], *[[f"b{i}", 2 + i] for i in range(20)]])
    assert recognise(Place.of(path)) == "csv" and look(path).facts["rows"] == 21
    assert csv.field_size_limit() == before


def test_minimum_and_maximum_of_the_finite_values_are_said_of_every_column(tmp_path: Path) -> None:
    """Also beside damage; a column without a finite value has none."""
    features = np.arange(40, dtype=np.float32).reshape(10, 4) - 7.5
    features[3, 2] = np.inf
    np.savez(tmp_path / "cache.npz", features=features, labels=np.arange(10), lost=np.full((10, 2), np.nan, np.float32))
    said = repr(whynan.check(tmp_path / "cache.npz"))
    assert "  range   features -7.5 to 31.5, labels 0 to 9\n" in said


def test_ranges_of_many_columns_are_cut_short(tmp_path: Path) -> None:
    np.savez(tmp_path / "many.npz", **{f"c{n}": np.random.default_rng(n).random((10, 2)) for n in range(9)})
    assert "and 3 more columns; --all lists them" in " ".join(repr(whynan.check(tmp_path / "many.npz")).split())
