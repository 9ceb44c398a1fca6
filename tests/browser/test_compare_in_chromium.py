"""The page of ``compare --html`` in a real browser, from file://."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api

from clustertrain.report.html import runs_page
from clustertrain.report.runs import compare
from tests.browser import test_html_in_chromium as telemetry_page
from tests.browser.test_html_in_chromium import CHROMIUM, COUNT_COLORS, SETTLED
from tests.unit.tracking.tracked_runs import make, write

pytestmark = telemetry_page.pytestmark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_two_runs_are_drawn_without_requests(tmp_path: Path, scheme: Any) -> None:
    runs = [make(tmp_path, name, contract={"metric": "loss"}) for name in ("a-aaaaaa", "b-bbbbbb")]
    write(runs[0], 1, 1, 300, validation_loss=2.0)
    write(runs[1], 2, 1, 200)
    runs_page.write(compare.compare_runs(runs, ["loss", "validation_loss"]), tmp_path / "page.html")
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 420, "height": 800})
        requests: list[str] = []
        errors: list[str] = []
        page.on("request", lambda r: requests.append(r.url))
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text))
        page.goto((tmp_path / "page.html").as_uri())
        page.evaluate(SETTLED)
        canvases = page.query_selector_all("figure[data-scalar] canvas")
        assert len(canvases) == 1 and canvases[0].evaluate(COUNT_COLORS) > 4
        assert "2, constant" in page.locator("figure[data-scalar=validation_loss]").inner_text()
        assert page.locator(".key li").all_text_contents() == ["A a-aaaaaa", "B b-bbbbbb"]
        linear = canvases[0].evaluate("c => c.toDataURL()")
        page.get_by_label("log scale").check()
        page.evaluate(SETTLED)
        assert page.locator("figure[data-scalar=loss] canvas").evaluate("c => c.toDataURL()") != linear
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        assert errors == [] and requests == [(tmp_path / "page.html").as_uri()]
        browser.close()
