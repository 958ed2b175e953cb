"""Where in the user's source a torch call was made: cheap to take, exact to resolve.

While recording, a site is only a code object and an instruction offset (about 1 µs). Files, lines and columns are
looked up when there is something to report.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple

import torch

from whynan.records import NOWHERE, Span

_TORCH_ROOT: Final = os.path.dirname(torch.__file__) + os.sep
_OWN_ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB_ROOT: Final = os.path.dirname(os.__file__) + os.sep
_ENGINE: Final = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_KERAS: Final = os.sep + os.path.join("keras", "src", "")  # what stands between a Keras program and torch, not the layers and losses
_PLUMBING: Final = ("backend" + os.sep, "ops" + os.sep, "utils" + os.sep, "trainers" + os.sep, "models" + os.sep, os.path.join("layers", "layer.py"))
_shown: dict[str, str] = {}  # path inside an installed package: its full path where a capsule was written
_internal: dict[str, bool] = {}  # by file name: hashing a code object hashes all its constants
_installed: dict[str, bool] = {}
_MANY: Final = 10_000  # code objects whose sites are kept


Passer = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]


class Site(NamedTuple):
    """One call in the user's code, unresolved."""

    code: CodeType
    lasti: int


# by the number of a code object, kept with it so that the number stays its own: the calls of a loop share their sites; none are torch's or ours
_sites: dict[int, tuple[CodeType, bool, dict[int, Site] | None]] = {}


def is_internal(code: CodeType) -> bool:
    """Whether a code object belongs to torch, to whynan, to the standard library (contextlib, functools, …) or to what Keras puts around torch."""
    name = code.co_filename
    known = _internal.get(name)
    if known is None:
        stdlib = name.startswith(_STDLIB_ROOT) and "-packages" not in name
        known = _internal[name] = name.startswith((_TORCH_ROOT, _OWN_ROOT, "<frozen")) or stdlib or name.partition(_KERAS)[2].startswith(_PLUMBING)
    return known


def is_installed(code: CodeType) -> bool:
    """Whether a code object belongs to an installed library: in site-packages, or in a folder that `pip install --target` filled."""
    name = code.co_filename
    known = _installed.get(name)
    if known is None:
        known = _installed[name] = "-packages" in name or any(name.startswith(folder + os.sep) and _is_filled(folder) for folder in sys.path[1:] if folder)
    return known


@functools.cache
def _is_filled(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # a zip file, or nothing
        return False


def is_torch(code: CodeType) -> bool:
    """Whether a code object belongs to torch itself."""
    return code.co_filename.startswith(_TORCH_ROOT)


def take_site(depth: int = 1) -> Site | None:
    """Return the innermost frame outside torch, or None when there is none."""
    return take_sites(depth + 1)[0]


def take_sites(depth: int = 1) -> tuple[Site | None, Site | None]:
    """Return the same and, where that frame runs a library, where the program's own code called it."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        _, installed, sites = _sites.get(id(code)) or _begin_sites(code)
        if sites is not None:
            lasti = frame.f_lasti
            return sites.get(lasti) or sites.setdefault(lasti, Site(code, lasti)), _own(frame.f_back) if installed else None
        frame = frame.f_back
    return None, None


def passer_at(site: Site, depth: int = 1) -> Passer:
    """Return a function that passes a call on from a frame which looks like the program's own line.

    torch's warnings name the line that called, and are given once per place: with a line of ours in between, filters would not
    match and the second warning of a program would be taken for a repetition of the first.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code is not site.code:
        frame = frame.f_back
    if frame is None:
        return _pass_on
    code = _pass_on.__code__.replace(co_filename=site.code.co_filename, co_name=site.code.co_name, co_firstlineno=frame.f_lineno)
    passers[id(site)] = passer = FunctionType(code, frame.f_globals, site.code.co_name)
    return passer


_pass_on: Passer = lambda func, args, kwargs: func(*args, **kwargs)  # noqa: E731 (one line: it is that of the program)
passers: dict[int, Passer] = {}  # by the number of a site, which is kept below


def is_passer(code: CodeType) -> bool:
    """Whether a code object is one of ours that only looks like the program's."""
    return code.co_varnames == _pass_on.__code__.co_varnames and code.co_code == _pass_on.__code__.co_code


def forget() -> None:
    """Let go of the program's code and its globals."""
    _sites.clear()
    passers.clear()


def _begin_sites(code: CodeType) -> tuple[CodeType, bool, dict[int, Site] | None]:
    if len(_sites) >= _MANY:  # a program that makes functions all the time
        forget()
    return _sites.setdefault(id(code), (code, is_installed(code), None if is_internal(code) else {}))


def live_site(stop: CodeType, depth: int = 1) -> Site | None:
    """Return the innermost user frame above the frame that runs `stop`, or None when the call came from below it.

    A user's `loss.backward()` inside a replayed step function is below the engine: what the engine runs is not that line.
    """
    frame = live_frame(stop, depth + 1)
    return None if frame is None else Site(frame.f_code, frame.f_lasti)


def live_frame(stop: CodeType, depth: int = 1) -> FrameType | None:
    """Return the frame itself."""
    frame: FrameType | None = sys._getframe(depth)
    known = _internal.get
    while frame is not None:
        code = frame.f_code
        if code is stop or code is _ENGINE:
            return None
        internal = known(code.co_filename)
        if not (is_internal(code) if internal is None else internal):
            return frame
        frame = frame.f_back
    return None


def caller_of(frame: FrameType | None, stop: CodeType) -> Site | None:
    """Return where the user's own code called the library that a frame runs in; nothing where it is no library's."""
    return _own(frame.f_back, stop) if frame is not None and is_installed(frame.f_code) else None


def helped_by(frame: FrameType | None, stop: CodeType) -> Site | None:
    """Return where a library called the function of another of its files that a frame runs in; nothing where the program itself did, or torch."""
    before = frame.f_back if frame is not None and is_installed(frame.f_code) else None
    if frame is None or before is None or before.f_code is stop or not is_installed(before.f_code) or is_internal(before.f_code):
        return None
    return None if before.f_code.co_filename == frame.f_code.co_filename else Site(before.f_code, before.f_lasti)


def asked_for(thing: object) -> Site | None:
    """Return where an object that is being made was asked for: outside its own `__init__`, in the program's own code where there is some."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_internal(frame.f_code) or _makes(frame, thing)):
        frame = frame.f_back
    return None if frame is None else _own(frame) or Site(frame.f_code, frame.f_lasti)


def _makes(frame: FrameType, thing: object) -> bool:
    code = frame.f_code
    return code.co_name == "__init__" and code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is thing


def _own(frame: FrameType | None, stop: CodeType | None = None) -> Site | None:
    while frame is not None and frame.f_code is not stop and frame.f_code is not _ENGINE:
        if not is_internal(frame.f_code) and not is_installed(frame.f_code):
            return Site(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


def positions(site: Site) -> tuple[int, int, int, int]:
    """Return line, end line, column, end column of the instruction at a site (zeros where unknown)."""
    found = next(islice(site.code.co_positions(), site.lasti // 2, None), (None,) * 4)
    line, end_line, column, end_column = found
    if line is None:
        lines = [ln for start, end, ln in site.code.co_lines() if start <= site.lasti < end and ln]
        line = lines[0] if lines else site.code.co_firstlineno
    return line, end_line or line, column or 0, end_column or 0


def resolve(site: Site | None, label: str = "") -> Span:
    """Look up file, lines, columns and source text of a site."""
    if site is None:
        return NOWHERE
    line, end_line, column, end_column = positions(site)
    file = site.code.co_filename
    text = linecache.getline(file, line)
    # co_positions counts UTF-8 bytes; editors and carets count characters
    raw = text.encode()
    column = len(raw[:column].decode(errors="ignore"))
    if end_line == line:
        end_column = len(raw[:end_column].decode(errors="ignore"))
    return Span(
        file=shorten(file),
        line=line,
        end_line=end_line,
        column=column,
        end_column=end_column,
        function=_function(site.code),
        code=text.strip(),
        label=label,
        indent=len(text) - len(text.lstrip()) if text else -1,
    )


def _function(code: CodeType) -> str:
    """Return the name of the function that a code object is, or that a comprehension stands in; nothing for a module."""
    if not code.co_name.endswith(("comp>", "expr>")):
        return code.co_name if code.co_name != "<module>" else ""
    around = [name for name in code.co_qualname.split(".") if name != "<locals>" and not name.endswith(("comp>", "expr>"))]
    return around[-1] if around else ""


def _cell_of(file: str) -> str | None:
    """Return `In [3]` for the file name that a notebook gave to its third cell; the source can be looked up under it."""
    shells = sys.modules.get("IPython.core.interactiveshell")
    shell = shells.InteractiveShell._instance if shells is not None else None
    named = shell.compile.format_code_name(file) if shell is not None else None
    if named is None:
        return None
    cell = str(named[1]).replace("In[", "In [")
    if file in linecache.cache:
        linecache.cache[cell] = linecache.cache[file]
    return cell


def show_as(file: str) -> None:
    """Show a file of an installed package under the path it had on another machine."""
    tail = _installed_tail(file)
    if tail:
        _shown[tail] = file


def _installed_tail(file: str) -> str:
    return file.replace("\\", "/").partition("-packages/")[2]


def shorten(file: str) -> str:
    """Make a path relative to the working directory where it lies below it."""
    if (cell := _cell_of(file)) is not None:
        return cell
    if _shown and (tail := _installed_tail(file)) in _shown:
        return _shown[tail]
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):  # another drive, a working directory that is gone
        return file
    return file if relative.startswith("..") else relative
