"""Records the demo's run, preempted once and resumed, and draws it as docs/pictures/preempted-run-{light,dark}.gif.

    python docs/moving_picture.py [FOLDER]

Nothing is typed in by hand: the commands are run in a pseudo-terminal, and each letter, color and pause is theirs. The
whole recording is shown faster by one factor, which stands in the title.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parent))

import picture

COLUMNS, ROWS = 84, 25
COMMANDS = (("clustertrain", "submit", "--follow", "templates/demo.toml"), ("clustertrain", "list"))
PLAY_S = 9.0  # the run; then the last screen stands still
HOLD_S = 3.0
FRAME_S = 0.1  # browsers slow down shorter frames
WIDTH = 1000  # pixels: sharp where the page shows it with 800
PALETTE = 96  # colors: the edges of letters need most of them
# Rich's own light theme has a yellow that is pale on white.
_LIGHT = TerminalTheme(
    (255, 255, 255), (36, 41, 47),
    [(36, 41, 47), (176, 32, 36), (26, 112, 48), (140, 86, 0),
     (9, 84, 170), (112, 56, 160), (0, 104, 116), (90, 98, 106)],
)  # fmt: skip
THEMES = {"dark": (SVG_EXPORT_THEME, "#0d1117"), "light": (_LIGHT, "#ffffff")}  # and the page around the corners


class Frame(NamedTuple):
    """One screen: its lines with escape sequences, and how long it stands."""

    ansi: str
    seconds: float


def main(folder: Path) -> int:
    """Record once and draw both themes."""
    frames, factor = _record()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        for name, (theme, around) in THEMES.items():
            file = folder / f"preempted-run-{name}.gif"
            images = [_draw(page, frame, factor, theme, around) for frame in frames]
            _write(images, [frame.seconds for frame in frames], file)
            print(f"{file.name}: {len(frames)} frames, {file.stat().st_size / 1e3:.0f} kB")
        browser.close()
    return 0


def _record() -> tuple[list[Frame], float]:
    """Run the commands; returns the frames, and how much faster than the run they are."""
    screen = picture.Screen()
    with tempfile.TemporaryDirectory(prefix="clustertrain-") as home:
        env = picture.clean_environment(home)
        run, then = (picture.record_output(argv, env, COLUMNS, ROWS) for argv in COMMANDS)
    factor = run[-1][0] / PLAY_S
    screen.feed(_prompt(COMMANDS[0]))
    screens = [screen.ansi()]
    for index in range(1, round(PLAY_S / FRAME_S) + 1):
        due = index * FRAME_S * factor
        while run and (run[0][0] <= due or index == round(PLAY_S / FRAME_S)):
            screen.feed(run.pop(0)[1])
        screens.append(screen.ansi())
    screen.feed("\n\r" + _prompt(COMMANDS[1]) + "".join(text for _, text in then))
    frames: list[Frame] = []
    for ansi in screens:
        stands = frames.pop().seconds if frames and frames[-1].ansi == ansi else 0.0
        frames.append(Frame(ansi, stands + FRAME_S))
    frames.append(Frame(screen.ansi(), HOLD_S))
    lines = max(frame.ansi.count("\n") + 1 for frame in frames)
    if lines > ROWS:
        raise RuntimeError(f"the last screen has {lines} lines; raise ROWS")
    return frames, factor


def _prompt(argv: tuple[str, ...]) -> str:
    return f"\x1b[1m$ {' '.join(argv)}\x1b[0m\r\n"


def _draw(page: Page, frame: Frame, factor: float, theme: TerminalTheme, around: str) -> Image.Image:
    text = Text.from_ansi(frame.ansi)
    text.append("\n" * (ROWS - 1 - frame.ansi.count("\n")))
    svg = picture.draw(f"a preempted run, {factor:.1f} times faster", text, COLUMNS, theme)
    if theme is _LIGHT:
        svg = svg.replace("rgba(255,255,255,0.35)", "rgba(0,0,0,0.3)")  # the frame of the window
    style = f"body {{ margin: 0; background: {around} }} svg {{ width: {WIDTH}px; display: block }}"
    page.set_content(f"<style>{style}</style>{svg}")
    return Image.open(io.BytesIO(page.locator("svg").first.screenshot())).convert("RGB")


def _write(images: list[Image.Image], seconds: list[float], file: Path) -> None:
    """One palette for all images, so that what does not change stays equal and costs nothing."""
    size = images[0].size
    sample = Image.new("RGB", (size[0], 3 * size[1]))
    for index, image in enumerate((images[len(images) // 3], images[len(images) * 2 // 3], images[-1])):
        sample.paste(image, (0, index * size[1]))
    palette = sample.quantize(PALETTE, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    drawn = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    drawn[0].save(
        file,
        save_all=True,
        append_images=drawn[1:],
        duration=[round(1000 * s) for s in seconds],
        loop=0,
        optimize=False,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else picture.ROOT / "docs" / "pictures"))
