"""``clustertrain logs``: print logs over all attempts and follow them across requeues."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from clustertrain import clock, reading
from clustertrain.cli.common import find_run, run_argument
from clustertrain.cli.times import parse_moment
from clustertrain.errors import NotFound, UsageError
from clustertrain.printable import printable, unwrap_stream
from clustertrain.run.logs import backwards
from clustertrain.run.logs.files import LogSelection, list_log_files, list_nodes
from clustertrain.run.logs.search import compile_pattern
from clustertrain.run.run_dir import RunDir, explain_permission_errors

POLL_S = 0.3
STATUS_INTERVAL_S = 3.0
CHUNK = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line is split


@click.command()
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow the log across requeues until the run ends.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Only the last N lines (per rank), and new ones."
)
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match a regular expression.")
@click.option("--since", metavar="TIME", help="Only lines of the last 10m or 1h, or since 14:30 or '2026-01-31 14:30'.")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Rank whose log to print.  [default: 0]")
@click.option("--all-ranks", is_flag=True, help="Print the logs of all ranks, each line with its rank.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Only this attempt.")
@click.option("--job", is_flag=True, help="Print the job's log instead: batch script, srun and Slurm.")
@click.option("--node", metavar="NAME", help="Print torchrun's log of this node instead.")
@click.option("--errors", is_flag=True, help="Show why each failed rank of the last attempt failed, instead of a log.")
@click.option("--raw", is_flag=True, help="Print the log unchanged, colors included; only to a pipe or file.")
def logs(
    name: str,
    follow: bool,
    lines: int | None,
    pattern: str | None,
    since: str | None,
    rank: int | None,
    all_ranks: bool,
    attempt: int | None,
    job: bool,
    node: str | None,
    errors: bool,
    raw: bool,
) -> int:
    """Print the log of one rank of RUN.

    Control characters are shown escaped, for example as \\x1b.

    \b
    clustertrain logs -f                        follow rank 0 of the newest run
    clustertrain logs RUN -n 50 --rank 5        the last 50 lines of rank 5
    clustertrain logs RUN --since 10m --grep loss
    clustertrain logs RUN --errors              why it failed
    """
    chosen = {"--rank": rank is not None, "--all-ranks": all_ranks, "--job": job, "--node": node, "--errors": errors}
    if len(exclusive := [option for option, is_set in chosen.items() if is_set]) > 1:
        raise UsageError(f"{' and '.join(exclusive)} exclude each other", fix="use one of them")
    if errors and (follow or raw or lines is not None or pattern is not None or since is not None):
        raise UsageError(
            "--errors prints no log, so -f, -n, --grep, --since and --raw do not apply", fix="leave them out"
        )
    if job and attempt is not None:
        raise UsageError("--job: the job has one log for all attempts", fix="leave out --attempt")
    if raw and sys.stdout.isatty():
        raise UsageError(
            "--raw: the terminal would interpret control characters in the log",
            fix="leave it out, or pipe it: --raw | less -R",
        )
    run = find_run(name)
    if errors:
        return _print_errors(run, attempt)
    selection = LogSelection(rank or 0, attempt, job, node, all_ranks)
    matches = compile_pattern(pattern, "--grep") if pattern is not None else None
    since_t = parse_moment(since, "--since", clock.now()) if since is not None else None
    printed = False
    escaper = None if raw else _LogEscaper(sys.stdout.encoding)
    with explain_permission_errors():
        starts = _find_starts(run, selection, lines, matches, since_t)
        chunks = _read_chunks(run, selection, follow, starts)
        if starts or matches is not None or all_ranks:
            chunks = _select_lines(chunks, matches, with_rank=all_ranks, follow=follow)
        current: Path | None = None
        for path, chunk in chunks:
            printed = True
            if path != current and not all_ranks:
                click.echo(f"==> {path.relative_to(run.path)} <==", err=True)
            unwrap_stream(sys.stdout).buffer.write(
                chunk if escaper is None else escaper.escape(chunk, is_new_file=path != current)
            )
            sys.stdout.flush()
            current = path
    if escaper is not None:
        unwrap_stream(sys.stdout).buffer.write(escaper.flush())
    if not printed and since is not None and not follow and matches is None:
        click.echo(f"note: no lines since {since}", err=True)
    if not printed and not follow and lines != 0 and not any(path.exists() for path in list_log_files(run, selection)):
        raise NotFound(_no_output_reason(run, selection), fix=f"`clustertrain status {run.id}` shows its attempts")
    return 0 if printed or matches is None else 1  # as grep


def _print_errors(run: RunDir, attempt: int | None) -> int:
    """Print how the ranks of an attempt failed, the one first that explains the others; return the exit code."""
    from clustertrain.report.progress import iter_failures

    with explain_permission_errors():
        attempts = [a for a in run.attempts() if attempt in (None, a.n)]
        failures = list(iter_failures(attempts[-1])) if attempts else []
    if not attempts:
        raise NotFound(_no_output_reason(run, LogSelection(attempt=attempt)), fix="check --attempt")
    if not failures:
        click.echo(f"no rank of attempt {attempts[-1].n} of {run.id} has recorded a failure", err=True)
        return 1
    for i, failure in enumerate(failures):
        click.echo(printable(f"{failure.who}: {failure.reason}"))
        # The others mostly fail because of the first one.
        for line in failure.lines if i == 0 else ():
            click.echo(printable(f"  {line}"))
        click.echo(printable(f"  log: {failure.log}"))
    return 0


def _find_starts(
    run: RunDir, selection: LogSelection, count: int | None, pattern: re.Pattern[str] | None, since: float | None
) -> dict[Path, int]:
    """Return the offset at which to start each log.

    ``count`` limits the matching lines per rank, over all attempts together.
    """
    starts: dict[Path, int] = {}
    missing: dict[str, int] = {}
    without_times = []
    for path in reversed(list_log_files(run, selection)):
        try:
            if since is not None:
                start = backwards.find_since(path, since)
                without_times += [path.name] * (start is None)
                starts[path] = start or 0
            if count is not None:
                last = backwards.find_last(path, missing.setdefault(path.name, count), pattern)
                missing[path.name] -= last.found
                starts[path] = max(starts.get(path, 0), last.start)
        except FileNotFoundError:
            continue
    if without_times:
        names = ", ".join(dict.fromkeys(without_times))
        click.echo(f"note: --since: the lines of {names} begin with no time, so all of them are shown", err=True)
    return starts


def _select_lines(
    chunks: Iterator[tuple[Path, bytes]], pattern: re.Pattern[str] | None, *, with_rank: bool, follow: bool
) -> Iterator[tuple[Path, bytes]]:
    """Yield whole lines that match ``pattern``; with ``follow``, an unfinished line once it is finished.

    A carriage return also ends a line, so that a progress bar does not hold back what is new.
    """
    rests: dict[Path, bytes] = {}
    previous: Path | None = None

    def select(path: Path, lines: Sequence[bytes]) -> Iterator[tuple[Path, bytes]]:
        prefix = f"[{path.stem}] ".encode() if with_rank else b""
        for line in lines:
            if pattern is None or pattern.search(line.decode(errors="backslashreplace").rstrip("\r\n")):
                yield path, prefix + line

    for path, chunk in chunks:
        if previous is not None and path != previous and not (follow and path.name != previous.name):
            rest = rests.pop(previous, b"")  # nobody writes to the log of an earlier attempt
            yield from select(previous, [rest + b"\n"] if rest else [])
        previous = path
        *lines, rests[path] = _split_lines(rests.get(path, b"") + chunk)
        if len(rests[path]) > MAX_LINE_BYTES:
            lines, rests[path] = [*lines, rests[path]], b""
        yield from select(path, lines)
    for path, rest in rests.items():
        yield from select(path, [rest + b"\n"] if rest else [])


def _split_lines(text: bytes) -> list[bytes]:
    """Return the lines with their ends, and then what follows the last end."""
    # A carriage return at the very end may be followed by a newline in the next chunk.
    *pieces, rest = re.split(rb"(\r\n|\n|\r(?!\Z))", text)
    return [*(line + end for line, end in zip(pieces[::2], pieces[1::2], strict=True)), rest]


class _LogEscaper:
    """Makes chunks of logs safe for a terminal.

    Carriage returns stay: they only return to the start of the line, and progress bars need them.
    """

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._decoder = _build_decoder()

    def escape(self, chunk: bytes, *, is_new_file: bool) -> bytes:
        """Return the printable text of a chunk; ``is_new_file`` if the one before was of another file."""
        pending = self.flush() if is_new_file else b""
        return pending + self._encode(self._decoder.decode(chunk))

    def flush(self) -> bytes:
        """Return the rest of a file that ends within a character."""
        pending, self._decoder = self._decoder.decode(b"", final=True), _build_decoder()
        return self._encode(pending)

    def _encode(self, text: str) -> bytes:
        return printable(text, keep="\r").encode(self._encoding, "backslashreplace")


def _build_decoder() -> codecs.IncrementalDecoder:
    """Return a decoder that keeps an incomplete character for the next chunk and shows invalid bytes as \\xff."""
    return codecs.getincrementaldecoder("utf-8")("backslashreplace")


def _no_output_reason(run: RunDir, selection: LogSelection) -> str:
    numbers, attempt, node = [a.n for a in run.attempts()], selection.attempt, selection.node
    if not numbers:
        return f"{run.id} has not printed anything yet"
    if selection.job:
        return f"the job of {run.id} has printed nothing"
    if attempt is not None and attempt not in numbers:
        return f"{run.id} has no attempt {attempt}: it has {', '.join(map(str, numbers))}"
    if node is not None:
        nodes = list_nodes(run, attempt)
        if node in nodes or not nodes:
            return f"node {node} of {run.id} has printed nothing yet"
        return f"{run.id} has no node {node!r}: it has {', '.join(nodes)}"
    if selection.all_ranks:
        return f"no rank of {run.id} has printed anything yet"
    return f"rank {selection.rank} of {run.id} has printed nothing yet, or does not exist"


def _read_chunks(
    run: RunDir, selection: LogSelection, follow: bool, starts: dict[Path, int]
) -> Iterator[tuple[Path, bytes]]:
    """Yield (path, chunk) from the offsets in ``starts``, or from the start of a file."""
    offsets = dict(starts)
    has_ended, next_poll = not follow, 0.0
    while True:
        is_last_round = has_ended
        for path in list_log_files(run, selection):
            for chunk in _read_new(path, offsets):
                yield path, chunk
        if is_last_round:
            return
        if clock.monotonic() >= next_poll:
            next_poll = clock.monotonic() + STATUS_INTERVAL_S
            has_ended = _has_ended(run)
        clock.sleep(POLL_S)


def _read_new(path: Path, offsets: dict[Path, int]) -> Iterator[bytes]:
    try:
        with reading.open_regular(path) as f:
            f.seek(offsets.get(path, 0))
            while chunk := f.read(CHUNK):
                offsets[path] = f.tell()
                yield chunk
    except FileNotFoundError:
        return


def _has_ended(run: RunDir) -> bool:
    from clustertrain.scheduler.run_status import run_status

    return run_status(run).is_final
