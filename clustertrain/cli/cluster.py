"""``cluster detect``, ``show`` and ``list``: detect a site's profile and show profiles."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import json_option, print_json
from clustertrain.cli.completion import complete_profiles
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.cluster.detect import DetectResult
    from clustertrain.report.documents.clusters import DetectedProfile


@click.group()
def cluster() -> None:
    """Detect, show and list cluster profiles: the settings of a site."""


@cluster.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the profiles and mark the default."""
    from clustertrain import settings
    from clustertrain.config.cluster import default_profile_name, list_profiles

    profile_paths, default_name = list_profiles(), default_profile_name()
    if as_json:
        from clustertrain.report.documents.clusters import ProfileEntry, ProfileList

        entries = [
            ProfileEntry(name=n, path=str(p), default=n == default_name) for n, p in sorted(profile_paths.items())
        ]
        print_json("cluster-list", ProfileList(profiles=tuple(entries)))
        return
    if not profile_paths:
        click.echo(f"no cluster profile in {' or '.join(map(str, settings.profile_folders()))}")
        click.echo("the built-in defaults apply; `clustertrain init profile` or `cluster detect` writes a profile")
    for name, path in sorted(profile_paths.items()):
        click.echo(f"{name}  {path}" + (f"  (default, ${settings.CLUSTER})" if name == default_name else ""))
    if default_name and default_name not in profile_paths:
        click.echo(f"${settings.CLUSTER} is {default_name}, but that profile does not exist", err=True)


@cluster.command()
@click.argument("name", shell_complete=complete_profiles)
@json_option
def show(name: str, as_json: bool) -> None:
    """Show every key of the profile NAME, defaults included."""
    import msgspec

    from clustertrain.config.cluster import list_profiles, load_profile

    if not name:
        raise UsageError(
            "cluster show: the name of the profile is empty", fix="`clustertrain cluster list` lists the names"
        )
    profile = load_profile(name)
    path = list_profiles()[name]
    if as_json:
        from clustertrain.report.documents.clusters import Profile

        print_json("cluster-show", Profile(name=name, path=str(path), profile=profile))
        return
    import tomli_w

    values = msgspec.to_builtins(profile)
    click.echo(f"# {path}")
    for key in [key for key, value in values.items() if value is None]:
        click.echo(f"# {key}: unknown")
    click.echo(tomli_w.dumps(_without_none(values)), nl=False)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in inner.items() if value is not None}


@cluster.command(short_help="Write a profile from Slurm's configuration.")
@click.argument("name", default="")
@click.option(
    "--partition",
    default="",
    metavar="NAME",
    help="Partition.  [default: Slurm's default, or the one with the most GPUs]",
)
@click.option(
    "--measure/--no-measure", default=None, help="Measure transfer rates.  [default: only inside an allocation]"
)
@click.option("--local", is_flag=True, help="Describe this machine without asking Slurm.")
@click.option("--dry-run", is_flag=True, help="Print the profile; write nothing.")
@click.option("--force", is_flag=True, help="Overwrite keys whose value in the profile differs.")
@json_option
def detect(dry_run: bool, as_json: bool, **options: Any) -> int:
    """Write the profile NAME from Slurm's configuration and, inside an allocation, from measured rates.

    NAME defaults to $CLUSTERTRAIN_CLUSTER, or else to Slurm's name of the cluster. A key whose value in the profile
    differs is kept and reported, unless --force is given.
    """
    from clustertrain.cluster import profile_file
    from clustertrain.cluster.detect import DetectRequest, detect_cluster

    result = detect_cluster(DetectRequest(**options), os.environ, lambda text: click.echo(text, err=True))
    should_write = bool(result.merged.written) and not dry_run
    if should_write:
        profile_file.write(result.path, result.merged.text)
    if as_json:
        print_json("cluster-detect", _build_document(result, should_write))
    else:
        _print_result(result, dry_run)
    return 1 if result.bench_result.failures else 0


def _build_document(result: DetectResult, written: bool) -> DetectedProfile:
    from clustertrain.report.documents.clusters import DetectedKey, DetectedProfile, ProfileConflict

    return DetectedProfile(
        name=result.name,
        path=str(result.path),
        written=written,
        changed=tuple(result.merged.written),
        detected={
            key: DetectedKey(value=entry.value, source=entry.source) for key, entry in result.detected.keys.items()
        },
        conflicts={k.key: ProfileConflict(profile=k.in_profile, detected=k.detected) for k in result.merged.conflicts},
        measured=result.bench_result.measured,
        notes=(*result.detected.notes, *result.bench_result.notes),
        failures=tuple(result.bench_result.failures),
        profile=result.profile,
    )


def _print_result(result: DetectResult, dry_run: bool) -> None:
    """Print the result. With ``dry_run``, standard output is the profile and nothing else."""
    for note in (*result.detected.notes, *result.bench_result.notes):
        click.echo(f"note: {note}", err=dry_run)
    for entry in result.merged.conflicts:
        line = (
            f"kept: {entry.key} = {entry.in_profile!r}; detected: {entry.detected!r},"
            f" {result.detected.keys[entry.key].source}"
        )
        click.echo(line, err=dry_run)
    if result.merged.conflicts:
        click.echo("use --force to take the detected values", err=dry_run)
    for failure in result.bench_result.failures:
        click.echo(f"failed: {failure}", err=True)
    if dry_run:
        click.echo(result.merged.text, nl=False)
        return
    for key in result.merged.written:
        click.echo(_format_key(result, key))
    click.echo(f"{result.path}: {'written' if result.merged.written else 'unchanged'}")


def _format_key(result: DetectResult, key: str) -> str:
    import msgspec

    from clustertrain.config.parsing.documents import format_value

    if key in result.detected.keys:
        return f"{key} = {format_value(result.detected.keys[key].value)}  ({result.detected.keys[key].source})"
    values = msgspec.to_builtins(getattr(result.profile, key))
    formatted = {
        name: f"{len(value)} listed" if isinstance(value, (list, tuple)) else format_value(value)
        for name, value in values.items()
        if value is not None
    }
    return f"[{key}] " + ", ".join(f"{name}: {value}" for name, value in formatted.items())
