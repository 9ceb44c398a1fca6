"""Options, arguments and run names for every command that ends by itself."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

import click
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from clustertrain import fsio
from clustertrain.cli.main import COMMANDS
from clustertrain.run.run_dir import RunDir
from tests.harness.fuzz.inputs.text import arguments, numbers
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox
from tests.unit.report.live_runs import begin, new_run

# They train, serve, examine the machine for minutes, or, like requeue and data, have a separate class.
SKIPPED_COMMANDS = frozenset(
    {"diagnose", "requeue", "data", "cluster detect", "track", "demo", "exec", "shell", "ui", "mcp"}
)
# Each starts processes or waits.
SKIPPED_OPTIONS = frozenset(
    {"--find-micro-batch", "--count-model", "--follow", "-f", "--wait", "--help", "-h", "--version", "--interval"}
)
# Options without which a command would not end, or would start something.
REQUIRED_OPTIONS = {
    "submit": ("--dry-run",),
    "sweep": ("--dry-run",),
    "top": ("--once",),
    "checkpoint prune": ("--dry-run",),
}
# Their values are files to write. Any path would be legitimate, so they get paths below the current folder.
OUTPUT_OPTIONS = frozenset({"--html", "--csv", "--parquet", "--out", "--output"})
RUN = "llama-abc234"
FILES = {"train.py": "import clustertrain as ct\n", "recipe.toml": "[train]\nsteps = 3\n", "table.csv": "source\nx\n"}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Iterate over all commands and their full names, such as `checkpoint list`."""

    def visit(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            if command.callback is not None and command.invoke_without_command:
                yield words, command
            for name, inner in command.commands.items():
                yield from visit(f"{words} {name}", inner)
        else:
            yield words, command

    for verb, (location, _) in COMMANDS.items():
        module, _, name = location.partition(":")
        for words, command in visit(verb, getattr(importlib.import_module(module), name)):
            if words not in SKIPPED_COMMANDS and verb not in SKIPPED_COMMANDS:
                yield words, command


def option(parameter: click.Option) -> SearchStrategy[list[str]]:
    name = max(parameter.opts, key=len)
    if parameter.is_flag:
        return st.just([name])
    if name in OUTPUT_OPTIONS:
        value: SearchStrategy[str] = st.sampled_from(("out.x", "-", "no/such/folder/x", "recipe.toml/x", "."))
    elif isinstance(parameter.type, click.Choice):
        value = st.sampled_from([str(c) for c in parameter.type.choices]) | arguments()
    else:
        value = st.one_of(arguments(), numbers().map(str), st.sampled_from(("1", "2", "4", "8", "1h", "10m", "a=b")))
    return value.map(lambda word: [f"{name}={word}"])


def draw_call(words: str, command: click.Command) -> SearchStrategy[list[str]]:
    options = [p for p in command.params if isinstance(p, click.Option) and not SKIPPED_OPTIONS.intersection(p.opts)]
    drawn_options = st.lists(st.one_of([option(p) for p in options]), max_size=4) if options else st.just([])
    targets = st.sampled_from((RUN, RUN[:4], "latest", f"{RUN}@200", *FILES)) | arguments()
    arguments_drawn = st.lists(targets, max_size=3)
    return st.builds(
        lambda options, arguments_drawn: [
            *words.split(),
            *REQUIRED_OPTIONS.get(words, ()),
            *(w for o in options for w in o),
            *arguments_drawn,
        ],
        drawn_options,
        arguments_drawn,
    )


def lines() -> SearchStrategy[list[str]]:
    return st.one_of([draw_call(words, command) for words, command in commands()])


def names() -> SearchStrategy[list[str]]:
    """Draw a call with one hostile name of a run, profile or file."""
    verbs = st.sampled_from((
        ("status",), ("logs",), ("telemetry",), ("top", "--once"), ("checkpoint", "list"), ("checkpoint", "verify"),
        ("checkpoint", "digest"), ("cancel",), ("wait",), ("submit", "--dry-run", "--name"), ("compare", RUN),
        ("cluster", "show"), ("submit", "--dry-run"), ("plan",), ("submit", "--dry-run", "--cluster"),
    ))  # fmt: skip
    return st.builds(lambda verb, name: [*verb, name], verbs, arguments())


def play_line(box: Sandbox, drawn: list[str]) -> None:
    _prepare(box)
    box.call([word for word in drawn if word not in SKIPPED_OPTIONS])


def _prepare(box: Sandbox) -> None:
    """Create a completed run, so that no command waits for it, and a file of each kind."""
    for name, text in FILES.items():
        if not (box.site / name).is_file():
            (box.site / name).write_text(text)
    path = box.home / "runs" / RUN
    if not path.exists():
        finished_run(box)


def finished_run(box: Sandbox) -> RunDir:
    now = time.time()
    run = new_run(box.home, now, name=RUN)
    begin(run, now - 60, ["a"], steps=40)
    attempt = run.attempt(1)
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": now - 50, "event": "ended", "ending": "completed", "last_step": 40, "job_id": "local-1"})
    log.close()
    for folder in (attempt.logs, attempt.results):
        fsio.make_folder(folder)
    attempt.rank_log(0).write_text("hello\n")
    result: dict[str, Any] = {"node": "a", "ending": "completed", "step": 40, "ranks": []}
    fsio.write_json(attempt.result_path("a"), result)
    return run


CLASSES = (
    InputClass("options", lines, play_line, 15),
    InputClass("names", names, play_line, 10),
)
