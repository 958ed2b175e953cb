"""`whynan replay`: the diagnosis of a capsule, made again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whynan.commands.run import torch_is_there
from whynan.errors import UsageError, one_line
from whynan.records import Incident, dumps

if TYPE_CHECKING:
    from whynan.capsule.read import Capsule


@click.command(short_help="Diagnose a saved step again.")
@click.option("--trust", is_flag=True, help="Run the definitions in the source files the capsule carries, and import the packages it names.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print the diagnosis.")
@click.argument("path", type=click.Path(path_type=Path))
def replay(path: Path, trust: bool, form: str) -> int:
    """Replay the failing step in PATH, a capsule or a run directory, and diagnose it again.

    Needs neither the program nor its data. Code from the capsule is not run without --trust; without it, what would be
    run is shown. Exit status: 0 the diagnosis is that of the run, 1 it is another one, 2 refused or not readable.
    """
    torch_is_there()
    from whynan import capsules
    from whynan.capsule.names import CapsuleError
    from whynan.capsule.read import read
    from whynan.capsule.rebuild import NeedsTrust

    try:
        folder = capsules.find(path)
        capsule = read(folder)
        try:
            made = capsules.replay(capsule, trust)
        except NeedsTrust:
            click.echo("\n".join(_plan(capsule)))
            raise UsageError(f"this capsule needs code that came with it; if you trust where it came from: whynan replay --trust {path}") from None
    except CapsuleError as error:
        raise UsageError(_printable(str(error))) from None
    except UsageError:
        raise
    except Exception as error:  # whatever is in it: a capsule is somebody else's file
        raise UsageError(_printable(f"{path} is damaged, or not a capsule of this version: {one_line(error, 200)}")) from None
    return _tell(made, capsule.head["incident"], form)


def _plan(capsule: Capsule) -> list[str]:
    """Say what --trust would run."""
    lines = [f"{capsule.folder} would run the definitions (imports, classes, functions, constants) in"]
    lines += [f"  {s.path}  {len(s.text.encode())} bytes  sha256 {s.sha256}" for s in capsule.sources if s.runs]
    wanted = sorted({f"{_file(capsule, n)}{n['name']}" for n in _named(capsule.program) if isinstance(n.get("name"), str)})
    lines += ["for", *(f"  {name}"[:160] for name in wanted[:40])]
    packages = capsule.head.get("packages")
    if isinstance(packages, dict) and packages:
        lines += ["and import", *(f"  {name} {version}"[:80] for name, version in packages.items())]
    return [_printable(line) for line in lines]


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)


def _file(capsule: Capsule, node: dict[str, Any]) -> str:
    number = node.get("source")
    return f"{capsule.sources[number].shown}: " if isinstance(number, int) and 0 <= number < len(capsule.sources) else f"{str(node.get('package'))[:60]}: "


def _named(value: Any) -> list[dict[str, Any]]:
    """Return the nodes that name a class or function of somebody's code."""
    found, todo = [], [value.get("objects"), value.get("entries")]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if ("source" in item or "package" in item) and "at" not in item:
                found.append(item)
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return found


def _tell(made: Any, told: dict[str, Any], form: str) -> int:
    from whynan.report import terminal

    incident: Incident = made.incident
    text = dumps(incident.to_json()) if form == "json" else terminal.diagnosis(incident)
    click.echo("\n".join(_printable(line) for line in text.split("\n")))
    for note in made.notes:
        click.echo(_printable(f"whynan: {note}"), err=True)
    span = incident.origin.span
    before, after = _verdict(told), (incident.cause.code, span.file, span.line)
    if before == after:
        click.echo("whynan: the same diagnosis as in the run", err=True)
        return 0
    if after[1:] in _handed_in(told):
        words = f"{before[1]}:{before[2]} ({before[0]})"
        click.echo(f"whynan: the same step; that its bad value was made before it, at {words}, is known to the run alone", err=True)
        return 0
    click.echo(f"whynan: not the diagnosis of the run, which was {before[0]} at {before[1]}:{before[2]}", err=True)
    return 1


def _handed_in(told: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the places besides the origin that the run told."""
    spans = told["origin"].get("from")
    return [(str(s.get("file")), s["line"]) for s in spans if isinstance(s, dict) and isinstance(s.get("line"), int)] if isinstance(spans, list) else []


def _verdict(told: dict[str, Any]) -> tuple[str, str, int]:
    cause, origin = told.get("cause"), told.get("origin")
    if not isinstance(cause, dict) or not isinstance(origin, dict):
        raise UsageError("the capsule holds no proper incident")
    line = origin.get("line")
    return str(cause.get("code")), str(origin.get("file")), line if isinstance(line, int) else 0
