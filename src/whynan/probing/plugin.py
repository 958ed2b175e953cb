"""The pytest plugin: a fixture that probes, and tests that fail when a training step in them is not finite.

It does nothing, and loads no torch, unless `--whynan`, the marker `whynan` or the fixture `probe` is used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from whynan.probing.results import Probed


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--whynan`."""
    parser.getgroup("whynan").addoption("--whynan", action="store_true", help="fail every test in which a training step is not finite, with the diagnosis")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known; refuse `--whynan` where torch is missing."""
    config.addinivalue_line("markers", "whynan: fail this test when a training step in it is not finite, with the diagnosis")
    if config.getoption("--whynan") and importlib.util.find_spec("torch") is None:
        raise pytest.UsageError("--whynan needs torch, which is not installed here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch the test where that was asked for."""
    if not (item.config.getoption("--whynan") or item.get_closest_marker("whynan")):
        return (yield)
    from whynan.engine.guard import Guard
    from whynan.engine.options import Options
    from whynan.report import terminal
    from whynan.report.journal import Journal

    journal = Journal(None, quiet=True)
    with Guard(Options(policy="observe", spike="off", capsule_limit=0), journal):
        result = yield
    if journal.incidents:
        more = len(journal.incidents) - 1
        pytest.fail(terminal.diagnosis(journal.incidents[0]) + (f"\nand {more} more bad steps" if more else ""), pytrace=False)
    return result


@pytest.fixture
def probe() -> Callable[..., Probed]:
    """Return a function like `whynan.probe` that fails the test, with the report, if anything was found.

    def test_step(probe):
        probe(model, loss_fn, batch, budget=5)
    """

    def run(*args: Any, **options: Any) -> Probed:
        from whynan.probing.api import probe as search

        made = search(*args, **options)
        if not made.ok:
            pytest.fail(repr(made), pytrace=False)
        return made

    return run
