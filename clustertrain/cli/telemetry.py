"""``clustertrain telemetry``: the per-job report on GPUs and hosts."""

from __future__ import annotations

import re

import click

from clustertrain.cli.common import find_run, json_option, print_json, run_argument
from clustertrain.errors import UsageError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``1h``, ``2d`` or ``1h30m`` in seconds.

    Raises:
        UsageError: it is none of these.
    """
    parts = re.fullmatch(r"(?:\d+(?:\.\d+)?[smhd])+", text)
    if parts:
        return sum(float(n) * _UNITS_S[u] for n, u in re.findall(r"(\d+(?:\.\d+)?)([smhd])", text))
    if re.fullmatch(r"\d+(?:\.\d+)?", text):
        return float(text)
    raise UsageError(f"--since {text}: not a length of time", fix="write 90s, 10m, 1h or 1h30m")


@click.command()
@run_argument
@json_option
@click.option("--attempt", type=click.IntRange(min=1), help="Only this attempt.  [default: all]")
@click.option("--gpu", help="Only GPUs that fit: the beginning of a UUID, an index, or NODE:INDEX.")
@click.option("--since", help="Only the last part of what was recorded: 10m, 1h, …")
def telemetry(name: str, as_json: bool, attempt: int | None, gpu: str | None, since: str | None) -> None:
    """The report on a run's GPUs and hosts, over all nodes and attempts, while it runs and afterwards.

    RUN is a run id or a unique prefix of one, a job id, or `latest` (the default).
    """
    since_s = None if since is None else seconds(since)
    # Not at the top: numpy and rich cost more than the rest of the command line together.
    from clustertrain.telemetry.query import summarize

    summary = summarize(find_run(name), attempt, gpu, since_s)
    if as_json:
        print_json(summary)
        return
    from clustertrain.report import telemetry as report
    from clustertrain.report.terminal import make_console

    report.show(summary, make_console())
