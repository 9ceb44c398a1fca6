"""Draws what the reporting commands print on a terminal, for a person to look at.

    python -m docs.terminal_pictures [FOLDER]     default: site/terminal

Each sheet shows several commands on made-up runs, at 80 or 160 columns, on a light or a dark background. The commands
run in a pseudo-terminal, and Chromium draws the sheets.
"""

from __future__ import annotations

import fcntl
import html
import io
import math
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, TerminalTheme
from rich.text import Text

from clustertrain import clock, fsio
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir
from docs.picture import ROOT, clean_environment, record_output
from tests.unit.report import live_runs

WIDTHS, ROWS = (80, 160), 40
START_S, KEY_S = 60.0, 3.0  # until the first frame, and between two keys
DARK = TerminalTheme(
    (30, 30, 30),
    (220, 220, 220),
    [(0, 0, 0), (204, 0, 0), (78, 154, 6), (196, 160, 0), (52, 101, 164), (117, 80, 123), (6, 152, 154),
     (211, 215, 207)],
    [(85, 87, 83), (239, 41, 41), (138, 226, 52), (252, 233, 79), (114, 159, 207), (173, 127, 168), (52, 226, 226),
     (238, 238, 236)],
)  # fmt: skip
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": DARK}
LLAMA = "--set model.preset=llama3.1-8b --nodes 4 --gpus 8 --gpu-type h100"
LIVE, FAILED, QUEUED, DONE = "llama-abc234", "net-def567", "vit-ghj234", "net-klm567"
# After a |: keys, of which the last one ends the program.
SHEETS: Mapping[str, tuple[str, ...]] = {
    "help": ("--help", "submit --help", "logs --help", "checkpoint --help", "stauts", "status nosuchrun"),
    "plan": (
        "plan templates/demo.toml",
        f"plan {LLAMA}",
        f"plan {LLAMA} --why",
        f"plan {LLAMA} --gpus-range 8-64",
        "recipe explain optim.lr",
        "recipe explain checkpoint",
    ),
    "runs": (
        "list",
        f"status {LIVE}",
        f"status {FAILED}",
        f"status {QUEUED}",
        f"status {DONE}",
        f"logs {LIVE} -n 5",
        f"logs {FAILED} --errors",
        f"compare {DONE} {FAILED}",
        f"rm {DONE} {FAILED} --dry-run",
    ),
    "gpus": (
        f"top {LIVE} | q",
        f"top {LIVE} | / 1 3 \r q",
        f"top {LIVE} | \r q q",
        f"top {LIVE} | ? q q",
        f"telemetry {LIVE} --brief",
        f"telemetry {LIVE}",
    ),
}


def prepare_runs(home: Path) -> None:
    """Create a run with sick GPUs that runs, one that failed, one in the queue, and one that completed."""
    os.environ["CLUSTERTRAIN_HOME"] = str(home)
    now = clock.now()
    live = live_runs.new_run(home, now, name=LIVE, submitted=7000.0)
    nodes = [f"gpu-node-{i:02}" for i in range(4)]
    live_runs.begin(live, now, nodes)
    live_runs.create_job("local-1", live)
    for k, node in enumerate(nodes):
        live_runs.record(live, node, now, first=8 * k, seconds=600, change=_make_sick)
    _write_log(live, now)
    failed = _new_run(home, FAILED, "local-2", now - 4000)
    live_runs.begin(failed, now - 3600, ["a", "b"], steps=320, total=600)
    _set_job(failed, "local-2")
    _fail(failed, now - 3600)
    queued = _new_run(home, QUEUED, "local-3", now - 100)
    live_runs.create_job("local-3", queued, "PENDING", "Resources", now + 5400)
    done = _new_run(home, DONE, "local-4", now - 90_000)
    live_runs.begin(done, now - 80_000, ["a", "b"], steps=600, total=600)
    _set_job(done, "local-4")
    _end(done, now - 80_000, "completed", "all ranks completed", step=600)


def _new_run(home: Path, name: str, job_id: str, submitted: float) -> RunDir:
    run = live_runs.new_run(home, submitted, name=name, submitted=0.0)
    (run.events / "submit.jsonl").unlink()
    log = fsio.JsonlAppender(run.events / "submit.jsonl")
    log.append({"t": submitted, "event": "submitted", "job_id": job_id, "backend": "local"})
    log.close()
    live_runs.create_job(job_id, run, "FAILED")
    return run


def _set_job(run: RunDir, job_id: str) -> None:
    record = fsio.read_json(run.attempt(1).record)
    fsio.write_json(run.attempt(1).record, {**record, "job_id": job_id})


def _make_sick(node: str, second: int, values: dict[str, float]) -> None:
    if node == "gpu-node-01":
        values |= {"gpu1.throttle_thermal": 1.0, "gpu1.temperature_c": 91.0, "gpu1.sm_clock_mhz": 1200.0}
        values |= {"gpu2.utilization": 0.0, "rank13.step": values["rank13.step"] - 7}
        if second > 300:
            values |= {k: math.nan for k in values if k.startswith("gpu3.")}
    if node == "gpu-node-02":
        values |= {"gpu4.temperature_c": 84.0, "gpu5.utilization": 0.79}


def _write_log(run: RunDir, now: float) -> None:
    run.attempt(1).logs.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{time.strftime('%H:%M:%S', time.localtime(now - 600 + 5 * i))}  step {10 * i + 10:>5}/10000  loss"
        f" {8 / (1 + i / 20):.4g}  1h14m left  500 ms/step  1.05M tok/s  lr 0.000288  grad_norm 0.92"
        for i in range(120)
    ]
    for rank in (0, 10, 13):
        run.attempt(1).rank_log(rank).write_text("\n".join(lines) + "\n")


def _fail(run: RunDir, t: float) -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n    loss = step(batch)\n'
    error = {"type": "ValueError", "message": "expected 10 classes, got 11", "traceback": f"{trace}ValueError: …\n"}
    rank = {"rank": 5, "ending": "failed", "kind": "error", "error": error}
    run.attempt(1).results.mkdir(parents=True)
    fsio.write_json(
        run.attempt(1).result_path("b"), {"node": "b", "ending": "failed", "kind": "error", "ranks": [rank]}
    )
    run.attempt(1).logs.mkdir(parents=True, exist_ok=True)
    run.attempt(1).rank_log(5).write_text(f"{trace}ValueError: expected 10 classes, got 11\n")
    _end(run, t, "failed", "rank 5 on b: ValueError: expected 10 classes, got 11", step=320)


def _end(run: RunDir, t: float, ending: str, reason: str, step: int) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
    log.append({"t": t, "event": "ended", "ending": ending, "reason": reason, "last_step": step})
    if ending != "completed":
        log.append({"t": t, "event": "stopped", "reason": reason})
    log.close()


def record_command(command: str, columns: int, env: dict[str, str]) -> str:
    """Return what stands on the terminal after a command, or before its last key, with its colors."""
    arguments, _, keys = command.partition(" | ")
    argv = [sys.executable, "-m", "clustertrain", *shlex.split(arguments)]
    env = {**env, "PYTHONPATH": str(ROOT)}
    if keys:
        frames = re.split(r"\x1b\[H|\x1b\[\?1049h", _press_keys(argv, columns, env, keys.split(" ")))
        text = frames[-1]
    else:
        parts = record_output(["/bin/sh", "-c", f"{shlex.join(argv)}; true"], env, columns, ROWS)
        text = "".join(part for _, part in parts)
    return re.sub(r"\x1b\[\?\d+[hl]", "", text.replace("\r\n", "\n").replace("\r", ""))


def _press_keys(argv: Sequence[str], columns: int, env: dict[str, str], keys: Sequence[str]) -> str:
    """Return what a program wrote until its last key was pressed, which ends it. A key comes every ``KEY_S``."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    child = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=ROOT)
    os.close(slave)
    output, deadline = b"", time.monotonic() + START_S
    while b"\x1b[?1049h" not in output and time.monotonic() < deadline:  # it has taken the screen
        output += _read_for(master, 0.1)
    for key in keys:
        output += _read_for(master, KEY_S)
        os.write(master, key.encode())
    _read_for(master, 30.0)
    os.close(master)
    if child.wait() != 0:
        raise RuntimeError(f"{shlex.join(argv)} failed: {output.decode()}")
    return output.decode()


def _read_for(terminal: int, seconds: float) -> bytes:
    """Return what is written to a terminal in some seconds, or until its last program has ended."""
    output, deadline = b"", time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        if select.select([terminal], [], [], remaining)[0]:
            try:
                output += os.read(terminal, 1 << 16)
            except OSError:  # EIO: nobody has it open
                break
    return output


def _render_sheet(outputs: Mapping[str, str], columns: int, theme: TerminalTheme) -> str:
    figures = []
    for command, text in outputs.items():
        console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, legacy_windows=False)
        for line in Text.from_ansi(text).split("\n", allow_blank=True):
            # As a terminal does, in the middle of a word.
            for part in line.divide(range(columns, line.cell_len, columns)):
                console.print(part, soft_wrap=True)
        code = console.export_html(theme=theme, inline_styles=True, code_format="<pre>{code}</pre>")
        shown = html.escape(command.replace("\r", "⏎"))
        figures.append(f"<figure><figcaption>$ clustertrain {shown}</figcaption>{code}</figure>")
    background, foreground = theme.background_color.hex, theme.foreground_color.hex
    style = f"""
body {{ margin: 16px; background: {background}; color: {foreground}; columns: {3 if columns < 100 else 2}; gap: 24px }}
figure {{ margin: 0 0 24px; break-inside: avoid }}
figcaption {{ font: bold 13px monospace; border-bottom: 1px solid gray; margin-bottom: 6px }}
pre {{ font: 13px/1.25 'DejaVu Sans Mono', monospace; margin: 0; width: {columns}ch }}
"""
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(figures)}"


def main(folder: Path) -> None:
    """Write one PNG per sheet, width and background."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="clustertrain-") as home, sync_playwright() as playwright:
        prepare_runs(Path(home))
        assert run_dir.runs_folder().is_dir()
        env = clean_environment(home)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for columns in WIDTHS:
            view = browser.new_page(viewport={"width": 2100 if columns < 100 else 2700, "height": 400})
            for name, commands in SHEETS.items():
                outputs = {command: record_command(command, columns, env) for command in commands}
                for scheme, theme in THEMES.items():
                    view.set_content(_render_sheet(outputs, columns, theme))
                    view.screenshot(path=folder / f"{name}-{columns}-{scheme}.png", full_page=True)
        browser.close()
    print(f"{len(SHEETS) * len(WIDTHS) * len(THEMES)} sheets in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site" / "terminal")
