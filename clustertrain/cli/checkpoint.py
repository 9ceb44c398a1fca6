"""``clustertrain checkpoint``: work on checkpoints offline, without a GPU or a process group.

torch is imported only to export a file in torch's format.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain import reading, settings
from clustertrain.checkpoint.format.dtypes import FLOATS
from clustertrain.checkpoint.format.manifest import has_commit_marker, parse_step
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.format.storage_errors import with_retries
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.offline import inspect
from clustertrain.cli.common import find_run, json_option, print_json, required_run_argument, run_argument
from clustertrain.cli.completion import complete_runs
from clustertrain.cli.progress import ProgressBar
from clustertrain.config.checks.storage_paths import is_url
from clustertrain.errors import EXIT_FAILED, EXIT_SUCCESS, CheckpointError, NotFound, UsageError
from clustertrain.printable import printable
from clustertrain.run.attempts import load_attempts
from clustertrain.run.run_dir import RunDir

if TYPE_CHECKING:
    from clustertrain.report.documents.checkpoints import VerifiedCheckpoint

step_option = click.option(
    "--step", type=click.IntRange(min=0), metavar="STEP", help="Step of the checkpoint.  [default: see above]"
)


@dataclass(frozen=True)
class CheckpointLocation:
    """The target of a command: a folder of checkpoints, or one checkpoint in it, given by ``folder`` or ``step``."""

    label: str
    root: Folder
    folder: Folder | None = None
    step: int | None = None
    run: RunDir | None = None
    """The run, if the target is one."""

    @property
    def is_single(self) -> bool:
        return self.folder is not None or self.step is not None

    def select(self, step: int | None, *, needs_record: bool = True) -> Folder:
        """Return the committed checkpoint of ``step``; None selects the named one, or else the newest.

        For ``needs_record``, see :func:`clustertrain.checkpoint.offline.inspect.find_checkpoint`.

        Raises:
            NotFound: it does not exist.
            UsageError: ``step`` contradicts the named checkpoint.
        """
        own_step = self.step if self.folder is None else parse_step(self.folder)
        if None not in (step, own_step) and step != own_step:
            raise UsageError(
                f"--step {step}: RUN already names the checkpoint of step {own_step}", fix="leave one of them out"
            )
        if self.folder is None:
            self._refuse_program()
            return inspect.find_checkpoint(self.root, own_step if step is None else step, needs_record=needs_record)
        if not has_commit_marker(self.folder):
            raise NotFound(
                f"{self.folder} was never committed", fix="`clustertrain checkpoint list` shows the committed ones"
            )
        return self.folder

    def find_program_checkpoint(self) -> str | None:
        """Return the newest checkpoint that the run's program has saved itself; None if there is none."""
        if self.run is None:
            return None
        return next((a.newest_checkpoint for a in reversed(load_attempts(self.run)) if a.newest_checkpoint), None)

    def _refuse_program(self) -> None:
        """Raise NotFound if the run has only checkpoints of its program."""
        own = self.find_program_checkpoint()
        if own is not None and not rollback.list_readable_folders(self.root):
            raise NotFound(
                f"{self.label} has no checkpoints of clustertrain: its program saves its own, the newest in {own}",
                fix="read it with the program's own tools",
            )


def locate(name: str) -> CheckpointLocation:
    """Resolve RUN, RUN@STEP, a path or a URL.

    Raises:
        NotFound, AmbiguousName: see :func:`find_run`; or the folder does not exist.
        ConfigError: the package for such URLs is not installed.
        StorageError: the storage cannot be read.
    """
    run_name, separator, step = name.rpartition("@")
    if separator and reading.is_unsigned_int(step) and not Path(name).exists():
        location = locate(run_name)
        if location.is_single:
            raise UsageError(f"{name}: {run_name} is already one checkpoint", fix=f"leave out @{step}")
        return CheckpointLocation(location.label, location.root, step=int(step), run=location.run)
    if "/" not in name:
        run = find_run(name)
        return CheckpointLocation(run.id, run.checkpoints, run=run)
    if is_url(name):
        remote = RemoteFolder(name)
        if not with_retries(remote.is_dir, remote):
            raise NotFound(f"{remote} does not exist")
        return _location_in(remote)
    path = settings.expand_user_path(name, "the checkpoint").absolute()
    if (path / "spec.toml").is_file():
        return CheckpointLocation(path.name, path / "checkpoints", run=RunDir(path))
    if not path.is_dir():
        raise NotFound(f"{path} does not exist")
    return _location_in(path)


def _location_in(folder: Folder) -> CheckpointLocation:
    if parse_step(folder) is None:
        return CheckpointLocation(str(folder), folder)
    return CheckpointLocation(str(folder.parent), folder.parent, folder=folder)


@click.group()
def checkpoint() -> None:
    """List, verify, compare, export and prune checkpoints.

    RUN is a run id or a unique prefix of one, a job id, or `latest`. It may also be a path (with a slash) of a run, of
    a folder of checkpoints or of one checkpoint, or a URL of the latter two, for example s3://bucket/prefix/RUN.
    RUN@STEP is the checkpoint of one step.
    """


@checkpoint.command("list")
@run_argument
@click.option(
    "--verify", is_flag=True, help="Read every byte and compare checksums (default: only the manifest and file sizes)."
)
@json_option
def list_(name: str, verify: bool, as_json: bool) -> None:
    """List the checkpoints of RUN, oldest first."""
    location = locate(name)
    if location.folder is not None:
        rows = [inspect.describe(location.folder, verify=verify)]
    else:
        rows = inspect.list_checkpoints(location.root, verify=verify, step=location.step)
    record_error = rollback.find_record_error(location.root)
    if as_json:
        from clustertrain.report.documents.checkpoints import build_list

        print_json("checkpoint-list", build_list(location.label, rows, record_error))
        return
    from clustertrain.report.checkpoint import damage_messages, render_list
    from clustertrain.report.terminal import emit, make_console

    if rows:
        emit(make_console(), render_list(rows))
    else:
        own = location.find_program_checkpoint()
        saved = "" if own is None else f"; the program saves its own, the newest in {printable(own)}"
        click.echo(f"no checkpoints in {location.root}{saved}", err=True)
    for reason in damage_messages(rows):
        click.echo(reason)
    if record_error is not None:
        _print_record_error(record_error)


@checkpoint.command(short_help="Read every byte and compare the checksums.")
@run_argument
@step_option
@json_option
def verify(name: str, step: int | None, as_json: bool) -> int:
    """Read every byte of all committed checkpoints, or of one STEP, and compare the checksums.

    Exit 1 on damage, also of the record of rollbacks (rolled-back.json).
    """
    location = locate(name)
    selected = location.select(step, needs_record=False)
    is_single = step is not None or location.is_single
    rows = []
    for folder in (
        [selected] if is_single else [p for p in rollback.list_readable_folders(location.root) if has_commit_marker(p)]
    ):
        row, reasons = _verify(folder)
        rows.append(row)
        if not as_json:
            outcome = "UNREADABLE" if row.verified is None else "ok" if row.verified else "DAMAGED"
            click.echo(f"step {row.step}: {outcome}")
        for reason in reasons:
            click.echo(f"clustertrain: {reason}", err=True)
    record_error = rollback.find_record_error(location.root)
    if record_error is not None:
        _print_record_error(record_error)
    if as_json:
        from clustertrain.report.documents.checkpoints import VerifiedCheckpoints

        document = VerifiedCheckpoints(run=location.label, checkpoints=tuple(rows), record_error=record_error)
        print_json("checkpoint-verify", document)
    return EXIT_SUCCESS if record_error is None and all(r.verified for r in rows) else EXIT_FAILED


def _print_record_error(reason: str) -> None:
    from clustertrain.report.checkpoint import format_record_error

    click.echo(f"clustertrain: {format_record_error(reason)}", err=True)


def _verify(folder: Folder) -> tuple[VerifiedCheckpoint, list[str]]:
    """Read every byte of a checkpoint. Return the result, and what is wrong."""
    from clustertrain.report.documents.checkpoints import VerifiedCheckpoint

    step = parse_step(folder)
    try:
        with ProgressBar(f"step {step}") as bar:
            reasons = inspect.find_damage(folder, bar)
    except CheckpointError as e:  # unreadable, but not known to be damaged
        return VerifiedCheckpoint(step=step, path=str(folder), verified=None, unreadable=e.message), [str(e)]
    damage = "; ".join(reasons) or None
    return VerifiedCheckpoint(step=step, path=str(folder), verified=not reasons, damage=damage), reasons


@checkpoint.command(short_help="Hash the tensors, independent of the layout that saved them.")
@run_argument
@step_option
@click.option(
    "--of",
    "kind",
    type=click.Choice(["model", "optimizer", "all"]),
    default="all",
    show_default=True,
    help="Which tensors to hash.",
)
@json_option
def digest(name: str, step: int | None, kind: str, as_json: bool) -> None:
    """Print one hash of the model's and optimizer's tensors, independent of the layout that saved them.

    Without STEP, of the newest committed checkpoint. Random states and other values are excluded.
    """
    location = locate(name)
    folder = location.select(step)
    kinds = [k for k in inspect.DIGEST_KINDS if kind in (k, "all")]
    with ProgressBar("digest") as bar:
        value = inspect.digest(folder, kinds, bar)
    if as_json:
        from clustertrain.report.documents.checkpoints import CheckpointDigest

        step = parse_step(folder)
        print_json("checkpoint-digest", CheckpointDigest(run=location.label, step=step, contents=kind, digest=value))
    else:
        click.echo(value)


@checkpoint.command(short_help="Compare two checkpoints.")
@click.argument("a", metavar="A", shell_complete=complete_runs)
@click.argument("b", metavar="B", shell_complete=complete_runs)
@click.option("--all", "whole", is_flag=True, help="Show every difference, not only the largest.")
@json_option
def diff(a: str, b: str, whole: bool, as_json: bool) -> int:
    """Compare two checkpoints: tensors, with the largest difference, and values. Exit 1 if they differ.

    A and B are RUN@STEP, RUN (its newest committed checkpoint), or paths. Layout, number of ranks and engine are shown
    but do not count as differences; neither do random states if different numbers of ranks saved the two.
    """
    from clustertrain.checkpoint.offline.diff import compare_checkpoints

    locations = locate(a), locate(b)
    folders = locations[0].select(None), locations[1].select(None)
    with ProgressBar("compared") as bar:
        comparison = compare_checkpoints(folders[0], folders[1], bar)
    if as_json:
        import msgspec

        from clustertrain.report.documents.checkpoints import CheckpointComparison, ComparedCheckpoint

        first, second = (
            ComparedCheckpoint(run=p.label, step=parse_step(f), path=str(f))
            for p, f in zip(locations, folders, strict=True)
        )
        document = CheckpointComparison(a=first, b=second, **msgspec.structs.asdict(comparison))
        print_json("checkpoint-diff", document)
    else:
        from clustertrain.report.checkpoint import render_diff
        from clustertrain.report.terminal import emit, make_console

        click.echo(f"A  {folders[0]}\nB  {folders[1]}\n")
        emit(make_console(), render_diff(comparison, show_all=whole))
    return EXIT_SUCCESS if comparison.equal else EXIT_FAILED


def _parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Parse ``5GB``, ``500MB``, ``2GiB`` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(I?)B?", value.upper())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is not a size: write 5GB, 500MB or 2GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


@checkpoint.command(short_help="Write the model as safetensors or as a torch file.")
@run_argument
@step_option
@click.option("--best", is_flag=True, help="Export the best checkpoint by the run's deciding metric, not the newest.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    show_default=True,
    help="Output format.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Output folder (safetensors) or file (torch).",
)
@click.option(
    "--dtype",
    type=click.Choice(FLOATS),
    help="Convert floating-point tensors.  [default: as saved]",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=_parse_size,
    default="5GB",
    show_default=True,
    help="Maximum size of a safetensors file, for example 5GB.",
)
@click.option(
    "--names",
    type=click.Choice(["huggingface", "own"]),
    help="Tensor names.  [default: huggingface for safetensors of a built-in decoder, else own]",
)
@click.option("--merge", is_flag=True, help="Add an adapter to its base, and write the whole model.")
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
    merge: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Export the model of the newest committed checkpoint, of one STEP, or of the best, without the optimizer.

    `safetensors` of a built-in decoder is a folder that transformers.AutoModelForCausalLM.from_pretrained() loads;
    `torch` is a file with a state_dict that torch.load(weights_only=True) reads. `safetensors` of a model with an
    adapter is the adapter alone, as peft.PeftModel.from_pretrained() loads it; with --merge it is the whole model.
    """
    from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint

    location = locate(name)
    if best and (step is not None or location.is_single):
        raise UsageError(
            "--best selects among all checkpoints of a run, but one is already named", fix="leave one of them out"
        )
    folder = inspect.find_best(location.root) if best else location.select(step)
    request = ExportRequest(folder, output, form, dtype, max_shard_size, names, force, merge)
    with ProgressBar("exported") as bar:
        result = export_checkpoint(request, bar)
    if as_json:
        from clustertrain.report.documents.checkpoints import CheckpointExport

        document = CheckpointExport(run=location.label, **{**asdict(result), "path": str(result.path)})
        print_json("checkpoint-export", document)
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
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", required=True, help="Number of newest checkpoints to keep."
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@json_option
def prune(name: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Delete all but the newest checkpoints. The newest intact one always stays."""
    location = locate(name)
    if location.is_single:
        raise UsageError(f"{name} is one checkpoint", fix="name a run or a folder of checkpoints")
    if isinstance(location.root, RemoteFolder):
        raise UsageError(
            f"{name}: the run itself deletes remote copies, as checkpoint.remote_keep says",
            fix="to delete one by hand with the store's tools, delete its file COMMITTED first",
        )
    deleted = [str(p) for p in (inspect.list_prunable if dry_run else inspect.prune)(location.root, keep)]
    if as_json:
        from clustertrain.report.documents.checkpoints import PrunedCheckpoints

        folders = {"would_delete" if dry_run else "deleted": tuple(deleted)}
        print_json("checkpoint-prune", PrunedCheckpoints(run=location.label, **folders))
        return
    for folder in deleted:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {folder}")
    if not deleted:
        click.echo("no checkpoint to delete", err=True)
