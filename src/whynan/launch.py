"""Run a user's script or module as `python` would, with a guard around it."""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import os
import pkgutil
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException

from whynan.capsule.sites import is_internal, is_passer
from whynan.engine.guard import Guard
from whynan.errors import TrainingStopped, UsageError
from whynan.spawned import STOPPED, Children

_OURS = ("click", "safetensors")  # libraries that we have loaded by now, and torch has not


def run_script(guard: Guard, path: str, args: list[str]) -> int:
    """Run a file, or the `__main__` in a directory or a zip application, as `__main__`; return the exit status it would have had."""
    if (importer := pkgutil.get_importer(path)) is not None:
        return _run_application(guard, path, args, importer)
    code = _compiled(path)
    if code is None:
        return 1
    main = ModuleType("__main__")
    full = os.path.abspath(path)
    main.__dict__.update(__file__=full, __builtins__=builtins, __cached__=None, __annotations__={})
    main.__loader__ = SourceFileLoader("__main__", full)
    sys.modules["__main__"] = main
    sys.argv = [path, *args]
    _look_first_in(os.path.dirname(os.path.realpath(path)))
    return _guarded(guard, lambda: exec(code, main.__dict__))  # the user's own program


def _run_application(guard: Guard, path: str, args: list[str], importer: Any) -> int:
    """Run a directory or zip file that holds a `__main__`."""
    if importer.find_spec("__main__") is None:
        raise UsageError(f"{path} is a {'directory' if os.path.isdir(path) else 'zip file'} without `__main__`; give the script itself, or -m for a module")
    sys.argv = [path, *args]
    _look_first_in(os.path.abspath(path))
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    sys.modules["__main__"] = main
    return _guarded(guard, lambda: runpy._run_module_as_main("__main__", alter_argv=False))  # type: ignore[attr-defined]  # what `python` itself calls


def _look_first_in(place: str) -> None:
    """Have the program's imports look here first, also for what has the name of a library that we have loaded and it has not."""
    sys.path[0] = place
    for library in _OURS:
        if library in sys.modules and PathFinder.find_spec(library, [place]) is not None:
            for name in [n for n in sys.modules if n.partition(".")[0] == library]:
                del sys.modules[name]  # our modules keep theirs


def run_module(guard: Guard, name: str, args: list[str]) -> int:
    """Run a module as `python -m` would."""
    sys.argv = [name, *args]
    _look_first_in(os.getcwd())
    if not _findable(name):
        raise UsageError(f"no module named {name!r}, or it cannot be run with -m")
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    sys.modules["__main__"] = main
    return _guarded(guard, lambda: runpy._run_module_as_main(name))  # type: ignore[attr-defined]  # what `python -m` itself calls


def _findable(name: str) -> bool:
    import importlib.util

    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        return spec is not None
    except (ImportError, ValueError):
        return False


def _compiled(path: str) -> CodeType | None:
    """Return the code of a script; of what is not Python nothing, once that is said in Python's words."""
    try:
        with io.open_code(path) as file:
            source = file.read()
    except FileNotFoundError:
        raise UsageError(f"no such script: {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    try:
        return compile(source, os.path.abspath(path), "exec")
    except (SyntaxError, ValueError) as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        return None


def _guarded(guard: Guard, program: object) -> int:
    children = Children(guard)
    gc.freeze()  # torch and whynan stay to the end: a collection that the tape's objects bring about need not go through them
    try:
        with children.watched(), _watched(guard):
            program()  # type: ignore[operator]
    except TrainingStopped:
        _flush()
        return STOPPED
    except SystemExit as stop:
        if guard.stopped or children.stopped:
            return STOPPED
        raise SystemExit(stop.code) from None
    except BaseException as error:
        if guard.together.left_behind:
            _flush()
            return STOPPED
        if children.stopped and isinstance(error, ProcessExitedException):
            return STOPPED  # of a process that was stopped torch says only that it ended
        sys.excepthook = _without_us(sys.excepthook)
        raise
    return STOPPED if guard.stopped or children.stopped else 0


@contextlib.contextmanager
def _watched(guard: Guard) -> Iterator[None]:
    """Watch the program to its end: where threads of its own go on, until Python has waited for them; the guard is closed by `atexit` then."""
    guard.open()
    _hear_threads(guard)
    try:
        yield
    except BaseException as error:
        guard.failed_with(error)
        raise
    finally:
        thread = guard.recorder.thread
        if guard.recorder.moved and not thread.daemon and thread not in pools._threads_queues and thread is not threading.current_thread():
            thread.join()  # Python would, and its end may be ours to report
        if all(t.daemon or t is threading.current_thread() for t in threading.enumerate()):
            guard.close()


def _hear_threads(guard: Guard) -> None:
    """Explain what the watched thread raises, where it is not the main one; one that the policy stopped ends without a traceback."""
    usual = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None:
            if args.thread is guard.recorder.thread:
                guard.failed_with(error)
            _cut(error)
        if args.exc_type is not TrainingStopped:
            usual(threading.ExceptHookArgs((args.exc_type, error, error and error.__traceback__, args.thread)))

    threading.excepthook = hook


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def _without_us(hook: Callable[..., object]) -> Callable[..., None]:
    """Give a hook, Python's or one of the script's own, the traceback that the script would have had."""

    def quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = trace
        _cut(error)
        hook(kind, error, error.__traceback__)

    return quiet


def _cut(error: BaseException) -> None:
    """Cut our frames out of the tracebacks of an exception and of those behind it."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = without_own_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _starts_with_us(trace: TracebackType | None) -> bool:
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == __file__ and code.co_name == "<lambda>":
            return True
        trace = trace.tb_next
    return False


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Cut the frames of whynan (and of the machinery that started it) out of a traceback."""
    kept: list[TracebackType] = []
    started = not _starts_with_us(trace)  # a chained exception begins in the user's own frames
    while trace is not None:
        code = trace.tb_frame.f_code
        own = (f"{os.sep}whynan{os.sep}" in code.co_filename and is_internal(code)) or is_passer(code)
        started = started or (code.co_filename == __file__ and code.co_name == "<lambda>")
        if started and not own:
            kept.append(trace)
        trace = trace.tb_next
    following: TracebackType | None = None
    for entry in reversed(kept):
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following
