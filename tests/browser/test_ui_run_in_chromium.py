"""The page of one run of `clustertrain ui` in a real browser: live, by keyboard, with hostile text, narrow and dark."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api

from clustertrain import clock, fsio
from clustertrain.run.run_dir import RunDir
from tests import runs, ui_server
from tests.unit.report import live_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        CHROMIUM is None and "CLUSTERTRAIN_REQUIRE_SLURM" not in os.environ,
        reason="no Chromium: slurm/install-packages installs it",
    ),
]
TABS = ("overview", "training", "gpus", "timeline", "logs", "setup", "checkpoints")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"> \x1b[31mred\x1b[0m \x1b]0;title\x07 \u202egnp.exe"
HOSTILE_AS_TEXT = "<img src=x onerror=\"document.title='owned'\"> red \\x1b]0;title\\x07 \\u202egnp.exe"
# Number of pixels of a chart that have the color of its first line.
DRAWN = """figure => {
  const canvas = figure.querySelector("canvas");
  if (!canvas) return 0;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let n = 0;
  for (let i = 0; i < data.length; i += 4) n += data[i] < 20 && data[i + 1] > 90 && data[i + 2] > 150;
  return n;
}"""
Open = Callable[..., Any]
Serve = Callable[[Path], str]


def wait_until(is_met: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition; the pages' policy forbids wait_for_function, which evaluates text in the page."""
    end = time.monotonic() + timeout_s
    while not is_met():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # A container lacks the user namespaces that the sandbox needs; the page is trusted.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that serves the runs of a home until the pages of ``open_page`` are closed."""
    with contextlib.ExitStack() as servers:
        yield lambda home: servers.enter_context(ui_server.serve(home))


@pytest.fixture
def open_page(browser: Any, serve: Serve) -> Iterator[Open]:
    """Return a function that opens a page of a server and fails the test on any error of its scripts."""
    contexts, errors = [], []

    def open_it(server: str, path: str, width: int = 1400, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(server)
        page.wait_for_url("**/")
        page.goto(ui_server.address_of(server, path))
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def made(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, RunDir]:
    """Serve an active run of two nodes with telemetry, logs and a hostile log line; return the server and the run."""
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    now = clock.now()
    run = live_runs.new_run(tmp_path, now)
    live_runs.create_job("local-1", run)
    live_runs.begin(run, now, ["n1", "n2"])
    for i, node in enumerate(("n1", "n2")):
        live_runs.record(run, node, now, gpus=4, first=4 * i)
    attempt = run.attempt(1)
    attempt.logs.mkdir()
    for rank in range(8):
        attempt.rank_log(rank).write_text("".join(f"step {s} of rank {rank}\n" for s in range(1200)))
    with attempt.rank_log(0).open("a") as f:
        f.write(f"{HOSTILE}\n")
    fsio.write_json(run.record, {"argv": ["clustertrain", "submit", HOSTILE]})
    return serve(tmp_path), run


@pytest.mark.ranks
def test_run_under_way_grows_is_preempted_and_continues(open_page: Open, serve: Serve, tmp_path: Path) -> None:
    clean_env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    env = {**clean_env, "CLUSTERTRAIN_HOME": str(tmp_path / "home")}
    run = runs.submit(env, *runs.LOCAL, "--gpus", "1", str(runs.write_recipe(tmp_path, steps=600)))
    try:
        server = serve(tmp_path / "home")
        page = open_page(server, f"/runs/{run.id}#training")
        loss = page.locator("figure[data-scalar=loss]")
        loss.wait_for(timeout=120_000)
        wait_until(lambda: loss.evaluate(DRAWN) > 20)
        last = float(loss.get_attribute("data-to"))
        wait_until(lambda: float(loss.get_attribute("data-to")) >= last + 5)
        page.get_by_role("tab", name="Logs").click()
        log = page.get_by_role("log")
        sync_api.expect(log.locator(".line").last).to_contain_text("step")
        seen = log.locator(".line").last.text_content()
        sync_api.expect(log.locator(".line").last).not_to_have_text(seen, timeout=20_000)

        run.call("requeue", run.id)
        page.get_by_role("tab", name="Timeline").click()
        events = page.get_by_role("region", name="Events")
        sync_api.expect(events).to_contain_text("preempted", timeout=60_000)
        sync_api.expect(events).to_contain_text("restored step", timeout=120_000)
        page.get_by_role("tab", name="Overview").click()
        attempts = page.get_by_role("region", name="Attempts").locator("tbody tr")
        sync_api.expect(attempts).to_have_count(2)
        sync_api.expect(attempts.nth(0)).to_contain_text("preempted")
        page.get_by_role("tab", name="Logs").click()
        # The lines of attempt 1 stay until the list of logs arrives.
        chosen = page.get_by_label("Log", exact=True)
        sync_api.expect(chosen, "the log follows the requeue").to_have_value("2/rank-0", timeout=20_000)
        sync_api.expect(log).to_contain_text("step", timeout=60_000)
        page.get_by_role("tab", name="Training").click()
        sync_api.expect(page.locator("#panel-training .key").first).to_contain_text("start of an attempt")
    finally:
        run.cancel_if_active()


def test_rows_lines_and_events_appear_and_a_deleted_run_says_so(open_page: Open, made: tuple[str, RunDir]) -> None:
    server, run = made
    page = open_page(server, f"/runs/{run.id}")
    sync_api.expect(page.locator(".progress-line")).to_contain_text("Step 1,200 of 10,000")
    append(run.metrics_path(1), {"step": 1201, "t": clock.now(), "loss": 0.125, "step_s": 0.5})
    sync_api.expect(page.locator(".progress-line")).to_contain_text("Step 1,201")
    sync_api.expect(page.locator(".stats")).to_contain_text("0.125")

    page.get_by_role("tab", name="Logs").click()
    last = page.get_by_role("log").locator(".line").last
    sync_api.expect(last).to_have_text(HOSTILE_AS_TEXT)
    assert page.locator("img[src=x]").count() == 0 and "owned" not in page.title()
    with run.attempt(1).rank_log(0).open("a") as f:
        f.write("an unfinished")
    sync_api.expect(last).to_have_text("an unfinished")
    with run.attempt(1).rank_log(0).open("a") as f:
        f.write(" line\nRuntimeError: out of memory\n")
    sync_api.expect(last).to_have_text("RuntimeError: out of memory")
    assert "trouble" in last.get_attribute("class")
    assert "an unfinished line" in page.get_by_role("log").locator(".line").nth(-2).text_content()

    search = page.get_by_role("search")
    search.get_by_role("searchbox").fill("Step 1199")
    search.get_by_label("In", exact=True).select_option("run")
    search.get_by_role("button", name="Search").click()
    matches = page.locator(".matches li")
    sync_api.expect(matches).to_have_count(8)
    matches.nth(5).get_by_role("button").click()
    match = page.get_by_role("log").locator(".match")
    sync_api.expect(match).to_have_text("step 1199 of rank 5")
    sync_api.expect(match).to_be_in_viewport()
    page.get_by_role("button", name="Newest lines").click()
    page.get_by_label("Log", exact=True).select_option("1/rank-0")
    for rank in (5, 0):
        with run.attempt(1).rank_log(rank).open("a") as f:
            f.write(f"new line of rank {rank}\n")
    sync_api.expect(last).to_have_text("new line of rank 0")
    assert page.get_by_role("log").get_by_text("new line of rank 5").count() == 0, "of the log that was shown before"

    append(run.attempt(1).events_path("batch"), {"t": clock.now(), "event": "signal", "source": "preemption"})
    page.get_by_role("tab", name="Timeline").click()
    sync_api.expect(page.get_by_role("region", name="Events")).to_contain_text("stop requested (preemption)")
    append(run.attempt(1).events_path("batch"), {"t": clock.now(), "event": "stop_agreed", "step": 1201})
    sync_api.expect(page.get_by_role("region", name="Events")).to_contain_text("all ranks stop at step 1201")

    shutil.rmtree(run.path)
    sync_api.expect(page.get_by_role("alert")).to_contain_text("This run has been deleted")
    assert page.get_by_role("region", name="Events").is_visible(), "what was known stays"


def append(path: Path, record: dict[str, Any]) -> None:
    log = fsio.JsonlAppender(path)
    log.append(record)
    log.close()


def test_every_tab_is_accessible_and_fits_a_phone(open_page: Open, made: tuple[str, RunDir]) -> None:
    server, run = made
    page = open_page(server, f"/runs/{run.id}")
    page.get_by_role("tab", name="Overview").focus()
    for i, tab in enumerate(TABS):
        if i:
            page.keyboard.press("ArrowRight")
        panel = page.get_by_role("tabpanel")
        sync_api.expect(panel).to_have_count(1)
        sync_api.expect(panel).to_have_attribute("id", f"panel-{tab}")
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        sync_api.expect(panel.get_by_text("being summarized")).to_be_hidden(timeout=30_000)
        assert find_violations(page) == [], tab
        page.emulate_media(color_scheme="dark")
        assert find_violations(page, "color-contrast") == [], f"{tab}, dark"
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 375, "height": 800})
        page.wait_for_timeout(100)  # for the charts' ResizeObserver
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, f"{tab} scrolls sideways"
        page.set_viewport_size({"width": 1400, "height": 900})
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("#overview"), "the arrow keys go round"


def find_violations(page: Any, *rules: str) -> list[str]:
    """Return the serious and critical findings of axe-core."""
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found = Axe().run(page, options=options).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] in ("serious", "critical")]


def test_curves_by_time_on_log_axes_and_smoothed(open_page: Open, made: tuple[str, RunDir]) -> None:
    server, run = made
    page = open_page(server, f"/runs/{run.id}#training")
    loss = page.locator("figure[data-scalar=loss]")
    wait_until(lambda: loss.evaluate(DRAWN) > 20)
    assert (loss.get_attribute("data-from"), loss.get_attribute("data-to")) == ("1", "1200")

    def picture() -> str:
        page.wait_for_timeout(150)
        url: str = loss.locator("canvas").evaluate("c => c.toDataURL()")
        return url

    pictures = [picture()]
    page.get_by_label("Log scale").check()
    pictures.append(picture())
    page.get_by_label("Smoothing").fill("0.9")
    pictures.append(picture())
    page.get_by_text("Time", exact=True).click()
    pictures.append(picture())
    assert float(loss.get_attribute("data-from")) > 1e9
    assert len(set(pictures)) == 4
    assert "between" in loss.locator(".plot").get_attribute("aria-label")
