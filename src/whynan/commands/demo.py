"""`whynan demo`: the five hunts of the casebook, each found, explained and healed before your eyes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from whynan.casebook.cases import Case
    from whynan.casebook.hunting import Hunt


@click.command(short_help="Run the five failing programs of the casebook and heal them.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Leave the programs, their runs and the page here.")
def demo(names: tuple[str, ...], keep: Path | None) -> int:
    """Run real training programs that die of a NaN, find out why, apply the remedy that is printed, and train them to the end.

    NAME is one of transcoder, token_image, joint_diffusion, clustering_heads, hyper_connections; all five by default, in
    about two minutes on two cores. Without --keep the programs are gone afterwards, and the page is whynan-demo.html.
    """
    from whynan.casebook.cases import chosen
    from whynan.casebook.hunting import need_torch

    need_torch()
    cases = chosen(names)
    with _workplace(keep) as folder:
        hunts = _hunt_all(cases, folder)
        page = _write_page(hunts, keep)
    _table(hunts)
    if page is not None:
        click.echo(f"whynan: wrote {page}")
    if keep is not None:
        click.echo(f"        the programs are in {keep}: cd {keep / cases[0].name}; whynan run {' '.join(cases[0].failing).replace('{out}', 'out')}")
    return 0 if all(h.incident is not None and h.as_expected and h.healed for h in hunts) else 1


@contextlib.contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="whynan-demo-") as folder:
        yield Path(folder)


def _hunt_all(cases: list[Case], folder: Path) -> list[Hunt]:
    """Run two cases at a time where there are two cores; tell them in order."""
    from rich.console import Console

    from whynan.casebook.hunting import hunt

    console, doing, lock = Console(stderr=True), dict[str, str](), threading.Lock()
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool, console.status("starting") as status:

        def one(case: Case) -> Hunt:
            def progress(text: str) -> None:
                with lock:
                    doing[case.name] = text
                    status.update("   ".join(f"{name}: {what} …" for name, what in doing.items()))

            done = hunt(case, folder, progress)
            with lock:
                doing.pop(case.name, None)
            return done

        hunts = []
        for number, waiting in enumerate([pool.submit(one, case) for case in cases], 1):
            hunts.append(waiting.result())
            _tell(hunts[-1], number, len(cases))
    return hunts


def _tell(hunt: Hunt, number: int, total: int) -> None:
    from whynan.report.terminal import diagnosis

    case = hunt.case
    click.echo(f"\n== {number} of {total}: {case.name}, {case.title} ==\n")
    click.echo(click.wrap_text(case.story, 80) + "\n")
    if hunt.incident is not None:
        click.echo(diagnosis(hunt.incident))
        action = hunt.incident.action
        click.echo(f"whynan: step {hunt.incident.step} {action.taken} (policy {action.policy})")
    else:
        click.echo("whynan: nothing was found")
    if hunt.quality is not None:
        click.echo(f"healed: {hunt.remedy}")
        click.echo(f"        {case.what}: {hunt.quality:.4g}, untrained {hunt.untrained:.4g}")
    if hunt.trouble:
        click.echo(f"trouble: {hunt.trouble}")


def _write_page(hunts: list[Hunt], keep: Path | None) -> Path | None:
    from whynan.report.about import replace_text
    from whynan.report.html import page_for

    runs = [h.run for h in hunts if h.incident is not None]
    if not runs:
        return None
    page = (keep / "report.html") if keep is not None else Path("whynan-demo.html")
    replace_text(page, page_for(runs, title="whynan demo: the casebook"))
    return page


def _table(hunts: list[Hunt]) -> None:
    click.echo()
    rows = [_row(hunt) for hunt in hunts]
    widths = [max(len(row[n]) for row in rows) for n in range(4)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(hunt: Hunt) -> tuple[str, str, str, str]:
    incident = hunt.incident
    place = f"{incident.origin.span.place} {incident.cause.code}" if incident is not None else "no incident"
    result = f"{hunt.untrained:.3g} -> {hunt.quality:.3g}" if hunt.quality is not None and hunt.untrained is not None else "no result"
    return hunt.case.name, place, result, hunt.verdict
