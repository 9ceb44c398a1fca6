"""``cluster detect``: Slurm's answers, this machine's GPUs and measured rates, put together into a profile."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustertrain import clock, settings
from clustertrain.cluster import bench, profile_file, slurm_site, slurm_site_profile
from clustertrain.cluster.bench import Outcome, Where
from clustertrain.cluster.local_machine import of_machine
from clustertrain.cluster.profile_file import Merged
from clustertrain.cluster.slurm_site import Site
from clustertrain.cluster.slurm_site_profile import Findings
from clustertrain.config import cluster
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.parsing import read_text
from clustertrain.errors import UsageError
from clustertrain.scheduler.slurm import SlurmBackend

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Request:
    """``measure`` None: inside an allocation. ``local``: this machine alone. ``force``: also change what is there."""

    name: str = ""
    partition: str = ""
    measure: bool | None = None
    local: bool = False
    force: bool = False


@dataclass(frozen=True)
class Detected:
    """Nothing is written yet. ``profile`` is what ``merged.text`` says."""

    name: str
    path: Path
    found: Findings
    outcome: Outcome
    merged: Merged
    profile: ClusterProfile


def detect(request: Request, environ: Mapping[str, str], say: Callable[[str], None]) -> Detected:
    """Ask, measure and merge. ``say`` hears what is measured next.

    Raises:
        UsageError: a bad name, or a partition that Slurm does not know.
        ConfigError: the profile that is there does not read.
        CommandFailed: Slurm does not answer.
    """
    slurm = None if request.local else slurm_site.ask()
    name = _name(request, slurm, environ)
    path = cluster.find(environ).get(name)
    text = read_text(path) if path else None
    before = profile_file.parsed(text, str(path)) if text is not None else ClusterProfile()
    found = _look(request, slurm, before, environ)
    outcome = _measure(request, before, found, environ, say)
    measured = profile_file.carried(before.measured, outcome.measured) if outcome.measured else None
    path = path or settings.profile_folders(environ)[-1] / f"{name}.toml"
    header = profile_file.header(found.notes, clock.now())
    tables = {"measured": measured, "node": outcome.node}
    merged = profile_file.merge(text, found.keys, tables, header=header, force=request.force)
    return Detected(name, path, found, outcome, merged, profile_file.parsed(merged.text, str(path)))


def _name(request: Request, slurm: Site | None, environ: Mapping[str, str]) -> str:
    of_slurm = slurm.cluster_name if slurm else ""
    name = request.name or cluster.chosen(environ) or of_slurm or socket.gethostname().split(".")[0]
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a profile", fix="use letters, digits, '-', '_' and '.'")
    return name


def _look(request: Request, slurm: Site | None, before: ClusterProfile, environ: Mapping[str, str]) -> Findings:
    if slurm is None:
        if request.partition:
            raise UsageError(f"--partition {request.partition}: there is no Slurm to ask", fix="leave it out")
        found = of_machine()
        found.notes.insert(0, "without Slurm: what follows is this machine alone")
        return found
    if request.partition:
        return slurm_site_profile.of_site(slurm, request.partition, "--partition")
    if before.partition:
        return slurm_site_profile.of_site(slurm, before.partition, "the profile's")
    return slurm_site_profile.of_site(slurm, environ.get(settings.SLURM_JOB_PARTITION, ""), "this job's")


def _measure(
    request: Request, before: ClusterProfile, found: Findings, environ: Mapping[str, str], say: Callable[[str], None]
) -> Outcome:
    allocated = not request.local and settings.SLURM_JOB_ID in environ
    if request.measure is False or (request.measure is None and not allocated):
        return Outcome()
    nodes = SlurmBackend().own_nodes(environ) if allocated else ()
    # Of a partition with GPUs, rates of the CPU would be wrong, not slow.
    device = before.device if before.device != "auto" or "device" not in found.keys else found.keys["device"].value
    return bench.measure(Where.of(before, sys.executable, nodes, device), say)
