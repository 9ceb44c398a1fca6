"""``cluster detect``, ``show`` and ``list``: what is known of a site, and filling it in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import json_option, print_json
from clustertrain.errors import UsageError

if TYPE_CHECKING:
    from clustertrain.cluster.detect import Detected


@click.group()
def cluster() -> None:
    """Cluster profiles: what a site needs before and around a job."""


@cluster.command("list")
@json_option
def list_(as_json: bool) -> None:
    """The profiles found, and which is the default."""
    from clustertrain import settings
    from clustertrain.config import cluster as profiles

    found, default = profiles.find(), profiles.chosen()
    if as_json:
        print_json([{"name": n, "path": str(p), "default": n == default} for n, p in sorted(found.items())])
        return
    if not found:
        click.echo(f"there is no cluster profile in {' or '.join(map(str, settings.profile_folders()))}")
        click.echo("the built-in defaults hold; `clustertrain cluster detect` writes a profile")
    for name, path in sorted(found.items()):
        click.echo(f"{name}  {path}" + (f"  (default, ${settings.CLUSTER})" if name == default else ""))
    if default and default not in found:
        click.echo(f"${settings.CLUSTER} is {default}, and there is no such profile", err=True)


@cluster.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Every key of the profile NAME, with the defaults of those that it leaves out."""
    import msgspec

    from clustertrain.config import cluster as profiles

    if not name:
        raise UsageError("cluster show: the name of the profile is empty", fix="`clustertrain cluster list` has them")
    values = msgspec.to_builtins(profiles.load(name))
    path = profiles.find()[name]
    if as_json:
        print_json({"name": name, "path": str(path), "profile": values})
        return
    import tomli_w

    click.echo(f"# {path}")
    for key in [key for key, value in values.items() if value is None]:
        click.echo(f"# {key}: not known")
    click.echo(tomli_w.dumps(_without_none(values)), nl=False)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _without_none(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in inner.items() if value is not None}


@cluster.command()
@click.argument("name", default="")
@click.option("--partition", default="", help="Which one.  [default: the default one, or the one with most GPUs]")
@click.option("--measure/--no-measure", default=None, help="Measure rates.  [default: inside an allocation]")
@click.option("--local", is_flag=True, help="This machine alone, without asking Slurm.")
@click.option("--dry-run", is_flag=True, help="Print the profile, write nothing.")
@click.option("--force", is_flag=True, help="Also change keys that the profile has with another value.")
@json_option
def detect(dry_run: bool, as_json: bool, **asked: Any) -> int:
    """Fill the profile NAME from what Slurm says, and inside an allocation from measured rates.

    NAME is by default that of $CLUSTERTRAIN_CLUSTER, else Slurm's name of the cluster. A key that the profile has with
    another value is kept and told, unless --force.
    """
    from clustertrain.cluster import profile_file
    from clustertrain.cluster.detect import Request
    from clustertrain.cluster.detect import detect as find_out

    seen = find_out(Request(**asked), os.environ, lambda text: click.echo(text, err=True))
    write = bool(seen.merged.written) and not dry_run
    if write:
        profile_file.write(seen.path, seen.merged.text)
    if as_json:
        print_json(_json(seen, write))
    else:
        _tell(seen, dry_run)
    return 1 if seen.outcome.failures else 0


def _json(seen: Detected, written: bool) -> dict[str, Any]:
    return {
        "name": seen.name,
        "path": str(seen.path),
        "written": written,
        "changed": list(seen.merged.written),
        "found": {key: {"value": it.value, "source": it.source} for key, it in seen.found.keys.items()},
        "kept": {k.key: {"profile": k.in_profile, "found": k.found} for k in seen.merged.kept},
        "measured": seen.outcome.measured,
        "notes": [*seen.found.notes, *seen.outcome.notes],
        "failures": list(seen.outcome.failures),
        "profile": seen.profile,
    }


def _tell(seen: Detected, dry_run: bool) -> None:
    """With ``dry_run`` standard output is the profile and nothing else."""
    for note in (*seen.found.notes, *seen.outcome.notes):
        click.echo(f"note: {note}", err=dry_run)
    for kept in seen.merged.kept:
        line = f"kept: {kept.key} = {kept.in_profile!r}; found: {kept.found!r}, {seen.found.keys[kept.key].source}"
        click.echo(line, err=dry_run)
    if seen.merged.kept:
        click.echo("--force takes what was found", err=dry_run)
    for failure in seen.outcome.failures:
        click.echo(f"failed: {failure}", err=True)
    if dry_run:
        click.echo(seen.merged.text, nl=False)
        return
    for key in seen.merged.written:
        click.echo(_line(seen, key))
    click.echo(f"{seen.path}: {'written' if seen.merged.written else 'nothing new'}")


def _line(seen: Detected, key: str) -> str:
    import msgspec

    from clustertrain.config.parsing import text_of

    if key in seen.found.keys:
        return f"{key} = {text_of(seen.found.keys[key].value)}  ({seen.found.keys[key].source})"
    values = msgspec.to_builtins(getattr(seen.profile, key))
    short = {
        name: f"{len(value)} listed" if isinstance(value, (list, tuple)) else text_of(value)
        for name, value in values.items()
        if value is not None
    }
    return f"[{key}] " + ", ".join(f"{name}: {value}" for name, value in short.items())
