"""``clustertrain logs``: what the ranks printed, over all attempts, followed across requeues."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from clustertrain import clock, reading
from clustertrain.cli.common import find_run, run_argument
from clustertrain.errors import NotFound, UsageError
from clustertrain.printable import printable
from clustertrain.printable import raw as unescaped
from clustertrain.run.run_dir import RunDir, readable

POLL_S = 0.3
ASK_S = 3.0
CHUNK = 1 << 16


@click.command()
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on as the logs grow, across requeues, until the run ends.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Which rank's log.")
@click.option("--attempt", type=click.IntRange(min=1), help="Only this attempt's.")
@click.option("--job", is_flag=True, help="Instead of a rank's: what the batch script, srun and Slurm printed.")
@click.option("--node", metavar="NAME", help="Instead of a rank's: what torchrun printed on this node.")
@click.option("--raw", is_flag=True, help="For a pipe or a file: print the log unchanged, colors included.")
def logs(name: str, follow: bool, rank: int, attempt: int | None, job: bool, node: str | None, raw: bool) -> None:
    """Print the log of one rank of RUN.

    Control characters, which a terminal acts on, are shown as \\x1b and the like.
    """
    if job and node:
        raise UsageError("--job and --node are two different logs")
    if raw and sys.stdout.isatty():
        raise UsageError(
            "--raw: a terminal would act on what the run has printed", fix="leave it out, or pipe it: --raw | less -R"
        )
    run = find_run(name)
    printed = False
    shown = None if raw else _Printable(sys.stdout.encoding)
    with readable():
        for path, chunk in _chunks(run, follow, rank, attempt, job, node):
            printed = True
            if path is not None:
                click.echo(f"==> {path.relative_to(run.path)} <==", err=True)
            unescaped(sys.stdout).buffer.write(chunk if shown is None else shown.of(path, chunk))
            sys.stdout.flush()
    if shown is not None:
        unescaped(sys.stdout).buffer.write(shown.rest())
    if not printed and not follow:
        raise NotFound(
            _why_none(run, rank, attempt, job, node), fix=f"`clustertrain status {run.id}` shows its attempts"
        )


class _Printable:
    """Chunks of logs for a terminal. A carriage return stays: it leads back to the begin of its own line at most, and
    a progress bar without it fills the screen."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._decoder = _decoder()

    def of(self, path: Path | None, chunk: bytes) -> bytes:
        """``path``: where another file begins."""
        rest = b"" if path is None else self.rest()
        return rest + self._encoded(self._decoder.decode(chunk))

    def rest(self) -> bytes:
        """What is left of a file that ends within a character."""
        rest, self._decoder = self._decoder.decode(b"", final=True), _decoder()
        return self._encoded(rest)

    def _encoded(self, text: str) -> bytes:
        return printable(text, but="\r").encode(self._encoding, "backslashreplace")


def _decoder() -> codecs.IncrementalDecoder:
    """Keeps half a character until its rest comes; what is no UTF-8 becomes \\xff and the like."""
    return codecs.getincrementaldecoder("utf-8")("backslashreplace")


def _why_none(run: RunDir, rank: int, attempt: int | None, job: bool, node: str | None) -> str:
    numbers = [a.n for a in run.attempts()]
    if job or not numbers:
        return f"{run.id} has printed nothing yet"
    if attempt is not None and attempt not in numbers:
        return f"{run.id} has no attempt {attempt}: it has {', '.join(map(str, numbers))}"
    if node is not None:
        known = _nodes(run, attempt)
        if node in known or not known:
            return f"node {node} of {run.id} has printed nothing yet"
        return f"{run.id} has no node {node!r}: it has {', '.join(known)}"
    return f"rank {rank} of {run.id} has printed nothing yet, or does not exist"


def _nodes(run: RunDir, attempt: int | None) -> list[str]:
    from clustertrain.run import attempts

    known = [attempts.read_one(run, a) for a in run.attempts() if attempt in (None, a.n)]
    return list(dict.fromkeys(node for found in known for node in found.nodes))


def _files(run: RunDir, rank: int, attempt: int | None, job: bool, node: str | None) -> list[Path]:
    if job:
        return [run.job_log]
    asked = [a for a in run.attempts() if attempt in (None, a.n)]
    if node is not None:
        return [a.logs / f"agent-{node}.log" for a in asked]
    return [a.rank_log(rank) for a in asked]


def _chunks(
    run: RunDir, follow: bool, rank: int, attempt: int | None, job: bool, node: str | None
) -> Iterator[tuple[Path | None, bytes]]:
    """(the file, at its first chunk and where the file changes, else None; what is new in it)."""
    read: dict[Path, int] = {}
    current: Path | None = None
    ended, next_ask = not follow, 0.0
    while True:
        last_round = ended
        for path in _files(run, rank, attempt, job, node):
            for chunk in _new(path, read):
                yield (path if path != current else None), chunk
                current = path
        if last_round:
            return
        if clock.monotonic() >= next_ask:
            next_ask = clock.monotonic() + ASK_S
            ended = _ended(run)
        clock.sleep(POLL_S)


def _new(path: Path, read: dict[Path, int]) -> Iterator[bytes]:
    try:
        with reading.opened(path) as f:
            f.seek(read.get(path, 0))
            while chunk := f.read(CHUNK):
                read[path] = f.tell()
                yield chunk
    except FileNotFoundError:
        return


def _ended(run: RunDir) -> bool:
    from clustertrain.scheduler.run_status import look

    return look(run).final
