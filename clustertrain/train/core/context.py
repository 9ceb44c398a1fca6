"""A rank's place in the run, read from the environment, spec.toml and plan.json."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from clustertrain import fsio, settings
from clustertrain.config.job import RunSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.stability import StabilitySpec
from clustertrain.config.train import AttentionBackend, Precision
from clustertrain.errors import ConfigError, UnsuitableEnvironment
from clustertrain.plan.layout import Batch, Layout
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.run_spec import load_spec


@dataclass(frozen=True)
class RankContext:
    """Rank, device, plan and run folder of this process.

    ``run``, ``attempt``, ``spec`` and ``batch`` are None outside a run of clustertrain.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched_by_torchrun: bool  # there is a rendezvous to join
    device: torch.device
    layout: Layout
    precision: Precision  # never auto
    run: RunDir | None
    attempt: AttemptDir | None
    rank_dir: Path | None
    spec: RunSpec | None
    batch: Batch | None

    @property
    def parallel(self) -> ParallelSpec:
        return self.spec.recipe.parallel if self.spec else ParallelSpec()

    @property
    def attention_backend(self) -> AttentionBackend:
        return self.spec.recipe.train.attention_backend if self.spec else "auto"

    @property
    def stability(self) -> StabilitySpec:
        return self.spec.recipe.stability if self.spec else StabilitySpec()

    @property
    def node(self) -> str:
        return os.environ.get(settings.NODE) or socket.gethostname()

    @property
    def data_rank(self) -> int:
        """The part of the global batch that this rank works on."""
        return self.layout.data_rank(self.rank)


def _read_int(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError as e:
        raise ConfigError(f"{name} = {text!r}: must be an integer", fix="start the ranks with torchrun") from e


def _select_device(requested: str | None, environ: Mapping[str, str], local_rank: int) -> torch.device:
    name = requested or environ.get(settings.DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigError(f"device {name!r}: must be cpu or cuda")
    if not torch.cuda.is_available():
        cuda_version = torch.version.cuda
        cause = "no usable GPU on this node" if cuda_version else "this torch was built without CUDA"
        raise UnsuitableEnvironment(
            f"device cuda was requested, but torch cannot use it: {cause} (torch {torch.__version__})",
            fix="check nvidia-smi on the node and the torch build, or submit with device cpu",
        )
    if local_rank >= torch.cuda.device_count():
        raise UnsuitableEnvironment(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}",
            fix="request as many GPUs per node as ranks per node, and check CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", local_rank)


def load_plan(run: RunDir) -> tuple[Layout, Batch, Precision]:
    """Return the layout, batch and precision from plan.json.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    value = fsio.read_json(run.plan)
    if not isinstance(value, dict) or not isinstance(value.get("layout"), dict):
        raise ConfigError(f"{run.plan}: the file is missing or has no layout", fix="submit the run again")
    layout = build(value["layout"], Layout, f"{run.plan}: layout")
    batch = build(value.get("batch") or {}, Batch, f"{run.plan}: batch")
    precision: Precision = value.get("precision") or "fp32"
    supported = [p for p in get_args(Precision) if p != "auto"]
    if precision not in supported:
        raise ConfigError(f"{run.plan}: precision {precision!r}: must be one of {', '.join(supported)}")
    return layout, batch, precision


def context_from_environment(*, device: str | None = None, environ: Mapping[str, str] = os.environ) -> RankContext:
    """Build the context of this rank.

    Raises:
        ConfigError: the environment, the plan and the number of ranks do not match.
        UnsuitableEnvironment: cuda was requested but cannot be used.
    """
    rank, world_size = _read_int(environ, "RANK", 0), _read_int(environ, "WORLD_SIZE", 1)
    local_rank = _read_int(environ, "LOCAL_RANK", rank)
    run_dir = environ.get(settings.RUN_DIR)
    rank_dir = environ.get(settings.RANK_DIR)
    run = RunDir(Path(run_dir)) if run_dir else None
    attempt = run.attempt(_read_int(environ, settings.ATTEMPT, 1)) if run else None
    batch: Batch | None = None
    precision: Precision = "fp32"
    if run is not None:
        layout, batch, precision = load_plan(run)
        if layout.world_size != world_size:
            raise ConfigError(
                f"the plan is for {layout.world_size} ranks, but {world_size} were started",
                fix="start as many ranks as plan.json has, or submit again for this allocation",
            )
    else:
        layout = Layout(strategy="ddp" if world_size > 1 else "single", dp_replicate=world_size)
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=_read_int(environ, "LOCAL_WORLD_SIZE", world_size),
        launched_by_torchrun="RANK" in environ and "MASTER_ADDR" in environ,
        device=_select_device(device, environ, local_rank),
        layout=layout,
        precision=precision,
        run=run,
        attempt=attempt,
        rank_dir=Path(rank_dir) if rank_dir else None,
        spec=load_spec(run) if run else None,
        batch=batch,
    )
