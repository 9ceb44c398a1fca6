"""The configuration of a session's checkpoints, from the recipe's ``[checkpoint]`` table and the rank's context."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
from pathlib import Path
from typing import Any, Literal

import msgspec

import clustertrain
from clustertrain import fsio, settings
from clustertrain.checkpoint.core.interval import CheckpointInterval, FailureHistory, count_failures
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import has_commit_marker, list_checkpoint_folders
from clustertrain.checkpoint.load.restore import LocalTier, RemoteTier
from clustertrain.checkpoint.manager import CheckpointConfig
from clustertrain.config.checkpoint import AUTO, KEEP_BEST_AUTO, CheckpointSpec
from clustertrain.config.checks.storage_paths import resolve_node_folder
from clustertrain.config.recipe import Recipe
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core.context import RankContext
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.session import resume_check

log = logging.getLogger(__name__)


def build_config(context: RankContext, keep: int | None, early_stopping: EarlyStopping | None) -> CheckpointConfig:
    """Return the configuration of this rank's checkpoint manager.

    For ``keep`` and ``early_stopping``, see :func:`build_policy`.
    """
    spec = _checkpoint_spec(context)
    policy = build_policy(context, keep, early_stopping)
    return CheckpointConfig(
        attempt=str(context.attempt.n) if context.attempt else "local",
        layout={f: getattr(context.layout, f) for f in context.layout.__struct_fields__},
        policy=policy,
        engine=spec.engine,
        async_save=spec.async_save,
        device=context.device,
        # In the local backend, all nodes are this machine.
        local_world_size=context.world_size if settings.LOCAL_JOB in os.environ else context.local_world_size,
        about=build_about(context),
        local=_build_local_tier(context),
        remote=_build_remote_tier(context, policy),
        fence=_build_fence(context),
    )


def build_interval(context: RankContext, every: int | str) -> CheckpointInterval:
    """Return when to save.

    Args:
        every: number of steps, a duration, or "auto", which follows from the failures of the run so far.
    """
    history = FailureHistory()
    if every == AUTO and context.run is not None and context.rank == 0:
        nodes = context.world_size // context.local_world_size
        history = count_failures(attempts.load_attempts(context.run)[:-1], max(1, nodes))  # the last is this attempt
    return CheckpointInterval(every, milestone=_checkpoint_spec(context).keep_every, history=history)


def build_policy(context: RankContext, keep: int | None, early_stopping: EarlyStopping | None) -> RetentionPolicy:
    """Return which checkpoints to keep: the ``keep`` newest (None: the recipe's number), and the best.

    If the recipe does not define which are best, ``early_stopping`` does.
    """
    spec = _checkpoint_spec(context)
    keep_best, best, mode = _resolve_best(context, spec, early_stopping)
    return RetentionPolicy(
        keep=keep or spec.keep, keep_every=spec.keep_every, keep_best=keep_best, best=best, best_mode=mode
    )


def build_about(context: RankContext) -> dict[str, Any]:
    """Return what produces this run's checkpoints: versions, recipe, code and precision.

    It contains no secrets, since checkpoints are copied and shared.
    """
    spec, run = context.spec, context.run
    record = (fsio.read_json(run.record) or {}) if run is not None else {}
    return {
        "clustertrain": clustertrain.__version__,
        "python": platform.python_version(),
        "recipe": msgspec.to_builtins(_without_secrets(spec.recipe))
        if spec is not None and spec.script is None
        else None,
        "git": record.get("git"),
        # Only one rank reads the files, and only for an exact resume, since they may be 100 MiB.
        "code": resume_check.checksum_files(run.code)
        if run is not None and context.rank == 0 and resume_check.is_exact_resume(context)
        else None,
        "precision": context.precision,
    }


def _checkpoint_spec(context: RankContext) -> CheckpointSpec:
    return context.spec.recipe.checkpoint if context.spec else CheckpointSpec()


def _resolve_best(
    context: RankContext, spec: CheckpointSpec, early_stopping: EarlyStopping | None
) -> tuple[int, str, Literal["min", "max"]]:
    """Return how many of the best to keep, the metric that decides, and whether its minimum or maximum is best."""
    recipe = context.spec.recipe if context.spec else Recipe()
    keep_best = spec.keep_best if spec.keep_best != KEEP_BEST_AUTO else int(early_stopping is not None)
    if keep_best == 0:
        return 0, "", "min"
    metric = spec.best or recipe.contract.metric
    if early_stopping is not None and metric in ("", early_stopping.metric):
        return keep_best, early_stopping.metric, "max" if early_stopping.higher_is_better else "min"
    return keep_best, metric or recipe.deciding_metric, recipe.best_mode


def _build_local_tier(context: RankContext) -> LocalTier | None:
    spec = _checkpoint_spec(context)
    if not spec.local or context.run is None:
        return None
    try:
        root = resolve_node_folder(spec.local, os.environ) / context.run.id
    except UnsuitableEnvironment as e:
        root = None
        log.warning("checkpoint.local = %s; checkpoints of this node go straight to the shared folder", e.message)
    return LocalTier(root, is_node_leader=context.local_rank == 0)


def has_committed(context: RankContext, folder: Path) -> bool:
    """Return whether ``folder`` has a committed checkpoint, or an earlier attempt of the run has committed one."""
    return any(map(has_commit_marker, list_checkpoint_folders(folder))) or (
        context.run is not None and _have_attempts_committed(context.run)
    )


def _have_attempts_committed(run: RunDir) -> bool:
    return any(a.committed_step is not None for a in attempts.load_attempts(run)[:-1])


def _build_remote_tier(context: RankContext, policy: RetentionPolicy) -> RemoteTier | None:
    spec, run = _checkpoint_spec(context), context.run
    if not spec.remote or run is None:
        return None
    is_required = context.rank == 0 and _have_attempts_committed(run)
    policy = dataclasses.replace(policy, keep=spec.remote_keep or policy.keep)
    return RemoteTier(f"{spec.remote.rstrip('/')}/{run.id}", policy, is_required)


def _build_fence(context: RankContext) -> Fence | None:
    if context.run is None or context.attempt is None:
        return None
    return Fence(run=str(context.run.path), attempt=context.attempt.n)


def _without_secrets(recipe: Recipe) -> Recipe:
    telemetry = msgspec.structs.replace(recipe.telemetry, alerts=recipe.telemetry.alerts.redacted())
    return msgspec.structs.replace(recipe, telemetry=telemetry)
