"""The user's source a capsule carries: which files define the classes, functions and places of a step.

Text only. Nothing of it runs unless whoever replays the capsule says `--trust`.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.metadata
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

from whynan.capsule.sites import Site, is_internal, positions, shorten
from whynan.capsule.trusted import find_class
from whynan.records import Json

LIMIT = 4 << 20  # bytes of one source file
_INSTALLED = tuple({os.path.realpath(p) + os.sep for p in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))})


@dataclass(slots=True)
class Source:
    """One file."""

    file: str  # as code objects name it
    shown: str  # as reports name it
    text: str
    stored: str  # in the capsule
    module: str = ""
    package: str = ""
    main: bool = False
    runs: bool = False  # its definitions are needed for a replay
    globals: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        raw = self.text.encode()
        return {
            "path": self.stored, "shown": self.shown, "module": self.module, "package": self.package, "main": self.main, "runs": self.runs,
            "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(),
        }  # fmt: skip


class Sources:
    """Collects files by need."""

    def __init__(self) -> None:
        self.files: dict[str, Source | None] = {}
        self.packages: dict[str, str] = {}
        self.imports: set[str] = set()
        self._seen: set[int] = set()
        self._stored: set[str] = set()
        self.alive: list[object] = []

    def number(self, source: Source) -> int:
        """Return the place of a file in the list the capsule holds."""
        return [s for s in self.files.values() if s is not None].index(source)

    def listed(self) -> list[Source]:
        """Return the files in order."""
        return [s for s in self.files.values() if s is not None]

    def of_file(self, file: str) -> Source | None:
        """Take a file in, if its text can be had."""
        if file not in self.files:
            lines = linecache.getlines(file)
            text = "".join(lines)
            fit = bool(lines) and len(text) <= LIMIT
            self.files[file] = Source(file, shorten(file), text, self._name_for(shorten(file))) if fit else None
        return self.files[file]

    def _name_for(self, shown: str) -> str:
        path = PurePath(shown)
        parts = [_clean(p) for p in path.parts] if not path.is_absolute() and ".." not in path.parts else [_clean(path.name)]
        stem = "/".join(parts).removesuffix(".py") or "code"
        name, number = f"source/{stem}.py", 1
        while name in self._stored:
            number += 1
            name = f"source/{stem}-{number}.py"
        self._stored.add(name)
        return name

    def site(self, site: Site | None) -> Json:
        """Write a place down so that it can be found again in the carried text."""
        if site is None:
            return None
        source = self.of_file(site.code.co_filename)
        number = self.number(source) if source is not None else None
        code = site.code
        place: dict[str, Json] = {"source": number, "shown": shorten(code.co_filename), "name": code.co_qualname, "first": code.co_firstlineno}
        return {**place, "lasti": site.lasti, "at": list(positions(site))}

    def module(self, module: ModuleType) -> str:
        """Name a module that an object holds."""
        if is_users(module):
            self._take_module(module.__name__)
        else:
            self._package(module.__name__)
        return module.__name__

    def class_(self, cls: type) -> dict[str, Json] | None:
        """Say where a class is defined, taking its file in; for installed packages its name and version."""
        module = sys.modules.get(cls.__module__)
        if module is not None and not is_users(module):
            self._package(cls.__module__)
            found: Any = module
            for part in cls.__qualname__.split("."):
                found = getattr(found, part, None)
            return {"package": cls.__module__, "name": cls.__qualname__} if found is cls else None
        source = self._take_module(cls.__module__)
        if source is None:
            return None
        if id(cls) not in self._seen:
            self._seen.add(id(cls))
            self.alive.append(cls)
            for method in _functions_of(cls):
                self._names_in(method)
            self._names_of_body(source, cls)
        return {"source": self.number(source), "name": cls.__qualname__, "line": _first_line(cls)}

    def function(self, function: FunctionType) -> dict[str, Json] | None:
        """Do the same for a function."""
        code, home = function.__code__, function.__globals__.get("__name__", "")  # __module__ and __qualname__ may be those of a wrapped function
        module = sys.modules.get(home)
        place: dict[str, Json] = {"name": code.co_qualname, "line": code.co_firstlineno}
        if module is not None and not is_users(module):
            self._package(home)
            return {"package": home, **place}
        source = self._take_module(home)
        if source is None or os.path.abspath(code.co_filename) != os.path.abspath(source.file):
            return None
        self._names_in(function)
        return {"source": self.number(source), **place}

    def _take_module(self, name: str) -> Source | None:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None:
            return None
        source = self.of_file(_code_file(module, file))
        if source is not None and not source.runs:
            source.runs, source.main = True, name == "__main__"
            spec = getattr(module, "__spec__", None)
            source.module = (spec.name if spec is not None else "") if source.main else name
            source.package = getattr(module, "__package__", "") or ""
            source.globals = {}
            for parent in _parents(source.package if source.main else name):
                self._take_module(parent)
            self._imports_of(module)
        return source

    def _imports_of(self, module: ModuleType) -> None:
        """Take in the user's own modules that this one imports."""
        for value in list(vars(module).values()):
            home = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
            if home is not None and home is not module and is_users(home) and (isinstance(value, ModuleType | type) or callable(value)):
                self._take_module(home.__name__)

    def _names_in(self, function: FunctionType) -> None:
        """Note the global variables a function reads, and those of the user's functions and classes it names."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.alive.append(function)
        space = function.__globals__
        module = sys.modules.get(space.get("__name__", ""))
        if module is None or not is_users(module):
            return
        source = self._take_module(module.__name__)
        for name in _global_names(function.__code__):
            if name in space:
                self._note(source, name, space[name], function.__code__)

    def _names_of_body(self, source: Source, cls: type) -> None:
        """Note the global variables that the class statement itself reads: bases, decorators, defaults, class attributes."""
        tree = find_class(_parsed(source.text), cls.__qualname__, _first_line(cls))
        space = vars(sys.modules[cls.__module__])
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Name) and node.id in space:
                self._note(source, node.id, space[node.id], _NO_CODE)

    def _note(self, source: Source | None, name: str, value: Any, code: CodeType) -> None:
        if isinstance(value, ModuleType):
            if is_users(value):
                self._take_module(value.__name__)
                for attribute in set(_all_names(code)):
                    self._follow(vars(value).get(attribute))
            return
        if isinstance(value, FunctionType | type) and self._follow(value):
            return
        if source is not None and name not in source.globals and not (name.startswith("__") and name.endswith("__")):
            source.globals[name] = value

    def _follow(self, value: Any) -> bool:
        """Look into a function or class; return whether its own definition brings it."""
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if not isinstance(value, FunctionType | type) or module is None:
            return False
        if not is_users(module):
            return True
        if isinstance(value, type):
            self.class_(value)
        else:
            self._names_in(value)
        return vars(module).get(value.__name__) is value

    def _package(self, module: str) -> None:
        top = module.partition(".")[0]
        self.imports.add(module)
        if top in sys.stdlib_module_names or top in ("torch", "whynan") or top in self.packages:
            return
        try:
            self.packages[top] = importlib.metadata.version((importlib.metadata.packages_distributions().get(top) or [top])[0])
        except (importlib.metadata.PackageNotFoundError, OSError):
            self.packages[top] = ""


_NO_CODE = compile("", "", "exec")


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def is_users(module: ModuleType) -> bool:
    """Whether a module is the user's own: Python source outside torch, the standard library and installed packages."""
    if module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return file is not None and _users_file(file)


@functools.cache
def _users_file(file: str) -> bool:
    installed = os.path.realpath(file).startswith(_INSTALLED) or f"-packages{os.sep}" in file
    return file.endswith(".py") and not installed and not is_internal(compile("", file, "exec"))


def _code_file(module: ModuleType, file: str) -> str:
    """Return the file name as the module's code objects spell it."""
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            named = value.__code__.co_filename
            if os.path.basename(named) == os.path.basename(file):
                return named
    return os.path.abspath(file)


def _parents(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [p for i in range(1, len(parts) + 1) if (p := ".".join(parts[:i])) in sys.modules and p != "__main__"]


def _functions_of(cls: type) -> Iterator[FunctionType]:
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        if module is None or not is_users(module):
            continue
        for value in vars(base).values():
            for candidate in (value, getattr(value, "__func__", None), getattr(value, "fget", None), getattr(value, "func", None)):
                plain = inspect.unwrap(candidate) if callable(candidate) else candidate
                if isinstance(plain, FunctionType):
                    yield plain


def _first_line(cls: type) -> int:
    known = vars(cls).get("__firstlineno__")  # Python 3.13
    if known is not None:
        return int(known)
    return min((f.__code__.co_firstlineno for f in _functions_of(cls) if f.__qualname__.startswith(cls.__qualname__ + ".")), default=0)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _global_names(code: CodeType) -> list[str]:
    found = [i.argval for c in _codes(code) for i in dis.get_instructions(c) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return list(dict.fromkeys(found))


def _all_names(code: CodeType) -> Iterator[str]:
    for part in _codes(code):
        yield from part.co_names


def _clean(part: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in part).lstrip(".") or "_"
