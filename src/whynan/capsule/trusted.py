"""Run the definitions of the source a capsule carries, after somebody said that it is to be trusted.

A training script is never run as a whole: only its imports, classes, functions and constants are, under another name
than `__main__`, so that a script without a main guard does not begin to train. Global variables come from the capsule.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import linecache
import sys
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from whynan.capsule.names import CapsuleError
from whynan.capsule.read import Text
from whynan.capsule.statements import definitions, find_class, find_code

MAIN = "capsule_main"


class TrustedCode:
    """The modules of a capsule, made on demand. `lookup(module number, name)` gives a carried global variable."""

    def __init__(self, sources: list[Text], carried: list[Any], decode: Callable[[Any], Any]) -> None:
        self.sources, self.decode = sources, decode
        self.carried: list[dict[str, Any]] = [dict(pairs) for pairs in carried]
        self.modules: dict[int, ModuleType] = {}
        self.notes: list[str] = []
        self._finder = _Finder(self)
        self._hidden: dict[str, ModuleType] = {}

    def __enter__(self) -> TrustedCode:
        self._hidden = {name: sys.modules.pop(name) for name in self._own_modules()}
        sys.meta_path.insert(0, self._finder)
        return self

    def _own_modules(self) -> list[str]:
        """Return the names of loaded modules that the capsule's own stand or may stand behind."""
        tops = {self._top(s) for s in self.sources if s.runs} - {""}
        here = [(name, str(getattr(module, "__file__", None))) for name, module in sys.modules.items()]
        return [name for name, file in here if name.partition(".")[0] in tops and "-packages" not in file]

    def _top(self, source: Text) -> str:
        return (source.package if source.main else source.module).partition(".")[0]

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self._finder)
        for name in [MAIN, *self._own_modules()]:
            sys.modules.pop(name, None)
        sys.modules.update(self._hidden)

    def finish(self) -> None:
        """Put the carried global variables in place, in every module that was run."""
        for number, source in enumerate(self.sources):
            if source.runs:
                space = vars(self._module(number))
                for name in self.carried[number] if number < len(self.carried) else ():
                    self._put(space, name, self.decode(self.carried[number][name]))

    def _put(self, space: dict[str, Any], name: str, value: Any) -> None:
        """Set a global variable, or as `Class.name` an attribute of a class, unless that is not defined here or refuses."""
        owner, _, attribute = name.rpartition(".")
        if not owner:
            space[name] = value
            return
        first, *rest = owner.split(".")
        if first in space:
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                setattr(functools.reduce(getattr, rest, space[first]), attribute, value)

    def class_(self, node: dict[str, Any]) -> type:
        """Return a class by its place in a source, or import it from an installed package."""
        name = str(node["name"])
        if "package" in node:
            return self._walk(self.module(str(node["package"])), name)  # type: ignore[no-any-return]
        number = self._number(node["source"])
        space = vars(self._module(number))
        if "<locals>" in name:
            return self._local_class(number, name, node)
        return self._walk(self._module(number), name) if name.partition(".")[0] in space else self._lost_class(number, name)

    def function(self, node: dict[str, Any]) -> Any:
        """Return a function by its place in a source: its code, the globals of its module, the closure as carried."""
        name = str(node["name"])
        home = self.module(str(node["package"])) if "package" in node else self._module(self._number(node["source"]))
        if "package" in node and "<" not in name:
            return self._walk(home, name)
        code = find_code(_compiled_module(home) if "package" in node else self._compiled(node["source"]), name, int(node["line"]), int(node.get("nth", 0)))
        if code is None:
            raise CapsuleError(
                f"{getattr(home, '__file__', home)} has no function {name} at line {node['line']}; the capsule was made with another version of it"
            )
        cells = {k: self.decode(v) for k, v in node.get("cells", [])}
        closure = tuple(CellType(cells[n]) if n in cells else CellType() for n in code.co_freevars)
        made = FunctionType(code, vars(home), code.co_name, self.decode(node.get("defaults")), closure or None)
        made.__kwdefaults__ = self.decode(node.get("kwdefaults"))
        return made

    def module(self, name: str) -> Any:
        """Import a module: one of the capsule's, or one that is installed here."""
        for number, source in enumerate(self.sources):
            if source.runs and not source.main and source.module == name:
                return self._module(number)
        return self._import(name, "the capsule")

    def _import(self, name: str, who: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise self._missing(error, who) from None

    def _missing(self, error: ImportError, who: str) -> CapsuleError:
        """Say what an import did not find: a file that should have come along, or a package."""
        name = error.name or ""
        top = name.partition(".")[0]
        if not isinstance(error, ModuleNotFoundError):
            return CapsuleError(f"{who} cannot be imported here: {error}")
        if top in {self._top(s) for s in self.sources if s.runs}:
            return CapsuleError(f"{who} needs the module {name!r}, which the capsule does not carry")
        return CapsuleError(f"{who} needs the package {top!r}, which is not installed here; pip install it")

    def _number(self, value: Any) -> int:
        if not isinstance(value, int) or not 0 <= value < len(self.sources):
            raise CapsuleError("the capsule refers to a source file that is not in it")
        return value

    def _walk(self, owner: Any, name: str) -> Any:
        for part in name.split("."):
            if not hasattr(owner, part):
                raise CapsuleError(f"{getattr(owner, '__name__', owner)} has no {part} here; the capsule was made with another version of it")
            owner = getattr(owner, part)
        return owner

    def _compiled(self, number: int) -> CodeType:
        return compile_source(self.sources[number])

    def _module(self, number: int) -> ModuleType:
        if number not in self.modules:
            source = self.sources[number]
            if not source.main and source.module:
                self.modules[number] = self._import(source.module, source.shown)
                return self.modules[number]
            made = ModuleType(MAIN)
            made.__dict__.update(__file__=source.shown, __builtins__=builtins, __package__=source.package or None)
            self.modules[number] = sys.modules[MAIN] = made
            self.run(number, vars(made), definitions(ast.parse(source.text).body))
        return self.modules[number]

    def run(self, number: int, space: dict[str, Any], body: Iterable[ast.stmt]) -> None:
        """Run statements one by one; one that fails is left out, and noted."""
        source = self.sources[number]
        for name, value in (self.carried[number] if number < len(self.carried) else {}).items():
            if "." not in name and (value is None or isinstance(value, bool | int | float | str)):
                space[name] = value
        for statement in body:
            failure = self._one(number, space, statement)
            if failure is not None and isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.decorator_list:
                statement.decorator_list = []  # a decorator may be an object of the run, such as the guard itself
                failure = self._one(number, space, statement)
            if isinstance(failure, ImportError):
                raise self._missing(failure, f"{source.shown}:{statement.lineno}")
            if failure is not None and not isinstance(statement, ast.Assign | ast.AnnAssign):
                self.notes.append(f"{source.shown}:{statement.lineno} was left out: {type(failure).__name__}: {failure}")

    def _one(self, number: int, space: dict[str, Any], statement: ast.stmt) -> Exception | None:
        carried = self.carried[number] if number < len(self.carried) else {}
        code = compile(ast.Module([statement], []), self.sources[number].shown, "exec")
        for _ in range(20):
            try:
                exec(code, space)
                return None
            except NameError as error:
                name = error.name or ""
                if name not in carried or name in space:
                    return error
                space[name] = self.decode(carried[name])
            except Exception as error:
                return error
        return None

    def _local_class(self, number: int, name: str, node: dict[str, Any]) -> type:
        """Define a class that stood inside a function, with what it saw there as global names."""
        tree = find_class(ast.parse(self.sources[number].text), name, int(node.get("line", 0)))
        if tree is None:
            return self._lost_class(number, name)
        space = {**vars(self._module(number)), **{k: self.decode(v) for k, v in node.get("cells", [])}}
        failure = self._one(number, space, tree)
        while isinstance(failure, NameError) and failure.name and failure.name not in space:
            space[failure.name] = None  # a local variable that only the class statement read: a default, or an attribute set below
            failure = self._one(number, space, tree)
        if failure is not None:
            raise CapsuleError(f"class {name} of {self.sources[number].shown} cannot be defined: {failure}")
        made = space[tree.name]
        made.__qualname__ = name
        for key, value in node.get("attributes", []):
            setattr(made, str(key), self.decode(value))
        return made  # type: ignore[no-any-return]

    def _lost_class(self, number: int, name: str) -> type:
        raise CapsuleError(f"{self.sources[number].shown} does not define class {name} when only its definitions are run")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the capsule's modules under their own names."""

    def __init__(self, code: TrustedCode) -> None:
        self.code = code

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        numbers = [n for n, s in enumerate(self.code.sources) if s.runs and not s.main and s.module == fullname]
        inside = any(f"{s.package}.".startswith(fullname + ".") or s.module.startswith(fullname + ".") for s in self.code.sources if s.runs)
        if not numbers and not inside:
            return None
        source = self.code.sources[numbers[0]] if numbers else None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=source.shown if source is not None else None, is_package=inside)
        spec.loader_state = numbers[0] if numbers else None
        if inside and spec.submodule_search_locations is not None:
            spec.submodule_search_locations += _installed_parts(fullname, path)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run a module as import does; if that fails here, only its definitions."""
        assert module.__spec__ is not None
        number = module.__spec__.loader_state
        if number is None:
            return  # a folder without `__init__.py`
        self.code.modules[number] = module
        module.__file__ = self.code.sources[number].shown
        try:
            exec(self.code._compiled(number), vars(module))
        except ImportError:
            raise
        except (Exception, SystemExit) as error:  # one that reads the command line ends itself here
            self.code.notes.append(f"{module.__file__} did not run as a whole ({type(error).__name__}: {error}); its definitions did")
            self.code.run(number, vars(module), definitions(ast.parse(self.code.sources[number].text).body))


def _installed_parts(name: str, path: Any) -> list[str]:
    """Return the folders of installed packages that share a package without `__init__.py` with the user."""
    found = importlib.machinery.PathFinder.find_spec(name, path)
    folders = found.submodule_search_locations if found is not None and found.loader is None else None
    return [folder for folder in folders or () if "-packages" in folder]


def compile_source(source: Text) -> CodeType:
    """Compile a carried file under the name it had, and let tracebacks and reports find its text; nothing is run."""
    lines = source.text.splitlines(keepends=True)
    linecache.cache[source.shown] = (len(source.text), None, lines, source.shown)
    try:
        return compile(source.text, source.shown, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CapsuleError(f"{source.path} of the capsule is not Python") from None


def _compiled_module(module: ModuleType) -> CodeType:
    """Compile the source of an installed module, to find functions in it that have no name outside."""
    file = getattr(module, "__file__", None) or ""
    return compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
