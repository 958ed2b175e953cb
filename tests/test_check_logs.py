"""`whynan.forensics.logs`: what a log says, found in files written as the usual libraries write them."""

from __future__ import annotations

import doctest
import importlib
import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from log_files import HEALTHY, INF, NAN, cosine, falling, json_lines, text

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.findings import Checked, Finding, Kind, Severity
from whynan.forensics.logs import check_log, recognise
from whynan.forensics.logs.names import Role, naming
from whynan.forensics.wishes import Wishes


def check(path: Path, **wishes: object) -> Checked:
    return check_log(Place.of(path), Wishes(**wishes))  # type: ignore[arg-type]


def found(checked: Checked, what: str, place: str = "") -> Finding:
    matching = [f for f in checked.findings if f.what == what and (not place or f.place == place)]
    assert matching, f"no {what} {place} in {[str(f) for f in checked.findings]}"
    return matching[0]


def alarms(checked: Checked) -> list[str]:
    return [str(f) for f in checked.findings if f.severity is not Severity.NOTE]


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_logs_are_silent(kind: str, tmp_path: Path) -> None:
    """No alarm in twenty kinds of healthy logs, each with ten seeds; the count is printed."""
    wrong = [(seed, a) for seed in range(10) for a in alarms(check(HEALTHY[kind](tmp_path, random.Random(seed))))]
    print(f"{kind}: {len(wrong)} false alarms in 10 logs")
    assert not wrong


def test_healthy_logs_are_recognised_by_content(tmp_path: Path) -> None:
    for number, maker in enumerate(HEALTHY.values()):
        path = maker(tmp_path, random.Random(0)).rename(tmp_path / f"file-{number}")
        assert recognise(Place.of(path)), maker.__name__


@pytest.mark.parametrize(
    "content",
    [
        "import torch\n\nloss = 0.0\nfor step in range(10):\n    loss += 1\nlr = 1e-3\n",
        "learning_rate: 0.001\nepochs: 10\nloss: cross_entropy\n",
        "age,height,label\n1,2,3\n4,5,6\n",
        '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n',
        "",
        "\0\1\2binary\0",
        "Some words about nan and inf, and 12 numbers.\n",
    ],
)
def test_what_is_no_log_is_not_taken_for_one(content: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    assert recognise(Place.of(path)) is None
    with pytest.raises(Unreadable):
        check(path)


def test_one_infinity_then_nan_for_ever(tmp_path: Path) -> None:
    """The joint-diffusion story: the first bad norm was inf, the loss was finite then, all after it is nan, and it is said once."""
    chance, rows = random.Random(0), []
    for s in range(4000):
        norm = 0.8 * math.exp(chance.gauss(0, 0.3)) if s < 2261 else INF if s == 2261 else NAN
        rows.append(
            {
                "step": s,
                "text_loss": falling(s, chance) if s < 2262 else NAN,
                "latent_loss": falling(s, chance),
                "loss": falling(s, chance) if s < 2262 else NAN,
                "grad_norm": norm,
            }
        )
    checked = check(json_lines(tmp_path / "training_log.jsonl", rows))
    first = checked.findings[0]
    assert (first.place, first.severity, first.rows, first.row_count, first.line) == ("grad_norm", Severity.BAD, (2261,), 1739, 2262)
    assert "inf at step 2 261, nan from step 2 262 on; not finite in 1 739 of 4 000 values" in first.message
    assert "still finite then: text_loss, latent_loss, loss" in first.message
    assert checked.facts["first_bad"] == "grad_norm" and checked.facts["first_bad_step"] == 2261
    assert [f.place for f in checked.findings] == ["grad_norm", "text_loss", "loss"]


def test_infinities_that_come_and_go(tmp_path: Path) -> None:
    """The transcoder's log: python dicts, inf at steps 39 to 59, healthy numbers, inf again."""
    chance = random.Random(0)
    lines = [str({"step": s, "fvu/transformer.blocks.0": INF if 39 <= s < 60 or s == 120 else falling(s, chance, 0.2, 1.0)}) for s in range(200)]
    finding = found(check(text(tmp_path / "out.log", lines)), "not-finite")
    assert finding.severity is Severity.BAD and finding.place == "fvu/transformer.blocks.0"
    assert (finding.rows, finding.row_count, finding.line) == ((39, 120), 22, 40)
    assert finding.message.startswith("inf in 22 of 200 values, first at step 39, last at step 120")


def test_spikes_before_the_first_nan_are_told_with_their_ratio(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [{"step": s, "loss": NAN if s >= 400 else falling(s, chance, noise=0.02) * (12 if s == 396 else 1)} for s in range(500)]
    finding = check(json_lines(tmp_path / "m.jsonl", rows)).findings[0]
    assert "a spike to " in finding.message and "at step 396, 12 times the running median" in finding.message
    spikes = finding.values["spikes"]
    assert isinstance(spikes, list) and len(spikes) == 1


@pytest.mark.parametrize("norm", [NAN, INF])
def test_trainers_filter_shows_zero_for_nan(norm: float, tmp_path: Path) -> None:
    """`loss 0.0, grad_norm nan` on a Trainer's stdout is a nan loss, since the first line of its kind."""
    chance, lines = random.Random(0), ["some words before", "***** Running training *****"]
    for s in range(100):
        dead = s >= 60
        lines.append(
            str(
                {
                    "loss": 0.0 if dead else round(falling(s, chance), 4),
                    "grad_norm": norm if dead else round(chance.uniform(0.5, 2), 4),
                    "learning_rate": cosine(s),
                    "epoch": round(s / 50, 2),
                }
            )
        )
    checked = check(text(tmp_path / "stdout.txt", lines))
    hidden = found(checked, "hidden-nan")
    assert hidden.severity is Severity.BAD and hidden.place == "loss" and hidden.line == 63 and hidden.row_count == 40
    assert "logging_nan_inf_filter" in hidden.message
    assert found(checked, "not-finite", "grad_norm").severity is Severity.BAD


def test_a_loss_of_zero_without_a_norm(tmp_path: Path) -> None:
    """Older Trainers write no gradient norm: a loss that drops from 2.1 to exactly 0.0 and stays is suspect."""
    chance = random.Random(0)
    lines = [str({"loss": round(falling(s, chance), 4) if s < 30 else 0.0, "learning_rate": cosine(s), "epoch": round(s / 50, 2)}) for s in range(36)]
    finding = found(check(text(tmp_path / "old.log", lines)), "silent-death")
    assert finding.severity is Severity.SUSPECT and finding.row_count == 6 and finding.line == 31


def test_a_loss_that_stands_still(tmp_path: Path) -> None:
    """A loss that moved and then is equal to the last bit for many lines trains nothing any more."""
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance) if s < 200 else 2.302585} for s in range(260)]
    finding = found(check(json_lines(tmp_path / "m.jsonl", rows)), "silent-death")
    assert finding.rows == (200,) and finding.row_count == 60 and finding.severity is Severity.SUSPECT


def test_finite_and_absurd(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [{"step": s, "fvu": 4.5e12 if s == 150 else 0.05 * math.exp(chance.gauss(0, 0.2)), "grad_norm": 1.0} for s in range(300)]
    finding = found(check(json_lines(tmp_path / "m.jsonl", rows)), "absurd")
    assert finding.severity is Severity.SUSPECT and finding.rows == (150,) and "4.5e+12 at step 150" in finding.message


def test_rate_other_than_expected(tmp_path: Path) -> None:
    """1e-4 was configured, the log reaches 4.92e-4; a warm-up, a cosine and a decay below the peak are no contradiction."""
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance), "lr": cosine(s, peak=4.92e-4)} for s in range(500)]
    path = json_lines(tmp_path / "m.jsonl", rows)
    finding = found(check(path, expect={"lr": 1e-4}), "rate-overridden")
    assert finding.code == "WN607" and "0.000492" in finding.message and "0.0001 was expected" in finding.message
    assert not alarms(check(path, expect={"lr": 4.92e-4}))
    assert not alarms(check(json_lines(tmp_path / "warm.jsonl", rows[:50]), expect={"lr": 4.92e-4})), "the warm-up is not over"
    assert not alarms(check(json_lines(tmp_path / "late.jsonl", rows[300:]), expect={"lr": 4.92e-4})), "the log begins late"
    assert found(check(path, expect={"lr": 1e-3}), "rate-overridden").code == "WN607", "never reached"


def test_rate_that_a_resume_replaced(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance), "lr": cosine(s, peak=1e-4)} for s in range(600)]
    rows += [{"step": s, "loss": falling(s, chance), "lr": cosine(s, peak=4.92e-4)} for s in range(500, 800)]
    checked = check(json_lines(tmp_path / "m.jsonl", rows))
    finding = found(checked, "rate-overridden")
    assert finding.code == "WN607" and finding.rows == (500,) and finding.line == 601
    resumed = found(checked, "resumed")
    assert resumed.severity is Severity.NOTE and resumed.rows == (500,) and "from step 599 to step 500" in resumed.message


def test_rate_lowered_at_a_resume_is_no_alarm(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance), "lr": 1e-3} for s in range(600)] + [
        {"step": s, "loss": falling(s, chance), "lr": 3e-4} for s in range(500, 800)
    ]
    assert not alarms(check(json_lines(tmp_path / "m.jsonl", rows)))


def test_several_runs_in_one_file_are_no_alarm(tmp_path: Path) -> None:
    """A sweep that tries higher rates begins again at step 0 each time."""
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance), "lr": rate} for rate in (1e-4, 3e-4, 1e-3) for s in range(300)]
    checked = check(json_lines(tmp_path / "sweep.jsonl", rows))
    assert not alarms(checked) and [f.rows for f in checked.findings if f.what == "resumed"] == [(0,), (0,)]


def test_rate_of_zero_and_rate_that_is_not_a_number(tmp_path: Path) -> None:
    chance = random.Random(0)
    zero = json_lines(tmp_path / "zero.jsonl", [{"step": s, "loss": falling(s, chance), "lr": 0.0} for s in range(30)])
    assert found(check(zero), "rate-zero").severity is Severity.SUSPECT
    broken = json_lines(tmp_path / "nan.jsonl", [{"step": s, "loss": falling(s, chance), "lr": NAN if s > 20 else 1e-3} for s in range(30)])
    assert found(check(broken), "not-finite", "lr").severity is Severity.SUSPECT


def test_rate_that_jumps_in_one_run_is_noted(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance), "lr": 1e-4 if s < 100 else 1e-3} for s in range(200)]
    checked = check(json_lines(tmp_path / "m.jsonl", rows))
    assert found(checked, "rate-jump").rows == (100,) and not alarms(checked)


def test_a_term_of_the_loss_comes_before_the_loss(tmp_path: Path) -> None:
    """All go bad on one line: the term is named first, what is still finite is said."""
    rows = [{"step": s, "loss": NAN if s > 9 else 1.0 / (s + 1), "kl_loss": NAN if s > 9 else 2.0 / (s + 1), "ce_loss": 3.0 / (s + 1)} for s in range(20)]
    first = check(json_lines(tmp_path / "m.jsonl", rows)).findings[0]
    assert first.place == "kl_loss" and "the same at that step: loss" in first.message and "still finite then: ce_loss" in first.message


def test_many_bad_series_are_counted(tmp_path: Path) -> None:
    rows = [{"step": s, **{f"fvu/block.{b}": NAN if s > 5 else 1.0 for b in range(40)}} for s in range(10)]
    checked = check(json_lines(tmp_path / "m.jsonl", rows))
    assert len(checked.findings) == 13 and "and 28 more series" in checked.findings[12].message


MODULES = ("clock", "curve", "entries", "grammar", "lines", "names", "svg", "tables", "wire")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"whynan.forensics.logs.{name}"))
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("loss", Role.LOSS), ("train/total_loss", Role.LOSS), ("eval_loss", Role.LOSS), ("nll", Role.LOSS), ("val_ppl", Role.LOSS), ("LossD", Role.LOSS),
        ("loss_weight", Role.OTHER), ("loss scale", Role.SCALE), ("scale", Role.SCALE), ("amp/grad_scaler", Role.SCALE), ("lr_scale", Role.OTHER),
        ("grad_norm", Role.NORM), ("gnorm", Role.NORM), ("norm", Role.NORM), ("layer_norm", Role.OTHER), ("param_norm", Role.OTHER),
        ("lr", Role.RATE), ("learning_rate", Role.RATE), ("lr-Adam/pg2", Role.RATE), ("Current learning rate", Role.RATE), ("lr_mult", Role.OTHER),
        ("accuracy", Role.OTHER), ("time", Role.OTHER), ("glossary", Role.OTHER), ("nan_count", Role.TALLY),
    ],
)  # fmt: skip
def test_what_a_series_is_by_its_name(name: str, role: Role) -> None:
    assert naming(name).role is role


def test_loss_scale_that_collapses(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance), "loss_scale": max(2.0 ** (16 - max(0, s - 100)), 2.0**-20)} for s in range(200)]
    finding = found(check(json_lines(tmp_path / "m.jsonl", rows)), "loss-scale-collapse")
    assert finding.code == "WN606" and finding.rows == (116,)


def test_nan_counted_by_the_log_itself(tmp_path: Path) -> None:
    """Megatron leaves out the loss of a nan iteration and counts it."""
    line = " iteration {:>8}/    5000 | learning rate: 3.000E-04 |{} loss scale: 1.0 | grad norm: {} | number of nan iterations:   {} |"
    lines = [line.format(s, f" lm loss: {6 - s / 100:.6E} |" if s != 50 else "", "1.2", int(s == 50)) for s in range(1, 100)]
    assert found(check(text(tmp_path / "m.log", lines)), "counted-nan").place == "number of nan iterations"


def test_ranks_with_values_of_their_own(tmp_path: Path) -> None:
    """Of one step's lines the non-finite one counts, whichever rank wrote it; ranks may be a few steps apart."""
    chance = random.Random(0)
    lines = [(s + r / 3, f"[rank{r}] step {s}: loss {NAN if (s, r) == (77, 2) else falling(s, chance):.4f}") for s in range(150) for r in range(4)]
    checked = check(text(tmp_path / "ranks.log", [line for _, line in sorted(lines)]))
    bad = found(checked, "not-finite")
    assert bad.rows == (77,) and bad.row_count == 1 and "1 of 150 values" in bad.message
    assert "4 times: 4 ranks each write its own line" in found(checked, "duplicates").message


def test_gaps_are_noted(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [{"step": s, "loss": falling(s, chance)} for s in (*range(0, 1000, 10), *range(3000, 4000, 10))]
    checked = check(json_lines(tmp_path / "m.jsonl", rows))
    assert "nothing between step 990 and step 3 000" in found(checked, "gap").message and not alarms(checked)


def test_norms_that_recover_only_sometimes_are_suspect_and_dead_ones_bad(tmp_path: Path) -> None:
    chance = random.Random(0)

    def severity(bad: set[int]) -> Severity:
        rows = [{"step": s, "loss": falling(s, chance), "grad_norm": NAN if s in bad else chance.uniform(0.5, 2)} for s in range(300)]
        return found(check(json_lines(tmp_path / "m.jsonl", rows)), "not-finite", "grad_norm").severity

    assert severity({120}) is Severity.NOTE
    assert severity(set(range(100, 140))) is Severity.SUSPECT
    assert severity(set(range(280, 300))) is Severity.BAD
    assert severity(set(range(300))) is Severity.BAD


def test_validation_that_breaks_is_bad(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows: list[dict[str, object]] = [
        {"step": s, "loss": falling(s, chance)} | ({"val_loss": NAN if s > 300 else 3.0} if s % 50 == 0 else {}) for s in range(500)
    ]
    finding = found(check(json_lines(tmp_path / "m.jsonl", rows)), "not-finite", "val_loss")
    assert finding.severity is Severity.BAD and finding.rows == (350,)


def test_names_that_are_allowed_are_not_looked_at(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "m.jsonl", [{"step": s, "loss": 1.0 / (s + 1), "aux_loss": NAN} for s in range(30)])
    assert alarms(check(path)) and not alarms(check(path, allow=("aux_*",)))


def test_whynans_own_metrics_and_broken_lines(tmp_path: Path) -> None:
    """Strings for what is not finite; bare NaN and Infinity; lines that are torn are counted."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "loss": 1.5, "grad_norm": 1}\n{"step": 1, "loss": "nan"}\n{"step": 2, "lo\n\n'
        '{"step": 3, "loss": NaN, "grad_norm": -Infinity}\n[1]\n{"step": 4, "loss": "inf"}\n'
    )
    checked = check(path)
    assert (checked.form, checked.kind, checked.step, checked.size) == ("JSON lines", Kind.LOG, 4, path.stat().st_size)
    assert found(checked, "not-finite", "loss").values == {"first": "nan", "nan": 2, "inf": 1, "values": 4, "runs": 1, "then": 4, "before": 1.5}
    assert "2 broken lines" in found(checked, "broken").message
    json.dumps(checked.findings[0].values, allow_nan=False)


def trainer_state(rows: list[dict[str, object]]) -> str:
    head = {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": 1.0,
        "eval_steps": 500,
        "global_step": len(rows),
        "is_hyper_param_search": False,
    }
    tail = {
        "logging_steps": 1,
        "max_steps": len(rows),
        "num_train_epochs": 1,
        "save_steps": 500,
        "stateful_callbacks": {"TrainerControl": {"args": {"should_log": False}}},
        "train_batch_size": 8,
    }
    return json.dumps(head | {"is_local_process_zero": True, "is_world_process_zero": True, "log_history": rows} | tail, indent=2)


def test_trainer_state(tmp_path: Path) -> None:
    """The history of a Trainer's checkpoint, also of one that was torn off."""
    chance = random.Random(0)
    rows: list[dict[str, object]] = [
        {"epoch": s / 200, "grad_norm": NAN if s > 90 else 1.5, "learning_rate": cosine(s), "loss": 0.0 if s > 90 else falling(s, chance), "step": s}
        for s in range(1, 200)
    ]
    rows.insert(100, {"epoch": 0.5, "eval_loss": NAN, "eval_runtime": 3.1, "step": 100})
    path = tmp_path / "trainer_state.json"
    path.write_text(trainer_state(rows))
    checked = check(path)
    hidden = found(checked, "hidden-nan")
    assert (checked.form, checked.step, hidden.rows, hidden.row_count) == ("Trainer state", 199, (91,), 109)
    assert path.read_text().splitlines()[hidden.line - 1].strip() == "{"
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    torn = check(path)
    assert found(torn, "hidden-nan").rows == (91,) and found(torn, "broken")


def test_list_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps([{"epoch": e, "loss": 1 / (e + 1) if e < 7 else NAN} for e in range(10)]))
    assert found(check(path), "not-finite").rows == (7,)


def test_columns_with_any_delimiter_and_a_header_written_twice(tmp_path: Path) -> None:
    for delimiter in ",;\t":
        rows = (
            ["epoch{0}step{0}train_loss{0}val_loss"]
            + [f"{s // 10}{{0}}{s}{{0}}{'nan' if s > 42 else 1 / (s + 1)}{{0}}" for s in range(50)]
            + ["epoch{0}step{0}train_loss{0}val_loss", "5{0}50{0}1{0}2{0}3{0}4"]
        )
        checked = check(text(tmp_path / "metrics.csv", [r.format(delimiter) for r in rows]))
        assert found(checked, "not-finite").line == 45 and checked.form == "CSV"
        assert "1 broken line " in found(checked, "broken").message


@pytest.mark.parametrize(
    ("line", "step", "name", "where"),
    [
        ("{{'loss': {v}, 'grad_norm': 1.0, 'learning_rate': 4.9e-05, 'epoch': {e}}}", 30, "loss", "epoch 0.3"),
        ("{{'step': {s}, 'loss': np.float64({v})}}", 30, "loss", "step 30"),
        ("iter {s}: loss {v}, time 512.33ms, mfu 1.68%", 30, "loss", "step 30"),
        ("{s} | loss {v} | lr 0.000000e+00 | 2006.12ms | mfu 1.68%", 30, "loss", "step 30"),
        ("[ {s}/1251] loss: {v} (6.95) lr: 1.0e-03", 30, "loss", "30/1 251"),
        ("Epoch: [2]  [{s}/100]  eta: 0:10:01  lr: 0.1  img/s: 300.2  loss: {v} (6.95)  acc1: 0.0", 230, "loss", "epoch 2, 30/100"),
        ("\x1b[1m{s}/100\x1b[0m \x1b[32m━━━━━━━━\x1b[0m \x1b[37m━━━━\x1b[0m 1s 12ms/step - acc: 0.1000 - loss: {v}", 30, "loss", "30/100"),
        (" iteration {s:>8}/    5000 | consumed samples: 43408 | learning rate: 2.999E-04 | lm loss: {v} | loss scale: 1.0 |", 30, "lm loss", "step 30"),
        ('2024-01-01 10:00:00 | INFO | train_inner | {{"epoch": 1, "update": 0.5, "loss": "{v}", "num_updates": "{s}", "lr": "1e-05"}}', 30, "loss", "step 30"),
        (
            "2023/06/09 21:58:41 - mmengine - INFO - Epoch(train) [2][{s}/100] lr: 2.3e-03 eta: 5 days, 23:52:36 time: 1.01 loss: {v}",
            230,
            "loss",
            "epoch 2, 30/100",
        ),
        ("Epoch [3/10], Step [{s}/100], Loss: {v}", 330, "Loss", "epoch 3, 30/100"),
        ("INFO:root:epoch=3 step={s} loss=tensor({v}, device='cuda:0', grad_fn=<NllLossBackward0>)", 30, "loss", "step 30"),
        ("[rank0]: step=1,0{s:02d} loss={v}", 1030, "loss", "step 1 030"),
        (
            "2017-08-20 16:11:46 INFO  Optimizer$:295 - [Epoch 64 74/128][Iteration {s}] At 44.2 records/second. Loss is {v}. Current learning rate is 0.04.",
            30,
            "Loss",
            "step 30",
        ),
        ("Cost loss after iteration {s}: {v}", 30, "Cost loss", "step 30"),
        ("|    train/loss   | {v}  |", 31, "train/loss", "entry 31"),
        ("[{s}]\ttrain-logloss:{v}", 30, "train-logloss", "step 30"),
        ("INFO:tensorflow:loss = {v}, step = {s} (3.123 sec)", 30, "loss", "step 30"),
        ("step:{s} - actor/pg_loss:{v} - actor/lr:1e-06 - critic/score/mean:0.3", 30, "actor/pg_loss", "step 30"),
        ("I0728 23:55:39.066  4259 solver.cpp:218] Iteration {s} (4.71 iter/s, 21.2s/100 iters), loss = {v}", 30, "loss", "step 30"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_lines_as_people_print_them(line: str, step: int, name: str, where: str, value: str, tmp_path: Path) -> None:
    """The step and the name of the first non-finite value, from the line alone."""
    lines = [line.format(s=s, e=round(s / 100, 2), v=value if s >= 30 else f"{5 - s / 20:.4f}") for s in range(40)]
    path = tmp_path / "out.log"
    path.write_text("Starting 4 processes on 10.0.0.1:29500 at 2024-01-01\n" + "\n".join(lines) + "\n", encoding="utf-8")
    finding = found(check(path), "not-finite")
    assert (finding.place, finding.rows, finding.row_count, finding.line, finding.severity) == (name, (step,), 10, 32, Severity.BAD)
    assert finding.message.startswith(f"{value} from {where} to the end, 10 of 40 values")


def test_a_summary_without_a_step_does_not_disturb_the_steps(tmp_path: Path) -> None:
    """Caffe prints each loss again without its step; a nan that is only there counts at the last step."""
    lines = []
    for s in range(0, 4000, 100):
        lines.append(f"solver.cpp:218] Iteration {s} (4.71 iter/s, 21.213s/100 iters), loss = {5 - s / 2000}")
        lines.append(f"solver.cpp:237]     Train net output #0: loss = {'nan' if s == 3000 else 5 - s / 2000} (* 1 = 2.40473 loss)")
    checked = check(text(tmp_path / "caffe.log", lines))
    assert found(checked, "not-finite").rows == (3000,) and len(checked.findings) == 1


def test_series_of_unknown_names(tmp_path: Path) -> None:
    """CycleGAN's names say nothing: what turns nan for good is suspect, an option printed as inf is nothing."""
    lines = ["max_dataset_size: inf"]
    lines += [
        f"(epoch: {s // 10 + 1}, iters: {s % 10 * 100 + 100}, time: 1.294) , D_A: {0.5 + s % 3}, G_A: {'nan' if s > 40 else 1.5 + s % 5}" for s in range(60)
    ]
    checked = check(text(tmp_path / "loss_log.txt", lines))
    finding = found(checked, "not-finite")
    assert (finding.place, finding.severity, finding.row_count) == ("G_A", Severity.SUSPECT, 19) and len(checked.findings) == 1
    assert "from epoch 5, step 200 to the end" in finding.message


def test_progress_bars_drawn_over_themselves(tmp_path: Path) -> None:
    """One line, many drawings; the last drawing of a step holds, and epochs follow each other."""
    bars = "".join(f"\rEpoch {e}:  45%|####  | {n}/50 [00:12<00:14, loss={'nan' if (e, n) >= (1, 20) else 2.5}]" * 2 for e in range(2) for n in range(1, 51))
    path = tmp_path / "out.log"
    path.write_text(bars)
    finding = found(check(path), "not-finite")
    assert finding.message.startswith("nan from epoch 1, 20/50 to the end, 31 of 100 values") and finding.line == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "latin-1"])
def test_text_in_other_encodings(encoding: str, tmp_path: Path) -> None:
    """Output redirected on Windows is UTF-16; bytes that are no UTF-8 are passed over."""
    path = tmp_path / "out.log"
    path.write_bytes("".join(f"größe step {s}: loss {'nan' if s == 8 else 1.5}\n" for s in range(20)).encode(encoding))
    assert found(check(path), "not-finite").rows == (8,)


def event_file(folder: Path, write: object) -> Path:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="torch or tensorboard is not installed")
    with tensorboard.SummaryWriter(folder) as writer:
        write(writer)  # type: ignore[operator]
    return next(folder.glob("events.out.*"))


@pytest.mark.parametrize("style", [False, True], ids=["simple value", "tensor"])
def test_event_files(style: bool, tmp_path: Path) -> None:
    """Written by torch's own writer, in both styles, with pictures, texts and histograms between."""
    chance = random.Random(0)

    def write(writer: object) -> None:
        import torch

        for s in range(300):
            writer.add_scalar("train/loss", NAN if s >= 222 else falling(s, chance), s, new_style=style)  # type: ignore[attr-defined]
            writer.add_scalar("lr", cosine(s), s, new_style=style)  # type: ignore[attr-defined]
            if s % 50 == 0:
                writer.add_histogram("weights", torch.randn(1000), s)  # type: ignore[attr-defined]
                writer.add_image("picture", torch.rand(3, 200, 200), s)  # type: ignore[attr-defined]
                writer.add_text("words", "loss: nan", s)  # type: ignore[attr-defined]
                writer.add_scalar("epoch/acc", 0.5, s // 50, new_style=style)  # type: ignore[attr-defined]

    path = event_file(tmp_path / "runs", write)
    checked = check(path)
    finding = found(checked, "not-finite")
    assert checked.form == "TensorBoard events" and checked.step == 299 and alarms(checked) == [str(finding)]
    assert (finding.place, finding.rows, finding.row_count, finding.line) == ("train/loss", (222,), 78, 0)
    assert checked.facts["series"] == ["train/loss", "lr", "epoch/acc"]
    assert not [f for f in checked.findings if f.what in ("resumed", "duplicates", "gap", "broken")]


def test_event_file_of_a_live_run_and_a_broken_one(tmp_path: Path) -> None:
    """A torn end is normal; a record whose checksum does not fit is counted; a lost frame ends the reading."""
    path = event_file(tmp_path / "runs", lambda w: [w.add_scalar("loss", 1.5 if s < 60 else NAN, s) for s in range(100)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    torn = check(path)
    assert found(torn, "not-finite").row_count == 39 and not [f for f in torn.findings if f.what == "broken"]
    middle = whole.index(struct.pack("<f", NAN), len(whole) // 2)
    path.write_bytes(whole[:middle] + b"\0\0\0\0" + whole[middle + 4 :])
    assert "1 broken line" in found(check(path), "broken").message
    path.write_bytes(whole[: len(whole) // 2] + b"\xff" + whole[len(whole) // 2 :])
    assert found(check(path), "broken")


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 0x7FC0), ("float16", 0x7E00)])
def test_event_tensors_in_half_precision(name: str, bits: int, tmp_path: Path) -> None:
    """A nan in a tensor summary of two bytes, written with TensorBoard's own messages."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

    kind = types_pb2.DT_BFLOAT16 if name == "bfloat16" else types_pb2.DT_HALF
    packed = (tensor_pb2.TensorProto(dtype=kind, half_val=[bits]), tensor_pb2.TensorProto(dtype=kind, tensor_content=struct.pack("<H", bits)))

    def write(writer: object) -> None:
        for step, tensor in enumerate(packed):
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="loss", tensor=tensor)])
            writer._get_file_writer().add_summary(summary, step)  # type: ignore[attr-defined]

    assert found(check(event_file(tmp_path / "runs", write)), "not-finite").row_count == 2


def test_offline_runs_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=tmp_path)
    for s in range(600):
        run.log({"train/loss": NAN if s >= 500 else 1 / (s + 1), "lr": 1e-3, "nested": {"grad_norm": 1.0}, "text": "words " * 50})
    run.finish()
    checked = check(next(tmp_path.rglob("run-*.wandb")))
    finding = found(checked, "not-finite")
    assert checked.form == "W&B offline run" and (finding.place, finding.rows, finding.row_count) == ("train/loss", (500,), 100)
    assert sorted(map(str, checked.facts["series"])) == ["lr", "nested/grad_norm", "train/loss"]


def _orjson(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _pandas(rows: list[dict[str, object]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return "\n".join([",".join(names), *(",".join("" if row.get(n) is None else str(row[n]) for n in names) for row in rows)]) + "\n"


@pytest.mark.parametrize("write", [_orjson, _pandas])
@pytest.mark.parametrize("beside", [{"lr": 0.001}, {}])
def test_a_loss_that_is_empty_to_the_end_is_suspect(write: Callable[[list[dict[str, object]]], str], beside: dict[str, object], tmp_path: Path) -> None:
    """orjson writes null for nan, pandas an empty cell."""
    path = tmp_path / "metrics"
    path.write_text(write([{"step": s, "loss": 2.0 / (1 + s) if s < 40 else None, **beside} for s in range(50)]))
    stops = found(check(path), "stops", "loss")
    assert (stops.severity, stops.rows, stops.row_count) == (Severity.SUSPECT, (40,), 10)


@pytest.mark.parametrize("write", [_orjson, _pandas])
def test_rows_of_another_kind_do_not_make_a_loss_stop(write: Callable[[list[dict[str, object]]], str], tmp_path: Path) -> None:
    """Validations between, a whole test at the end, and a loss that is written every fifth step: none of them is silence."""
    rows: list[dict[str, object]] = []
    for step in range(100):
        rows.append({"step": step, "loss": 2.0 / (1 + step) if step % 5 == 0 else None, "lr": 0.001})
        rows += [{"step": step, "loss": None, "lr": None, "val_loss": 1.0 / (1 + step)}] if step % 25 == 24 else []
    rows += [{"step": 100 + n, "loss": None, "test_loss": 0.5} for n in range(30)]
    (tmp_path / "metrics").write_text(write(rows))
    assert not alarms(check(tmp_path / "metrics"))


def test_an_item_of_a_list_that_is_no_object_is_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps([{"step": s, "loss": NAN if s > 20 else 1.0 / (1 + s)} if s != 10 else None for s in range(30)]))
    checked = check(path)
    assert found(checked, "not-finite", "loss").row_count == 9
    assert "1 broken line" in found(checked, "broken").message


def test_perplexity_may_be_infinite_while_the_loss_is_large_and_finite(tmp_path: Path) -> None:
    def written(losses: list[float]) -> Checked:
        path = tmp_path / "train.log"
        path.write_text("".join(f"step {s} | loss {v} | ppl {'inf' if not v < 700 else 2.5}\n" for s, v in enumerate(losses)))
        return check(path)

    usual = [falling(s, random.Random(s)) for s in range(60)]
    calm = written([900.0, 800.0, *usual])
    assert not alarms(calm) and found(calm, "not-finite", "ppl").severity is Severity.NOTE
    assert found(written([*usual, INF, INF, INF]), "not-finite", "ppl").severity is Severity.BAD


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", "The first run diverged: loss = nan at step 100. We lowered the rate.\n"),
        ("README", "Run it:\n\n    step 1 loss 2.0\n    step 1 loss 2.0\n"),
        ("records.py", '"""\n>>> run()\nstep 1: loss 2.5\nstep 2: loss nan\nstep 3: loss nan\nstep 4: loss nan\n"""\n'),
        ("guide.md", "step 1: loss 2.5\nstep 2: loss nan\nstep 3: loss nan\nstep 4: loss nan\n"),
        ("incidents.jsonl", '{"schema": 1, "step": 35, "symptom": {"place": "loss", "kind": "inf"}, "loss": {"min": "nan"}}\n' * 5),
    ],
)
def test_text_that_quotes_a_log_is_none(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert recognise(Place.of(tmp_path / name)) is None


@pytest.mark.parametrize("name", ["train.log", "slurm-123.out", "log.txt"])
def test_a_short_log_is_taken_for_one_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("epoch 1: loss nan\n")
    assert recognise(Place.of(tmp_path / name)) == "text log"
