"""Progress bars of the program stay whole: what a terminal shows at the end, bar by bar and line by line."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
import traceback
from pathlib import Path
from typing import NoReturn

import pytest
from conftest import Sandbox

pyte = pytest.importorskip("pyte", reason="pyte, the terminal in the tests, is not installed here")

TRAIN = """
import sys, time, torch
{setup}
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(i):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
    x = x * 0 if i == 3 else x
    optimizer.zero_grad()
    loss = torch.sqrt((model(x) - model.bias).pow(2).sum(-1)).mean()
    loss.backward()
    optimizer.step()

{loop}
"""
BARS = {
    "tqdm": ("from tqdm import tqdm", "for i in tqdm(range(6), desc='epoch', mininterval=0):\n    step(i)", ["epoch: 100%"]),
    "tqdm.auto": ("from tqdm.auto import trange", "for i in trange(6, desc='epoch', mininterval=0):\n    step(i)", ["epoch: 100%"]),
    "on stdout": ("from tqdm import tqdm", "for i in tqdm(range(6), desc='epoch', file=sys.stdout, mininterval=0):\n    step(i)", ["epoch: 100%"]),
    "nested": (
        "from tqdm import tqdm",
        "for e in tqdm(range(2), desc='epoch', mininterval=0):\n"
        "    for i in tqdm(range(4), desc='batch', mininterval=0, leave=False):\n        step(i + 4 * e)",
        ["epoch: 100%"],
    ),
    "nested and left": (
        "from tqdm import tqdm",
        "outer = tqdm(range(2), desc='epoch', position=0, mininterval=0)\nfor e in outer:\n"
        "    for i in tqdm(range(4), desc=f'batch {e}', position=1, mininterval=0):\n        step(i + 4 * e)\nouter.close()",
        ["epoch: 100%", "batch 1: 100%"],
    ),
    "rich progress": ("from rich.progress import track", "for i in track(range(6), description='epoch'):\n    step(i)\n    time.sleep(0.01)", ["epoch ━"]),
    "rich, stderr its own": (
        "from rich.progress import Progress",
        "with Progress(redirect_stderr=False) as p:\n    t = p.add_task('epoch', total=6)\n"
        "    for i in range(6):\n        step(i)\n        p.advance(t)\n        time.sleep(0.15)",
        ["epoch ━"],
    ),
    "rich on stderr": (
        "from rich.console import Console\nfrom rich.live import Live",
        "with Live('epoch ...', console=Console(stderr=True)) as live:\n"
        "    for i in range(6):\n        step(i)\n        live.update(f'epoch {i} of 6')\n        time.sleep(0.15)",
        ["epoch 5 of 6"],
    ),
}
MESSAGE = ("error[WN501]: infinite slope", "   = values: (model(x) - model.bias).pow(2)", "   = more: whynan explain WN501")


def shown(box: Sandbox, setup: str, loop: str) -> list[str]:
    """Run a program under whynan in a terminal of 100 columns; return its lines, without trailing blanks."""
    box.write(TRAIN.format(setup=setup, loop=loop))
    pid, terminal = pty.fork()
    if pid == 0:
        _child(box)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 100, 0, 0))
    screen = pyte.Screen(100, 60)
    stream = pyte.ByteStream(screen)
    while data := _read(terminal):
        stream.feed(data)
    os.close(terminal)
    lines = [line.rstrip() for line in screen.display]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "\n".join(lines)
    return lines


def _child(box: Sandbox) -> NoReturn:
    """Be a process that was started in a terminal; the fork has no streams of its own yet."""
    status = 70
    try:
        from whynan.commands.main import main

        time.sleep(0.1)  # the size of the terminal is set by then
        os.environ.pop("NO_COLOR", None)
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="60")
        sys.stdout, sys.stderr = open(1, "w", closefd=False, buffering=1), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115 (stay open)
        os.chdir(box.folder)
        status = main(["run", "--run-dir", str(box.run_dir), "train.py"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _read(terminal: int) -> bytes:
    if not select.select([terminal], [], [], 60)[0]:
        return b""
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize("name", list(BARS))
def test_a_diagnosis_stands_above_the_bar_and_the_bar_is_whole(tmp_path: Path, name: str) -> None:
    setup, loop, bars = BARS[name]
    if setup.startswith("from tqdm"):
        pytest.importorskip("tqdm")
    lines = shown(Sandbox(tmp_path), setup, loop)
    page = "\n".join(lines)
    for text in MESSAGE:
        assert any(line.startswith(text) for line in lines), page
    begin = next(n for n, line in enumerate(lines) if line.startswith("error["))
    end = next(n for n, line in enumerate(lines) if "= more:" in line)
    assert not any(word in line for line in lines[begin : end + 1] for word in ("epoch", "batch 0:", "batch:")), page
    for bar in bars:
        assert sum(line.startswith(bar) for line in lines) == 1, page
        assert next(n for n, line in enumerate(lines) if line.startswith(bar)) > end, page
    words = {bar.split()[0].rstrip(":") for bar in bars}
    assert all(line.startswith(("epoch", "batch 0: 100%", "batch 1: 100%")) for line in lines if line.startswith(tuple(words))), page


def test_a_bar_in_a_file_is_left_alone(box: Sandbox) -> None:
    pytest.importorskip("tqdm")
    lines = shown(box, "from tqdm import tqdm\nlog = open('bar.log', 'w')", "for i in tqdm(range(6), file=log):\n    step(i)")
    assert any(line.startswith("error[WN501]") for line in lines)
    assert "whynan" not in (box.folder / "bar.log").read_text()
    assert not any("%" in line for line in lines if "skipped" not in line)


def test_the_displays_of_rich_are_not_imported_for_it(box: Sandbox) -> None:
    done = box.whynan(str(box.write(TRAIN.format(setup="", loop="for i in range(6):\n    step(i)\nprint('rich.live' in sys.modules)"))))
    assert done.out == "False\n"
    assert "error[WN501]" in done.err
