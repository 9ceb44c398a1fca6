"""``clustertrain version``: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections import Counter
from typing import TYPE_CHECKING

import click

from clustertrain.cli.common import json_option, print_json
from clustertrain.errors import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clustertrain.report.documents.tools import Versions

_PACKAGES = (
    "torch", "torchsnapshot", "transformers", "lightning", "accelerate", "numpy", "pyarrow", "submitit", "nvidia-ml-py",
)  # fmt: skip
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # that torch's wheels for these versions of CUDA install


@click.command()
@click.option("-v", "--verbose", is_flag=True, help="Also show the machine, the packages, the scheduler and the GPUs.")
@json_option
def version(verbose: bool, as_json: bool) -> None:
    """Show the version; with -v or --json, everything that a bug report needs."""
    if as_json:
        print_json("version", collect_versions())
        return
    facts = {"clustertrain": _installed("clustertrain"), **(dict(_facts()) if verbose else {})}
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:{width}}  {'-' if value is None else value}")


def _facts() -> Iterator[tuple[str, str | None]]:
    """Yield the lines of ``version -v``, each with its name."""
    from clustertrain.submit.preflight import filesystem

    versions = collect_versions()
    for name in versions.__struct_fields__[1:]:
        value = getattr(versions, name)
        if name == "packages":
            yield from value.items()
        elif name == "home_filesystem":
            yield "filesystem", value and f"{value}{' (a disk of this machine)' if filesystem.is_local(value) else ''}"
        else:
            yield name, None if value is None else str(value)


def collect_versions() -> Versions:
    """Return what a bug report needs."""
    from clustertrain import settings
    from clustertrain.config.cluster import default_profile_name
    from clustertrain.report.documents.tools import Versions
    from clustertrain.submit.preflight import filesystem

    nccl = map(_installed, _NCCL)
    return Versions(
        clustertrain=_installed("clustertrain"),
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        packages={name: _installed(name) for name in _PACKAGES} | {"nccl": next(filter(None, nccl), None)},
        slurm=_describe_slurm(),
        gpus=_describe_gpus(),
        home=str(settings.home()),
        home_filesystem=filesystem.find_type(settings.home()) or None,
        profile=default_profile_name() or None,
    )


def _installed(package: str) -> str | None:
    """Return the version of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_slurm() -> str | None:
    from clustertrain.scheduler.slurm import SlurmBackend

    try:
        return SlurmBackend().sbatch_version()
    except CommandFailed as e:
        return f"sbatch is installed but does not answer: {e.message.splitlines()[-1]}"


def _describe_gpus() -> str | None:
    from clustertrain.telemetry.readers.nvml import Nvml, NvmlError

    nvml = Nvml()
    try:
        driver = nvml.open()
        names = Counter(device.name or "unreadable" for device in nvml.devices() if device.parent is None)
    except NvmlError as e:
        return None if e.name in ("LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED") else e.reason
    finally:
        nvml.close()
    return f"{', '.join(f'{count} x {name}' for name, count in names.items()) or 'none'}, driver {driver or 'unknown'}"
