"""``clustertrain init``: a first recipe or script in the current folder, and a cluster profile."""

from __future__ import annotations

import contextlib
import json
import shlex
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from clustertrain.cli.completion import complete_gpu_types
from clustertrain.errors import ClusterTrainError, ConfigError, NotFound, UsageError
from clustertrain.printable import printable

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")  # a checked answer
SCHEMA_FILE = "recipe.schema.json"
SCRIPT = "train_script.py"  # in the examples of a checkout, in the templates of a wheel


class _WholeNumber(click.IntRange):
    """A whole number in a range, with a message that people understand for anything else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


@click.group()
def init() -> None:
    """Write a first recipe, training script or cluster profile, and show the next commands."""


def _output_option(default: str) -> Callable[[F], F]:
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        default=Path(default),
        show_default=True,
        help="File to write.",
    )


_force_option = click.option("--force", is_flag=True, help="Replace the file if it exists.")


@init.command(short_help="Write a recipe for the built-in trainer.")
@click.option("--model", metavar="PRESET|PATH|RUN", help="A preset, or pretrained weights to start from.")
@click.option("--data", metavar="PATH", help="A folder of text or token shards, or a .jsonl file of conversations.")
@click.option("--tokenizer", metavar="PATH", help="Tokenizer of the conversations.")
@click.option("--steps", type=_WholeNumber(min=1), metavar="N", help="Optimizer steps.")
@click.option("--adapter", is_flag=True, help="Train a LoRA adapter instead of all weights.")
@click.option("--unchecked", is_flag=True, help="Accept a model and data that only the compute nodes have.")
@click.option(
    "--schema",
    "with_schema",
    is_flag=True,
    help=f"Also write {SCHEMA_FILE}, with which editors complete and check keys.",
)
@_output_option("recipe.toml")
@_force_option
def recipe(
    model: str | None,
    data: str | None,
    tokenizer: str | None,
    steps: int | None,
    adapter: bool,
    unchecked: bool,
    with_schema: bool,
    output: Path,
    force: bool,
) -> None:
    """Write a recipe for the built-in trainer. On a terminal, it asks for what no option says."""
    from clustertrain.config.parsing.presets import PRESETS

    _check_output(output, force=force)
    schema_file = output.with_name(SCHEMA_FILE)
    if with_schema:
        _check_output(schema_file, force=force)
    check_model, check_data = (str.strip, str.strip) if unchecked else (_check_model, _check_data)
    # Options are checked before the first question.
    model = check_model(model) if model else ""
    data = check_data(data) if data is not None else None
    if _is_terminal():
        if not model:
            click.echo(f"Presets: {', '.join(PRESETS)}")
            model = _ask("Model: a preset, or weights to start from", "tiny", check_model)
        data = data if data is not None else _ask("Data: a folder or file; empty for a sample text", "", check_data)
        steps = steps or click.prompt("Optimizer steps", default=1000, type=_WholeNumber(min=1))
    text = build_recipe(model or "tiny", data or "", tokenizer or "", steps or 1000, adapter=adapter)
    _check_recipe(text, output)
    if with_schema:
        from clustertrain.cli.recipe import format_schema

        _write({output: f"#:schema ./{SCHEMA_FILE}\n{text}", schema_file: format_schema()})
    else:
        _write({output: text})
    click.echo(f"wrote {output}{f' and {schema_file}' if with_schema else ''}; next:")
    name = shlex.quote(str(output))
    _echo_next(
        {
            f"clustertrain plan {name}": "what submit would choose",
            f"clustertrain diagnose init-loss {name}": "does the first loss make sense?",
            f"clustertrain submit {name}": "train",
            "clustertrain recipe explain optim.lr": "what a key means",
        }
    )


@init.command(short_help="Write a training script that uses a session.")
@_output_option("train.py")
@_force_option
def script(output: Path, force: bool) -> None:
    """Write a training script that uses a session: a small example to put your own model and data into."""
    from clustertrain.submit.templates import find_template_folder

    _check_output(output, force=force)
    templates = find_template_folder()
    source = next((f / SCRIPT for f in (templates, templates.parent / "examples") if (f / SCRIPT).is_file()), None)
    if source is None:
        raise ConfigError(f"{SCRIPT} is missing in {templates}", fix="reinstall clustertrain")
    _write({output: source.read_text().replace(SCRIPT, output.name)})
    click.echo(f"wrote {output}; next:")
    name = shlex.quote(str(output))
    _echo_next(
        {
            f"python {name} --checkpoint-dir /tmp/first": "one process, no launcher",
            f"clustertrain submit --gpus 2 {name}": "two ranks",
            "clustertrain logs -f": "its output",
        }
    )


@init.command(short_help="Write a cluster profile.")
@click.argument("name", required=False)
@click.option("--partition", metavar="NAME", help="Slurm partition.")
@click.option("--account", metavar="NAME", help="Slurm account to charge.")
@click.option("--gpu-type", metavar="TYPE", help="GPU type as Slurm names it.", shell_complete=complete_gpu_types)
@click.option("--gpus-per-node", type=_WholeNumber(min=1), metavar="G", help="GPUs of a node.")
@click.option("--time", metavar="LIMIT", help="Default time limit.")
@click.option("--setup", metavar="LINE", multiple=True, help="Shell line that jobs run first (repeatable).")
@_force_option
def profile(name: str | None, force: bool, setup: tuple[str, ...], **options: Any) -> None:
    """Write the cluster profile NAME: the settings of a site, for `submit --cluster NAME`.

    On a terminal, it asks for what no option says. On a login node, `clustertrain cluster detect NAME` adds what Slurm
    knows about the nodes, and keeps the rest.
    """
    from clustertrain import settings
    from clustertrain.cluster import new_profile, profile_file
    from clustertrain.config.cluster import list_profiles

    if name is None and not _is_terminal():
        raise UsageError("init profile: the name of the profile is missing", fix="clustertrain init profile NAME")
    name = profile_file.check_name(name if name is not None else _ask("Name", "cluster", profile_file.check_name))
    path = list_profiles().get(name) or settings.profile_folders()[-1] / f"{name}.toml"
    if path.exists() and not force:
        raise UsageError(
            f"cluster profile {name} exists: {path}", fix="choose another name, edit it, or replace it with --force"
        )
    known = {key: value for key, value in {**options, "setup": setup}.items() if value}
    new_profile.format_profile(new_profile.SiteAnswers(**known), name)  # options are checked before the first question
    if _is_terminal():
        known |= _ask_about_site(known)
    text = new_profile.format_profile(new_profile.SiteAnswers(**known), name)
    profile_file.write(path, text)
    click.echo(f"wrote {path}; next:")
    gpus = known.get("gpus_per_node") or 8
    _echo_next(
        {
            f"clustertrain cluster detect {name}": "add what Slurm knows, on a login node",
            f"clustertrain plan --cluster {name} --nodes 2 --gpus {gpus}": "what submit would choose",
            f"export {settings.CLUSTER}={name}": "use it without --cluster",
        }
    )


def _ask_about_site(known: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for what ``known`` lacks. Return the answers; an empty one leaves the setting to Slurm and is left out."""

    def check_time(text: str) -> str:
        time_limits.parse_time_limit_s(text.strip())
        return text.strip()

    from clustertrain.config.parsing import time_limits

    click.echo("An empty answer leaves the setting to Slurm.")
    questions: dict[str, tuple[str, Callable[[str], Any]]] = {
        "partition": ("Partition", str.strip),
        "account": ("Account", str.strip),
        "gpu_type": ("GPU type, such as h100", str.strip),
        "gpus_per_node": ("GPUs per node", lambda text: _WholeNumber(min=0).convert(text or "0", None, None)),
        "time": ("Default time limit, such as 1-00:00:00", check_time),
        "setup": (
            "Shell line that jobs run first, such as module load cuda",
            lambda text: list(filter(None, [text.strip()])),
        ),
    }
    return {key: _ask(question, "", check) for key, (question, check) in questions.items() if key not in known}


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask(question: str, default: str, check: Callable[[str], A]) -> A:
    """Ask until ``check`` accepts the answer. Return what it returns."""

    def parse(answer: str) -> A:
        try:
            return check(answer)
        except ClusterTrainError as e:
            fix = f"\n  fix: {printable(e.fix)}" if e.fix else ""
            raise click.UsageError(printable(e.message) + fix) from e

    answer: A = click.prompt(question, default=default, value_proc=parse, show_default=bool(default))
    return answer


def _check_model(text: str) -> str:
    """Return ``text`` without spaces around it.

    Raises:
        UsageError: it is neither a preset nor weights that exist on this machine.
    """
    from clustertrain.config.parsing.presets import PRESETS

    name = text.strip()
    if not name or name in PRESETS:
        return name
    from clustertrain.checkpoint.offline import start_weights

    try:
        start_weights.resolve_weights(name, Path.cwd())
    except NotFound as e:
        if "/" in name:
            raise UsageError(f"model: {e.message}", fix=e.fix) from e
        raise UsageError(
            f"model: no preset {name!r}; {e.message}", fix=f"{_suggest(name, [*PRESETS])} Otherwise {e.fix}"
        ) from e
    except OSError as e:
        raise UsageError(f"model: {name}: {e.strerror}", fix="check the path") from e
    return name


def _check_data(text: str) -> str:
    """Return ``text`` without spaces around it; empty stands for a sample.

    Raises:
        UsageError: it is neither a built-in data set nor a file or folder on this machine.
    """
    from clustertrain import settings
    from clustertrain.config.data import BUILT_IN_DATASETS

    name = text.strip()
    built_in = sorted({data_set for names in BUILT_IN_DATASETS.values() for data_set in names})
    if not name or name in built_in:
        return name
    path = settings.expand_user_path(name, "the data")
    try:
        # Shards of Megatron are named without the suffix.
        if path.exists() or path.with_name(f"{path.name}.bin").exists():
            return name
    except OSError as e:
        raise UsageError(f"data: {name}: {e.strerror}", fix="check the path") from e
    fix = "check the path; if only the nodes have it, add --unchecked"
    if "/" not in name:
        fix = f"{_suggest(name, built_in)} Otherwise {fix}"
    raise UsageError(f"data: {name}: no such file or folder", fix=fix)


def _suggest(name: str, known: list[str]) -> str:
    from clustertrain.config.parsing.documents import did_you_mean

    suggestion = did_you_mean(name.lower(), known)
    return suggestion if suggestion.endswith("?") else f"{suggestion}."


def _echo_next(commands: dict[str, str]) -> None:
    """Print commands, each with what it shows or does."""
    width = max(map(len, commands))
    for command, words in commands.items():
        click.echo(f"  {command:<{width}}   {words}")


def build_recipe(model: str, data: str, tokenizer: str, steps: int, *, adapter: bool) -> str:
    """Return the text of a recipe with the keys that people change first."""
    from clustertrain.config.parsing.presets import PRESETS

    is_preset = model in PRESETS
    kind = _guess_kind(data)
    if kind == "chat" and not tokenizer:
        tokenizer = "" if is_preset else model
    lines = [
        "# Every key has a default: `clustertrain recipe explain KEY`. An unknown key is an error.",
        "",
        "[model]",
        f"{'preset' if is_preset else 'init'} = {_quote(model)}",
        "",
        "[data]",
        *([f"kind = {_quote(kind)}"] if kind else []),
        f"path = {_quote(data)}"
        if data
        else 'path = "stdlib"        # the source of the Python standard library, a sample',
        *([f"tokenizer = {_quote(tokenizer)}"] if tokenizer else []),
        "validation = 0.01      # share held out to measure the loss on; the best checkpoint is kept",
        "",
        "[train]",
        f"steps = {steps}",
        "# global_batch = 256   # without it, the plan chooses one for the number of GPUs",
        "",
        "[optim]",
        f"lr = {'2e-4' if adapter else '3e-4'}              # `clustertrain diagnose lr-range` finds one",
        *(["", "[adapter]", 'kind = "lora"', "rank = 16"] if adapter else []),
        "",
        "[checkpoint]",
        'every = "auto"         # seldom enough to cost little, often enough to lose little',
    ]
    return "\n".join(lines) + "\n"


def _guess_kind(data: str) -> str:
    """Return the kind of the data from its files; empty: text, which is the default."""
    path = Path(data)
    if data.endswith((".jsonl", ".parquet")):
        return "chat"
    is_shards = (path.is_dir() and any(path.glob("*.bin"))) or Path(f"{data}.bin").is_file()
    return "tokens" if data and is_shards else ""


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_output(output: Path, *, force: bool) -> None:
    try:
        mode = output.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except OSError as e:  # a loop of links, a name that is too long, a folder that may not be searched
        raise ConfigError(f"{output} cannot be written: {e.strerror}", fix="name another file with --output") from e
    if mode is not None and not force:
        raise UsageError(f"{output} exists already", fix="name another file with --output, or replace it with --force")
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"{output} is not a regular file and will not be replaced", fix="name a file with --output")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist", fix="create it first")


def _write(texts: dict[Path, str]) -> None:
    """Write each text to its file; if one cannot be written, write none. A link stays, and its target is replaced.

    Raises:
        ConfigError: a file cannot be written.
    """
    from clustertrain import fsio

    try:
        with contextlib.ExitStack() as files:
            for path, text in texts.items():
                # The umask decides who else may read the file, as for any other program.
                file = files.enter_context(fsio.atomic_write(path.resolve(), mode=0o666))
                file.write(text.encode())
                file.flush()
    except OSError as e:
        raise ConfigError(
            f"{e.filename} cannot be written: {e.strerror}",
            fix="name a file in a writable folder, with space on its disk, with --output",
        ) from e


def _check_recipe(text: str, output: Path) -> None:
    """Raise an error if the recipe is not one that submit would take, as far as it can be read here."""
    import tomllib

    from clustertrain.config.parsing.documents import build
    from clustertrain.config.parsing.presets import apply_preset
    from clustertrain.config.recipe import Recipe

    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UsageError("a path is not UTF-8, as a recipe must be", fix="rename the file, or name a link to it") from e
    document = tomllib.loads(text)
    document["model"].pop("init", None)  # its sizes are those of a file, which submit reads
    build(apply_preset(document), Recipe, str(output))
