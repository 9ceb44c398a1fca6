"""What a recipe's ``[checkpoint]`` table asks of the checkpoints of this rank."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Literal

from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.manager import LocalTier, RemoteTier
from clustertrain.config.checkpoint import KEEP_BEST_AUTO, CheckpointSpec
from clustertrain.config.checks.storage_paths import resolve_node_folder
from clustertrain.config.recipe import Recipe
from clustertrain.errors import UnsuitableEnvironment
from clustertrain.run import attempts
from clustertrain.train.core.context import RankContext
from clustertrain.train.evaluation.best_metric import EarlyStopping

log = logging.getLogger(__name__)


def get_checkpoint_spec(context: RankContext) -> CheckpointSpec:
    return context.spec.recipe.checkpoint if context.spec else CheckpointSpec()


def build_policy(context: RankContext, keep: int | None, early_stopping: EarlyStopping | None) -> RetentionPolicy:
    """``keep``: so many of the newest, None: as many as the recipe says. Where that is silent, the best one by
    ``early_stopping`` is kept."""
    spec = get_checkpoint_spec(context)
    keep_best, best, mode = _resolve_best(context, spec, early_stopping)
    return RetentionPolicy(
        keep=keep or spec.keep, keep_every=spec.keep_every, keep_best=keep_best, best=best, best_mode=mode
    )


def _resolve_best(
    context: RankContext, spec: CheckpointSpec, early_stopping: EarlyStopping | None
) -> tuple[int, str, Literal["min", "max"]]:
    """How many of the best ones stay, by which scalar, and whether the least is the best."""
    recipe = context.spec.recipe if context.spec else Recipe()
    keep_best = spec.keep_best if spec.keep_best != KEEP_BEST_AUTO else int(early_stopping is not None)
    if keep_best == 0:
        return 0, "", "min"
    metric = spec.best or recipe.contract.metric
    if early_stopping is not None and metric in ("", early_stopping.metric):
        return keep_best, early_stopping.metric, "max" if early_stopping.higher_is_better else "min"
    return keep_best, metric or recipe.deciding_metric, recipe.best_mode


def build_local_tier(context: RankContext) -> LocalTier | None:
    spec = get_checkpoint_spec(context)
    if not spec.local or context.run is None:
        return None
    try:
        root = resolve_node_folder(spec.local, os.environ) / context.run.id
    except UnsuitableEnvironment as e:
        root = None
        log.warning("checkpoint.local = %s; checkpoints of this node go straight to the shared folder", e.message)
    return LocalTier(root, is_node_leader=context.local_rank == 0)


def build_remote_tier(context: RankContext, policy: RetentionPolicy) -> RemoteTier | None:
    spec, run = get_checkpoint_spec(context), context.run
    if not spec.remote or run is None:
        return None
    needed = context.rank == 0 and any(a.committed_step is not None for a in attempts.load_attempts(run)[:-1])
    policy = dataclasses.replace(policy, keep=spec.remote_keep or policy.keep)
    return RemoteTier(f"{spec.remote.rstrip('/')}/{run.id}", policy, needed)
