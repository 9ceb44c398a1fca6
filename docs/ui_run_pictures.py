"""Draws docs/pictures/ui-run-{light,dark}.png, ui-gpus-light.png and ui-logs-narrow.png: the page of a made-up run.

python docs/ui_run_pictures.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import ui_run, ui_server  # noqa: E402

WIDTH, NARROW = 1400, 375


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        run = ui_run.make(Path(scratch))
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        with ui_server.serve(Path(scratch)) as server:

            def draw(name: str, tab: str, width: int, height: int, scheme: str = "light") -> None:
                view: Any = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
                view.goto(server)
                view.wait_for_url("**/")
                view.goto(ui_server.address_of(server, f"/runs/{run.id}#{tab}"))
                view.wait_for_selector("html[data-ready]")
                view.get_by_text("being summarized").first.wait_for(state="hidden", timeout=60_000)
                view.wait_for_timeout(1500)  # for the charts
                view.screenshot(path=folder / f"{name}.png")
                view.close()

            for scheme in ("light", "dark"):
                draw(f"ui-run-{scheme}", "overview", WIDTH, 1080, scheme)
            draw("ui-gpus-light", "gpus", WIDTH, 1080)
            draw("ui-logs-narrow", "logs", NARROW, 760)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
