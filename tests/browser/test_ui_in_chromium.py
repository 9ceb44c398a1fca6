"""The pages of `clustertrain ui` in a real browser, from a real server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api

from clustertrain import settings
from clustertrain.run.run_dir import RunDir
from tests import ui_home
from tests.browser import test_html_in_chromium as telemetry_page
from tests.browser.test_html_in_chromium import CHROMIUM
from tests.ui_home import Made

pytestmark = telemetry_page.pytestmark
NOW = time.time()
MISSING = "/nothing"  # a page that does not exist
HOSTILE = "<img src=x onerror=document.title=1>"


class Server:
    """A running `clustertrain ui`."""

    def __init__(self, home: Path, cache: Path) -> None:
        env = {**os.environ, settings.HOME: str(home), settings.XDG_CACHE_HOME: str(cache)}
        argv = [sys.executable, "-m", "clustertrain", "ui", "--no-browser"]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    @property
    def address(self) -> str:
        return self.url.partition("/?")[0]

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunDir]]:
    home = tmp_path_factory.mktemp("ui") / "home"
    before = os.environ.get(settings.HOME)
    ui_home.use_home(home)
    small: dict[str, Any] = {"steps": 60, "total": 100, "rows": 60, "samples": 30, "gpus": 2}
    kinds = [Made("alive", "running", age_s=9000, loss=2.5, **small), Made("good", age_s=20_000, loss=1.5, **small)]
    kinds += [Made("bad", "failed", age_s=30_000, idle_gpus=1, **small), Made("soon", "pending", age_s=100, **small)]
    made = {one.name: ui_home.make_run(home, NOW, one, seed=i) for i, one in enumerate(kinds)}
    shutil.copytree(made["good"].path, home / "runs" / HOSTILE)
    points = [({"optim.lr": lr}, Made("s", steps=60, total=60, loss=1 / lr, telemetry=False)) for lr in (1.0, 2.0)]
    ui_home.make_sweep(home, NOW, "lr-abcdef", points)
    yield made
    if before is not None:
        os.environ[settings.HOME] = before


@pytest.fixture(scope="module")
def server(runs: dict[str, RunDir], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(runs["alive"].path.parents[1], tmp_path_factory.mktemp("cache"))
    yield running
    assert running.end() == 0, "Ctrl-C ends it, also with open streams"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


Open = Callable[..., Any]


def is_error(message: Any, may_fail: bool) -> bool:
    if may_fail and "server responded with a status of" in message.text:
        return False
    return message.type == "error" and not message.location["url"].endswith(MISSING)


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[Open]:
    """Yield a function that opens a page as a signed-in user and fails the test on any error in it."""
    contexts, errors = [], []

    def open_it(path: str = "/", width: int = 1400, scheme: str = "light", may_fail: bool = False) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if is_error(m, may_fail) else None)
        page.on("request", lambda r: errors.append(r.url) if not r.url.startswith((server.address, "data:")) else None)
        page.goto(server.url)
        page.wait_for_selector("html[data-ready]")
        if path != "/":
            page.goto(server.address + path)
            page.wait_for_selector("html[data-ready]")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert errors == []


def run_ids(page: Any) -> list[str]:
    return page.locator("#runs tbody tr a").all_text_contents()


def line(page: Any, run: RunDir) -> Any:
    return page.locator("#runs tbody tr", has=page.get_by_role("link", name=run.id, exact=True))


def test_nothing_is_shown_without_the_token(browser: Any, server: Server, open_page: Open) -> None:
    page = browser.new_page()
    assert page.goto(server.address).status == 401 and page.locator("table").count() == 0
    page.close()
    signed_in = open_page()
    assert "token" not in signed_in.url and signed_in.evaluate("document.cookie") == ""
    assert signed_in.goto(server.address + "/usage").status == 200


def test_table_filters_sorts_and_keeps_both_in_the_address(open_page: Open, runs: dict[str, RunDir]) -> None:
    page = open_page()
    sync_api.expect(page.locator("#runs tbody tr")).to_have_count(7)
    assert run_ids(page)[0] == runs["soon"].id, "the newest first"
    assert HOSTILE in run_ids(page) and page.locator("img[src=x]").count() == 0
    page.get_by_role("button", name="Loss").click()
    losses = [float(text) for text in page.locator("#runs td.c-loss").all_text_contents() if text]
    assert losses == sorted(losses)
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.keyboard.press("/")
    page.keyboard.type("BAD fail")
    assert run_ids(page) == [runs["bad"].id]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert run_ids(page) == [runs["bad"].id] and page.locator("#filter").input_value() == "BAD fail"
    assert page.locator("th[aria-sort]").text_content() == "Loss"
    page.locator("#filter").press("Escape")
    page.locator("#states [data-state=running]").click()
    assert run_ids(page) == [runs["alive"].id]
    page.locator("#filter").fill("nothing like it")
    page.get_by_role("button", name="Show all runs").click()
    assert page.locator("#runs tbody tr").count() == 7


def test_rows_change_while_one_looks(open_page: Open, runs: dict[str, RunDir], server: Server) -> None:
    page = open_page()
    sync_api.expect(page.locator("#live")).to_have_text("Live")
    alive = line(page, runs["alive"])
    assert "60 / 100 · 60 %" in alive.locator(".steps").text_content()
    alive.locator("a").focus()
    with runs["alive"].metrics_path(1).open("a") as f:
        f.write(json.dumps({"step": 80, "t": time.time(), "loss": 0.125, "step_s": 1.0}) + "\n")
    sync_api.expect(alive.locator(".steps")).to_have_text("80 / 100 · 80 %", timeout=5000)
    assert alive.locator(".c-loss").text_content() == "0.125"
    assert page.evaluate("document.activeElement.textContent") == runs["alive"].id, "the focus stays"
    bad = line(page, runs["bad"])
    sync_api.expect(bad.locator(".c-insights .mark.critical, .c-insights .mark.warning").first).to_be_visible(
        timeout=60_000
    )
    assert bad.locator("svg.spark").count() == 1
    page.locator(f"input[aria-label='Select {HOSTILE}']").check()
    shutil.rmtree(runs["alive"].path.parent / HOSTILE)
    sync_api.expect(page.locator("#runs tbody tr")).to_have_count(6, timeout=5000)
    assert "was deleted" in page.locator("#changes").text_content()


def test_two_selected_runs_are_compared(open_page: Open, runs: dict[str, RunDir]) -> None:
    page = open_page()
    compare = page.locator("#compare")
    assert compare.get_attribute("aria-disabled") == "true"
    for name in ("alive", "good"):
        line(page, runs[name]).get_by_role("checkbox").check()
    compare.click()
    page.wait_for_selector("html[data-ready]")
    assert page.get_by_role("heading", level=1).text_content() == "2 runs compared by loss"
    assert page.locator("figure canvas").first.evaluate(telemetry_page.COUNT_COLORS) > 4
    page.get_by_role("link", name="hours").click()
    page.wait_for_selector("html[data-ready]")
    assert "by=hours" in page.url


def test_comparison_follows_its_runs(open_page: Open, runs: dict[str, RunDir]) -> None:
    growing = ui_home.make_run(
        runs["good"].path.parents[1], NOW, Made("growing", "running", steps=60, total=200, rows=60, telemetry=False), 11
    )
    page = open_page(f"/compare?run={growing.id}&run={runs['good'].id}", width=600, may_fail=True)
    sync_api.expect(page.locator("#live")).to_have_text("Live")
    figure = page.locator("figure[data-scalar=loss]")
    row = page.locator("#content .compared tbody tr", has=page.get_by_role("link", name=growing.id, exact=True))
    assert (row.locator("td").nth(2).text_content(), figure.get_attribute("data-to")) == ("60", "60")
    page.get_by_label("log scale").check()
    row.get_by_role("link").focus()
    _append(growing, 120, loss=0.25)
    sync_api.expect(row.locator("td").nth(2)).to_have_text("120", timeout=10_000)
    sync_api.expect(figure).to_have_attribute("data-to", "120")
    assert page.get_by_label("log scale").is_checked(), "the chart is the same one"
    assert page.evaluate("document.activeElement.textContent") == growing.id, "the focus stays"
    assert f"({growing.id}) is best, 0.25 at step 120" in page.locator(".verdict").text_content()
    figure.locator(".plot").press("+")
    zoomed = figure.get_attribute("data-from"), figure.get_attribute("data-to")
    assert zoomed != ("1", "120")
    _append(growing, 150, loss=0.2)
    sync_api.expect(row.locator("td").nth(2)).to_have_text("150", timeout=10_000)
    assert (figure.get_attribute("data-from"), figure.get_attribute("data-to")) == zoomed, "the zoom stays"
    _append(growing, 160, loss=0.2, validation_loss=1.0)
    sync_api.expect(page.get_by_role("link", name="validation_loss")).to_be_visible(timeout=10_000)
    shutil.rmtree(growing.path)
    sync_api.expect(page.get_by_text(f"there is no run '{growing.id}'")).to_be_visible(timeout=10_000)


def test_comparison_says_that_a_run_was_damaged(open_page: Open, runs: dict[str, RunDir]) -> None:
    damaged = ui_home.make_run(
        runs["good"].path.parents[1], NOW, Made("damaged", steps=9, total=9, telemetry=False), 12
    )
    page = open_page(f"/compare?run={damaged.id}&run={runs['good'].id}", may_fail=True)
    sync_api.expect(page.locator("#live")).to_have_text("Live")
    damaged.spec.write_text("[job")
    sync_api.expect(page.get_by_text("spec.toml")).to_be_visible(timeout=10_000)
    shutil.rmtree(damaged.path)


def _append(run: RunDir, step: int, **scalars: float) -> None:
    with run.metrics_path(1).open("a") as f:
        f.write(json.dumps({"step": step, "t": time.time(), "step_s": 1.0, **scalars}) + "\n")


def test_usage_changes_while_one_looks(open_page: Open, runs: dict[str, RunDir]) -> None:
    page = open_page("/usage", width=600)
    sync_api.expect(page.locator("#live")).to_have_text("Live")
    before = page.locator(".head .about").text_content()
    page.get_by_role("link", name=runs["bad"].id).focus()
    page.evaluate("scrollTo(0, 200)")
    kept = page.evaluate("scrollY")
    assert kept > 0
    extra = ui_home.make_run(runs["bad"].path.parents[1], NOW, Made("extra", steps=60, total=60, telemetry=False), 9)
    sync_api.expect(page.locator(".head .about")).not_to_have_text(before, timeout=10_000)
    assert page.evaluate("document.activeElement.textContent") == runs["bad"].id, "the focus stays"
    assert page.evaluate("scrollY") == kept, "and the place"
    shutil.rmtree(extra.path)
    sync_api.expect(page.locator(".head .about")).to_have_text(before, timeout=10_000)


def test_usage_loads_again_after_a_lost_connection_and_after_a_page_without_content(
    browser: Any, server: Server, runs: dict[str, RunDir]
) -> None:
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.goto(server.url)
    page.wait_for_selector("html[data-ready]")
    address = f"{server.address}/usage"
    page.goto(address)
    sync_api.expect(page.locator("#live")).to_have_text("Live")
    about = page.locator(".head .about")
    before = about.text_content()
    home, made = runs["bad"].path.parents[1], Made("extra", steps=60, total=60, telemetry=False)
    page.route(address, lambda route: route.abort())
    with page.expect_event("requestfailed", timeout=10_000):
        extra = ui_home.make_run(home, NOW, made, 9)
    assert (errors, about.text_content()) == ([], before), "the page says already that the connection is lost"
    page.unroute(address)
    page.route(address, lambda route: route.fulfill(body="<p>another page", content_type="text/html"))
    with page.expect_event("pageerror", timeout=10_000):
        more = ui_home.make_run(home, NOW, made, 10)
    page.unroute(address)
    shutil.rmtree(more.path)
    sync_api.expect(about).not_to_have_text(before, timeout=10_000)
    shutil.rmtree(extra.path)
    sync_api.expect(about).to_have_text(before, timeout=10_000)
    page.close()


def test_a_lost_connection_is_said(browser: Any, runs: dict[str, RunDir], tmp_path: Path) -> None:
    other = Server(runs["alive"].path.parents[1], tmp_path)
    page = browser.new_page()
    page.goto(other.url)
    sync_api.expect(page.locator("#live")).to_have_text("Live")
    assert other.end() == 0
    sync_api.expect(page.locator("#live")).to_contain_text("onnect", timeout=10_000)
    assert page.locator("#live").get_attribute("data-state") == "lost" and page.locator("#runs tbody tr").count() > 0
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_and_fit(open_page: Open, runs: dict[str, RunDir], server: Server, scheme: str) -> None:
    compare = f"/compare?run={runs['alive'].id}&run={runs['good'].id}"
    page = open_page("/", 1400, scheme)
    for path in ("/", "/sweeps", "/sweeps/lr-abcdef", "/usage", compare, MISSING):
        page.set_viewport_size({"width": 1400, "height": 900})
        page.goto(server.address + path)
        if path != MISSING:
            page.wait_for_selector("html[data-ready]")
        check_accessible(page)
        page.set_viewport_size({"width": 375, "height": 900})
        wait_until_narrow(page, path)
        if path == "/":
            check_accessible(page)


def wait_until_narrow(page: Any, path: str) -> None:
    """Charts take their new width after the window has."""
    deadline = time.monotonic() + 10
    while (width := page.evaluate("document.documentElement.scrollWidth")) > 375:
        assert time.monotonic() < deadline, (path, width)
        page.wait_for_timeout(50)


def check_accessible(page: Any) -> None:
    found = Axe().run(page).response["violations"]
    serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
    assert serious == [], page.url
