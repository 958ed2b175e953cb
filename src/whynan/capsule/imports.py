"""Which modules a file imports, and which of them are there wherever their package is installed."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import ModuleType

from whynan.capsule.sites import is_internal

_INSTALLED = tuple({os.path.realpath(p) + os.sep for p in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib"))})
_LIBRARIES = frozenset({"torch", "numpy", "whynan"})


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> ast.Module:
    """Return the tree of a file, an empty one where the text is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def imported(text: str, package: str) -> Iterator[str]:
    """Yield the names that the import statements of a file may mean as modules, wherever they stand in it.

    >>> list(imported("from .c import d", "p"))
    ['p.c', 'p.c.d']
    """
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                home = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # higher than the package: this import never worked
                continue
            yield from (home, *(f"{home}.{alias.name}" for alias in node.names))


def defined(text: str, name: str, whole: bool) -> ast.stmt | None:
    """Return the statement of a file that gives a name its value where only its definitions are run, or where the `whole` file is.

    >>> defined("import a.b as c", "c", whole=False), defined("c = f()", "c", whole=False)
    (<ast.Import object at 0x...>, None)
    """
    for node in reversed(parsed(text).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name.partition(".")[0]) == name for a in node.names):
            return node
        if whole and any(isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.id == name for part in ast.walk(node)):
            return node
    return None


def is_library(module: object) -> bool:
    """Whether what calls itself a module's name is that of torch, of numpy or of whynan, or of a part of them. A class may say anything of itself.

    >>> is_library("torch.nn"), is_library("torchvision.models"), is_library(None)
    (True, False, False)
    """
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def is_users(module: ModuleType) -> bool:
    """Whether a module is the user's own: Python source outside torch, the standard library and installed packages."""
    if module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return file is not None and file.endswith(".py") and not _is_installed(file)


def is_elsewhere_too(module: ModuleType) -> bool:
    """Whether a module needs no carrying: it is built in, installed, or a folder without a file of its own."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    files = [file for file in (getattr(m, "__file__", None) for m in (module, top)) if file is not None]
    if any(_is_installed(file) for file in files) or top.__name__ in sys.stdlib_module_names:
        return True
    return not files and (hasattr(module, "__path__") or top.__name__ in sys.builtin_module_names)


@functools.cache
def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(_INSTALLED) or f"-packages{os.sep}" in file or is_internal(compile("", file, "exec"))
