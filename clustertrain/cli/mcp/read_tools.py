"""Tools that only read: runs, reports, logs, checkpoints and recipe keys."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from clustertrain import clock
from clustertrain.cli.checkpoint import locate
from clustertrain.cli.common import find_run, find_runs
from clustertrain.cli.mcp.answer import Document
from clustertrain.cli.recipe import explain_keys
from clustertrain.cli.telemetry import read_summary
from clustertrain.cli.times import parse_moment
from clustertrain.errors import NotFound, PermissionDenied, UsageError
from clustertrain.report.documents.encode import to_document
from clustertrain.report.documents.runs import build_list
from clustertrain.report.documents.status import build_status
from clustertrain.report.html.text import clean_log_line
from clustertrain.run.logs import files, lines, search
from clustertrain.run.run_dir import RunDir, explain_permission_errors

SEARCH_TIMEOUT_S = 10.0
MAX_LINES = 1000
MAX_LINE_CHARACTERS = 2000
MAX_LOG_CHARACTERS = 30_000

RunName = Annotated[
    str, Field(description="Id of a run, a unique prefix of one, a job id, or `latest` for the newest run.")
]
State = Literal["pending", "running", "requeued", "cancelling", "completed", "failed", "cancelled"]
# What identifies a run and says how it is; `run_status` has the rest.
_LISTED = (
    "run", "name", "state", "job_id", "backend", "user", "submitted_unix_s", "step", "total_steps", "loss", "step_s",
    "eta_s", "nodes", "gpus_per_node", "checkpoint_step", "pending_reason", "cancelling", "failure", "recipe_hash",
    "run_dir",
)  # fmt: skip


def list_runs(
    limit: Annotated[int, Field(ge=1, le=100, description="Most runs to return, the newest ones.")] = 20,
    states: Annotated[list[State] | None, Field(description="Only runs in one of these states.")] = None,
    since: Annotated[str, Field(description="Only runs submitted in the last 12h or 7d. Empty: all.")] = "",
) -> Document:
    """List the user's runs, newest first: state, progress, loss, time left, and why a run failed."""
    from clustertrain.scheduler.run_list import RunFilter, select_statuses

    now = clock.now()
    since_t = parse_moment(since, "since", now) if since else None
    document = to_document(
        "list", build_list(select_statuses(RunFilter("", frozenset(states or ()), since_t), limit), now)
    )
    runs = [{key: row[key] for key in _LISTED} for row in document["runs"]]
    return {"now_unix_s": round(now, 3), "runs": runs, "unreadable": document["unreadable"]}


def run_status(run: RunName = "latest") -> Document:
    """Show one run: state, progress, loss, time left, attempts, where its time went, why it failed, its log's path."""
    from clustertrain.scheduler.run_status import run_status as read_status

    with explain_permission_errors():
        return to_document("status", build_status(read_status(find_run(run))))


def telemetry_report(
    run: RunName = "latest",
    attempt: Annotated[int | None, Field(ge=1, description="Only this attempt. Null: all.")] = None,
    since: Annotated[str, Field(description="Only the last part of the recording, such as 10min. Empty: all.")] = "",
    per_gpu: Annotated[bool, Field(description="Also return each GPU, host and rank, which is long.")] = False,
) -> Document:
    """Report GPU use: insights with their fixes, training speed, goodput, energy, and GPU-hours lost by cause."""
    with explain_permission_errors():
        document = to_document("telemetry", read_summary(find_run(run), attempt=attempt, since=since or None))
    if not per_gpu:
        counts = {f"{name}_count": len(document.pop(name)) for name in ("gpus", "hosts", "ranks")}
        document |= counts
    return document


def read_log(
    run: RunName = "latest",
    rank: Annotated[int, Field(ge=0, description="Rank whose output to read.")] = 0,
    source: Annotated[
        Literal["rank", "job", "node"],
        Field(description="`rank`: the program's output; `job`: the batch script and Slurm; `node`: the launcher."),
    ] = "rank",
    node: Annotated[str, Field(description="Name of the node, for source `node`.")] = "",
    attempt: Annotated[int | None, Field(ge=1, description="Null: the newest attempt that has this log.")] = None,
    count: Annotated[int, Field(ge=1, le=MAX_LINES, description="Number of lines, from the end.")] = 100,
) -> Document:
    """Read the last lines of a log of a run."""
    found = find_run(run)
    selection = files.LogSelection(rank, attempt, source == "job", node if source == "node" else None)
    with explain_permission_errors():
        if source == "node" and node not in (nodes := files.list_nodes(found, attempt)):  # a part of a path
            raise NotFound(f"{found.id} has no node {node!r}", fix=f"name one of {', '.join(nodes) or 'none yet'}")
        paths = [path for path in files.list_log_files(found, selection) if path.is_file()]
        if not paths:
            raise NotFound(
                f"{found.id} has no such log yet",
                fix="run_status shows its attempts, nodes and the path of its log; job logs begin before ranks do",
            )
        if files.leads_outside(found, paths[-1]):
            raise PermissionDenied(f"{paths[-1]}: a link to a file outside of the run", fix="ask the user to read it")
        window = lines.read_before(paths[-1], None, count)
    shown = _keep_last([clean_log_line(line.text)[:MAX_LINE_CHARACTERS] for line in window.lines])
    document = {"run": found.id, "file": str(paths[-1]), "size_bytes": window.size, "lines": shown}
    return document | ({"omitted_lines": len(window.lines) - len(shown)} if len(shown) < len(window.lines) else {})


def _keep_last(texts: list[str]) -> list[str]:
    """Return the last lines that have at most :data:`MAX_LOG_CHARACTERS`: the end of a log says how it ended."""
    size, start = 0, len(texts)
    while start > 0 and (size := size + len(texts[start - 1]) + 4) <= MAX_LOG_CHARACTERS:
        start -= 1
    return texts[start:]


def search_logs(
    text: Annotated[str, Field(min_length=1, max_length=200, description="Text to find, in upper or lower case.")],
    run: RunName = "latest",
    attempt: Annotated[int | None, Field(ge=1, description="Only this attempt. Null: all.")] = None,
    limit: Annotated[int, Field(ge=1, le=200, description="Most matches to return, the newest ones.")] = 50,
) -> Document:
    """Find lines in the logs of all ranks, nodes and the job of a run."""
    found = find_run(run)
    with explain_permission_errors():
        paths = [path for path in _all_logs(found, attempt) if not files.leads_outside(found, path)]
        result = search.search(paths, search.find_text(text), max_matches=limit, timeout_s=SEARCH_TIMEOUT_S)
    matches = [
        {"file": str(m.path.relative_to(found.path)), "line": clean_log_line(m.text)}
        for m in result.matches
    ]  # fmt: skip
    return {
        "run": found.id,
        "run_dir": str(found.path),
        "matches": matches,
        "searched_bytes": result.searched_bytes,
        "total_bytes": result.total_bytes,
        "problems": result.problems,
    }


def _all_logs(run: RunDir, attempt: int | None) -> list[Path]:
    attempts = [a for a in run.attempts() if attempt in (None, a.n)]
    of_attempts = itertools.chain.from_iterable(sorted(a.logs.glob("*.log")) for a in attempts)
    return [run.job_log, *of_attempts] if attempt is None else list(of_attempts)


def failures(
    run: RunName = "latest",
    attempt: Annotated[int | None, Field(ge=1, description="Null: the newest attempt.")] = None,
    limit: Annotated[int, Field(ge=1, le=100, description="Most ranks to return.")] = 10,
) -> Document:
    """Show how ranks failed, the one first that explains the others, with the end of its traceback and its log."""
    from clustertrain.report.progress import iter_failures

    found = find_run(run)
    with explain_permission_errors():
        attempts = [a for a in found.attempts() if attempt in (None, a.n)]
        if not attempts:
            raise NotFound(f"{found.id} has no attempt {attempt or ''}".rstrip(), fix="run_status lists its attempts")
        rows = list(itertools.islice(iter_failures(attempts[-1]), limit))
    shown: list[dict[str, Any]] = [
        {"who": f.who, "reason": f.reason, "log": f.log, "last_lines": f.lines} for f in rows
    ]
    return {"run": found.id, "attempt": attempts[-1].n, "failures": shown}


def compare_runs(
    runs: Annotated[list[str], Field(min_length=2, max_length=26, description="Ids of the runs, or of a sweep.")],
    metric: Annotated[str, Field(description="Metric that ranks the runs. Empty: the recipe's.")] = "",
) -> Document:
    """Compare runs: which is best by a metric, the settings that differ and, for two runs, their telemetry."""
    from clustertrain.report.runs.compare import compare_runs as compare

    with explain_permission_errors():
        document = to_document("compare", compare(find_runs(runs), [metric] if metric else []))
    for row in document["runs"]:
        del row["curves"]  # thousands of points
    return document


def list_checkpoints(run: RunName = "latest") -> Document:
    """List the checkpoints of a run: step, size, whether it is committed, its metric, and which one is best."""
    from clustertrain.checkpoint.load import rollback
    from clustertrain.checkpoint.offline import inspect
    from clustertrain.report.documents.checkpoints import build_list as build_checkpoints

    if "/" in run:  # a path or a URL, which the command takes from its user
        raise UsageError(f"{run!r} is not a run", fix="list_runs has the ids")
    location = locate(run)
    with explain_permission_errors():
        rows = inspect.list_checkpoints(location.root, step=location.step)
        record_error = rollback.find_record_error(location.root)
    return to_document("checkpoint-list", build_checkpoints(location.label, rows, record_error))


def explain_recipe_key(
    key: Annotated[str, Field(description="A key such as `optim.lr`, or a table such as `optim`.")],
) -> Document:
    """Explain a key of recipes: type, default, allowed values and meaning."""
    return to_document("recipe-explain", explain_keys(key))


TOOLS = (
    list_runs, run_status, failures, read_log, search_logs, telemetry_report, compare_runs, list_checkpoints,
    explain_recipe_key,
)  # fmt: skip
