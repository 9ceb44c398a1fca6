"""Start of ranks without torchrun: those of a command, and those of the trainer in containers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import clustertrain
from clustertrain import proc, settings
from clustertrain.agent.command_ranks import CommandRanks, build_rank_environment
from clustertrain.agent.containers.ranks import RankContainers
from clustertrain.agent.node_context import NodeContext
from clustertrain.config.job import RunSpec, ScriptSpec
from clustertrain.rank_hooks.clustertrain_hooks import checkpoints
from clustertrain.rank_hooks.clustertrain_hooks.rank import Rank
from clustertrain.scheduler.rendezvous import Rendezvous

RANK_HOOKS = Path(clustertrain.__file__).with_name("rank_hooks")


def start_ranks(
    context: NodeContext,
    spec: RunSpec,
    rdzv: Rendezvous,
    env: Mapping[str, str],
    rank_dir: Path,
    stop_requested: Callable[[], bool],
) -> CommandRanks:
    """Start each rank of the node as a process of its own.

    Args:
        env: the variables that all ranks have.

    Raises:
        ConfigError, UnsuitableEnvironment: this node lacks the image, a mount or the runtime of the containers.
    """
    script = spec.script
    if script is None:
        command = proc.python_module_argv(spec.job.python or "python3", "clustertrain", "train")
        cwd = str(context.run.path)
    else:
        command, env = _prepare_command(context, spec, script, env, rank_dir)
        cwd = script.cwd
    containers = None
    if spec.job.container:
        containers = RankContainers(
            context.run,
            spec,
            cwd=cwd,
            rank_dir=rank_dir,
            device=context.device,
            node_env=context.environ,
            hooks=RANK_HOOKS,
        )
    sizes = {"ranks_per_node": context.ranks_per_node, "nodes": len(context.nodes), "node_rank": context.node_rank}
    return CommandRanks(
        command,
        {
            rank: build_rank_environment(env, rdzv, local_rank=local_rank, **sizes)
            for local_rank, rank in enumerate(context.ranks)
        },
        cwd=Path(cwd),
        rank_dir=rank_dir,
        logs={rank: context.attempt.rank_log(rank) for rank in context.ranks},
        stop_requested=stop_requested,
        containers=containers,
    )


def _prepare_command(
    context: NodeContext, spec: RunSpec, script: ScriptSpec, env: Mapping[str, str], rank_dir: Path
) -> tuple[list[str], dict[str, str]]:
    """Return what each rank of a command executes, and its variables."""
    command, variables = list(script.command), dict(env)
    if script.path_index is not None:
        command[script.path_index] = str(context.run.code / script.path)
    if spec.job.hooks:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(RANK_HOOKS), env.get("PYTHONPATH"))))
    if checkpoint := _find_checkpoint(context, rank_dir):
        variables[settings.CHECKPOINT] = checkpoint
    if script.is_package:
        variables["PYTHONSAFEPATH"] = "1"  # otherwise Python imports from the current folder before the snapshot
    return command, variables


def _find_checkpoint(context: NodeContext, rank_dir: Path) -> str:
    """Return the newest whole checkpoint that hooks have reported in an earlier attempt; empty without one."""
    run, attempt = context.run.path, context.attempt.n
    rank = Rank(rank=0, world_size=1, attempt=attempt, run_dir=str(run), rank_dir=str(rank_dir))
    return next((path for path in checkpoints.list_saved(rank) if not checkpoints.find_problem(path)), "")
