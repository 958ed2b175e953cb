"""Faults of the surroundings and of whynan itself: the training goes on, and the files that can be written are complete."""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Sandbox

from whynan.errors import let_through

TRAIN = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for step in range(8):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        if BAD and step == 4:
            loss = loss + torch.log(x.sum() * 0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    for name, tensor in model.state_dict().items():
        print(name, tensor.double().sum().item().hex())
"""
HEALTHY = TRAIN.replace("BAD and ", "False and ")
BAD = TRAIN.replace("BAD and ", "")


def unwatched(box: Sandbox, source: str) -> str:
    """Return what a program prints without whynan."""
    path = box.write(source, "plain.py")

    def work() -> int:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})  # noqa: S102 (the program is ours)
        return 0

    return box.in_child(work).out


# -- workers and forks --------------------------------------------------------------------------------------------

LOADERS = """
    import multiprocessing, os, sys, torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.randn(3, generator=torch.Generator().manual_seed(index)) if index != 5 else torch.full((3,), float("nan"))

    def train(**options):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Rows(), batch_size=4, **options):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
        return model.weight.sum().item().hex()

    if __name__ == "__main__":
        print(train())
        for method in ("fork", "spawn", "forkserver"):
            print(train(num_workers=1, multiprocessing_context=method))
        print(os.getpid() == os.getppid(), __name__)
    else:
        print("worker", __name__)
"""


def test_workers_of_every_start_method(box: Sandbox) -> None:
    """DataLoader workers by fork, spawn and forkserver: the same numbers as without workers, one incident each, all files whole."""
    box.write(LOADERS)
    done = box.whynan("train.py")
    assert done.status == 0, done.err
    weights = [line for line in done.out.splitlines() if line.startswith(("0x", "-0x"))]
    assert len(weights) == 4
    assert len(set(weights)) == 1
    assert done.out.count("worker __mp_main__") == 2
    assert [i["step"] for i in done.incidents] == [1, 4, 7, 10]
    assert [row["step"] for row in done.metrics] == list(range(12))
    assert "internal error" not in done.err


FORKS = """
    import os, sys, torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps, bad=-1):
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).pow(2).mean() / (step != bad)
            loss.backward()
            optimizer.step()

    train(5)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        train(3, bad=1)
        print("child ends")
        ENDING
    _, status = os.waitpid(child, 0)
    train(5, bad=2)
    print("child status", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("ending", ["sys.exit(5)", "sys.stdout.flush(); os._exit(5)"])
def test_forked_child_keeps_out_of_the_files(box: Sandbox, ending: str) -> None:
    """A child made by os.fork ends as without whynan and writes nothing into its parent's files."""
    done = box.watched(FORKS.replace("ENDING", ending))
    assert done.out == "child ends\nchild status 5\n"
    assert done.status == 0
    assert [row["step"] for row in done.metrics] == list(range(10))
    assert [i["step"] for i in done.incidents] == [7]


def test_process_pool_of_the_script(box: Sandbox) -> None:
    """A multiprocessing pool by fork, in the middle of a watched run, works and leaves the files alone."""
    source = """
        import multiprocessing, torch

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            weight = torch.nn.Parameter(torch.randn(3, generator=generator))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            weight.square().sum().backward()
            optimizer.step()
            return weight.sum().item() == weight.sum().item()

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(2):
            weight.square().sum().backward()
            optimizer.step()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(work, range(4)))
    """
    done = box.watched(source)
    assert (done.out, done.err, done.status) == ("[True, True, True, True]\n", "", 0)
    assert [row["step"] for row in done.metrics] == [0, 1]


# -- the disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/proc/whynan", "plain-file/run"])
def test_run_directory_that_cannot_be_made(box: Sandbox, place: str) -> None:
    """A run directory that cannot be made is said once; the diagnosis is printed and the training goes on."""
    (box.folder / "plain-file").write_text("")
    done = box.forked("run", "--run-dir", place, str(box.write(BAD)))
    assert done.status == 0
    assert len(done.out.splitlines()) == 9
    assert len(re.findall("cannot write the run directory", done.err)) == 1
    assert "error[WN" in done.err
    assert "Traceback" not in done.err
    assert "wrote" not in done.err


@pytest.mark.parametrize("full", [["metrics.jsonl"], ["incidents.jsonl"], ["metrics.jsonl", "incidents.jsonl"]])
def test_full_disk(box: Sandbox, full: list[str]) -> None:
    """No space left on the device: said once in a line, no traceback, the training and the diagnosis go on."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    box.run_dir.mkdir()
    for name in full:
        (box.run_dir / name).symlink_to("/dev/full")
    done = box.watched(BAD)
    assert done.status == 0
    assert done.out == box.watched(BAD, "--run-dir", str(box.folder / "other")).out
    assert len(re.findall("cannot write the run directory .No space left", done.err)) == 1
    assert "error[WN" in done.err
    assert "Traceback" not in done.err
    assert "internal error" not in done.err


def test_disk_that_is_full_when_the_report_is_written(box: Sandbox) -> None:
    """No space for the report: said once, and no half of it is left."""

    def fill() -> None:
        import whynan.report.writing

        def fail(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device")

        whynan.report.writing.replace_text = fail

    done = box.watched(BAD, before=fill)
    assert done.status == 0
    assert len(re.findall("cannot write the run directory .No space left", done.err)) == 1
    assert "internal error" not in done.err
    assert not list(box.run_dir.glob("*report*"))


def test_disk_that_fills_up(box: Sandbox) -> None:
    """A disk that fills up in the middle of a long run, seen by a process of its own until its end."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    box.run_dir.mkdir()
    (box.run_dir / "metrics.jsonl").symlink_to("/dev/full")
    box.write(HEALTHY)
    done = box.whynan("train.py")
    assert done.status == 0
    assert done.err.count("\n") == 1, done.err
    assert "No space left" in done.err


def test_run_directory_removed_meanwhile(box: Sandbox) -> None:
    """A script that deletes the run directory costs files, not the training."""
    done = box.watched(
        "import shutil, pathlib\n" + textwrap.dedent(BAD).replace("    x =", f"    shutil.rmtree({str(box.run_dir)!r}, ignore_errors=True)\n    x =")
    )
    assert done.status == 0, done.err
    assert len(done.out.splitlines()) == 9
    assert "Traceback" not in done.err


def test_stderr_that_is_closed(box: Sandbox) -> None:
    """A script that closes stderr does not make whynan's words an error."""
    done = box.watched("import sys; sys.stderr.close()\n" + textwrap.dedent(BAD))
    assert done.status == 0
    assert len(done.out.splitlines()) == 9
    assert len(done.incidents) == 1
    assert done.report


@pytest.mark.parametrize("how", ["the shell closes it", "the script closes it"])
def test_what_is_said_without_a_stderr(box: Sandbox, how: str) -> None:
    """Where there is no stderr, stdout stays the script's own, and no file of whynan's takes the number of stderr."""
    plain = unwatched(box, BAD)
    box.write(BAD if how == "the shell closes it" else "    import os; os.close(2)" + BAD)
    command = f"{sys.executable} -m whynan run --policy observe --save-every 3 --run-dir run train.py"
    done = box._process(["sh", "-c", f"{command} 2>&-" if how == "the shell closes it" else command])
    assert (done.out, done.status) == (plain, 0)
    assert [row["step"] for row in done.metrics] == list(range(8))
    assert [i["step"] for i in done.incidents] == [4]
    assert done.report


def test_path_that_the_script_clears(box: Sandbox) -> None:
    """What whynan imports late is found where it was at the start; the script's own path stays as the script has it."""
    program = textwrap.dedent(BAD).replace("for step", "import sys; sys.path.clear(); sys.path_importer_cache.clear()\nfor step", 1)
    box.write(program + "print(sys.path)\n")
    done = box.whynan("train.py")
    assert done.status == 0, done.err
    assert done.out.endswith("[]\n")
    assert "WN101" in done.err
    assert "internal error" not in done.err
    assert done.report


# -- faults of whynan's own ---------------------------------------------------------------------------------------


def breaking(where: str) -> Callable[[], None]:
    """Return what makes one of whynan's functions fail."""

    def fail(*_: object, **__: object) -> object:
        raise ZeroDivisionError("planted")

    def plant() -> None:
        module, _, path = where.partition(":")
        *owners, name = path.split(".")
        owner = importlib.import_module(module)
        for step in owners:
            owner = getattr(owner, step)
        assert hasattr(owner, name), f"{where} is gone: choose another place to break"
        setattr(owner, name, fail)

    return plant


AT_ANY_STEP = [
    "whynan.engine.noticing:Noticing.look",
    "whynan.engine.noticing:Noticing.losses",
    "whynan.engine.session:Session.next_step",
    "whynan.engine.session:Session.write_metrics",
    "whynan.engine.stepping:may_break",
    "whynan.engine.zeroing:Zeroing._note",
    "whynan.capsule.recorder:Recorder.note",
    "whynan.engine.guard:Guard._note_optimizer",
    "whynan.capsule.recorder:take_sites",
    "whynan.capsule.recorder:take_rng",
    "whynan.capsule.recorder:Recorder._close",
    "whynan.capsule.roots:ModuleState",
    "whynan.capsule.recorder:sort_of",
    "whynan.capsule.tape.tape:Tape.add",
    "whynan.capsule.tape.tape:Tape.roll",
    "whynan.report.journal:Journal.metrics",
]


@pytest.mark.parametrize("where", AT_ANY_STEP)
def test_internal_error_while_watching(box: Sandbox, where: str) -> None:
    """An error inside whynan: said once, with how to report it, and the training ends as without whynan, bit for bit."""
    done = box.watched(HEALTHY, before=breaking(where))
    assert done.status == 0, done.err
    assert done.out == unwatched(box, HEALTHY)
    assert_told_once(box, done.err)


def test_nothing_is_told_of_what_happened_after_watching_ended(box: Sandbox) -> None:
    """Weights that go bad when nobody looks any more are none of the step that was looked at last."""

    def break_late() -> None:
        from whynan.engine.noticing import Noticing

        look, calls = Noticing.look, iter(range(99))

        def fail(self: Noticing, *given: object) -> None:
            if next(calls) == 3:
                raise ZeroDivisionError("planted")
            look(self, *given)

        Noticing.look = fail  # type: ignore[method-assign]

    done = box.watched(HEALTHY_THEN_BAD, before=break_late)
    assert done.out.split() == ["False"], done.err
    assert not done.incidents
    assert "error[WN" not in done.err
    assert_told_once(box, done.err)


HEALTHY_THEN_BAD = """
import torch
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    x = torch.randn(8, 4)
    loss = model(x * float("nan") if step == 4 else x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(bool(model.weight.isfinite().all()))
"""
IN_A_DIAGNOSIS = [
    "whynan.engine.diagnosing:diagnose",
    "whynan.engine.acting:Acting.act",
    "whynan.engine.acting:gather",
    "whynan.diagnosis:locate",
    "whynan.diagnosis:judge",
    "whynan.capsule.replay:Program.play",
    "whynan.report.journal:Journal.incident",
    "whynan.report.terminal:diagnosis",
    "whynan.report.terminal:farewell",
    "whynan.report.markdown:render",
    "whynan.report.html:render",
    "whynan.engine.guard:watched",
]


@pytest.mark.parametrize("where", IN_A_DIAGNOSIS)
def test_internal_error_in_a_diagnosis(box: Sandbox, where: str) -> None:
    """An error while a bad step is diagnosed or told: said once, and the training goes on to its end."""
    done = box.watched(BAD, before=breaking(where))
    assert done.status == 0, done.err
    assert len(done.out.splitlines()) == 9
    assert_told_once(box, done.err)


@pytest.mark.parametrize("where", ["whynan.engine.acting:Acting.act", "whynan.engine.recovering:Recovering.hold_averages"])
def test_a_step_known_to_be_bad_is_left_out_whatever_fails(box: Sandbox, where: str) -> None:
    """Its update is not made, and what could not be put back is not said to be as before."""
    program = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(8, 4)
    if step == 5:
        x[0] = float("nan")
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
print(all(bool(t.isfinite().all()) for t in model.state_dict().values()))
"""
    done = box.watched(program, before=breaking(where))
    assert done.out.split() == ["True"], done.err
    assert_told_once(box, done.err)
    assert "as before it" not in done.err
    if "hold_averages" in where:
        assert "batch skipped (1 of 10 allowed); putting back what it had changed has failed" in done.err
        assert "as before it" not in (box.run_dir / "report.md").read_text(encoding="utf-8")


def assert_told_once(box: Sandbox, err: str) -> None:
    """The fault is said once, names the error, says where to report it; the details are in a file."""
    assert len(re.findall("internal error", err)) == 1, err
    assert "planted" in err
    assert "report" in err
    details = (box.run_dir / "internal-error.txt").read_text(encoding="utf-8")
    assert "ZeroDivisionError: planted" in details
    assert "whynan 0" in details


def test_too_little_memory_for_a_replay(box: Sandbox) -> None:
    """Too little memory to replay: the step is still noticed, skipped and told, with the reason why the place is not known."""

    def exhaust() -> None:
        import whynan.diagnosis

        def fail(*_: object, **__: object) -> object:
            raise MemoryError

        whynan.diagnosis.locate = fail

    done = box.watched(BAD, before=exhaust)
    assert done.status == 0
    assert "internal error" not in done.err
    (incident,) = done.incidents
    assert incident["action"]["taken"] == "skipped"
    assert incident["origin"]["exact"] is False
    assert "memory" in " ".join(incident["cause"]["evidence"]) + incident["origin"]["note"]


def test_stop_is_not_swallowed(box: Sandbox) -> None:
    """A script that catches every exception of a step is stopped all the same, with status 3."""
    source = """
        import torch

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(30):
            try:
                optimizer.zero_grad()
                torch.log(weight.sum() * 0).backward()
                optimizer.step()
            except Exception as error:
                print("caught", type(error).__name__)
        print("reached the end")
    """
    done = box.watched(source)
    assert done.status == 3
    assert done.out == ""
    assert len(done.incidents) == 4


def test_files_of_a_run_that_raises(box: Sandbox) -> None:
    """A script that dies of its own exception after a bad step leaves complete files."""
    done = box.watched(textwrap.dedent(BAD) + "raise RuntimeError('of the script')\n")
    assert done.status == 1
    assert "RuntimeError: of the script" in done.err
    assert len(done.incidents) == 1
    assert [row["step"] for row in done.metrics] == list(range(8))
    assert "WN101" in done.report


def test_ordinary_exception_is_no_incident(box: Sandbox) -> None:
    """A mistake of the script's own that has nothing to do with numbers (shapes that do not fit) is not diagnosed."""
    done = box.watched("import torch\ntorch.nn.Linear(2, 2)(torch.ones(3))\n")
    assert done.status == 1
    assert "shapes cannot be multiplied" in done.err
    assert done.incidents == []
    assert "error[" not in done.err


def test_index_outside_its_table_is_explained(box: Sandbox) -> None:
    """A token id outside its embedding raises as without whynan, and is explained (WN703)."""
    done = box.watched("import torch\ntorch.nn.Embedding(4, 2)(torch.tensor([1, 9]))\n")
    assert done.status == 1
    assert "IndexError: index out of range in self" in done.err
    assert [i["cause"]["code"] for i in done.incidents] == ["WN703"]
    assert done.incidents[0]["origin"]["line"] == 2


def test_files_are_there_while_the_run_goes_on(box: Sandbox) -> None:
    """An incident is on disk as soon as it is closed: a run that is killed hard afterwards has lost nothing of it."""
    source = textwrap.dedent(BAD).replace("    scheduler.step()", "    scheduler.step()\n    if step == 5: __import__('os')._exit(9)")
    done = box.watched(source)
    assert done.status == 9
    assert [i["step"] for i in done.incidents] == [4]
    assert [row["step"] for row in done.metrics][:4] == list(range(4))


def test_path_is_a_dangling_folder(box: Sandbox) -> None:
    """A working directory that is deleted under the script does not disturb it."""
    folder = box.folder / "gone"
    folder.mkdir()
    source = f"import os\nos.chdir({str(folder)!r}); os.rmdir({str(folder)!r})\n" + textwrap.dedent(BAD)
    done = box.forked("run", str(box.write(source)))
    assert done.status == 0, done.err
    assert len(done.out.splitlines()) == 9
    assert "Traceback" not in done.err
    assert not Path(folder).exists()


# -- signals of the program's own ---------------------------------------------------------------------------------

ALARM = """
    import signal, torch

    class Late(Exception):
        pass

    def late(signum, frame):
        raise Late

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model[0].register_forward_hook(lambda module, args, result: result * 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train(bad=False):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).pow(2).mean()
        (loss + torch.log(loss.detach() * (not bad))).backward()
        optimizer.step()

    for step in range(3):
        train()
    signal.signal(signal.SIGUSR1, late)
    caught = 0
    for step in range(4):
        try:
            train(bad=step == 1)
        except Late:
            caught += 1
    print("caught", caught)
    before = model[0].weight.clone()
    train()
    print("goes on", not torch.equal(before, model[0].weight), torch.is_grad_enabled())
    train(bad=True)
"""
INTERRUPTED = [
    "whynan.engine.noticing:Noticing.losses",
    "whynan.engine.session:Session.next_step",
    "whynan.engine.zeroing:Zeroing._note",
    "whynan.capsule.recorder:take_sites",
    "whynan.capsule.stack:pop",
    "whynan.capsule.recorder:Recorder._close",
    "whynan.capsule.recorder:Recorder._hooked",
    "whynan.capsule.tape.tape:Tape.add",
    "whynan.engine.diagnosing:diagnose",
    "whynan.diagnosis:locate",
    "whynan.capsule.replay:Program._play_entry",
    "whynan.trace.tracer:Tracer._before",
]


def interrupting(where: str) -> Callable[[], None]:
    """Return what has a signal come once after one of whynan's functions, when the program listens to it."""

    def plant() -> None:
        module, _, path = where.partition(":")
        *owners, name = path.split(".")
        owner = importlib.import_module(module)
        for step in owners:
            owner = getattr(owner, step)
        original = getattr(owner, name)
        came: list[str] = []

        @functools.wraps(original)
        def interrupted(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            if not came and callable(signal.getsignal(signal.SIGUSR1)):
                came.append(where)
                signal.raise_signal(signal.SIGUSR1)
            return result

        setattr(owner, name, interrupted)

    return plant


@pytest.mark.parametrize("where", INTERRUPTED)
def test_exception_of_a_signal_handler_arrives(box: Sandbox, where: str) -> None:
    """A handler of the program's own raises while whynan's code runs: the program gets it, and is watched as before."""
    done = box.watched(ALARM, before=interrupting(where))
    assert done.status == 0, done.err
    assert done.out == "caught 1\ngoes on True True\n"
    assert "internal error" not in done.err
    assert done.incidents[-1]["cause"]["code"] == "WN101"
    assert done.incidents[-1]["step"] == done.metrics[-1]["step"]


class Preempted(Exception):
    """What handlers of the tests raise."""


def _resets(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Preempted


class _Callable:
    def __call__(self, *_: object) -> None:
        raise Preempted

    def method(self, number: int, _frame: object, more: int = 0) -> None:
        raise Preempted(number + more)


HANDLERS = {
    "resets itself": _resets,
    "callable": _Callable(),
    "method": _Callable().method,
    "partial": functools.partial(_Callable.method, _Callable()),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_exceptions_of_signal_handlers_are_known(handler: Callable[..., None]) -> None:
    """Whatever the handler is, what it raises is told from a failure of ours."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except Preempted as error:
        with pytest.raises(Preempted) as caught:
            let_through(error)
        assert caught.value is error
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_exceptions_of_ours_are_no_signals() -> None:
    """A failure that no handler raised is not raised again."""
    try:
        _Callable().method(10, None)
    except Preempted as error:
        let_through(error)


# -- memory -------------------------------------------------------------------------------------------------------

TIGHT = """
    import resource
    import torch

    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(512))

        def forward(self, x):
            return torch.relu(x * self.weight)

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Gate() for _ in range(16)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmPeak"))

    for step in range(6):
        x = torch.ones(16384, 512)
        loss = model(x).square().mean()
        if step == 3:
            loss = loss + torch.log(x.sum() * 0)
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            resource.setrlimit(resource.RLIMIT_AS, (peak() + (96 << 20), -1))
        cache = torch.empty(HELD << 18) if step == 3 else None  # megabytes that the replay will miss and the training does not
        optimizer.step()
        del cache
    print("steps", step + 1, all(p.isfinite().all() for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs a limit on the address space and /proc")
@pytest.mark.parametrize(("held", "code"), [(400, "WN101"), (700, "WN901")])
def test_memory_really_runs_out(box: Sandbox, held: int, code: str) -> None:
    """A replay that runs out of memory says so and the training goes on; a bad loss is still found where a forward pass without graph fits."""
    path = box.write(TIGHT.replace("HELD", str(held)))
    done = box.whynan(str(path), timeout=240)
    assert (done.out.split(), done.status) == (["steps", "6", "True"], 0)
    assert "internal error" not in done.err
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"], incident["action"]["taken"]) == (3, code, "skipped")
    if code == "WN901":
        assert incident["origin"]["exact"] is False
        assert "not seen: there was too little memory to replay the step" in done.err
    else:
        assert incident["origin"]["code"] == "loss = loss + torch.log(x.sum() * 0)"
        assert "not proven: there was too little memory for another replay" in done.err
