"""A real Chromium for the tests of pages; without one they are skipped with the reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
axe_core = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed: pip install axe-playwright-python")

LOOKS = {"wide": (1280, 800, "light"), "phone": (390, 844, "light"), "dark": (1280, 800, "dark"), "dark phone": (390, 844, "dark")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or the one playwright has installed."""
    with playwright.sync_playwright() as driver:
        started = _launched(driver.chromium)
        yield started
        started.close()


def _launched(chrome: Any) -> Any:
    found = os.environ.get("WHYNAN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        return chrome.launch(executable_path=found, args=["--no-sandbox"])
    except playwright.Error as error:
        pytest.skip(f"no Chromium can be started (apt-get install chromium, or playwright install chromium): {str(error).splitlines()[0]}")


class Opened:
    """A page in the browser, with what it did."""

    def __init__(self, browser: Any, path: Path, look: str) -> None:
        width, height, scheme = LOOKS[look]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *details: Any) -> None:
        self.context.close()


def until(page: Any, truth: str) -> None:
    """Wait until something holds on a page; asked from here, since the page's own policy forbids to evaluate text in it."""
    for _ in range(200):
        if page.evaluate(truth):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not so after 10 s: {truth}")


def reloaded(page: Any, truth: str) -> bool:
    """Load a page again until something holds on it: what it kept may reach the next process of the browser a moment late."""
    for _ in range(20):
        page.reload()
        if page.evaluate(truth):
            return True
        page.wait_for_timeout(100)
    return False


def serious(page: Any) -> list[tuple[str, list[str]]]:
    """What axe-core finds serious or critical on a page."""
    found = axe_core.Axe().run(page).response["violations"]
    return [(v["id"], [n["html"][:120] for n in v["nodes"]][:4]) for v in found if v["impact"] in ("serious", "critical")]
