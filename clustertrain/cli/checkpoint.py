"""``clustertrain checkpoint``: look at a run's checkpoints, offline; needs no GPU and no process group, and torch only
for a file in torch's own format."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from clustertrain import reading, settings
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.dtypes import FLOATS
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import with_retries
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.offline import inspect
from clustertrain.cli.common import find_run, json_option, print_json, required_run_argument, run_argument
from clustertrain.cli.progress import ProgressBar
from clustertrain.config.checks.storage_paths import is_url
from clustertrain.errors import EXIT_FAILED, EXIT_SUCCESS, CheckpointError, NotFound, UsageError

step_option = click.option("--step", type=click.IntRange(min=0), help="Which one.  [default: see above]")


@dataclass(frozen=True)
class CheckpointLocation:
    """What RUN stands for: the folder ``root`` with checkpoints, or in it the one in ``folder`` or of ``step``."""

    label: str
    root: Folder
    folder: Folder | None = None
    step: int | None = None

    @property
    def is_single(self) -> bool:
        return self.folder is not None or self.step is not None

    def select(self, step: int | None) -> Folder:
        """The committed checkpoint of ``step``; None: the one that is named, else the newest.

        Raises:
            NotFound: there is none.
            UsageError: another one is named.
        """
        own_step = self.step if self.folder is None else index.parse_step(self.folder)
        if None not in (step, own_step) and step != own_step:
            raise UsageError(
                f"--step {step}: RUN is the checkpoint of step {own_step} already", fix="leave one of them out"
            )
        if self.folder is None:
            return inspect.find_checkpoint(self.root, own_step if step is None else step)
        if not index.is_committed(self.folder):
            raise NotFound(
                f"{self.folder}: was never committed", fix="`clustertrain checkpoint list` shows those that were"
            )
        return self.folder


def locate(name: str) -> CheckpointLocation:
    """RUN, RUN@STEP, a path or a URL.

    Raises:
        NotFound, Ambiguous: as :func:`find_run`; there is no such folder.
        ConfigError: no package for such URLs is installed.
        StorageError: nothing can be read there.
    """
    run_name, separator, step = name.rpartition("@")
    if separator and reading.is_unsigned_int(step) and not Path(name).exists():
        location = locate(run_name)
        if location.is_single:
            raise UsageError(f"{name}: {run_name} is one checkpoint already", fix=f"leave out @{step}")
        return CheckpointLocation(location.label, location.root, step=int(step))
    if "/" not in name:
        run = find_run(name)
        return CheckpointLocation(run.id, run.checkpoints)
    if is_url(name):
        remote = RemoteFolder(name)
        if not with_retries(remote.is_dir, remote):
            raise NotFound(f"{remote}: nothing is there")
        return _location_in(remote)
    path = settings.expand_user_path(name, "the checkpoint").absolute()
    if (path / "spec.toml").is_file():
        return CheckpointLocation(path.name, path / "checkpoints")
    if not path.is_dir():
        raise NotFound(f"{path}: no such folder")
    return _location_in(path)


def _location_in(folder: Folder) -> CheckpointLocation:
    if index.parse_step(folder) is None:
        return CheckpointLocation(str(folder), folder)
    return CheckpointLocation(str(folder.parent), folder.parent, folder=folder)


@click.group()
def checkpoint() -> None:
    """Look at a run's checkpoints, compare, export and prune them.

    RUN is a run id or a unique prefix of one, a job id, or `latest`; or a path (with a / in it) of a run, of a folder
    with checkpoints, or of one checkpoint; or a URL of the last two, as s3://bucket/prefix/RUN. RUN@STEP is the
    checkpoint of one step.
    """


@checkpoint.command("list")
@run_argument
@click.option("--verify", is_flag=True, help="Read every byte and compare checksums; else only index and file sizes.")
@json_option
def list_(name: str, verify: bool, as_json: bool) -> None:
    """All checkpoints of RUN, oldest first."""
    location = locate(name)
    if location.folder is not None:
        rows = [inspect.describe(location.folder, verify=verify)]
    else:
        rows = inspect.list_checkpoints(location.root, verify=verify, step=location.step)
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"no checkpoints in {location.root}", err=True)
        return
    from clustertrain.report.checkpoint import damage_messages, render_list
    from clustertrain.report.terminal import emit, make_console

    emit(make_console(), render_list(rows))
    for reason in damage_messages(rows):
        click.echo(reason)


@checkpoint.command(short_help="Read every byte and compare the checksums.")
@run_argument
@step_option
@json_option
def verify(name: str, step: int | None, as_json: bool) -> int:
    """Read every byte and compare the checksums; of all committed checkpoints, or of one STEP. Exit 1 on damage."""
    location = locate(name)
    selected = location.select(step)
    is_single = step is not None or location.is_single
    rows = []
    for folder in (
        [selected] if is_single else [p for p in rollback.list_valid_folders(location.root) if index.is_committed(p)]
    ):
        row: dict[str, Any] = {"step": index.parse_step(folder), "path": str(folder), "verified": None, "damage": None}
        reasons: list[str] = []
        try:
            with ProgressBar(f"step {row['step']}") as bar:
                reasons = inspect.find_damage(folder, bar)
            row.update(verified=not reasons, damage="; ".join(reasons) or None)
        except CheckpointError as e:  # not known to be damaged
            row["unreadable"] = e.message
            reasons = [str(e)]
        rows.append(row)
        if not as_json:
            outcome = "UNREADABLE" if row["verified"] is None else "ok" if row["verified"] else "DAMAGED"
            click.echo(f"step {row['step']}: {outcome}")
        for reason in reasons:
            click.echo(f"clustertrain: {reason}", err=True)
    if as_json:
        print_json({"run": location.label, "checkpoints": rows})
    return EXIT_SUCCESS if all(r["verified"] for r in rows) else EXIT_FAILED


@checkpoint.command(short_help="One hash of the tensors, whatever layout saved them.")
@run_argument
@step_option
@click.option(
    "--of", "kind", type=click.Choice(["model", "optimizer", "all"]), default="all", show_default=True, help="Of what."
)
@json_option
def digest(name: str, step: int | None, kind: str, as_json: bool) -> None:
    """One hash of the model's and the optimizer's tensors, whatever layout saved them; of the newest committed
    checkpoint, or of one STEP. Random states and other values are left out."""
    location = locate(name)
    folder = location.select(step)
    kinds = [k for k in inspect.DIGEST_KINDS if kind in (k, "all")]
    with ProgressBar("digest") as bar:
        value = inspect.digest(folder, kinds, bar)
    if as_json:
        print_json({"run": location.label, "step": index.parse_step(folder), "of": kind, "digest": value})
    else:
        click.echo(value)


@checkpoint.command(short_help="What differs between two checkpoints.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--all", "whole", is_flag=True, help="Each difference, not only the largest.")
@json_option
def diff(a: str, b: str, whole: bool, as_json: bool) -> int:
    """What differs between two checkpoints: tensors with the largest difference, and values. Exit 1 if anything does.

    A and B are RUN@STEP, RUN (its newest committed checkpoint), or paths. Layout, number of ranks and engine are told,
    and make no difference; neither do random states where other numbers of ranks saved the two.
    """
    from clustertrain.checkpoint.offline.diff import compare_checkpoints

    locations = locate(a), locate(b)
    folders = locations[0].select(None), locations[1].select(None)
    with ProgressBar("compared") as bar:
        comparison = compare_checkpoints(folders[0], folders[1], bar)
    if as_json:
        import msgspec

        sides = [
            {"run": p.label, "step": index.parse_step(f), "path": str(f)}
            for p, f in zip(locations, folders, strict=True)
        ]
        print_json({"a": sides[0], "b": sides[1], **msgspec.structs.asdict(comparison)})
    else:
        from clustertrain.report.checkpoint import render_diff
        from clustertrain.report.terminal import emit, make_console

        click.echo(f"A  {folders[0]}\nB  {folders[1]}\n")
        emit(make_console(), render_diff(comparison, show_all=whole))
    return EXIT_SUCCESS if comparison.equal else EXIT_FAILED


def _parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """``5GB``, ``500MB``, ``2GiB`` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(I?)B?", value.upper())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is no size: write 5GB, 500MB or 2GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


@checkpoint.command(short_help="The model as safetensors or as one file of torch's.")
@run_argument
@step_option
@click.option("--best", is_flag=True, help="The best one by the run's deciding metric, in place of the newest.")
@click.option("--format", "form", type=click.Choice(["safetensors", "torch"]), default="safetensors", show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder for safetensors; torch: the file.",
)
@click.option(
    "--dtype",
    type=click.Choice(FLOATS),
    help="Convert floating tensors.  [default: as they are]",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=_parse_size,
    default="5GB",
    show_default=True,
    help="Of a safetensors file: 5GB, 2GiB, …",
)
@click.option(
    "--names",
    type=click.Choice(["huggingface", "own"]),
    help="What the tensors are called.  [default: huggingface in safetensors of a built-in decoder, else own]",
)
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@json_option
def export(
    name: str,
    step: int | None,
    best: bool,
    form: Any,
    output: Path,
    dtype: str | None,
    max_shard_size: int,
    names: Any,
    force: bool,
    as_json: bool,
) -> None:
    """The model of RUN for other programs; of the newest committed checkpoint, of one STEP, or of the best.

    `safetensors` of a built-in decoder is a folder that transformers.AutoModelForCausalLM.from_pretrained() loads;
    `torch` is a file with a state_dict that torch.load(weights_only=True) reads. The optimizer is left out.
    """
    from clustertrain.checkpoint.offline.export import ExportRequest
    from clustertrain.checkpoint.offline.export import export as write_export

    location = locate(name)
    if best and (step is not None or location.is_single):
        raise UsageError("--best chooses among all checkpoints of a run, and one is named", fix="leave one of them out")
    folder = inspect.find_best(location.root) if best else location.select(step)
    request = ExportRequest(folder, output, form, dtype, max_shard_size, names, force)
    with ProgressBar("exported") as bar:
        result = write_export(request, bar)
    if as_json:
        print_json({"run": location.label, **asdict(result), "path": str(result.path)})
        return
    from clustertrain.report.checkpoint import format_size

    click.echo(
        f"step {result.step}: {result.tensors} tensors, {format_size(result.bytes)}, {result.names} names, in"
        f" {result.path}"
    )
    for file in result.files:
        click.echo(f"  {file}")


@checkpoint.command()
@required_run_argument
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many of the newest to keep.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted; delete nothing.")
@json_option
def prune(name: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Delete all but the newest checkpoints. The newest one that verifies always stays."""
    location = locate(name)
    if location.is_single:
        raise UsageError(f"{name}: is one checkpoint", fix="name a run, or a folder with checkpoints")
    if isinstance(location.root, RemoteFolder):
        raise UsageError(
            f"{name}: copies behind a URL are deleted by their run, as checkpoint.remote_keep says",
            fix="delete one by hand with the store's own tools, its file COMMITTED first",
        )
    deleted = [str(p) for p in (inspect.list_prunable if dry_run else inspect.prune)(location.root, keep)]
    if as_json:
        preview = {"would_delete": deleted} if dry_run else {}
        print_json({"run": location.label, "deleted": [] if dry_run else deleted, **preview})
        return
    for folder in deleted:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {folder}")
