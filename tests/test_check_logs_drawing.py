"""The curves of a log: in a terminal, as SVG, as PNG."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from log_files import INF, NAN, falling, json_lines
from test_check_logs import check

from whynan.errors import UsageError
from whynan.forensics.addresses import Place
from whynan.forensics.logs import plot
from whynan.forensics.logs.curve import Curve
from whynan.forensics.logs.font import GLYPHS
from whynan.forensics.logs.png import Canvas
from whynan.forensics.logs.sheet import Box, Line


@pytest.fixture
def log(tmp_path: Path) -> Path:
    chance = random.Random(0)
    rows = [
        {
            "step": s,
            "loss": NAN if s >= 700 else falling(s, chance, 0.01, 10.0, slow=60),
            "grad_norm": INF if s == 699 else NAN if s > 699 else chance.uniform(0.5, 2),
        }
        for s in range(1000)
    ]
    return json_lines(tmp_path / "run <1>.jsonl", rows)


def test_terminal_plot(log: Path) -> None:
    """At most 78 columns, a logarithmic axis, an x wherever the loss is not finite and nowhere else, steps below."""
    lines = check(log).plot.splitlines()
    assert len(lines) <= 14 and max(map(len, lines)) <= 78
    assert "loss, log axis" in lines[0] and "x not finite" in lines[0]
    field = lines[1][11:].ljust(66)
    assert set(field[:46]) == {" "} and set(field[47:]) == {"x"}
    assert lines[-1].split() == ["0", "499", "999"]
    drawn = [line[11:] for line in lines[2:-2]]
    assert all(any("\u2800" < c <= "\u28ff" for c in row) for row in drawn), "the curve falls through every row of a logarithmic axis"
    assert not any(c != " " for row in drawn for c in row[47:])


def test_terminal_plot_of_a_flat_range_is_linear(tmp_path: Path) -> None:
    plotted = check(json_lines(tmp_path / "m.jsonl", [{"step": s, "loss": 2 + s / 100} for s in range(100)])).plot
    assert "log axis" not in plotted and "x not finite" not in plotted
    assert plotted.splitlines()[1].split()[0] == "2.99" and "2.5" in plotted


def test_svg_says_the_first_bad_step_and_leaves_gaps(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "curve.svg"
    plot(Place.of(log), target)
    root = ElementTree.fromstring(target.read_text())
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "run <1>.jsonl" in texts and "loss (log axis)" in texts and "step" in texts
    assert "nan at step 700" in texts and "inf at step 699" in texts and "300 of 1 000 values not finite" in texts
    assert {"0.1", "1", "10"} <= set(texts) and {"0", "200", "400"} <= set(texts)
    curves = [e for e in root.iter("{http://www.w3.org/2000/svg}polyline") if e.get("stroke") == "#1565c0"]
    right = max(float(p.split(",")[0]) for e in curves for p in str(e.get("points")).split())
    assert right == pytest.approx(90 + 880 * 699 / 999, abs=0.1), "the curve ends at the last finite step"
    assert "http" not in target.read_text().replace("http://www.w3.org/2000/svg", "")


def decode(data: bytes) -> tuple[int, int, bytes]:
    """A reader of its own for the PNG that is written: 8-bit RGB rows without a filter, every checksum looked at."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, size = 8, b"", (0, 0)
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        size = struct.unpack(">II", body[:8]) if kind == b"IHDR" else size
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    rows, stride = zlib.decompress(packed), 3 * size[0] + 1
    assert len(rows) == stride * size[1] and not any(rows[::stride])
    return size[0], size[1], b"".join(rows[y * stride + 1 : (y + 1) * stride] for y in range(size[1]))


def test_png_shows_curve_gap_and_words(log: Path, tmp_path: Path) -> None:
    target = tmp_path / "curve.png"
    plot(Place.of(log), target)
    width, height, pixels = decode(target.read_bytes())
    assert (width, height) == (2000, 1532)
    colours = [{pixels[3 * (y * width + x) : 3 * (y * width + x) + 3] for y in range(140, 720)} for x in (400, 1700)]
    blue, rose = bytes.fromhex("1565c0"), bytes.fromhex("fbe3e4")
    assert blue in colours[0] and rose not in colours[0] and rose in colours[1] and blue not in colours[1]


def test_canvas_draws_where_it_is_told() -> None:
    canvas = Canvas(10, 6)
    canvas.draw(Box(2, 1, 3, 2, "#0000ff"))
    canvas.draw(Line(((0, 5), (9, 5)), "#ff0000", 1))
    canvas.draw(Line(((-50, -50), (-5, 90)), "#ff0000", 3))
    _, _, pixels = decode(canvas.encode())
    blue = {(i // 3 % 10, i // 30) for i in range(0, len(pixels), 3) if pixels[i : i + 3] == b"\0\0\xff"}
    assert blue == {(x, y) for x in (2, 3, 4) for y in (1, 2)}
    assert pixels[150:180] == b"\xff\0\0" * 10


def test_every_printable_letter_has_a_shape() -> None:
    assert set(GLYPHS) == {chr(c) for c in range(32, 127)} and len(set(GLYPHS.values())) == 95
    assert all(len(columns) == 5 for columns in GLYPHS.values())


def test_other_endings_and_places_that_cannot_be_written_are_refused(log: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "curve.pdf", tmp_path / "missing" / "curve.svg"):
        with pytest.raises(UsageError, match="--plot"):
            plot(Place.of(log), target)


def test_thinning_keeps_extremes_and_every_bad_stretch() -> None:
    """A million values in 64 stretches: the one spike, the one dip and the one nan are still there."""
    curve = Curve(64)
    for step in range(100_000):
        curve.add(step, {31_337: 1e9, 77_777: -5.0, 50_001: NAN}.get(step, 1.0))
    assert len(curve.stretches) <= 64
    assert max(s.high for s in curve.stretches) == 1e9 and min(s.low for s in curve.stretches) == -5.0
    assert [s.bad_at for s in curve.stretches if s.bad_at is not None] == [50_001]
    assert all(a.last < b.first for a, b in zip(curve.stretches, curve.stretches[1:], strict=False))
