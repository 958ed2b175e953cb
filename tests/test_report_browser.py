"""The report page in a real Chromium: drawn, quiet, reachable by keyboard, readable by everyone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import LOOKS, Opened, browser, reloaded, serious, until
from run_folders import HOSTILE, incident, metrics, write_run

from whynan.report.writing import write_report

__all__ = ["browser"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with two kinds of incidents, hostile text, ranks, warnings."""
    folder = tmp_path_factory.mktemp("page") / "run"
    told = [
        incident(40),
        incident(41),
        incident(200, code="WN101", line=10, cause={"code": "WN101", "title": f"log of zero {HOSTILE}", "confidence": "suspected"}),
    ]
    write_run(folder, told, metrics(300, (40, 41, 200)), {"steps": 300, "watched": {"loss_dtype": "float16", "optimizers": ["AdamW"]}})
    write_run(folder / "ranks" / "rank-1", [incident(40, rank=1)], metrics(300))
    (folder / "warnings.jsonl").write_text('{"kind": "spike", "step": 7, "name": "loss", "value": 3.0, "text": "loss jumped"}\n')
    return write_report(folder)


@pytest.fixture(params=LOOKS)
def opened(request: pytest.FixtureRequest, browser: Any, run: Path) -> Iterator[Opened]:
    with Opened(browser, run, request.param) as made:
        yield made


INK = """canvas => {
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set(); let ink = 0;
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) { ink++; colours.add(data[i] + ',' + data[i + 1] + ',' + data[i + 2]); }
  return [ink, colours.size];
}"""


CURVE_AT = """(canvas, places) => {
  const line = getComputedStyle(document.documentElement).getPropertyValue('--curve').trim().match(/\\w\\w/g).map(h => parseInt(h, 16));
  const far = (data, i) => [0, 1, 2].reduce((sum, k) => sum + Math.abs(data[i + k] - line[k]), 0);
  return places.map(place => {
    const {data} = canvas.getContext('2d').getImageData(canvas.width * place, 0, 20, canvas.height);
    let found = 0;
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && far(data, i) < 30) found++;
    return found;
  });
}"""

FOCUSED = """(e => [e.className || e.tagName, e.offsetParent !== null || getComputedStyle(e).position === 'fixed',
  e.getAttribute('aria-describedby')])(document.activeElement)"""


def test_opens_quietly_and_draws(opened: Opened) -> None:
    """At both widths, light and dark: nothing on the console, nothing asked of a network, all charts drawn, nothing wider than the window."""
    page = opened.page
    assert opened.said == []
    assert [url.split(":")[0] for url in opened.asked] == ["file"]
    drawn = page.locator(".plot canvas").all()
    assert len(drawn) == 5
    for canvas in drawn:
        ink, colours = canvas.evaluate(INK)
        assert ink > 500
        assert colours >= 3  # the grid, the curve, an incident
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.title() == "whynan: run"  # the hostile text did not run


def test_axe_finds_nothing_serious(opened: Opened) -> None:
    """axe-core: no serious or critical issue."""
    assert serious(opened.page) == []


def test_theme_is_set_before_the_first_paint_and_can_be_switched(browser: Any, run: Path) -> None:
    """The system's choice counts until the switch is used; the switch is remembered."""
    with Opened(browser, run, "dark") as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click(".theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert reloaded(page, "document.documentElement.dataset.theme === 'light'")
        head = page.content().partition("<style>")[0]
        assert "dataset.theme" in head  # decided before any style is read
        assert opened.said == []


def shows(page: Any, code: str) -> None:
    """The one diagnosis that can be seen is of this code."""
    seen = "[...document.querySelectorAll('.diagnosis')].filter(d => d.offsetParent).map(d => d.querySelector('.code').textContent).join()"
    until(page, f"{seen} === '{code}'")


@pytest.mark.parametrize("look", ["wide", "phone"])
def test_click_on_an_incident_shows_it(browser: Any, run: Path, look: str) -> None:
    """In the table, by its mark, and on the line in a chart."""
    with Opened(browser, run, look) as opened:
        page = opened.page
        shows(page, "WN501")
        page.click("table.incidents a[data-step='200']")
        shows(page, "WN101")
        assert page.locator(".details:visible .which").inner_text().startswith("WN101")
        page.click(".track button[data-step='40']")
        shows(page, "WN501")
        over = page.locator(".plot .u-over").first
        box = over.bounding_box()
        at = {"x": box["width"] * 200 / 299, "y": box["height"] / 2}
        over.hover(position=at)
        page.wait_for_timeout(200)  # the chart follows the mouse frame by frame
        over.click(position=at)
        shows(page, "WN101")


def test_zoom_moves_all_charts(browser: Any, run: Path) -> None:
    """Buttons and dragging zoom every chart to the same steps; one button shows all again; marks follow."""
    with Opened(browser, run, "wide") as opened:
        page = opened.page
        until(page, "document.querySelectorAll('.track button').length === 2")
        assert page.locator(".track button").first.inner_text() == "2"  # steps 40 and 41 share a mark
        for _ in range(4):
            page.click("[data-zoom='in']")
        until(page, "document.querySelectorAll('.track button').length === 2 && !document.querySelector('.track button').textContent")
        until(page, "document.querySelector('.live').textContent.includes('Steps 3')")
        page.click("[data-zoom='all']")
        until(page, "document.querySelector('.track button').textContent === '2'")
        last = page.locator(".plot .u-over").last
        last.scroll_into_view_if_needed()  # with other fonts it lies below the window, where a mouse reaches nothing
        box = last.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 20, steps=10)
        page.mouse.up()
        until(page, "document.querySelectorAll('.track button').length === 1")
        page.uncheck(".log")
        assert opened.said == []


def test_gap_where_a_value_was_not_finite(browser: Any, tmp_path: Path) -> None:
    """A long stretch that is not finite has no curve in it."""
    folder = write_run(tmp_path / "run", [], metrics(100, tuple(range(40, 60))))
    with Opened(browser, write_report(folder), "wide") as opened:
        middle = opened.page.locator(".plot[data-series='grad_norm'] canvas").evaluate(CURVE_AT, [0.3, 0.53])
        assert middle[0] > 10
        assert middle[1] == 0


def test_copy_button(browser: Any, run: Path) -> None:
    """The diff is on the clipboard, and the button says so."""
    with Opened(browser, run, "wide") as opened:
        opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = opened.page
        page.locator(".copy:visible").first.click()
        until(page, "document.querySelector('.copy').firstChild.textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()").startswith("--- a/train.py\n+++ b/train.py")


def test_tab_order(browser: Any, run: Path) -> None:
    """Tab goes from the head through diagnosis, charts and incidents to the stations of the way, whose values then show; nothing hidden is met."""
    with Opened(browser, run, "wide") as opened:
        page = opened.page
        met: list[str] = []
        for _ in range(60):
            page.keyboard.press("Tab")
            now = page.evaluate(FOCUSED)
            if now[0] == "BODY":
                break
            assert now[1], f"{now[0]} is focused and not seen"
            met.append(now[0].split()[0])
            if now[2]:
                assert page.locator(f"#{now[2]}").is_visible()
        order = [met.index(name) for name in ("skip", "theme", "listing", "log", "node", "copy")]
        assert order == sorted(order)
        assert met.count("node") == 4
        page.keyboard.press("Home")


def test_enter_on_a_mark_selects_it(browser: Any, run: Path) -> None:
    """Marks of incidents work by keyboard; what is shown is announced and has the focus."""
    with Opened(browser, run, "wide") as opened:
        page = opened.page
        page.locator(".track button[data-step='200']").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.classList.contains('diagnosis')")
        assert page.locator(".live").inner_text().startswith("Showing step 200")


def test_prints_everything(browser: Any, run: Path) -> None:
    """On paper both kinds are told, in light colours, without buttons, not wider than the paper."""
    with Opened(browser, run, "dark") as opened:
        page = opened.page
        page.set_viewport_size({"width": 700, "height": 900})
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator(".diagnosis:visible").count() == 2
        assert page.locator("button.theme:visible, .tools:visible, .copy:visible").count() == 0
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("document.documentElement.scrollWidth") <= 700
        assert len(page.pdf()) > 20_000


def test_without_scripts(browser: Any, run: Path) -> None:
    """Where scripts are off, as in some mail readers, all text is there."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(run.as_uri())
    assert page.locator(".diagnosis:visible").count() == 2
    assert page.locator("button.theme:visible, .tools:visible, .copy:visible").count() == 0
    context.close()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_very_short_runs(browser: Any, tmp_path: Path, steps: int) -> None:
    """A run of no step, one or two is drawn without a word on the console."""
    rows = [{"step": n, "loss": 0.0, "grad_norm": "inf", "lr": -1.0} for n in range(steps)]
    with Opened(browser, write_report(write_run(tmp_path / "run", [incident(0)], rows)), "phone") as opened:
        assert opened.said == []
        assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_large_run(browser: Any, tmp_path: Path) -> None:
    """10,000 steps with 500 incidents: drawn, and the marks stay apart."""
    folder = write_run(tmp_path / "run", [incident(n, line=11 + n % 3) for n in range(0, 10_000, 20)], metrics(10_000, (777,)))
    with Opened(browser, write_report(folder), "phone") as opened:
        assert opened.said == []
        assert 2 < opened.page.locator(".track button").count() <= 20
        assert opened.page.locator("table.incidents tbody tr").count() == 500
