"""The run between the phases of a submission: resolved, then planned. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import BackendName, Device, RunSpec
from clustertrain.plan.planner import Plan
from clustertrain.scheduler.backend import Backend
from clustertrain.submit.program.job_python import JobPython
from clustertrain.submit.recipe import ParsedRecipe


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run whose profile, backend, device and paths are known.

    Until the snapshot is taken, ``spec.script.path`` is the user's path.
    """

    parsed: ParsedRecipe
    spec: RunSpec
    profile: ClusterProfile
    backend: Backend
    requested_device: Device
    """``job.device`` before ``auto`` was resolved."""
    requested_backend: BackendName
    """``job.backend`` before ``auto`` was resolved."""
    python: JobPython
    search_path: tuple[Path, ...] = ()
    """Folders that are searched for entries."""
    code: Path | None = None
    """User code that the run executes: the script or the package of an entry; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ResolvedRun):
    """A run that can be rendered and submitted."""

    plan: Plan

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the keys of ``--set`` and ``--grid`` that have no effect on this run."""
        return tuple(key for key in self.parsed.override_keys if key in self.parsed.unused)
