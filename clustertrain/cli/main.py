"""The ``clustertrain`` command. Subcommands are imported on demand, so that ``--help`` is fast."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from clustertrain.cli.completion import COMPLETION_VARIABLE, complete_files
from clustertrain.cli.output import flush_error, flush_output, print_error, replace_closed_streams
from clustertrain.errors import EXIT_FAILED, ClusterTrainError
from clustertrain.printable import sanitized_output

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Allocations between two garbage collections. Python's default, 700 or 2000, is reached in every import.
GC_THRESHOLD = 100_000
# Errors that the file system reports about a path or a disk, as opposed to bugs in this program.
_FILE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.ELOOP, errno.ENAMETOOLONG}
    | {errno.ENOTDIR, errno.ETIMEDOUT, errno.EBADF, errno.EFBIG}
    # A run's files were removed or changed while a command read them.
    | {errno.ENOENT, errno.EISDIR}
)

# Name: (module:attribute, one line of help). The help is here so that listing the commands imports none of them.
COMMANDS = {
    "submit": ("clustertrain.cli.submit:submit", "Plan, render and submit a training run."),
    "init": ("clustertrain.cli.init:init", "Write a first recipe, script or cluster profile."),
    "demo": ("clustertrain.cli.demo:demo", "Train a small model here: preempted, resumed, completed."),
    "plan": ("clustertrain.cli.plan:plan", "Show what submit would choose; --why explains it."),
    "adopt": ("clustertrain.cli.adopt:adopt", "Read a batch script; write the profile and the submit line."),
    "wrap": ("clustertrain.cli.wrap:wrap", "Run a program inside your own batch script."),
    "watch": ("clustertrain.cli.watch:watch", "Watch any running Slurm job of yours: GPUs, hosts and ranks."),
    "list": ("clustertrain.cli.jobs:list_", "List your runs, newest first."),
    "status": ("clustertrain.cli.jobs:status", "Show a run's progress, loss and attempts, and why it failed."),
    "sweep": ("clustertrain.cli.sweep:sweep", "Submit one run per point of a grid; show the results."),
    "compare": ("clustertrain.cli.compare:compare", "Compare runs: results, settings and telemetry."),
    "logs": ("clustertrain.cli.logs:logs", "Print a rank's log; follow it across requeues."),
    "wait": ("clustertrain.cli.jobs:wait", "Wait for runs to end; exit 0 only if all completed."),
    "cancel": ("clustertrain.cli.jobs:cancel", "End runs for good."),
    "requeue": (
        "clustertrain.cli.jobs:requeue",
        "Stop a run at a checkpoint and start it again, or continue an ended one.",
    ),
    "rm": ("clustertrain.cli.rm:rm", "Delete ended runs."),
    "rerun": ("clustertrain.cli.rerun:rerun", "Submit a run's command again, with other options."),
    "exec": ("clustertrain.cli.exec:exec_", "Run a command on a node of a running run."),
    "shell": ("clustertrain.cli.exec:shell", "Open a shell on a node of a running run."),
    "top": ("clustertrain.cli.top:top", "Watch a run's GPUs, ranks, speed and events live."),
    "telemetry": ("clustertrain.cli.telemetry:telemetry", "Report a run's GPU and host utilization."),
    "open": ("clustertrain.cli.open:open_", "Show a run's report in a browser."),
    "ui": ("clustertrain.cli.ui:ui", "Show all runs, live, in a browser."),
    "track": ("clustertrain.cli.track:track", "Upload an ended run's metrics to trackers."),
    "recipe": (
        "clustertrain.cli.recipe:recipe",
        "Show a recipe with its defaults; explain keys; print the JSON Schema.",
    ),
    "cluster": ("clustertrain.cli.cluster:cluster", "Detect, show and list cluster profiles."),
    "data": ("clustertrain.cli.data:data", "Prepare data: token shards."),
    "diagnose": ("clustertrain.cli.diagnose:diagnose", "Check a recipe before a long job."),
    "checkpoint": ("clustertrain.cli.checkpoint:checkpoint", "List, verify, compare, export and prune checkpoints."),
    "mcp": ("clustertrain.cli.mcp.command:mcp", "Serve runs, plans, reports and logs to agents (MCP)."),
    "skill": ("clustertrain.cli.skill:skill", "Print the skill file for agents."),
    "schema": ("clustertrain.cli.schema:schema", "Print the JSON Schema of a --json document."),
    "version": ("clustertrain.cli.version:version", "Show the version; with -v, everything that a bug report needs."),
    "completion": (
        "clustertrain.cli.completion:completion",
        "Print the shell completion script for bash, zsh or fish.",
    ),
}
# Sections of `--help`. Commands that no section names come last.
_SECTIONS = {
    "Start": ("init", "demo", "plan", "submit", "sweep", "adopt", "wrap"),
    "Watch": ("list", "status", "logs", "top", "ui", "watch"),
    "Control": ("wait", "cancel", "requeue", "rerun", "rm", "exec", "shell"),
    "Understand": ("telemetry", "compare", "open", "diagnose", "track"),
    "Files and settings": ("checkpoint", "data", "recipe", "cluster"),
    "Scripts and agents": ("schema", "mcp", "skill"),
}
# What other tools call a command, and the commands that do it here.
_ELSEWHERE = {
    "attach": ("exec", "shell"), "board": ("ui",), "clean": ("rm",), "config": ("recipe", "cluster"),
    "dashboard": ("ui",), "delete": ("rm",), "describe": ("status",), "diff": ("compare", "checkpoint diff"),
    "doctor": ("version -v", "diagnose", "cluster detect"), "env": ("version -v",), "export": ("checkpoint export",),
    "follow": ("logs -f",), "gpus": ("top", "telemetry"), "help": ("--help",), "history": ("list",), "html": ("open",),
    "info": ("status",),
    "jobs": ("list",), "kill": ("cancel",), "launch": ("submit",), "ls": ("list",), "man": ("--help",),
    "metrics": ("telemetry", "compare"), "monitor": ("top", "ui"), "new": ("init",), "ps": ("list",),
    "queue": ("list",), "remove": ("rm",), "report": ("telemetry", "open"), "restart": ("requeue", "rerun"),
    "resume": ("requeue",), "run": ("submit",), "runs": ("list", "compare"), "show": ("status",), "ssh": ("shell",),
    "start": ("submit",), "stats": ("telemetry",), "stop": ("cancel", "requeue"), "tail": ("logs -f",),
    "tensorboard": ("ui", "track"), "train": ("submit",), "web": ("ui",),
}  # fmt: skip


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        if COMPLETION_VARIABLE in os.environ:
            complete_files(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click suggests names from `commands`, which is empty here.
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {args[0]!r}: {_suggest_command(args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands without importing them, which takes a second for all."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(n, help=text) for n, (_, text) in COMMANDS.items() if n.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {verb for verbs in _SECTIONS.values() for verb in verbs}
        width = max(map(len, COMMANDS))  # one column for all sections
        for title, verbs in {**_SECTIONS, "Other": tuple(verb for verb in COMMANDS if verb not in named)}.items():
            rows = [(verb.ljust(width), COMMANDS[verb][1]) for verb in verbs if verb in COMMANDS]
            with formatter.section(title):
                formatter.write_dl(rows)


def _suggest_command(name: str) -> str:
    from clustertrain.config.parsing.documents import did_you_mean

    if name in _ELSEWHERE:
        return f"did you mean {' or '.join(_ELSEWHERE[name])}?"
    return did_you_mean(name, list(COMMANDS))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="clustertrain")
def cli() -> None:
    """Submit PyTorch training to Slurm or to this machine, survive preemption, and see every GPU.

    RUN is a run id or a unique prefix of one, a job id, or `latest`.
    """


def main() -> int:
    """Run the command line and return the exit code. Expected errors are printed without a traceback."""
    # A command runs for a fraction of a second, and a third of that would go into garbage collection (submit: 0.22 s of
    # CPU time, 0.15 s with this). Most of it happens at exit, which skips frozen objects.
    gc.set_threshold(GC_THRESHOLD)
    try:
        with replace_closed_streams():
            # For a shell's completion click writes bytes, and only values that are printable.
            with contextlib.nullcontext() if COMPLETION_VARIABLE in os.environ else sanitized_output():
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
    except SystemExit:  # click exits so if the reader of a pipe has closed it, as `| head` does
        return EXIT_FAILED
    except OSError as e:
        if e.errno not in _FILE_ERRNOS:
            raise
        if e.filename or flush_error(sys.stdout) is None:  # otherwise flush_output reports the lost output
            target = "standard output" if e.errno in (errno.EBADF, errno.EFBIG) else "a file or standard output"
            print_error(f"clustertrain: {e.filename or target}: {e.strerror}")
        return EXIT_FAILED
    return result if isinstance(result, int) else 0
