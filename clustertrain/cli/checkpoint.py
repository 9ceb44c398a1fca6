"""``clustertrain checkpoint``: look at a run's checkpoints, offline; needs no GPU, no process group and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clustertrain.checkpoint import manifest as index
from clustertrain.checkpoint import offline
from clustertrain.checkpoint.storage import StorageError
from clustertrain.cli.common import find_run, json_option, named_run_argument, print_json, run_argument
from clustertrain.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, NotFound

step_option = click.option("--step", type=click.IntRange(min=0), help="One step; default: see above.")


def _locate(name: str) -> tuple[str, Path, int | None]:
    """RUN as what to call it, the folder of its checkpoints, and the step where RUN is the path of one checkpoint."""
    if "/" not in name:
        run = find_run(name)
        return run.id, run.checkpoints, None
    path = Path(name).expanduser().absolute()
    if (path / "spec.toml").is_file():
        return path.name, path / "checkpoints", None
    if not path.is_dir():
        raise NotFound(f"{path}: no such folder")
    step = index.step_of(path)
    return (str(path), path, None) if step is None else (str(path.parent), path.parent, step)


@click.group()
def checkpoint() -> None:
    """List, verify, digest and prune a run's checkpoints. RUN may also be the path of a folder with checkpoints."""


@checkpoint.command("list")
@run_argument
@click.option("--verify", is_flag=True, help="Read every byte and compare checksums; else only index and file sizes.")
@json_option
def list_(name: str, verify: bool, as_json: bool) -> None:
    """All checkpoints of RUN, oldest first."""
    _, root, step = _locate(name)
    rows = [r for r in offline.list_checkpoints(root, verify=verify) if step in (None, r["step"])]
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"no checkpoints in {root}", err=True)
        return
    click.echo(f"{'STEP':>8}  {'SIZE':>10}  {'RANKS':>5}  {'LAYOUT':8}  STATE")
    for row in rows:
        click.echo(
            f"{row['step']:>8}  {_size(row['bytes']):>10}  {row['world_size'] or '-':>5}  "
            f"{(row['layout'] or {}).get('strategy', '-'):8}  {_state(row)}"
        )


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _state(row: dict[str, Any]) -> str:
    if not row["committed"]:
        return "not committed"
    if "unreadable" in row:
        return f"UNREADABLE: {row['unreadable']}"
    if row["verified"] is None:
        return "committed"
    return "verified" if row["verified"] else f"DAMAGED: {row['damage']}"


@checkpoint.command()
@run_argument
@step_option
@json_option
def verify(name: str, step: int | None, as_json: bool) -> int:
    """Read every byte and compare the checksums; of all committed checkpoints, or of one STEP. Exit 1 on damage."""
    label, root, only = _locate(name)
    wanted = only if step is None else step
    newest = offline.find(root, wanted)
    folders = [newest] if wanted is not None else [p for p in index.folders(root) if index.is_committed(p)]
    rows = []
    for folder in folders:
        damage = None
        try:
            offline.verify(folder)
        except StorageError:
            raise  # not known to be damaged
        except CheckpointError as e:
            damage = e.message
        rows.append({"step": index.step_of(folder), "path": str(folder), "verified": damage is None, "damage": damage})
        if not as_json:
            click.echo(f"step {rows[-1]['step']}: {'ok' if damage is None else 'DAMAGED'}")
        if damage is not None:
            click.echo(f"clustertrain: {damage}", err=True)
    if as_json:
        print_json({"run": label, "checkpoints": rows})
    return EXIT_DONE if all(r["verified"] for r in rows) else EXIT_FAILED


@checkpoint.command()
@run_argument
@step_option
@json_option
def digest(name: str, step: int | None, as_json: bool) -> None:
    """One hash of the model's and the optimizer's tensors, whatever layout saved them; of the newest committed
    checkpoint, or of one STEP."""
    label, root, only = _locate(name)
    folder = offline.find(root, only if step is None else step)
    value = offline.digest(folder)
    if as_json:
        print_json({"run": label, "step": index.step_of(folder), "digest": value})
    else:
        click.echo(value)


@checkpoint.command()
@named_run_argument
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many of the newest to keep.")
@json_option
def prune(name: str, keep: int, as_json: bool) -> None:
    """Delete all but the newest checkpoints. The newest one that verifies always stays."""
    label, root, _ = _locate(name)
    gone = offline.prune(root, keep)
    if as_json:
        print_json({"run": label, "deleted": [str(p) for p in gone]})
        return
    for folder in gone:
        click.echo(f"deleted {folder}")
