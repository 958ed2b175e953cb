"""Damage real checkpoints, data and logs of every format in thousands of ways, and see that each is either read or refused in one line.

    python benchmarks/fuzz_check.py --count 20000

Every file goes through all of `whynan check`, from the decision what it is to the printed report, in a worker process with a limit on
its memory; a file that takes longer than the wall limit, raises, is caught by the net for what nobody foresaw, ends the worker, or makes
it grow is reported with its number, and `--only NUMBER` repeats it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WALL = 10  # seconds for one file
SPACE = 3 << 30  # bytes of address space of a worker: torch and numpy map one and a half themselves
GROWTH = 200 << 20  # bytes of resident memory one file may add
EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 10_000_000_000)
OPCODES = b"\x80\x95(0.12NIJKMLFGSTUVXBC\x8a\x8b\x8c\x8d\x8e\x96]ael)t\x85\x86\x87}dsu\x8f\x90\x91c\x93ioR\x81\x92bPQpqr\x94ghj\x82\x83\x84\x97\x98"


def mutate(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Damage a file, most often once."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if changed:
            chance.choice((_flip, _truncate, _splice, _extreme, _opcode, _delete, _repeat, _digits, _nest))(changed, others, chance)
    return bytes(changed)


def mutate_inside(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Damage the pickle or header alone and pack it again, so that what surrounds it stays whole."""
    if data[:2] == b"PK":
        packed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as new:
            victim = next((n for n in old.namelist() if n.endswith("data.pkl")), chance.choice(old.namelist()))
            for name in old.namelist():
                new.writestr(name, _damaged_pickle(old.read(name), others, chance) if name == victim else old.read(name))
        return packed.getvalue()
    if data[8:9] == b"{":
        size = struct.unpack("<Q", data[:8])[0]
        header = mutate(data[8 : 8 + size], others, chance)
        return struct.pack("<Q", len(header)) + header + data[8 + size :]
    return mutate(data, others, chance)


def _damaged_pickle(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    return soup(chance) if chance.random() < 0.3 else mutate(data, others, chance)


def soup(chance: random.Random) -> bytes:
    """A pickle that no program would write: calls of known names with whatever lies on the stack."""
    names = (b"torch._utils _rebuild_tensor_v2", b"torch._utils _rebuild_qtensor", b"torch._utils _rebuild_sparse_tensor", b"collections OrderedDict")
    names += (b"_codecs encode", b"numpy dtype", b"numpy._core.multiarray _reconstruct", b"numpy._core.multiarray scalar", b"torch FloatStorage", b"os system")
    names += (b"torch._tensor _rebuild_from_type_v2", b"copyreg _reconstructor", b"argparse Namespace", b"builtins set", b"torch Size", b"builtins getattr")
    steps = (
        b"(",
        b")",
        b"]",
        b"}",
        b"N",
        b"\x88",
        b"K\x03",
        b"J\xff\xff\xff\xff",
        b"X\x01\x00\x00\x00a",
        b"C\x04\x00\x00\x00\x00",
        b"t",
        b"\x85",
        b"\x86",
        b"\x87",
    )
    steps += (b"R", b"R", b"b", b"s", b"u", b"e", b"a", b"2", b"0", b"\x94", b"q\x01", b"h\x00", b"h\x01", b"Q", b"\x81", b"d", b"l", b"o", b"1", b"\x90")
    steps += (b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x20tQ",)
    made = bytearray(b"\x80\x02}\x94](")
    for _ in range(chance.randint(1, 60)):
        made += chance.choice(steps) if chance.random() < 0.8 else b"c" + chance.choice(names).replace(b" ", b"\n") + b"\n"
    return bytes(made + b"e" * chance.randint(0, 1) + b".")


def _at(data: bytearray, chance: random.Random) -> int:
    """A place in the file, most often near its beginning or its end, where headers lie."""
    size = len(data)
    edge = min(size, 2048)
    return chance.choice((chance.randrange(edge), size - 1 - chance.randrange(edge), chance.randrange(size)))


def _flip(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        data[_at(data, chance)] ^= 1 << chance.randrange(8)


def _truncate(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    del data[_at(data, chance) :]


def _splice(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    other = chance.choice(others)
    start = chance.randrange(len(other))
    at = _at(data, chance)
    piece = other[start : start + chance.randint(1, 512)]
    data[at : at + chance.choice((0, len(piece)))] = piece


def _extreme(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    at, code = _at(data, chance), chance.choice("BHIQ")
    number = struct.pack(f"<{code}", chance.choice(EXTREMES) & ((1 << 8 * struct.calcsize(code)) - 1))
    data[at : at + len(number)] = number


def _opcode(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        data[_at(data, chance)] = chance.choice(OPCODES)


def _delete(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    at = _at(data, chance)
    del data[at : at + chance.randint(1, 64)]


def _repeat(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    at = _at(data, chance)
    piece = data[at : at + chance.randint(1, 64)]
    data[at:at] = piece * chance.choice((1, 2, 100, 5000))


def _digits(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    """Change a number written in digits, as headers and indices hold them."""
    places = [i for i, b in enumerate(data[:8192]) if 48 <= b <= 57]
    if places:
        at = chance.choice(places)
        data[at : at + 1] = chance.choice((b"0", b"9" * 20, b"-1", b"1e9", b"null", b"[", b"NaN"))


def _nest(data: bytearray, others: list[bytes], chance: random.Random) -> None:
    at = _at(data, chance)
    data[at:at] = chance.choice((b"[", b"{", b'{"a":', b"(", b"]", b"}", b"\x85")) * chance.choice((1, 10, 1000, 100_000))


def one(number: int, originals: list[Path], folder: Path) -> Path:
    """Write the damaged thing that belongs to a number, most often under its own suffix; a folder has one of its files damaged."""
    chance = random.Random(number)  # noqa: S311 - the same file for the same number
    original = originals[number % len(originals)]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    target = folder / f"damaged{chance.choice((original, original, original, *originals)).suffix}"
    if original.is_dir():
        shutil.copytree(original, target)
        victim = chance.choice(sorted(p for p in target.rglob("*") if p.is_file()))
    else:
        victim = target
        shutil.copy(original, target)
    others = [p.read_bytes() for p in originals if p.is_file()]
    if chance.random() < 0.03 and original.is_dir():
        victim.unlink()
    else:
        change = mutate_inside if chance.random() < 0.6 else mutate
        victim.write_bytes(change(victim.read_bytes(), others, chance))
    return target


def look(path: Path) -> str:
    """Check it as the command does; returns what came of it."""
    from whynan.forensics.checking import look as check
    from whynan.forensics.nets import INTERNAL
    from whynan.report import annotations, checks

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check([path])
    json.loads(checks.as_json(report), parse_constant=_no_constant)
    said = checks.text(report, everything=True), annotations.github(report)
    everything = (*report.checked, *(m for h in report.histories for m in h.members), *report.comparisons)
    for reason in (c.unreadable for c in everything if c.unreadable):
        if INTERNAL in reason:
            raise AssertionError(reason)
        if "\n" in reason or len(reason) > 600:
            raise AssertionError(f"a reason that is no line: {reason[:80]!r}")
    assert all(said) or report.ok
    return "refused" if any(c.unreadable for c in everything) else "read"


def _no_constant(name: str) -> None:
    raise AssertionError(f"a bare {name} in JSON")


def work(originals: list[Path], numbers: Iterator[int]) -> None:
    """The worker: say each number before it is tried, and what came of it after."""
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    signal.signal(signal.SIGALRM, _too_long)
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        for number in numbers:
            path = one(number, originals, Path(folder) / "work")
            _say({"number": number})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            signal.alarm(WALL)
            try:
                answer, detail = look(path), ""
            except BaseException as error:
                answer, detail = type(error).__name__, "".join(traceback.format_exception(error)[-3:])
            signal.alarm(0)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            if grown > GROWTH:
                answer, detail = "grew", f"{grown >> 20} MiB"
            _say({"number": number, "answer": answer, "detail": detail})


def shared_memory() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - a private folder is made in it


class TooLongError(BaseException):
    """Not an `Exception`: a reader that takes any error of a driver for damage must not take this one."""


def _too_long(signum: int, frame: object) -> None:
    raise TooLongError(f"more than {WALL} s")


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def drive(folder: Path, first: int, count: int) -> tuple[Counter[str], list[dict[str, object]]]:
    """Run workers until every number was tried; one that dies is replaced and its number reported."""
    answers: Counter[str] = Counter()
    faults: list[dict[str, object]] = []
    at, end = first, first + count
    while at < end:
        last, done = _one_worker(folder, at, end, answers, faults)
        if done == end:
            break
        faults.append({"number": last, "answer": "the worker died or hung"})
        answers["died"] += 1
        at = last + 1
    return answers, faults


def _one_worker(folder: Path, at: int, end: int, answers: Counter[str], faults: list[dict[str, object]]) -> tuple[int, int]:
    command = [sys.executable, __file__, "--worker", str(at), "--end", str(end), "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    last, done = at, at
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as worker:  # noqa: S603 - ourselves
        assert worker.stdout is not None
        while select.select([worker.stdout], [], [], WALL + 60)[0] and (line := worker.stdout.readline()):
            message = json.loads(line)
            last = message["number"]
            if "answer" in message:
                done = last + 1
                answers[message["answer"]] += 1
                if message["answer"] not in ("read", "refused"):
                    faults.append(message)
        worker.kill()
    return last, done


def write_originals(folder: Path) -> list[Path]:
    """Write one whole file or folder of every format."""
    import checkpoint_files
    import other_files

    return sorted([*checkpoint_files.write_all(folder), *other_files.write_all(folder)])


def main() -> int:
    """Parse the arguments, run, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first number: each is another damaged file, always the same one")
    parser.add_argument("--only", type=int, help="repeat one number, with its traceback")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        originals = sorted(options.folder.iterdir())
        work(originals, iter(range(options.worker, options.end)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        originals = write_originals(Path(folder))
        if options.only is not None:
            with tempfile.TemporaryDirectory() as target:
                print(look(one(options.only, originals, Path(target) / "work")))
            return 0
        start = time.perf_counter()
        answers, faults = drive(Path(folder), options.first, options.count)
    for fault in faults[:50]:
        print(f"{fault['number']}: {fault['answer']} {fault.get('detail', '')}")
    print(f"{sum(answers.values())} damaged files in {time.perf_counter() - start:.0f} s: {dict(answers)}; {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
