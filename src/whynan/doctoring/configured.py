"""Settings in a YAML or JSON file that no code reads, or that stop on their way: configured, and not in effect.

Names are compared, nothing is run. A key counts as read where its name is an attribute, a string, a variable or an argument
anywhere in the project. Of those that are read, one stops on its way where a class or function takes an argument of that name
with a default and no call of it in the project hands one over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from whynan.doctoring.facts import Grade, Remark

_KEY = re.compile(r"^(?P<indent>\s*)(?:- )?[\"']?(?P<key>[A-Za-z_]\w*)[\"']?\s*:(?:\s+(?P<value>[^#\s][^#]*?)\s*,?)?\s*(?:#.*)?$")
MOST_BYTES = 256 << 10


@dataclass(slots=True)
class Uses:
    """What the source files of a project do with names."""

    read: set[str] = field(default_factory=set)
    defaults: dict[str, dict[str, str]] = field(default_factory=dict)  # callable: argument with a default, and that default
    order: dict[str, list[str]] = field(default_factory=dict)  # callable: its arguments in order
    calls: list[tuple[str, int, frozenset[str], bool]] = field(default_factory=list)  # name, positional, keywords, unpacks
    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # callable: where it is first called
    asked: set[str] = field(default_factory=set)  # names that may be settings: words, arguments, fields, attributes that are not called
    _called: set[int] = field(default_factory=set)

    def note(self, tree: ast.AST, shown: str) -> None:
        """Add one file."""
        self._called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            self._note_name(node)
            if isinstance(node, ast.ClassDef):
                init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
                if init is not None:
                    self._note_signature(node.name, init, skip=1)
            elif isinstance(node, ast.FunctionDef) and node.name != "__init__":
                self._note_signature(node.name, node, skip=0)
            elif isinstance(node, ast.Call):
                self._note_call(node, shown)

    def _note_name(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            self.read.add(node.attr)
            self.asked.update([node.attr] if id(node) not in self._called else ())
        elif isinstance(node, ast.Name):
            self.read.add(node.id)
        elif isinstance(node, ast.arg):
            self.read.add(node.arg)
            self.asked.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.read.update(re.findall(r"\w+", node.value) if len(node.value) < 80 else ())
            self.asked.update([node.value] if node.value.isidentifier() else ())
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self.read.add(node.target.id)
            self.asked.add(node.target.id)

    def _note_signature(self, name: str, function: ast.FunctionDef, skip: int) -> None:
        given = function.args
        ordered = [a.arg for a in (*given.posonlyargs, *given.args)][skip:]
        late = ordered[len(ordered) - len(given.defaults) :] if given.defaults else []
        pairs = [*zip(late, given.defaults, strict=False), *((a.arg, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None)]
        self.order.setdefault(name, ordered)
        self.defaults.setdefault(name, {a: ast.unparse(d) for a, d in pairs})

    def _note_call(self, node: ast.Call, shown: str) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        unpacks = any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
        self.calls.append((name, len(node.args), frozenset(k.arg for k in node.keywords if k.arg), unpacks))
        self.places.setdefault(name, (shown, node.lineno))

    def stops_at(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield the callables that take a setting and never get it, with the default that holds instead."""
        for name, defaults in self.defaults.items():
            calls = [c for c in self.calls if c[0] == name]
            if key not in defaults or not calls or any(unpacks for _, _, _, unpacks in calls):
                continue
            position = self.order[name].index(key) if key in self.order[name] else 1 << 30
            if not any(key in keywords or positional > position for _, positional, keywords, _ in calls):
                yield name, defaults[key]


def settings_not_in_effect(files: list[Path], uses: Uses) -> Iterator[Remark]:
    """Yield a remark for each setting of these files that does nothing."""
    for file in files:
        settings = list(_settings(file))
        if sum(key in uses.read for key, _, _ in settings) * 2 < len(settings):
            continue  # of another program: a workflow, a container
        for key, value, line in settings:
            if key not in uses.read:
                yield Remark(Grade.BAD, f"`{key}: {value}` is set and no code reads it", str(file), line, "take it out, or use it")
                continue
            for name, default in uses.stops_at(key):
                if default.strip("'\"").lower() == value.strip("'\"").lower():
                    continue
                where, at = uses.places[name]
                text = f"`{key}: {value}` does not reach `{name}`, which is called without it at {where}:{at}: {key}={default} holds"
                yield Remark(Grade.BAD, text, str(file), line, f"hand it on: {name}(…, {key}={key})")


def _settings(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yield key, value and line of each setting that has a value of its own."""
    try:
        if file.stat().st_size > MOST_BYTES:
            return
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for number, text in enumerate(lines, 1):
        found = _KEY.match(text)
        if found is not None and found["value"] and found["value"] not in ("|", ">", "{", "["):
            yield found["key"], found["value"], number
