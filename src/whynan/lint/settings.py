"""What the user asked for: the command line over `[tool.whynan]` in pyproject.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from whynan.errors import UsageError
from whynan.lint.codes import CODES
from whynan.lint.findings import Confidence, Finding

_DEFAULT_EXCLUDE = (
    ".git",
    ".venv",
    "venv",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    "node_modules",
    "build",
    "dist",
    ".ipynb_checkpoints",
    ".tox",
    ".eggs",
    "whynan-runs",  # capsules hold copies of the source
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Which findings are wanted, and of which files.

    >>> Settings(select=("WN1",)).wants("WN101"), Settings(ignore=("log-of-zero",)).wants("WN101")
    (True, False)
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    min_confidence: Confidence = Confidence.MEDIUM
    root: Path = Path()

    def wants(self, code: str) -> bool:
        """Whether a code is selected and not ignored; prefixes and slugs count too."""
        return (not self.select or _named(code, self.select)) and not _named(code, self.ignore)

    def keeps(self, finding: Finding) -> bool:
        """Whether a finding is to be shown."""
        if finding.confidence.rank < self.min_confidence.rank or not self.wants(finding.code):
            return False
        here = _relative(Path(finding.path), self.root)
        return not any(
            (fnmatch(here, pattern) or fnmatch(Path(here).name, pattern)) and _named(finding.code, codes) for pattern, codes in self.per_file_ignores.items()
        )

    def skips(self, path: Path) -> bool:
        """Whether a file or folder is left out."""
        here = _relative(path, self.root)
        return path.name in _DEFAULT_EXCLUDE or any(fnmatch(here, p) or fnmatch(path.name, p) or here.startswith(p.rstrip("/") + "/") for p in self.exclude)


def _relative(path: Path, root: Path) -> str:
    try:
        return path.absolute().relative_to(root.absolute()).as_posix()
    except ValueError:
        return path.as_posix()


def _named(code: str, wanted: tuple[str, ...]) -> bool:
    slug = CODES[code][0] if code in CODES else ""
    return any(code.startswith(w.upper()) or w.lower() == slug for w in wanted)


def known_codes(values: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The same values, or a usage error naming the first that is no code, prefix or slug."""
    for value in values:
        if not any(code.startswith(value.upper()) or slug == value.lower() for code, (slug, _) in CODES.items()) or not value:
            raise UsageError(f"{where}: there is no lint code {value!r}; `whynan explain` lists the codes")
    return values


def from_project(start: Path) -> Settings:
    """Read the nearest pyproject.toml with a [tool.whynan] table, from a path upwards."""
    first = start.absolute()
    for folder in [first, *first.parents]:
        file = folder / "pyproject.toml"
        try:
            if not file.is_file():
                continue
            tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool")
        except (OSError, ValueError) as error:
            raise UsageError(f"{file}: {error}") from None
        if isinstance(tools, Mapping) and "whynan" in tools:
            return _settings(tools["whynan"], file)
    return Settings(root=Path.cwd())


def _settings(table: object, file: Path) -> Settings:
    if not isinstance(table, Mapping):
        raise UsageError(f"{file}: tool.whynan is not a table")
    known = {"select", "ignore", "exclude", "per-file-ignores", "min-confidence"}
    lint = table.get("lint", table)
    if not isinstance(lint, Mapping):
        raise UsageError(f"{file}: [tool.whynan] lint is not a table")
    settings = Settings(root=file.parent)
    for key, value in lint.items():
        if key not in known:
            if lint is table:
                continue  # other commands may keep their own keys there
            raise UsageError(f"{file}: [tool.whynan.lint] has no key {key!r}; it has {', '.join(sorted(known))}")
        settings = _with(settings, key, value, f"{file}: {key}")
    return settings


def _with(settings: Settings, key: str, value: object, where: str) -> Settings:
    if key == "min-confidence":
        if value not in tuple(Confidence):
            raise UsageError(f"{where} is {value!r}; it is one of low, medium, high")
        return replace(settings, min_confidence=Confidence(str(value)))
    if key == "per-file-ignores":
        if not isinstance(value, Mapping):
            raise UsageError(f"{where} is not a table of patterns")
        return replace(settings, per_file_ignores={str(k): known_codes(_strings(v, where), where) for k, v in value.items()})
    strings = _strings(value, where)
    return replace(settings, **{key: strings if key == "exclude" else known_codes(strings, where)})  # type: ignore[arg-type]


def _strings(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"{where} is not a list of strings")
    return tuple(value)
