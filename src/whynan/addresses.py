"""Things of the user's that are named by where they stand: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from whynan.errors import UsageError, one_line


def callable_at(address: str) -> Callable[..., Any]:
    """Import the module and return the function of that name. Raises `UsageError` with one line."""
    place, found, name = found_at(address)
    if not callable(found):
        raise UsageError(f"{name} of {place} is not a function")
    return found  # type: ignore[no-any-return]


def found_at(address: str) -> tuple[str, Any, str]:
    """Import the module of an address; return its place, what stands there under the name, and the name."""
    place, sep, name = address.rpartition(":")
    if not sep or not place or not name:
        raise UsageError(f"{address!r}: write module:name or path/to/file.py:name")
    found: Any = _module(place)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise UsageError(f"{place} has no {name!r}")
    return place, found, name


def _module(place: str) -> ModuleType:
    try:
        if place.endswith(".py") or os.sep in place:
            return _file(place)
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            raise UsageError(f"no module named {place!r} here or on sys.path") from None
        raise UsageError(f"{place} cannot be imported: {one_line(error)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise UsageError(f"{place} cannot be imported: {one_line(error)}") from error


def _file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise UsageError(f"no such file: {path}")
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != os.path.abspath(path):
        name = f"whynan_{name}"  # a file named like a module in use must not take its place
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
