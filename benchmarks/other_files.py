"""Small data sets and logs of every format `whynan check` reads, written by the libraries that write them in real life; for `fuzz_check.py`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np


def _columns() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {"x": draw.normal(size=40).astype(np.float32), "ids": draw.integers(0, 900, 40), "label": draw.integers(0, 3, 40)}


def write_npy(path: Path) -> None:
    """`numpy.save` of floats."""
    np.save(path, np.random.default_rng(1).normal(size=(30, 6)))


def write_records(path: Path) -> None:
    """`numpy.save` of records, in the order of another machine."""
    np.save(path, np.zeros(9, [("a", "<f4"), ("b", ">i2", (2,)), ("n", "U3")]))


def write_npz(path: Path) -> None:
    """`numpy.savez_compressed`."""
    np.savez_compressed(path, **_columns())


def write_parquet(path: Path) -> None:
    """A table with lists and missing values."""
    import pyarrow as pa
    import pyarrow.parquet

    lists = [[i, i + 1] * (i % 4) for i in range(40)]
    pyarrow.parquet.write_table(pa.table({**_columns(), "tokens": lists, "text": ["a", None] * 20}), path, row_group_size=16)


def write_arrow(path: Path) -> None:
    """An Arrow file."""
    import pyarrow as pa

    table = pa.table({**_columns(), "text": ["a", None] * 20})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)


def write_feather(path: Path) -> None:
    """A compressed Feather file."""
    import pyarrow as pa
    import pyarrow.feather

    pyarrow.feather.write_feather(pa.table(_columns()), path, compression="lz4")


def write_csv(path: Path) -> None:
    """A table with a header and quoted text."""
    rows = [f'{i},"name, {i}",{v:.4f},{n % 3}' for i, (v, n) in enumerate(zip(_columns()["x"], _columns()["ids"], strict=True))]
    path.write_text("\n".join(["id,name,height,label", *rows]) + "\n")


def write_saved_dataset(folder: Path) -> None:
    """`Dataset.save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({n: c.tolist() for n, c in _columns().items()}).save_to_disk(folder)


def write_png(path: Path) -> None:
    """A picture."""
    from PIL import Image

    Image.fromarray(np.random.default_rng(2).integers(0, 256, (12, 14, 3), dtype=np.uint8)).save(path)


def write_images(folder: Path) -> None:
    """A folder of pictures in three formats, a class a folder."""
    from PIL import Image

    for i, suffix in enumerate(("jpg", "png", "webp", "gif", "bmp", "tiff")):
        (folder / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (9, 11, 3), dtype=np.uint8)).save(folder / f"class{i % 2}" / f"{i}.{suffix}")


def _losses() -> list[float]:
    return [2 + 8 * math.exp(-i / 20) for i in range(60)] + [math.nan] * 4


def write_json_lines(path: Path) -> None:
    """A line a step."""
    path.write_text("".join(json.dumps({"step": i, "loss": v, "lr": 1e-4, "grad_norm": 1.0 + i % 3}) + "\n" for i, v in enumerate(_losses())))


def write_trainer_state(path: Path) -> None:
    """The state that a Trainer keeps, alone."""
    history = [{"step": i, "epoch": i / 20, "loss": v, "learning_rate": 1e-4, "grad_norm": math.inf if i > 55 else 1.0} for i, v in enumerate(_losses())]
    path.write_text(json.dumps({"global_step": 64, "epoch": 3.2, "log_history": history}, indent=2))


def write_metrics(path: Path) -> None:
    """What Lightning's CSVLogger leaves."""
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(path.parent / "lightning")
    for i, value in enumerate(_losses()):
        logger.log_metrics({"train_loss": value, "epoch": i // 20}, step=i)
    logger.save()
    shutil.move(Path(logger.log_dir) / "metrics.csv", path)
    shutil.rmtree(path.parent / "lightning")


def write_events(path: Path) -> None:
    """What TensorBoard's writer leaves."""
    from torch.utils.tensorboard import SummaryWriter

    held = path.parent / "board"
    with SummaryWriter(str(held)) as writer:
        for i, value in enumerate(_losses()):
            writer.add_scalar("train/loss", value, i)
            writer.add_scalar("lr", 1e-4, i, new_style=True)
        writer.add_histogram("weights", np.arange(10.0), 1)
    shutil.move(next(held.iterdir()), path)
    shutil.rmtree(held)


def write_text(path: Path) -> None:
    """Lines of a loop, a bar drawn over itself, and a dictionary as Trainer prints it."""
    lines = [f"iter {i}: loss {v:.4f}, time {40 + i:.2f}ms" for i, v in enumerate(_losses())]
    bars = "".join(f"\rEpoch 0: {n:3d}%|##   | {n}/64 [00:{n % 60:02d}<01:40,  4.97it/s, loss={v:.3g}]" for n, v in enumerate(_losses()))
    dicts = [str({"step": i, "fvu/transformer.blocks.0": v, "epoch": 0.1}) for i, v in enumerate(_losses())]
    path.write_text("\n".join([*lines, bars, *dicts]) + "\n")


DATA = {
    "rows.npy": write_npy,
    "records.npy": write_records,
    "rows.npz": write_npz,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "rows.feather": write_feather,
    "rows.csv": write_csv,
    "saved": write_saved_dataset,
    "one.png": write_png,
    "images": write_images,
}
LOGS = {
    "log.jsonl": write_json_lines,
    "trainer_state.json": write_trainer_state,
    "metrics.csv": write_metrics,
    "events.out.tfevents.1": write_events,
    "train.log": write_text,
}


def write_all(folder: Path) -> list[Path]:
    """Write one of each; returns what can be checked."""
    found = []
    for name, write in (DATA | LOGS).items():
        write(folder / name)
        found.append(folder / name)
    return found
