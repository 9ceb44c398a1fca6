"""Draws docs/pictures/telemetry-{light,dark}.png: the HTML page of a made-up run in headless Chromium.

Also report-{light,dark}.png, the top of the page, for the README, and telemetry-narrow.png, as on a phone.

python docs/telemetry_pictures.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from clustertrain.report import html  # noqa: E402
from tests import pages  # noqa: E402

WIDTH, HEIGHT = 1400, 2060  # to the end of the heat map
NARROW = {"width": 375, "height": 1500}
MARGIN = 14  # px below the last section of the top


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        file = Path(scratch) / "page.html"
        html.write(*pages.page(), file)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
            view.goto(file.as_uri())
            view.wait_for_selector("html[data-ready]")
            view.screenshot(path=folder / f"telemetry-{scheme}.png")
            last = view.locator("#goodput").bounding_box()
            assert last is not None
            top = {"x": 0, "y": 0, "width": WIDTH, "height": last["y"] + last["height"] + MARGIN}
            view.screenshot(path=folder / f"report-{scheme}.png", clip=top)  # type: ignore[arg-type]
        view = browser.new_page(viewport=NARROW, color_scheme="dark")  # type: ignore[arg-type]
        view.goto(file.as_uri())
        view.wait_for_selector("html[data-ready]")
        view.screenshot(path=folder / "telemetry-narrow.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
