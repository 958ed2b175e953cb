"""Logs that are hostile, torn, huge or odd: no crash, no hang, no memory jump, one clear line."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_files import HEALTHY, NAN, falling, json_lines, text
from test_check_logs import check, found

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.findings import Kind
from whynan.forensics.logs import check_log, plot, recognise
from whynan.forensics.logs.grammar import read_line
from whynan.forensics.wishes import Wishes


def survives(path: Path) -> None:
    """Whatever a file holds, it is read or refused in one line, and its findings are valid JSON."""
    for wishes in (Wishes(), Wishes(kind=Kind.LOG, expect={"lr": 1e-3})):
        try:
            checked = check_log(Place.of(path), wishes)
        except Unreadable as why:
            assert str(why) and "\n" not in str(why)
            continue
        json.dumps([dict(f.values) for f in checked.findings] + [dict(checked.facts)], allow_nan=False)
        assert all(len(line) <= 78 for line in checked.plot.splitlines())


MUTANTS = ("", "NaN", "-Infinity", "1e999", "9" * 400, "\0", "\r", "\n", '"', "{", "]", ",", "/", "\xff", "step 5", "-1", "é" * 50, " " * 3000, "[" * 3000)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_logs_are_survived(data: st.DataObject, tmp_path: Path) -> None:
    """Healthy logs, cut and with things put into them, in any place."""
    kind = data.draw(st.sampled_from(["transformer", "lightning", "bars", "megatron", "nano", "policy_zero", "missing"]))
    whole = HEALTHY[kind](tmp_path, random.Random(0)).read_text()[: data.draw(st.integers(0, 6000))]
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(whole)))
        whole = whole[:at] + data.draw(st.sampled_from(MUTANTS)) + whole[at + data.draw(st.integers(0, 20)) :]
    path = tmp_path / "mutant"
    path.write_text(whole, encoding="utf-8", errors="replace")
    survives(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    head=st.sampled_from([b"", b":W&B\x1c\xbe\x00", b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\x09", b"\xff\xfe", b'{"log_history": [', b"[{"]),
    rest=st.binary(max_size=600),
)
def test_any_bytes_are_survived(head: bytes, rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(head + rest)
    survives(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=6)), max_size=6), end=st.integers(0, 10**6))
def test_mutated_event_files_are_survived(cuts: list[tuple[int, bytes]], end: int, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="torch or tensorboard is not installed")
    source = tmp_path / "source"
    if not source.exists():
        with tensorboard.SummaryWriter(tmp_path / "runs") as writer:
            for s in range(40):
                writer.add_scalar("loss", s, s, new_style=s % 2 == 0)
        source.write_bytes(next((tmp_path / "runs").iterdir()).read_bytes())
    data = source.read_bytes()
    for at, piece in cuts:
        at %= len(data)
        data = data[:at] + piece + data[at + len(piece) :]
    path = tmp_path / "mutant"
    path.write_bytes(data[: end % (len(data) + 1)])
    survives(path)


@pytest.mark.parametrize(
    "line",
    [
        "a" * 200_000,
        "step " + " " * 200_000 + "1",
        "loss: " * 40_000,
        "1/" * 100_000,
        "loss=" + "9" * 200_000,
        "a b " * 50_000,
        ": 1" * 60_000,
        "'" * 200_000,
        "epoch" * 40_000,
        "x.y/" * 50_000,
    ],
    ids=lambda line: line[:12],
)
def test_long_lines_take_linear_time(line: str) -> None:
    """A line of 200 000 characters of any kind: pytest's own limit is the clock; a quadratic pattern would take hours."""
    read_line(line, 1)


def test_memory_is_bounded_whatever_the_length(tmp_path: Path) -> None:
    """Five times the lines, the same memory; a line of 20 MB is cut."""
    chance = random.Random(0)
    peaks = []
    for count in (8_000, 40_000):
        path = json_lines(
            tmp_path / "m.jsonl",
            [{"step": s, "loss": falling(s, chance), "grad_norm": NAN if s % 7 == 0 else 1.0} for s in range(count)],
        )
        tracemalloc.start()
        check(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(f"peak {peaks[0] / 1e6:.1f} MB for 8 000 lines, {peaks[1] / 1e6:.1f} MB for 40 000")
    assert peaks[1] < 1.5 * peaks[0] < 20e6
    path = tmp_path / "long.log"
    path.write_text("step 1: loss 2.0\nstep 2: loss nan " + "x" * 20_000_000 + "\nstep 3: loss 2.0\n")
    tracemalloc.start()
    assert found(check(path), "not-finite").rows == (2,)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6


def test_more_names_than_can_be_kept_are_said(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "m.jsonl", [{"step": s, "loss": 1.0 / (s + 1), f"layer{s}": 1.0} for s in range(2000)])
    assert "more than 1 024 names" in found(check(path), "crowded").message


def test_every_byte_is_told_to_the_progress_bar(tmp_path: Path) -> None:
    for kind in ("transformer", "lightning", "bars", "nano"):
        path = HEALTHY[kind](tmp_path, random.Random(0))
        told: list[int] = []
        check_log(Place.of(path), Wishes(tick=told.append))
        assert sum(told) == path.stat().st_size


def test_a_folder_a_pipe_and_a_missing_file_are_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "pipe", "missing"):
        with pytest.raises(Unreadable):
            check(tmp_path / name)


def test_remote_logs_are_read_where_they_are(tmp_path: Path) -> None:
    """Through fsspec, from memory: the same answer as from the disk."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    path = json_lines(tmp_path / "m.jsonl", [{"step": s, "loss": NAN if s > 20 else 1.0 / (s + 1)} for s in range(40)])
    with fsspec.open("memory://logs/m.jsonl", "wb") as file:
        file.write(path.read_bytes())
    remote = check_log(Place.of("memory://logs/m.jsonl"), Wishes())
    assert remote.findings == check(path).findings and remote.size == path.stat().st_size


def test_a_long_preamble_hides_no_log(tmp_path: Path) -> None:
    """A printed model of more than 64 KB comes before the first loss."""
    lines = [f"(layer{n}): Linear(in_features=4096, out_features=4096, bias=True)" for n in range(3000)] + [
        f"step {s}: loss {'nan' if s > 5 else 2.5}" for s in range(10)
    ]
    path = text(tmp_path / "out.log", lines)
    assert recognise(Place.of(path)) and found(check(path), "not-finite").line == 3007


def test_torch_is_not_needed(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "m.jsonl", [{"step": s, "loss": NAN} for s in range(9)])
    program = "import sys\nfor name in ('torch', 'numpy', 'tensorboard'): sys.modules[name] = None\n"
    program += "from pathlib import Path\nfrom whynan.forensics.addresses import Place\nfrom whynan.forensics.logs import check_log, plot\n"
    program += "place = Place.of(sys.argv[1])\nprint(check_log(place).findings[0])\nplot(place, Path(sys.argv[1] + '.png'))"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert "bad: loss: nan from step 0 to the end, 9 of 9 values" in done.stdout


@pytest.mark.parametrize(
    "values", [[NAN], [math.inf, -math.inf], [1e308, -1e308, 1e308], [5e-324, 1.0], [0.0], [-3.0, -2.0], [1.0] * 5, [1e-300, 1e300]], ids=str
)
def test_any_values_can_be_drawn(values: list[float], tmp_path: Path) -> None:
    path = json_lines(tmp_path / "m.jsonl", [{"step": 10 * s, "loss": v} for s, v in enumerate(values)])
    assert check(path).plot
    for ending in ("svg", "png"):
        plot(Place.of(path), tmp_path / f"c.{ending}")
        assert (tmp_path / f"c.{ending}").stat().st_size > 500
