"""Start of ranks without torchrun: those of a command, and those of the trainer in containers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from clustertrain import fsio, proc, settings
from clustertrain.agent.containers.ranks import RankContainers
from clustertrain.agent.node_context import NodeContext
from clustertrain.agent.ranks.command_ranks import CommandRanks, build_rank_environment
from clustertrain.agent.ranks.command_start import RANK_HOOKS, build_command, build_environment, build_resume_arguments
from clustertrain.agent.relocation import RankPython
from clustertrain.config.command_options import parse_stop_signal
from clustertrain.config.job import RunSpec, ScriptSpec
from clustertrain.scheduler.rendezvous import Rendezvous


def start_ranks(
    context: NodeContext,
    spec: RunSpec,
    rdzv: Rendezvous,
    env: Mapping[str, str],
    *,
    rank_dir: Path,
    python: RankPython,
    stop_requested: Callable[[], bool],
) -> CommandRanks:
    """Start each rank of the node as a process of its own.

    Args:
        env: the variables that all ranks have.
        python: the node's copy of the environment, if the run ships it.

    Raises:
        ConfigError, UnsuitableEnvironment: this node lacks the image, a mount or the runtime of the containers.
    """
    script, job = spec.script, spec.job
    if script is None:
        command = proc.python_module_argv(job.python or "python3", "clustertrain", "train")
        cwd = str(context.run.path)
    else:
        command, env = _prepare_command(context, spec, script, env, python)
        cwd = script.cwd
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
        stop_signal=parse_stop_signal(job.stop_signal),
        local_rank_index=script.local_rank_index if script is not None else None,
        containers=_build_containers(context, spec, cwd, rank_dir) if job.container else None,
    )


def _build_containers(context: NodeContext, spec: RunSpec, cwd: str, rank_dir: Path) -> RankContainers:
    return RankContainers(
        context.run,
        spec,
        cwd=cwd,
        rank_dir=rank_dir,
        device=context.device,
        node_env=context.environ,
        hooks=RANK_HOOKS,
    )


def _prepare_command(
    context: NodeContext, spec: RunSpec, script: ScriptSpec, env: Mapping[str, str], python: RankPython
) -> tuple[list[str], dict[str, str]]:
    """Return what each rank of a command executes, and its variables."""
    document = fsio.poll_json(context.attempt.checkpoint)  # written by the batch process, before the first agent starts
    checkpoint = str(document["path"]) if isinstance(document, dict) and "path" in document else ""
    added = build_resume_arguments(spec.job, context.run, context.attempt, checkpoint)
    command = [*build_command(script, context.run), *added]
    command[0] = python.relocate(command[0])
    hooks = python.relocate(str(RANK_HOOKS))
    variables = build_environment(env, script, spec.job, checkpoint=checkpoint, grace_s=context.grace_s, hooks=hooks)
    return command, {**variables, settings.ADDED_ARGS: json.dumps(added)}
