"""What `terminal_pictures.py` shows: shell lines by sheet, and the made-up runs and files that they need."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from clustertrain import clock, fsio
from clustertrain.cli.main import cli
from clustertrain.run.run_dir import RunDir
from tests.unit.report import live_runs

LLAMA = "--set model.preset=llama3.1-8b --nodes 4 --gpus 8 --gpu-type h100"
LIVE, FAILED, QUEUED, DONE = "llama-abc234", "net-def567", "vit-ghj234", "net-klm567"
HELP_PER_SHEET = 10
MADE_UP = ("plan", "runs", "gpus", "errors")  # sheets about made-up runs
# What a sheet needs of others: their files or runs.
NEEDS = {"checkpoints": ("demo",), "control": ("start",), "slurm": ("start",)}
SLURM = "slurm"  # the sheet that needs Slurm, and what its commands need of the environment
SLURM_VARIABLES = (
    "JOB",
    "SLURM_CONF",
    "CLUSTERTRAIN_CLUSTER",
    "CLUSTERTRAIN_CLUSTER_PATH",
    "LD_LIBRARY_PATH",
    "NVML_STUB_DEVICES",
)
# Shell lines, in this order, in one folder. After a ` | KEYS `: keys for a program that takes the terminal; the last
# one ends it.
SHEETS: Mapping[str, tuple[str, ...]] = {
    "plan": (
        "clustertrain plan templates/demo.toml",
        f"clustertrain plan {LLAMA}",
        f"clustertrain plan {LLAMA} --why",
        f"clustertrain plan {LLAMA} --gpus-range 8-64",
        "clustertrain recipe explain optim.lr",
        "clustertrain recipe explain checkpoint",
        "clustertrain recipe schema | head -n 8",
        "clustertrain recipe show | head -n 12",
    ),
    "runs": (
        "clustertrain list",
        f"clustertrain status {LIVE}",
        f"clustertrain status {LIVE} --watch | KEYS \\x03",
        f"clustertrain status {FAILED}",
        f"clustertrain status {QUEUED}",
        f"clustertrain status {DONE}",
        f"clustertrain logs {LIVE} -n 5",
        f"clustertrain logs {FAILED} --errors",
        f"clustertrain compare {DONE} {FAILED}",
        f"clustertrain rm {DONE} {FAILED} --dry-run",
    ),
    "gpus": (
        f"clustertrain top {LIVE} | KEYS q",
        f"clustertrain top {LIVE} | KEYS / 1 3 \\r q",
        f"clustertrain top {LIVE} | KEYS \\r q q",
        f"clustertrain top {LIVE} | KEYS ? q q",
        f"clustertrain telemetry {LIVE} --brief",
        f"clustertrain telemetry {LIVE}",
    ),
    "errors": (
        "clustertrain",
        "clustertrain stauts",
        "clustertrain status nosuchrun",
        "clustertrain submit templates/demo.toml --gpus-per-nod 8",
        "clustertrain submit templates/demo.toml --set optim.lrr=1",
        "clustertrain submit --dry-run --partition gpu templates/demo.toml > /dev/null",
        "clustertrain submit --backend local --gpus 512 templates/demo.toml",
        "clustertrain wrap -- python train.py",
        "clustertrain watch 123",
        "clustertrain ui --port 70000",
        "clustertrain schema nope",
        "clustertrain compare nosuchrun",
    ),
    "start": (
        "clustertrain init recipe | KEYS \\r \\r \\r",
        "clustertrain init script",
        "clustertrain init script",
        "clustertrain adopt train.sbatch",
        "clustertrain submit --dry-run --backend slurm --nodes 2 --gpus 8 train.py --steps 400 | head -n 30",
        "clustertrain submit --backend local --follow --gpus 2 train.py --steps 400",
        "clustertrain submit --backend local --gpus 2 train.py --steps 200",
        "clustertrain wait latest",
        "clustertrain status",
        "clustertrain diagnose",
        "clustertrain diagnose gradients recipe.toml",
    ),
    "demo": (
        "clustertrain demo",
        "clustertrain logs latest -n 6",
        "clustertrain telemetry latest",
        "clustertrain open latest --no-browser",
        "clustertrain track latest --to tensorboard",
    ),
    "checkpoints": (
        "clustertrain checkpoint list latest",
        "clustertrain checkpoint verify latest",
        "clustertrain checkpoint digest latest",
        "clustertrain checkpoint diff latest@90 latest@120",
        "clustertrain checkpoint diff latest latest",
        "clustertrain checkpoint export latest -o model",
        "clustertrain checkpoint export latest -o model",
        "clustertrain checkpoint prune latest --keep 1 --dry-run",
        "clustertrain checkpoint prune latest --keep 1",
        "clustertrain checkpoint list nosuchrun",
    ),
    "control": (
        "clustertrain submit --backend local --gpus 2 train.py --steps 10000000",
        "sleep 20  # until it trains",
        "clustertrain exec latest -- hostname",
        "clustertrain shell latest | KEYS pwd\\r exit\\r",
        "clustertrain requeue latest",
        "clustertrain rm latest",
        "clustertrain cancel latest",
        "clustertrain wait latest",
        "clustertrain status",
        "clustertrain rerun latest --set job.name=again",
        "clustertrain cancel latest",
        "clustertrain wait latest",
        "clustertrain rm latest --checkpoints | KEYS y\\r",
    ),
    "sweeps": (
        "clustertrain sweep tiny.toml --backend local --grid optim.lr=1e-4,1e-3 --dry-run",
        "clustertrain sweep tiny.toml --backend local --grid optim.lr=1e-4,1e-3",
        "clustertrain sweep show",
        "clustertrain sweep show --watch",
        "clustertrain compare latest",
    ),
    "files": (
        "clustertrain data tokenize text --tokenizer bytes -o shards",
        "clustertrain cluster detect mine --local",
        "clustertrain cluster list",
        "clustertrain cluster show mine",
    ),
    "machine": (
        "clustertrain version",
        "clustertrain version -v",
        "clustertrain schema",
        "clustertrain schema status | head -n 12",
        "clustertrain list --json | head -n 12",
        "clustertrain skill | head -n 12",
        "clustertrain completion bash | head -n 8",
        "clustertrain mcp < /dev/null",
        "clustertrain ui --no-browser | KEYS \\x03",
    ),
    "slurm": (
        "clustertrain watch $JOB --once",
        "clustertrain watch $JOB | KEYS q",
        "clustertrain list",
        "clustertrain cluster detect mine",
        "clustertrain cluster list",
        "clustertrain adopt train.sbatch --write adopted",
        "clustertrain submit --time 10 --nodes 2 --gpus 2 --device cpu train.py --steps 10000000",
        "sleep 25  # until it trains",
        "clustertrain status latest",
        "clustertrain exec latest -- hostname",
        "clustertrain requeue latest",
        "clustertrain cancel latest",
        "clustertrain wait latest",
    ),
}
BATCH_SCRIPT = """#!/bin/bash
#SBATCH --job-name=llama
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-gpu=8
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --signal=B:USR1@120
module load cuda
source ~/venv/bin/activate
export NCCL_DEBUG=WARN
srun torchrun --nnodes=4 --nproc-per-node=8 train.py --lr 3e-4
"""


def list_sheets() -> dict[str, tuple[str, ...]]:
    """Return all sheets: those of `SHEETS`, and the help of every command."""
    helps = [f"clustertrain {' '.join(words)} --help".replace("  ", " ") for words in _list_commands(cli, ())]
    parts = range(0, len(helps), HELP_PER_SHEET)
    return dict(SHEETS) | {f"help{i // HELP_PER_SHEET}": tuple(helps[i : i + HELP_PER_SHEET]) for i in parts}


def _list_commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not command.hidden:
        yield words
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                child = command.get_command(click.Context(command), name)
                assert child is not None
                yield from _list_commands(child, (*words, name))


def prepare_folder(folder: Path) -> None:
    """Write the files that the lines of the sheets name: templates, a batch script and text."""
    (folder / "templates").symlink_to(Path(__file__).resolve().parents[1] / "templates")
    (folder / "train.sbatch").write_text(BATCH_SCRIPT)
    (folder / "tiny.toml").write_text("[train]\nsteps = 5\nglobal_batch = 4\n[data]\nseq_len = 32\n")
    (folder / "text").mkdir()
    for i in range(3):
        (folder / "text" / f"{i}.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 2000)


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
    _raise_alert(live, now)
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
    record = fsio.read_json(run.attempt(1).record) or {}
    fsio.write_json(run.attempt(1).record, {**record, "job_id": job_id})


def _make_sick(node: str, second: int, values: dict[str, float]) -> None:
    if node == "gpu-node-01":
        values |= {"gpu1.throttle_thermal": 1.0, "gpu1.temperature_c": 91.0, "gpu1.sm_clock_mhz": 1200.0}
        values |= {"gpu2.utilization": 0.0, "rank13.step": values["rank13.step"] - 7}
        if second > 300:
            values |= {k: math.nan for k in values if k.startswith("gpu3.")}
    if node == "gpu-node-02":
        values |= {"gpu4.temperature_c": 84.0, "gpu5.utilization": 0.79}


def _raise_alert(run: RunDir, now: float) -> None:
    alert = {"code": "throttled", "severity": "warning", "state": "raised", "node": "gpu-node-01", "rank": 9}
    text = "GPU 1 of gpu-node-01 throttles: heat lowers its clock to 1,200 MHz; it is at 91 °C"
    log = fsio.JsonlAppender(run.attempt(1).events_path("agent-gpu-node-01"))
    log.append({"t": now - 200, "event": "alert", "text": text, **alert})
    log.close()


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
