"""The ``clustertrain`` command. Sub-commands are imported when they are called, so that ``--help`` stays quick."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import sys

import click

from clustertrain.cli.output import flush_error, flush_output, print_error, replace_closed_streams
from clustertrain.errors import EXIT_FAILED, ClusterTrainError
from clustertrain.printable import sanitized_output

# New objects between two searches for reference cycles. Python's own number, 700 or 2000, is reached in every import.
GC_THRESHOLD = 100_000
# What a file system reports about a path or its disk: no mistake of this program.
_FILE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.ELOOP, errno.ENAMETOOLONG}
    | {errno.ENOTDIR, errno.ETIMEDOUT, errno.EBADF, errno.EFBIG}
    # Somebody removes or changes a run's files while a command reads them.
    | {errno.ENOENT, errno.EISDIR}
)

# verb: (where, one line of help). The help stands here so that the list needs no import.
COMMANDS = {
    "submit": ("clustertrain.cli.submit:submit", "Plan, render and submit a training run."),
    "plan": ("clustertrain.cli.plan:plan", "Show what submit would choose and why; submit nothing."),
    "list": ("clustertrain.cli.jobs:list_", "My runs, newest first."),
    "status": ("clustertrain.cli.jobs:status", "A run's attempts, their endings, the step and where the time went."),
    "sweep": ("clustertrain.cli.sweep:sweep", "Submit a run for each point of a grid; show their results."),
    "runs": ("clustertrain.cli.runs:runs", "Compare runs; hand their scalars on to trackers."),
    "logs": ("clustertrain.cli.logs:logs", "Per-rank logs, followed across requeues."),
    "wait": ("clustertrain.cli.jobs:wait", "Wait for runs to end; exit 0 only if all completed."),
    "cancel": ("clustertrain.cli.jobs:cancel", "End runs for good."),
    "requeue": ("clustertrain.cli.jobs:requeue", "Stop at a checkpoint and start again, or continue an ended run."),
    "top": ("clustertrain.cli.top:top", "A run's GPUs, ranks, rate and events, live."),
    "telemetry": ("clustertrain.cli.telemetry:telemetry", "The per-job report on GPUs and hosts."),
    "cluster": ("clustertrain.cli.cluster:cluster", "Cluster profiles: list, show, and detect what a site has."),
    "data": ("clustertrain.cli.data:data", "Make data for a run: shards of tokens."),
    "diagnose": ("clustertrain.cli.diagnose:diagnose", "Checks of a recipe before a long job."),
    "checkpoint": ("clustertrain.cli.checkpoint:checkpoint", "List, verify, compare, export and prune checkpoints."),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click, where it suggests at all, suggests from `commands`, which holds nothing here.
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from clustertrain.config.parsing.documents import did_you_mean

            raise click.UsageError(f"No such command {args[0]!r}: {did_you_mean(args[0], list(COMMANDS))}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="clustertrain")
def cli() -> None:
    """Submit PyTorch training to Slurm or to this machine, survive preemption, and see every GPU.

    RUN is a run id or a unique prefix of one, a job id, or `latest`.
    """


def main() -> int:
    """Run the command line; returns the exit code. Errors are shown, never a traceback of the expected ones."""
    # A command lives for a fraction of a second, a third of which would go into searching what it has imported for
    # cycles (submit: 0.22 s of processor time, 0.15 s so). Most of that at its exit, which skips what is frozen.
    gc.set_threshold(GC_THRESHOLD)
    try:
        with replace_closed_streams():
            with sanitized_output():
                code = _run()
            return flush_output(code)
    finally:
        gc.freeze()


def _run() -> int:
    try:
        result = cli.main(prog_name="clustertrain", standalone_mode=False)
    except ClusterTrainError as e:
        print_error(f"clustertrain: {e}")
        return e.exit_code
    except click.ClickException as e:
        with contextlib.suppress(OSError):
            e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except SystemExit:  # click's end of a command whose reader has left, `| head`
        return EXIT_FAILED
    except OSError as e:
        if e.errno not in _FILE_ERRNOS:
            raise
        if e.filename or flush_error(sys.stdout) is None:  # else :func:`written_out` names what was lost
            target = "standard output" if e.errno in (errno.EBADF, errno.EFBIG) else "a file"
            print_error(f"clustertrain: {e.filename or target}: {e.strerror}")
        return EXIT_FAILED
    return result if isinstance(result, int) else 0
