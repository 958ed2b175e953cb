"""Trackers that the program uses hear of incidents; the real libraries, their files read back."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ENVIRONMENT, Finished, Sandbox, Shown
from doc_blocks import compare

from whynan.forensics.logs.offline import _items, _records
from whynan.forensics.logs.wire import fields

TRAIN = """
import os, sys, torch
{setup}
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(8):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
    x = x * 0 if i in {bad} else x
    optimizer.zero_grad()
    loss = torch.sqrt((model(x) - model.bias).pow(2).sum(-1)).mean()
    loss.backward()
    optimizer.step()
    log(loss.item(), i)
end()
"""

WANDB = """
import wandb
auto = wandb.init(project="p", mode="offline", dir=".")
def log(loss, i):
    auto.log({"loss": loss})
    auto.log({"again": i, "own": i * 10}, step=auto.step + 2) if i == 4 else None
end = auto.finish
"""
WANDB_STEPS = """
import wandb
run = wandb.init(project="p", mode="offline", dir=".")
def log(loss, i):
    run.log({"loss": loss}, step=100 + 5 * i)
end = run.finish
"""
TENSORBOARD = """
from torch.utils.tensorboard import SummaryWriter
writer, other = SummaryWriter("tb"), SummaryWriter("closed")
other.close()
def log(loss, i):
    writer.add_scalar("loss", loss, i)
end = writer.close
"""
MLFLOW = """
import mlflow
mlflow.set_tracking_uri("file:" + os.path.abspath("mlruns"))
mlflow.start_run()
def log(loss, i):
    mlflow.log_metric("loss", loss, step=i)
end = mlflow.end_run
"""
TRACKIO = """
import trackio
trackio.init(project="p", name="r", embed=False)
def log(loss, i):
    trackio.log({"loss": loss})
end = trackio.finish
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

class Own(GeneralTracker):
    name, requires_logging_directory, rows = "own", False, []
    tracker = None
    def log(self, values, step=None, **kwargs):
        self.rows.append((step, sorted(values)))

own = Own()
accelerator = Accelerator(log_with=own)
accelerator.init_trackers("p")
def log(loss, i):
    accelerator.log({"loss": loss}, step=i)
def end():
    print(own.rows)
"""
ENV = ENVIRONMENT | {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}


def needs(module: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed here")


def run(box: Sandbox, setup: str, watched: bool = True, bad: tuple[int, ...] = (3, 5), **more: str) -> Finished:
    script = str(box.write(TRAIN.format(setup=setup, bad=bad)))
    env = ENV | {"TRACKIO_DIR": str(box.folder / "trackio")} | more
    done = box.whynan(script, env=env) if watched else box.python(script, env=env)
    assert done.status == 0, done.err
    assert "could not be told" not in done.err
    return done


def history(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The rows of an offline run, and all of its records in one piece."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    with path.open("rb") as file:
        records = list(_records(file, lambda size: None))
    rows = [dict(_items(value)) for record in records for number, value in fields(record) if number == 2 and isinstance(value, bytes)]
    return rows, b"\n".join(records)


def own(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the program itself logged."""
    kept = [{k: v for k, v in row.items() if k in ("loss", "again", "own", "_step")} for row in rows]
    return [row for row in kept if len(row) > 1]


@needs("wandb")
@pytest.mark.parametrize("setup", [WANDB, WANDB_STEPS], ids=["counting", "with steps"])
def test_wandb_gets_values_one_alert_and_the_report_and_keeps_its_steps(tmp_path: Path, setup: str, shown: Shown) -> None:
    for name in ("plain", "watched"):
        (tmp_path / name).mkdir()
    run(Sandbox(tmp_path / "plain"), setup, watched=False, bad=())
    done = run(Sandbox(tmp_path / "watched"), setup, WANDB_SILENT="false")
    if setup == WANDB:
        compare(shown("docs/trackers.md")[0], done.err)
    plain, _ = history(tmp_path / "plain")
    rows, records = history(tmp_path / "watched")
    assert [row["_step"] for row in own(rows)] == [row["_step"] for row in own(plain)]
    assert [sorted(row) for row in own(rows)] == [sorted(row) for row in own(plain)]
    told = [row for row in rows if "whynan/code" in row]
    assert [(row["whynan/incident_step"], row["whynan/code"], row["whynan/total"], row["whynan/action"]) for row in told] == [
        (3, "WN501", 1, "skipped"),
        (5, "WN501", 2, "skipped"),
    ]
    assert all("whynan/grad_norm" in row for row in told)
    assert records.count(b"whynan: WN501 at step 3") == 1
    assert b"whynan: WN501 at step 5" not in records
    (attached,) = (tmp_path / "watched").glob("wandb/offline-run-*/files/**/report.*")
    assert "2 incidents" in attached.read_text()  # the one of the end of the run, though the program finished it before


def test_tensorboard_gets_values_the_diagnosis_and_the_report(box: Sandbox) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(box, TENSORBOARD)  # in a process of its own: it aborts in a fork of one that has read event files
    events = EventAccumulator(str(box.folder / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("whynan/incident_step")] == [(3, 3.0), (5, 5.0)]
    assert [e.value for e in events.Scalars("whynan/code")] == [501.0, 501.0]
    assert [e.step for e in events.Scalars("loss")] == list(range(8))
    (alert,) = events.Tensors("whynan/alert/text_summary")
    assert b"torch.sqrt" in alert.tensor_proto.string_val[0]
    assert events.Tensors("whynan/report/text_summary")
    assert len(list((box.folder / "closed").iterdir())) == 1  # a closed writer stays closed


@needs("mlflow")
def test_mlflow_gets_metrics_tags_and_the_report_of_the_end(box: Sandbox) -> None:
    run(box, MLFLOW)
    (home,) = (path.parent for path in box.folder.glob("mlruns/*/*/meta.yaml"))
    assert [line.split()[1:] for line in (home / "metrics/whynan/incident_step").read_text().splitlines()] == [["3", "3"], ["5", "5"]] or [
        float(line.split()[1]) for line in (home / "metrics/whynan/incident_step").read_text().splitlines()
    ] == [3.0, 5.0]
    assert [line.split()[2] for line in (home / "metrics/loss").read_text().splitlines()] == [str(i) for i in range(8)]
    assert (home / "tags/whynan.alert").read_text() == "whynan: WN501 at step 3: infinite slope"
    assert (home / "tags/whynan.total").read_text() == "2"
    assert "2 incidents" in (home / "artifacts/whynan/report.html").read_text()


@needs("trackio")
def test_trackio_gets_values_and_one_alert_and_counts_on(box: Sandbox) -> None:
    done = run(box, TRACKIO)
    assert "infinite slope" not in done.out  # its alert is not printed a second time
    data = sqlite3.connect(box.folder / "trackio" / "p.db")
    rows = data.execute("select step, metrics from metrics order by id").fetchall()
    assert [step for step, text in rows if '"loss"' in str(text)] == list(range(8))
    assert sum("whynan/code" in str(text) for _, text in rows) == 2
    assert data.execute("select title from alerts").fetchall() == [("whynan: WN501 at step 3: infinite slope",)]


def test_a_tracker_of_accelerate_is_told_by_its_log(box: Sandbox) -> None:
    rows = eval(box.watched(TRAIN.format(setup=ACCELERATE, bad=(3, 5))).out)  # printed by the program above
    assert [step for step, keys in rows if keys == ["loss"]] == list(range(8))
    assert sum("whynan/code" in keys for _, keys in rows) == 2


def test_a_tracker_that_fails_is_said_once_and_harms_nothing(box: Sandbox) -> None:
    setup = """
import types
def refuse(*a, **k):
    raise ConnectionError("no route")
sys.modules["wandb"] = types.SimpleNamespace(run=types.SimpleNamespace(define_metric=refuse, log=refuse))
log, end = lambda loss, i: None, lambda: print("ended")
"""
    done = box.watched(TRAIN.format(setup=setup, bad=(3, 5)))
    assert done.out == "ended\n"
    assert done.status == 0
    assert done.err.count("whynan: wandb could not be told: ConnectionError: no route") == 1
    assert len(done.incidents) == 2


def test_no_tracker_is_imported_and_none_is_asked_while_nothing_is_wrong(box: Sandbox) -> None:
    setup = """
import types
class Never:
    @property
    def run(self):
        raise SystemExit("asked")
sys.modules["wandb"] = Never()
log = lambda loss, i: None
def end():
    print([m for m in ("mlflow", "trackio", "tensorboard", "accelerate") if m in sys.modules])
"""
    done = box.whynan(str(box.write(TRAIN.format(setup=setup, bad=()))))
    assert (done.out, done.status) == ("[]\n", 0)


def test_the_random_numbers_of_the_program_do_not_move(box: Sandbox) -> None:
    setup = """
import random, types
def draw(*a, **k):
    random.random()
sys.modules["wandb"] = types.SimpleNamespace(run=types.SimpleNamespace(define_metric=draw, log=draw, alert=draw, save=draw))
random.seed(7)
log = lambda loss, i: None
def end():
    print(random.random())
"""
    import random

    done = box.watched(TRAIN.format(setup=setup, bad=(3,)))
    assert float(done.out) == random.Random(7).random()
    assert os.path.exists(done.run_dir / "report.md")


def test_objects_of_a_class_are_found_anew_where_some_came_or_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked for among all objects only then; a subclass counts."""
    from whynan.integrations import telling

    class Writer:
        pass

    class Special(Writer):
        pass

    monkeypatch.setitem(sys.modules, "some.tracker", SimpleNamespace(Writer=Writer))
    walks: list[int] = []
    walk = telling.gc.get_referrers

    def counted(*kinds: type) -> list[Any]:
        walks.append(1)
        return walk(*kinds)

    monkeypatch.setattr(telling.gc, "get_referrers", counted)

    def found() -> list[object]:
        return telling.living("some.tracker", "Writer")

    assert found() == found() == found() == []
    one, looked = Special(), len(walks)
    assert found() == [one] and len(walks) == looked + 1
    assert found() == [one] and len(walks) == looked + 1
    other = Writer()
    del one
    assert found() == [other]
