"""`whynan explain`."""

from __future__ import annotations

import click


@click.command(short_help="Explain a code or an error message.")
@click.argument("what", nargs=-1)
def explain(what: tuple[str, ...]) -> int:
    """Print the page of a CODE (WN101), or what fits an error message or a piece of log. Without argument: all codes."""
    from whynan import explaining

    click.echo(explaining.explain(" ".join(what)) if what else explaining.listing())
    return 0
