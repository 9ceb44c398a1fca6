"""Draws docs/pictures/ui-*.png: the pages of `clustertrain ui` over synthetic runs, in headless Chromium.

python docs/ui_pictures.py [FOLDER] [NAME…]
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from clustertrain import settings  # noqa: E402
from tests import ui_home  # noqa: E402
from tests.ui_home import Made  # noqa: E402

RUNS = 26
GRID = [(lr, decay, batch) for lr in (1e-4, 3e-4, 1e-3, 3e-3) for decay in (0.0, 0.1) for batch in (64, 128, 256)]


@dataclass(frozen=True)
class Picture:
    """One picture: its name, the page, and the window."""

    name: str
    path: str
    scheme: str = "light"
    width: int = 1400
    height: int = 900


PICTURES = (
    Picture("ui-runs-light", "/"),
    Picture("ui-runs-dark", "/", "dark"),
    Picture("ui-runs-narrow", "/", width=375, height=760),
    Picture("ui-sweep", "/sweeps/vit-lr-k3v7xq", height=820),
    Picture("ui-usage", "/usage", height=940),
)


def make_home(home: Path) -> None:
    """Create the runs of the pictures, as of now."""
    now = time.time()
    for i, made in enumerate(ui_home.made_runs(RUNS, seed=4)):
        made.idle_gpus = int(i % 7 == 5)
        if i > 9:  # some weeks of work
            made.age_s, made.step_s, made.preempted = made.age_s * 22, made.step_s * 6, i % 3
        ui_home.make_run(home, now, made, seed=i)
    points = []
    for i, (lr, decay, batch) in enumerate(GRID):
        loss = 2.0 + 0.4 * abs(i % 7 - 3) / 3 + 0.5 * abs(GRID.index((lr, decay, batch)) // 6 - 1) + decay
        values = {"optim.lr": lr, "optim.weight_decay": decay, "train.global_batch": batch}
        points.append((values, Made("vit-lr", age_s=30 * 3600, loss=loss, rows=100, samples=60, step_s=1.5)))
    ui_home.make_sweep(home, now, "vit-lr-k3v7xq", points)


@contextlib.contextmanager
def serve(home: Path, cache: Path) -> Iterator[str]:
    """Start the server; yield the address with its token."""
    env = {**os.environ, settings.HOME: str(home), settings.XDG_CACHE_HOME: str(cache), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "clustertrain", "ui", "--no-browser"]
    server = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.communicate()


def wait_for_details(page: Any) -> None:
    """Wait until utilization and insights of the runs in view have been computed."""
    ended = "#runs tbody tr:not([data-state=pending]):not([data-state=running]) .c-insights"
    script = f"() => [...document.querySelectorAll('{ended}')].every(cell => cell.childNodes.length)"
    page.wait_for_function(script, timeout=300_000)


def draw(folder: Path, pictures: Sequence[Picture]) -> None:
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        home = Path(scratch, "home")
        ui_home.use_home(home)
        make_home(home)
        with serve(home, Path(scratch, "cache")) as url:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            for picture in pictures:
                size = {"width": picture.width, "height": picture.height}
                page = browser.new_page(viewport=size, color_scheme=picture.scheme)  # type: ignore[arg-type]
                page.goto(url)
                page.wait_for_selector("html[data-ready]")
                wait_for_details(page)
                page.goto(url.partition("/?")[0] + picture.path)
                page.wait_for_selector("html[data-ready]")
                page.evaluate("document.querySelector('footer .path').textContent = '/shared/you/clustertrain'")
                page.wait_for_timeout(1500)
                page.screenshot(path=folder / f"{picture.name}.png")
                page.close()
            browser.close()


if __name__ == "__main__":
    names = sys.argv[2:]
    draw(
        Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures",
        [picture for picture in PICTURES if not names or picture.name in names],
    )
