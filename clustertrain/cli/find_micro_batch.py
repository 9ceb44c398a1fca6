"""``plan --find-micro-batch``: run the trials and show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import print_json
from clustertrain.errors import ClusterTrainError

if TYPE_CHECKING:
    from rich.table import Table

    from clustertrain.agent.micro_batch_search import Found
    from clustertrain.plan.search.micro_batch import Trial
    from clustertrain.submit.request import Prepared


def find_micro_batch(prepared: Prepared, *, as_json: bool) -> int:
    """Raises ClusterTrainError, after what was found has been shown, where something other than memory ended it."""
    from clustertrain.agent.micro_batch_search import find_micro_batch as find

    found = find(prepared, lambda line: click.echo(line, err=True))
    if as_json:
        print_json(_document(found))
    elif found.trials:
        _show(found)
    if found.failed is not None:
        raise found.failed
    if found.advised is None:
        raise ClusterTrainError(
            _nothing(found), fix="a layout that shards more, activation checkpointing, or shorter sequences"
        )
    return 0


def _nothing(found: Found) -> str:
    if any(t.fits for t in found.trials):
        return "no micro-batch that fits divides a rank's share of train.global_batch"
    return f"micro_batch {found.trials[0].micro_batch} does not fit"


def _document(found: Found) -> dict[str, object]:
    chosen = found.advised
    return {
        "advised": chosen.micro_batch if chosen else None,
        "set": f"train.micro_batch={chosen.micro_batch}" if chosen else None,
        "stands_for": found.stands_for,
        "trials": [{"fits": t.fits, **_fields(t)} for t in found.trials],
        "error": found.failed.message if found.failed else None,
    }


def _fields(trial: Trial) -> dict[str, object]:
    return {f: getattr(trial, f) for f in trial.__struct_fields__}


def _show(found: Found) -> None:
    from clustertrain.report.terminal import emit, make_console

    chosen = found.advised
    said = []
    if chosen is not None:
        said = [f"\nPut into the recipe:\n\n  [train]\n  micro_batch = {chosen.micro_batch}"]
    emit(make_console(), _table(found), *said)


def _table(found: Found) -> Table:
    from rich.table import Table

    images = any(t.samples_per_s_per_gpu and not t.tokens_per_s_per_gpu for t in found.trials)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("micro_batch", "peak_gib", f"{'samples' if images else 'tokens'}_per_s_per_gpu"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    for t in sorted(found.trials, key=lambda t: t.micro_batch):
        speed = t.samples_per_s_per_gpu if images else t.tokens_per_s_per_gpu
        said = "yes" if t.fits else f"no: {t.outcome}"
        said += "" if t.usable else ", does not divide a rank's share"
        said += "  <- advised" if t is found.advised else ""
        table.add_row(
            str(t.micro_batch),
            "" if t.peak_gib is None else f"{t.peak_gib:.2f}",
            "" if speed is None else f"{speed:,.0f}",
            said,
        )
    return table
