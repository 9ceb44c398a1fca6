"""What a recipe's ``[checkpoint]`` table asks of the checkpoints of this rank."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Literal

from clustertrain.checkpoint.core.retention import Policy
from clustertrain.checkpoint.manager import Local, Remote
from clustertrain.config.recipe import CHOSEN, CheckpointSpec, Recipe
from clustertrain.config.storage_paths import node_folder
from clustertrain.errors import EnvironmentNotFit
from clustertrain.run import attempts
from clustertrain.train.core.context import RankContext
from clustertrain.train.evaluation.best_metric import Judge

log = logging.getLogger(__name__)


def table(context: RankContext) -> CheckpointSpec:
    return context.spec.recipe.checkpoint if context.spec else CheckpointSpec()


def policy(context: RankContext, keep: int | None, judge: Judge | None) -> Policy:
    """``keep``: so many of the newest, None: as many as the recipe says. Where that is silent, the best one by
    ``judge`` is kept."""
    asked = table(context)
    keep_best, best, mode = _deciding(context, asked, judge)
    return Policy(keep=keep or asked.keep, keep_every=asked.keep_every, keep_best=keep_best, best=best, best_mode=mode)


def _deciding(
    context: RankContext, asked: CheckpointSpec, judge: Judge | None
) -> tuple[int, str, Literal["min", "max"]]:
    """How many of the best ones stay, by which scalar, and whether the least is the best."""
    recipe = context.spec.recipe if context.spec else Recipe()
    keep_best = asked.keep_best if asked.keep_best != CHOSEN else int(judge is not None)
    if keep_best == 0:
        return 0, "", "min"
    named = asked.best or recipe.contract.metric
    if judge is not None and named in ("", judge.metric):
        return keep_best, judge.metric, "max" if judge.higher_is_better else "min"
    return keep_best, named or recipe.deciding_metric, recipe.best_mode


def local(context: RankContext) -> Local | None:
    asked = table(context)
    if not asked.local or context.run is None:
        return None
    try:
        root = node_folder(asked.local, os.environ) / context.run.id
    except EnvironmentNotFit as e:
        root = None
        log.warning("checkpoint.local = %s; checkpoints of this node go straight to the shared folder", e.message)
    return Local(root, first=context.local_rank == 0)


def remote(context: RankContext, policy: Policy) -> Remote | None:
    asked, run = table(context), context.run
    if not asked.remote or run is None:
        return None
    needed = context.rank == 0 and any(a.committed_step is not None for a in attempts.read_all(run)[:-1])
    policy = dataclasses.replace(policy, keep=asked.remote_keep or policy.keep)
    return Remote(f"{asked.remote.rstrip('/')}/{run.id}", policy, needed)
