"""The HTML page in a real browser, from file://."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api

from clustertrain.report import html
from clustertrain.telemetry.analysis.resample import CurveTable
from clustertrain.telemetry.report_schema import Insight
from tests import pages

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {1400: 1000, 420: 900}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        CHROMIUM is None and "CLUSTERTRAIN_REQUIRE_SLURM" not in os.environ,
        reason="no Chromium: slurm/install-packages installs it",
    ),
]

# The number of colors on a canvas, with 4 bits per channel. An empty canvas has one.
COUNT_COLORS = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colors = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 127) colors.add(((data[i] >> 4) << 8) | ((data[i + 1] >> 4) << 4) | (data[i + 2] >> 4));
  }
  return colors.size;
}"""
HAS_COLOR = """(canvas, rgb) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 250 && rgb.every((c, k) => Math.abs(data[i + k] - c) < 6)) return true;
  }
  return false;
}"""
RANGES = """() => [...document.querySelectorAll("figure:not(.constant)")].filter(f => !f.hidden)
  .map(f => [Number(f.dataset.from), Number(f.dataset.to)])"""
SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@dataclass
class OpenedPage:
    """A page with its requests and its errors."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ranges(self) -> list[tuple[float, float]]:
        self.page.evaluate(SETTLED)
        return [tuple(r) for r in self.page.evaluate(RANGES)]

    def one_range(self) -> tuple[float, float]:
        """Return the range of all charts, which must be the same."""
        ranges = self.ranges()
        assert len(ranges) > 10 and len(set(ranges)) == 1, ranges
        return ranges[0]

    def drag(self, figure: str, start: float, end: float) -> None:
        """Drag over the plot of a figure between two positions, as shares of its width."""
        over = self.page.locator(f"{figure} .u-over")
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + start * box["width"], y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + (start + end) / 2 * box["width"], y, steps=3)
        self.page.mouse.move(box["x"] + end * box["width"], y, steps=3)
        self.page.mouse.up()

    def readout(self, figure: str) -> str:
        self.page.evaluate(SETTLED)
        text: str = self.page.locator(f"{figure} .readout").text_content()
        return text


Open = Callable[..., OpenedPage]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # A container lacks the user namespaces that the sandbox needs; the page is trusted.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    html.write(*pages.page(), path)
    return path


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    contexts = []

    def open_it(path: Path, width: int = 1400, scheme: str = "light", **options: Any) -> OpenedPage:
        size = {"width": width, "height": WIDTHS[width]}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme, locale="de-DE", **options))
        opened = OpenedPage(contexts[-1].new_page())
        opened.page.on("request", lambda r: opened.requests.append(r.url))
        opened.page.on("console", lambda m: opened.errors.append(m.text))
        opened.page.on("pageerror", lambda e: opened.errors.append(str(e)))
        opened.page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            opened.page.wait_for_selector("html[data-ready]")
            opened.page.evaluate("document.querySelectorAll('#charts details').forEach(d => { d.open = true; })")
            opened.page.evaluate(SETTLED)
        return opened

    yield open_it
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_page_is_drawn_without_requests_or_errors(
    open_page: Open, day: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    opened = open_page(day, width, scheme)
    view = opened.page
    view.evaluate(SETTLED)
    canvases = view.locator("figure canvas")
    assert canvases.count() >= 23
    for i in range(canvases.count()):
        assert canvases.nth(i).evaluate(COUNT_COLORS) > 4, f"canvas {i} is blank"
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls horizontally"
    background = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")
    view.screenshot(path=tmp_path / "page.png", full_page=True)
    assert opened.requests == [day.as_uri()] and opened.errors == []


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_sick_gpu_is_one_click_from_the_first_screen(open_page: Open, day: Path, width: int, scheme: str) -> None:
    opened = open_page(day, width, scheme, timezone_id="Europe/Berlin")
    view = opened.page
    first_screen = WIDTHS[width]
    for found in (
        view.locator(".badge", has_text="completed"),
        view.locator(".verdict a").first,
        view.locator(".problem a"),
    ):
        assert found.bounding_box()["y"] < first_screen, "visible without scrolling"
    assert view.locator(".problem").inner_text() == f"gpu-node-01:{pages.IDLE} below 15%"
    view.locator(".insights a", has_text=f"rank {pages.HOT}").click()
    assert view.input_value("#shown") == f"gpu:{pages.HOT}" and view.url.endswith(f"#gpu-{pages.HOT}")
    assert "gpu-node-03:3, rank 19" in view.locator("#picked").inner_text()
    assert view.locator("#gpus tr.picked").get_attribute("id") == f"row-{pages.HOT}"
    assert 0 <= view.locator("#heat").bounding_box()["y"] < first_screen
    rows = view.locator("#gpus tbody tr")
    assert rows.count() == view.locator("#gpus tbody tr:visible").count() == 32, "no row is hidden"
    assert [rows.nth(i).get_attribute("id") for i in range(2)] == [f"row-{pages.IDLE}", f"row-{pages.HOT}"]
    recorded = view.locator(".facts time").first
    assert recorded.inner_text() == "2026-09-21 16:13:20 GMT+2"
    assert recorded.get_attribute("title") == "2026-09-21 14:13:20 UTC"
    view.get_by_role("button", name="UTC").click()
    assert recorded.inner_text() == "2026-09-21 14:13:20 UTC" and view.locator("#range").inner_text().endswith("UTC")
    problems = [v for v in Axe().run(view).response["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], [n["target"] for n in v["nodes"]]) for v in problems] == []
    assert opened.errors == [] and len(opened.requests) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_dragging_over_one_chart_zooms_all(open_page: Open, day: Path, width: int) -> None:
    opened = open_page(day, width)
    assert opened.one_range() == (pages.T0, pages.T0 + 86400)
    opened.drag("[data-curve='gpus.power_w']", 0.25, 0.5)
    low, high = opened.one_range()
    assert low == pytest.approx(pages.T0 + 0.25 * 86400, abs=900)
    assert high == pytest.approx(pages.T0 + 0.5 * 86400, abs=900)
    opened.drag("#heat", 0.5, 1.0)
    zoomed = opened.one_range()
    assert zoomed[0] == pytest.approx((low + high) / 2, abs=300) and zoomed[1] == pytest.approx(high, abs=300)
    assert opened.page.input_value("#shown") == "all", "a drag over the heat map is not a click"
    opened.page.locator("#timeline .u-over").dblclick()
    assert opened.one_range() == (pages.T0, pages.T0 + 86400)


def test_zoom_by_buttons_and_keys(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    opened.page.get_by_role("button", name="Zoom in").click()
    assert opened.one_range() == pytest.approx((pages.T0 + 21600, pages.T0 + 64800))
    opened.page.get_by_role("button", name="Later").click()
    assert opened.one_range() == pytest.approx((pages.T0 + 43200, pages.T0 + 86400))
    opened.page.locator("[data-curve='training.loss'] .plot").focus()
    opened.page.keyboard.press("+")
    assert opened.one_range() == pytest.approx((pages.T0 + 54000, pages.T0 + 75600))
    opened.page.keyboard.press("ArrowRight")
    assert "loss" in opened.readout("[data-curve='training.loss']")
    opened.page.keyboard.press("0")
    assert opened.one_range() == (pages.T0, pages.T0 + 86400)
    for _ in range(40):
        opened.page.get_by_role("button", name="Zoom in").click()
    low, high = opened.one_range()
    assert high - low == pytest.approx(240), "no further than a few points"


def test_training_curves_on_log_axes(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    loss, power = (opened.page.locator(f"[data-curve='{name}'] canvas") for name in ("training.loss", "gpus.power_w"))
    take = "c => c.toDataURL()"
    opened.page.evaluate(SETTLED)
    linear, linear_power = loss.evaluate(take), power.evaluate(take)
    opened.page.check("#logarithmic")
    opened.page.evaluate(SETTLED)
    assert loss.evaluate(take) != linear and power.evaluate(take) == linear_power
    assert loss.evaluate(COUNT_COLORS) > 4
    opened.page.uncheck("#logarithmic")
    opened.page.evaluate(SETTLED)
    assert loss.evaluate(take) == linear and opened.errors == []
    opened.page.locator("#smoothing").fill("0.95")
    opened.page.evaluate(SETTLED)
    assert loss.evaluate(take) != linear and power.evaluate(take) == linear_power
    opened.page.check("#by-step")
    figure = opened.page.locator("[data-curve='training.loss']")
    opened.page.evaluate(SETTLED)
    assert float(figure.get_attribute("data-to")) == pytest.approx(53_800, rel=0.01), "the axis has steps"
    opened.drag("[data-curve='training.loss']", 0.5, 1.0)
    opened.page.evaluate(SETTLED)
    assert float(figure.get_attribute("data-from")) == pytest.approx(26_900, rel=0.02)
    ranges = {
        c: opened.page.locator(f"[data-curve='{c}']").get_attribute("data-from")
        for c in ("training.lr", "gpus.power_w")
    }
    assert float(ranges["training.lr"]) == pytest.approx(26_900, rel=0.02), "training charts share the steps"
    assert float(ranges["gpus.power_w"]) == pages.T0, "the others keep the time"
    opened.page.locator("[data-curve='training.loss'] .u-over").hover()
    assert "step 4" in opened.readout("[data-curve='training.loss']")


def test_selector_shows_other_curves(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    key = opened.page.locator("#key li")
    assert key.all_text_contents() == ["mean", "lowest to highest"]
    opened.drag("#timeline", 0.2, 0.6)
    before = opened.one_range()
    pictures = set()
    for value, lines in (("nodes", 4), ("node:2", 8), ("gpu:5", 2)):
        opened.page.select_option("#shown", value)
        opened.page.evaluate(SETTLED)
        assert key.count() == lines
        canvas = opened.page.locator("[data-curve='gpus.power_w'] canvas")
        assert canvas.evaluate(COUNT_COLORS) > 4
        pictures.add(canvas.evaluate("c => c.toDataURL()"))
    assert len(pictures) == 3 and key.first.text_content() == "gpu-node-01:5"
    assert opened.one_range() == before, "the zoom stays"
    assert opened.errors == []


def test_cursor_shows_values_on_every_chart(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    opened.page.locator("[data-curve='gpus.utilization'] .u-over").hover()
    text = opened.readout("[data-curve='gpus.utilization']")
    assert "09-22 02:1" in text and "mean 8" in text and "lowest 0 %" in text
    assert "mean" in opened.readout("[data-curve='gpus.power_w']")
    assert "attempt 2" in opened.readout("#timeline")


def test_heat_map_tooltip_has_gpu_rank_time_and_value(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    over = opened.page.locator("#heat .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    row = box["height"] / 32
    place = {"x": box["width"] * 0.75, "y": row * (pages.IDLE + 0.5)}
    over.hover(position=place)
    text = opened.readout("#heat")
    assert text.startswith("gpu-node-01:5, rank 5 · 2026-09-22 08:1") and text.endswith(" · 0 %")
    opened.page.select_option("#heat select", label="Power")
    over.hover(position={**place, "y": row * (pages.HOT + 0.5)})
    assert opened.readout("#heat").startswith(
        "gpu-node-03:3, rank 19"
    ) and " W, slowed by heat or hardware" in opened.readout("#heat")
    over.click(position={**place, "y": row * (pages.HOT + 0.5)})
    assert opened.page.input_value("#shown") == "gpu:19", "a click shows that GPU's curves"


def test_event_has_a_tooltip(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    over = opened.page.locator("#timeline .u-over")
    box = over.bounding_box()
    lane = box["height"] / 8
    over.hover(position={"x": box["width"] * 20.1 / 24, "y": lane * 2.5})
    assert "xid: XID 63 on GPU 7 of gpu-node-03" in opened.readout("#timeline")


def test_timeline_has_phases(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    over = opened.page.locator("#timeline .u-over")
    box = over.bounding_box()
    for hour, expected in ((5.4, "attempt 1 · training"), (10.55, "attempt 2 · start-up"), (3.53, "evaluation")):
        over.hover(position={"x": box["width"] * hour / 24, "y": box["height"] / 8 * 1.5})
        assert opened.readout("#timeline").endswith(expected)
    canvas = opened.page.locator("#timeline canvas")
    assert canvas.evaluate(HAS_COLOR, [0x00, 0x79, 0x5A]), "training is drawn"


def test_theme_can_be_changed(open_page: Open, day: Path) -> None:
    opened = open_page(day, scheme="dark")

    def lines() -> list[bool]:
        """Return whether the canvas has the first line's color in the light theme and in the dark one."""
        opened.page.evaluate(SETTLED)
        canvas = opened.page.locator("[data-curve='gpus.power_w'] canvas")
        return [canvas.evaluate(HAS_COLOR, rgb) for rgb in ([0x00, 0x72, 0xB2], [0x56, 0xB4, 0xE9])]

    assert lines() == [False, True]
    opened.page.get_by_role("button", name="Light theme").click()
    assert lines() == [True, False]
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    opened.page.get_by_role("button", name="Dark theme").click()
    assert lines() == [False, True]


def test_tables_sort(open_page: Open, day: Path) -> None:
    opened = open_page(day)
    ranks = opened.page.locator("#gpus tbody td:nth-child(2)")
    head = opened.page.locator("#gpus thead th", has_text="Util. mean")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending" and ranks.last.text_content() == str(pages.IDLE)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending" and ranks.first.text_content() == str(pages.IDLE)
    heads = opened.page.locator("#gpus thead th")
    assert heads.count() == opened.page.locator("#gpus thead th button").count() > 10, "every column sorts"
    heads.first.get_by_role("button").click()
    assert opened.page.locator("#gpus thead th[aria-sort]").count() == 1


def test_report_works_without_javascript(open_page: Open, day: Path) -> None:
    view = open_page(day, java_script_enabled=False).page
    for text in ("llama-8b-pretrain-k3v7xq", "was not used", "The curves need JavaScript"):
        assert view.get_by_text(text).first.is_visible(), text
    assert "productive steps" in view.locator(".parts").inner_text()
    assert view.locator("#gpus tbody tr").count() == 32
    assert not view.locator("#curves").is_visible() and not view.locator("#theme").is_visible()


def test_markup_in_names_is_escaped(open_page: Open, tmp_path: Path) -> None:
    summary, curves = pages.page(nodes=2, gpus=2, hours=2)
    evil = '</script><img src=x onerror="document.title=1">'
    summary = msgspec.structs.replace(
        summary, run=evil, insights=[Insight(severity="info", code="x", text=evil)],
        gpus=[msgspec.structs.replace(g, node=evil) for g in summary.gpus],
    )  # fmt: skip
    html.write(summary, type(curves)(**{**vars(curves), "node_names": [evil, evil]}), tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    opened.page.select_option("#shown", "nodes")
    assert opened.page.locator("img").count() == 0 and opened.page.title() == f"{evil} (completed): telemetry"
    assert opened.errors == [] and len(opened.requests) == 1


def test_printed_page_is_light_and_complete(open_page: Open, day: Path, tmp_path: Path) -> None:
    view = open_page(day, scheme="dark").page
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert view.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    view.emulate_media(media="print")
    assert not view.locator(".toolbar").is_visible()
    assert len(view.pdf()) > 50_000
    view.evaluate("dispatchEvent(new Event('afterprint'))")
    assert view.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_only_selected_gpus_of_many_have_curves(open_page: Open, tmp_path: Path) -> None:
    summary, curves = pages.page(nodes=16, gpus=8, hours=24, step_s=900)
    chosen = list(range(64, 128))
    few = {**vars(curves), "gpus": curves.gpus.rows(chosen), "chosen": chosen, "choice": "64 of 128 GPUs have curves"}
    html.write(summary, type(curves)(**few), tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    assert opened.page.get_by_text("64 of 128 GPUs have curves").is_visible()
    rows = opened.page.locator("#gpus tbody tr:visible")
    assert rows.count() == 64 and rows.first.text_content().strip().startswith("✖")
    opened.page.get_by_role("button", name="Show all 128").click()
    assert rows.count() == 128
    opened.page.get_by_role("button", name="Show only 64").click()
    assert rows.count() == 64
    opened.page.evaluate("document.querySelector('#row-63 a').click()")
    assert opened.page.locator("#row-63").is_visible(), "a selected row is shown beyond the limit"
    assert "has no curves of its own" in opened.page.locator("#picked").text_content()
    opened.page.select_option("#shown", "gpu:0")
    assert opened.page.locator("#key li").first.text_content() == "gpu-node-09:0"
    opened.page.select_option("#shown", "node:0")
    assert opened.page.locator("#key li").all_text_contents() == ["gpu-node-01"], "none of its GPUs was chosen"
    heat = opened.page.locator("#heat .u-over")
    heat.hover(position={"x": 300, "y": heat.bounding_box()["height"] / 128 * 3.5})
    assert opened.readout("#heat").startswith("gpu-node-01:3, rank 3")
    assert opened.errors == []


def test_run_without_gpus_shows_nodes(open_page: Open, tmp_path: Path) -> None:
    summary, curves = pages.page(nodes=2, gpus=2, hours=4)
    none = CurveTable(curves.gpus.start, curves.gpus.step_s, curves.gpus.points)
    bare = {**vars(curves), "gpus": none, "heat": none, "overall": none, "nodes": none, "training": none, "chosen": []}
    html.write(msgspec.structs.replace(summary, gpus=[]), type(curves)(**bare), tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    opened.page.evaluate(SETTLED)
    assert opened.page.locator("[data-curve='hosts.cpu'] canvas").evaluate(COUNT_COLORS) > 4
    assert not opened.page.locator("#heat").is_visible()
    assert opened.page.locator("#shown option").all_text_contents()[1:] == ["Nodes", "gpu-node-01", "gpu-node-02"]
    opened.page.select_option("#shown", "node:1")
    assert opened.page.locator("#key li").all_text_contents() == ["gpu-node-02"]
    assert opened.errors == []


def test_short_run_needs_one_sample(open_page: Open, tmp_path: Path) -> None:
    summary, curves = pages.page(nodes=1, gpus=1, hours=1 / 60, step_s=60)
    html.write(summary, curves, tmp_path / "page.html")
    opened = open_page(tmp_path / "page.html")
    opened.page.get_by_role("button", name="Zoom in").click()
    assert len(opened.ranges()) > 10 and opened.errors == []
