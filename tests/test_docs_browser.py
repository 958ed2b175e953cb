"""The documentation site in a real Chromium: quiet, not wider than the window, readable by everyone, found by keyboard."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import LOOKS, Opened, browser, reloaded, serious
from conftest import ENVIRONMENT, PYTHON

__all__ = ["browser"]
ROOT = Path(__file__).resolve().parent.parent
PAGES = ("start.html", "codes/WN501.html", "benchmarks.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([PYTHON, "docs/build.py", str(folder)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=PAGES)
def path(request: pytest.FixtureRequest, site: Path) -> Path:
    return site / str(request.param)


@pytest.fixture(params=LOOKS)
def opened(request: pytest.FixtureRequest, browser: Any, path: Path) -> Iterator[Opened]:
    with Opened(browser, path, request.param) as made:
        yield made


def test_opens_quietly_in_one_column_and_axe_finds_nothing_serious(opened: Opened) -> None:
    """At both widths, light and dark: nothing on the console, nothing asked of a network, nothing wider than the window."""
    page = opened.page
    assert opened.said == []
    assert {url.split(":")[0] for url in opened.asked} == {"file"}
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("main h1").is_visible()
    assert serious(page) == []


@pytest.mark.parametrize("look", ["wide", "phone"])
def test_theme_can_be_switched_at_every_width_and_is_remembered(browser: Any, site: Path, look: str) -> None:
    with Opened(browser, site / "start.html", look) as opened:
        page = opened.page
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert reloaded(page, "document.documentElement.dataset.theme === 'dark'")


def test_menu_of_a_phone_opens_and_leads_to_a_page(browser: Any, site: Path) -> None:
    with Opened(browser, site / "start.html", "phone") as opened:
        page = opened.page
        assert not page.locator("#nav").is_visible()
        page.click("#menu")
        assert page.locator("#menu").get_attribute("aria-expanded") == "true"
        assert serious(page) == []
        page.click("#nav >> text=Recovery")
        page.wait_for_url("**/recovery.html")


def test_search_finds_a_code_and_enter_opens_it(browser: Any, site: Path) -> None:
    with Opened(browser, site / "start.html", "wide") as opened:
        page = opened.page
        page.keyboard.press("/")
        page.keyboard.type("WN404")
        page.locator("#found a").first.wait_for()
        assert serious(page) == []
        page.locator("#found a").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**/codes/WN404.html*")


def test_tab_begins_with_the_way_to_the_text(browser: Any, site: Path) -> None:
    with Opened(browser, site / "start.html", "wide") as opened:
        opened.page.keyboard.press("Tab")
        assert opened.page.evaluate("document.activeElement.className") == "skip"
        assert opened.page.locator(".skip").bounding_box()["x"] >= 0
