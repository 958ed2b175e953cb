"""`whynan lint`."""

from __future__ import annotations

import click


@click.command(short_help="Find numerical hazards in source, without running it.")
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--format", "form", type=click.Choice(["text", "concise", "json", "github", "sarif"]), default="text", help="How findings are written.")
@click.option("--select", multiple=True, help="Codes, prefixes (WN1) or slugs to look for; separated by commas.")
@click.option("--ignore", multiple=True, help="Codes, prefixes or slugs to leave out.")
@click.option("--min-confidence", type=click.Choice(["low", "medium", "high"]), default=None, help="Leave out what is less sure. Default: medium.")
@click.option("--fix", is_flag=True, help="Apply the fixes that keep the mathematics.")
@click.option("--unsafe-fixes", is_flag=True, help="Apply the other fixes too: they change results where the hazard strikes.")
@click.option("--diff", "show_diff", is_flag=True, help="Show what the fixes would change; write nothing.")
def lint(
    paths: tuple[str, ...],
    form: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    min_confidence: str | None,
    fix: bool,
    unsafe_fixes: bool,
    show_diff: bool,
) -> int:
    """Look for numerical hazards in Python files and notebooks. Settings: [tool.whynan] in pyproject.toml; `# whynan: ignore[WN101]` on a line.

    Exit status: 0 nothing found, 1 findings, 2 misuse or unreadable input.
    """
    import sys
    from dataclasses import replace
    from pathlib import Path

    from whynan.errors import UsageError
    from whynan.lint.findings import Confidence
    from whynan.lint.linting import lint_paths
    from whynan.lint.mending import mend
    from whynan.lint.reporting import FORMATS, printable
    from whynan.lint.settings import from_project, known_codes

    if not all(paths) or not paths:  # an empty name, from an unset variable of a shell, is not the working directory
        raise UsageError("give at least one file or folder: whynan lint PATH...")
    settings = from_project(Path(paths[0]))
    if select:
        settings = replace(settings, select=known_codes(_split(select), "--select"))
    if ignore:
        settings = replace(settings, ignore=(*settings.ignore, *known_codes(_split(ignore), "--ignore")))
    if min_confidence is not None:
        settings = replace(settings, min_confidence=Confidence(min_confidence))
    report = lint_paths([Path(p) for p in paths], settings)
    if fix or unsafe_fixes or show_diff:
        changes = mend(report, unsafe_fixes, write=not show_diff)
        if show_diff:
            click.echo(changes.diff, nl=False)
        elif changes.count:
            print(f"whynan: {changes.count} fixed in {changes.files} file{'s' * (changes.files != 1)}", file=sys.stderr)
            report = lint_paths([Path(p) for p in paths], settings)
        report.trouble.extend(changes.trouble)
    for path, reason in report.trouble:
        print(f"whynan: {printable(path)}: {reason}", file=sys.stderr)
    if not show_diff:
        written = FORMATS[form](report)
        if written:
            click.echo(written)
    return report.status


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())
