"""``clustertrain logs``: print logs over all attempts and follow them across requeues."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from clustertrain import clock, reading
from clustertrain.cli.common import find_run, run_argument
from clustertrain.errors import NotFound, UsageError
from clustertrain.printable import printable, unwrap_stream
from clustertrain.run.run_dir import RunDir, explain_permission_errors

POLL_S = 0.3
STATUS_INTERVAL_S = 3.0
CHUNK = 1 << 16


@click.command()
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow the log across requeues until the run ends.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Rank whose log to print.")
@click.option("--attempt", type=click.IntRange(min=1), help="Only this attempt.")
@click.option("--job", is_flag=True, help="Print the job's log instead: batch script, srun and Slurm.")
@click.option("--node", metavar="NAME", help="Print torchrun's log of this node instead.")
@click.option("--raw", is_flag=True, help="Print the log unchanged, colors included; only to a pipe or file.")
def logs(name: str, follow: bool, rank: int, attempt: int | None, job: bool, node: str | None, raw: bool) -> None:
    """Print the log of one rank of RUN.

    Control characters are shown escaped, for example as \\x1b.
    """
    if job and node:
        raise UsageError("--job and --node exclude each other", fix="use one of them")
    if raw and sys.stdout.isatty():
        raise UsageError(
            "--raw: the terminal would interpret control characters in the log",
            fix="leave it out, or pipe it: --raw | less -R",
        )
    run = find_run(name)
    printed = False
    escaper = None if raw else _LogEscaper(sys.stdout.encoding)
    with explain_permission_errors():
        for path, chunk in _read_chunks(run, follow, rank, attempt, job, node):
            printed = True
            if path is not None:
                click.echo(f"==> {path.relative_to(run.path)} <==", err=True)
            unwrap_stream(sys.stdout).buffer.write(chunk if escaper is None else escaper.escape(path, chunk))
            sys.stdout.flush()
    if escaper is not None:
        unwrap_stream(sys.stdout).buffer.write(escaper.flush())
    if not printed and not follow:
        raise NotFound(
            _no_output_reason(run, rank, attempt, job, node), fix=f"`clustertrain status {run.id}` shows its attempts"
        )


class _LogEscaper:
    """Makes chunks of logs safe for a terminal.

    Carriage returns stay: they only return to the start of the line, and progress bars need them.
    """

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._decoder = _build_decoder()

    def escape(self, path: Path | None, chunk: bytes) -> bytes:
        """Return the printable text of a chunk; ``path`` is set where a new file starts."""
        pending = b"" if path is None else self.flush()
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


def _no_output_reason(run: RunDir, rank: int, attempt: int | None, job: bool, node: str | None) -> str:
    numbers = [a.n for a in run.attempts()]
    if job or not numbers:
        return f"{run.id} has not printed anything yet"
    if attempt is not None and attempt not in numbers:
        return f"{run.id} has no attempt {attempt}: it has {', '.join(map(str, numbers))}"
    if node is not None:
        nodes = _list_nodes(run, attempt)
        if node in nodes or not nodes:
            return f"node {node} of {run.id} has printed nothing yet"
        return f"{run.id} has no node {node!r}: it has {', '.join(nodes)}"
    return f"rank {rank} of {run.id} has printed nothing yet, or does not exist"


def _list_nodes(run: RunDir, attempt: int | None) -> list[str]:
    from clustertrain.run import attempts

    records = [attempts.load_attempt(run, a) for a in run.attempts() if attempt in (None, a.n)]
    return list(dict.fromkeys(node for record in records for node in record.nodes))


def _log_files(run: RunDir, rank: int, attempt: int | None, job: bool, node: str | None) -> list[Path]:
    if job:
        return [run.job_log]
    selected = [a for a in run.attempts() if attempt in (None, a.n)]
    if node is not None:
        return [a.logs / f"agent-{node}.log" for a in selected]
    return [a.rank_log(rank) for a in selected]


def _read_chunks(
    run: RunDir, follow: bool, rank: int, attempt: int | None, job: bool, node: str | None
) -> Iterator[tuple[Path | None, bytes]]:
    """Yield (path, chunk); the path is None unless the file differs from that of the previous chunk."""
    offsets: dict[Path, int] = {}
    current: Path | None = None
    has_ended, next_poll = not follow, 0.0
    while True:
        is_last_round = has_ended
        for path in _log_files(run, rank, attempt, job, node):
            for chunk in _read_new(path, offsets):
                yield (path if path != current else None), chunk
                current = path
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
