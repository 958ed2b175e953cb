"""Healthy sets of data, of the kinds people train on, are silent: nothing that changes the exit status is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from datasets_on_disk import (
    arrow_table,
    counted,
    digits,
    iris,
    look,
    noise,
    padded_tokens,
    people,
    rng,
    save,
    write_arrow,
    write_csv,
    write_images,
    write_parquet,
)


def flat_digits(folder: Path) -> Path:
    return save(folder / "x_train.npy", digits().reshape(600, 784).astype("f4") / 255)


def standardised_digits(folder: Path) -> Path:
    flat = digits().reshape(600, 784).astype("f4")
    return save(folder / "x_train.npy", (flat - flat.mean()) / flat.std())


def scaled_digits(folder: Path) -> Path:
    """Every pixel scaled by itself, the border left at 0, as scikit-learn's StandardScaler does."""
    flat = digits().reshape(600, 784).astype("f8")
    spread = flat.std(0)
    return save(folder / "x.npy", (flat - flat.mean(0)) / np.where(spread == 0, 1, spread))


def digits_with_labels(folder: Path) -> Path:
    np.savez_compressed(
        folder / "mnist.npz", x_train=digits(), y_train=np.sort(rng().integers(0, 10, 600)), x_test=digits()[:99], y_test=rng().integers(0, 10, 99)
    )
    return folder / "mnist.npz"


def labels_alone(folder: Path) -> Path:
    return save(folder / "y.npy", np.sort(rng().integers(0, 10, 5000)))


def unnamed_labels(folder: Path) -> Path:
    return save(folder / "train_part.npy", rng().integers(0, 4, 5000))


def embeddings(folder: Path) -> Path:
    return save(folder / "embeddings.npy", rng().normal(size=(2000, 384)).astype("f2"))


def tokens_in_one_row(folder: Path) -> Path:
    """One long stream of ids, as nanoGPT keeps it."""
    return save(folder / "train.npy", rng().integers(0, 50257, 100_000).astype("u2"))


def padded_text(folder: Path) -> Path:
    ids = padded_tokens()
    labels = np.where(ids == 0, -100, ids)
    np.savez(folder / "text.npz", input_ids=ids, attention_mask=(ids != 0).astype("i8"), token_type_ids=np.zeros_like(ids), labels=labels)
    return folder / "text.npz"


def audio(folder: Path) -> Path:
    return save(folder / "audio.npy", rng().normal(0, 3000, (50, 4000)).astype("i2"))


def one_hot(folder: Path) -> Path:
    return save(folder / "onehot.npy", np.eye(100, dtype="f4")[rng().integers(0, 90, 500)])


def causal_masks(folder: Path) -> Path:
    return save(folder / "mask.npy", np.triu(np.full((64, 64), -np.inf, "f4"), 1))


def tabular_csv(folder: Path) -> Path:
    return write_csv(folder / "people.csv", people())


def rounded_csv(folder: Path) -> Path:
    return write_csv(folder / "iris.csv", iris())


def categories_csv(folder: Path) -> Path:
    """Few columns of few values: most rows are there many times, by nature."""
    draw = rng()
    return write_csv(
        folder / "survey.csv",
        [["sex", "class", "survived"], *[[["m", "f"][draw.integers(2)], int(draw.integers(1, 4)), int(draw.integers(2))] for _ in range(900)]],
    )


def hinge_csv(folder: Path) -> Path:
    draw = rng()
    return write_csv(folder / "hinge.csv", [["a", "b", "y"], *[[draw.normal(), draw.normal(), int(draw.choice([-1, 1]))] for _ in range(300)]])


def regression_csv(folder: Path) -> Path:
    draw = rng()
    return write_csv(
        folder / "prices.csv", [["area", "rooms", "target"], *[[draw.normal(90, 20), int(draw.integers(1, 7)), int(draw.normal(0, 10000))] for _ in range(300)]]
    )


def tokenised_parquet(folder: Path) -> Path:
    draw = rng()
    ids = [draw.integers(0, 30000, draw.integers(5, 200)).tolist() for _ in range(400)]
    return write_parquet(
        folder / "train.parquet", {"input_ids": ids, "labels": [[-100] * 3 + row[3:] for row in ids], "source": ["web"] * 400}, row_group_size=64
    )


def text_arrow(folder: Path) -> Path:
    """Reviews with a text column that is empty here and there, and a declared split."""
    words = ["" if i % 40 == 0 else f"review {i} is long enough" for i in range(400)]
    return write_arrow(folder / "imdb.arrow", {"text": words, "label": rng().integers(0, 2, 400), "lang": ["en"] * 400})


def user_ratings(folder: Path) -> Path:
    draw = rng()
    return write_parquet(
        folder / "ratings.parquet", {"user_id": draw.integers(0, 900, 3000), "item_id": draw.integers(0, 400, 3000), "rating": draw.integers(1, 6, 3000) / 1.0}
    )


def photographs(folder: Path) -> Path:
    return write_images(folder / "photos", noise, suffix="jpg")


def mixed_photographs(folder: Path) -> Path:
    """Sizes and modes may differ: that is said as a note."""
    write_images(folder / "photos", lambda i: rng(i).integers(0, 256, (16, 16 + i, 3), dtype=np.uint8), number=9)
    return write_images(folder / "photos", lambda i: rng(90 + i).integers(0, 256, (9, 9), dtype=np.uint8), number=3, suffix="bmp")


def saved_dataset(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": [f"text number {i}" for i in range(300)], "label": rng().integers(0, 2, 300).tolist()}
    hidden = {"text": [f"test {i}" for i in range(50)], "label": [-1] * 50}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features), "test": datasets.Dataset.from_dict(hidden, features)}).save_to_disk(
        folder / "glue"
    )
    return folder / "glue"


def tensors(folder: Path) -> Path:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    draw = torch.Generator().manual_seed(0)
    torch.save({"x": torch.randn(300, 3, 8, 8, generator=draw, dtype=torch.bfloat16), "y": torch.randint(0, 10, (300,), generator=draw)}, folder / "train.pt")
    return folder / "train.pt"


def weather(folder: Path) -> Path:
    """A frame with times, booleans, categories and decimals."""
    import datetime
    import decimal

    draw, start = rng(), datetime.datetime(2024, 1, 1)
    columns = {
        "time": [start + datetime.timedelta(hours=i) for i in range(500)],
        "rain": draw.random(500) < 0.2,
        "station": arrow_table({"s": ["north", "south"] * 250})["s"].dictionary_encode(),
        "price": [decimal.Decimal(int(v)) / 100 for v in draw.integers(100, 99999, 500)],
        "wind": draw.random(500).astype("f4"),
    }
    return write_parquet(folder / "weather.parquet", columns)


HEALTHY = [
    flat_digits, standardised_digits, scaled_digits, digits_with_labels, labels_alone, unnamed_labels, embeddings, tokens_in_one_row, padded_text, audio,
    one_hot, causal_masks, tabular_csv, rounded_csv, categories_csv, hinge_csv, regression_csv, tokenised_parquet, text_arrow, user_ratings,
    photographs, mixed_photographs, saved_dataset, tensors, weather,
]  # fmt: skip


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_a_healthy_set_is_silent_and_its_rows_are_counted(make: Callable[[Path], Path], tmp_path: Path) -> None:
    checked = look(make(tmp_path))
    assert not checked.unreadable
    assert counted(checked) == []
    assert checked.healthy
    assert checked.facts["rows"] >= 12  # type: ignore[operator]
