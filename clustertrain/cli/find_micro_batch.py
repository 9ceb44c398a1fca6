"""``plan --find-micro-batch``: run the trials and show the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import print_json
from clustertrain.errors import ClusterTrainError

if TYPE_CHECKING:
    from rich.table import Table

    from clustertrain.agent.micro_batch_search import MicroBatchSearchResult
    from clustertrain.report.documents.plans import MicroBatchSearch
    from clustertrain.submit.prepared_run import PreparedRun


def report_micro_batch_search(prepared: PreparedRun, *, as_json: bool) -> int:
    """Run the trials and show them. Raise ClusterTrainError afterwards if an error other than memory ended them."""
    from clustertrain.agent.micro_batch_search import find_micro_batch

    result = find_micro_batch(prepared, lambda line: click.echo(line, err=True))
    if as_json:
        print_json("plan-find-micro-batch", _build_document(result))
    elif result.trials:
        _show(result)
    if result.error is not None:
        raise result.error
    if result.recommended is None:
        raise ClusterTrainError(
            _no_fit_message(result), fix="shard more, use activation checkpointing, or shorten the sequences"
        )
    return 0


def _no_fit_message(result: MicroBatchSearchResult) -> str:
    if any(t.fits for t in result.trials):
        return "no micro-batch that fits divides a rank's share of train.global_batch"
    return f"micro_batch {result.trials[0].micro_batch} does not fit"


def _build_document(result: MicroBatchSearchResult) -> MicroBatchSearch:
    import msgspec

    from clustertrain.report.documents.plans import MicroBatchSearch, TrialEntry

    best = result.recommended
    return MicroBatchSearch(
        recommended=best.micro_batch if best else None,
        assignment=f"train.micro_batch={best.micro_batch}" if best else None,
        represents=result.description,
        trials=tuple(TrialEntry(fits=t.fits, **msgspec.structs.asdict(t)) for t in result.trials),
        error=result.error.message if result.error else None,
    )


def _show(result: MicroBatchSearchResult) -> None:
    from clustertrain.report.terminal import emit, make_console

    best = result.recommended
    advice = []
    if best is not None:
        advice = [f"\nSet in the recipe:\n\n  [train]\n  micro_batch = {best.micro_batch}"]
    emit(make_console(), _table(result), *advice)


def _table(result: MicroBatchSearchResult) -> Table:
    from rich.table import Table

    images = any(t.samples_per_s_per_gpu and not t.tokens_per_s_per_gpu for t in result.trials)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("micro_batch", "peak_gib", f"{'samples' if images else 'tokens'}_per_s_per_gpu"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    for t in sorted(result.trials, key=lambda t: t.micro_batch):
        speed = t.samples_per_s_per_gpu if images else t.tokens_per_s_per_gpu
        remark = "yes" if t.fits else f"no: {t.outcome.replace('_', ' ')}"
        remark += "" if t.divides_batch else ", does not divide a rank's batch"
        remark += "  <- recommended" if t is result.recommended else ""
        table.add_row(
            str(t.micro_batch),
            "" if t.peak_gib is None else f"{t.peak_gib:.2f}",
            "" if speed is None else f"{speed:,.0f}",
            remark,
        )
    return table
