"""The state that the checkpoint benchmark saves: a decoder's parameters and Adam's two moments, sharded as by FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from clustertrain.checkpoint.core.control_group import ControlGroup
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager, SaveResult

Shapes = dict[str, tuple[int, ...]]
_BYTES = 12  # of a parameter and its moments
_MIN_LAYERS = 6


def choose_shapes(size: int) -> Shapes:
    """Return the shapes of parameters that take about ``size`` bytes with their moments.

    The layers are as wide as possible with six of them; the embedding takes the rest.
    """
    count = size // _BYTES
    dim = 256
    while _MIN_LAYERS * 12 * (2 * dim) ** 2 <= count:
        dim *= 2
    layers = max(1, count * 19 // 20 // (12 * dim * dim))
    shapes: Shapes = {"embedding": (max(64, (count - layers * 12 * dim * dim) // dim // 64 * 64), dim)}
    for i in range(layers):
        shapes |= {f"layer_{i}_{name}": (dim, dim) for name in ("q", "k", "v", "o")}
        shapes |= {f"layer_{i}_up": (4 * dim, dim), f"layer_{i}_down": (dim, 4 * dim), f"layer_{i}_norm": (dim,)}
    return shapes


def count_bytes(shapes: Shapes) -> int:
    return _BYTES * sum(prod(s) for s in shapes.values())


class State:
    """A state as a training script holds it (``objects``). Its DTensors are sharded along ``dim``, vectors along 0."""

    def __init__(self, shapes: Shapes, *, dim: int = 0, filled: bool = True, moments: bool = True) -> None:
        """Fill it with random numbers or zeros; without ``moments``, as before the first step. Collective."""
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(dist.get_rank())
        model = nn.ParameterDict({n: nn.Parameter(self._tensor(s, dim, filled)) for n, s in shapes.items()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if moments:
            for name, p in model.items():
                optimizer.state[p] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": self._tensor(shapes[name], dim, filled),
                    "exp_avg_sq": self._tensor(shapes[name], dim, filled),
                }

    def _tensor(self, shape: tuple[int, ...], dim: int, filled: bool) -> DTensor:
        tensor = zeros(shape, device_mesh=self._mesh, placements=[Shard(min(dim, len(shape) - 1))])
        local = tensor.to_local()
        # Zeros are written too, so that the memory is allocated.
        local.uniform_() if filled else local.fill_(0)
        return tensor

    def nested(self) -> dict[str, dict[str, Any]]:
        """Return the parameters, and the optimizer's state of each parameter, as the peers expect them."""
        model, optimizer = self.objects["model"], self.objects["optimizer"]
        moments = {f"{n}.{k}": v for n, p in model.items() for k, v in optimizer.state[p].items()}
        return {"model": {n: p.detach() for n, p in model.items()}, "optimizer": moments}

    def flat(self) -> dict[str, torch.Tensor]:
        """Return this rank's part as plain tensors."""
        tensors_by_name = {f"{key}.{n}": t for key, tensors in self.nested().items() for n, t in tensors.items()}
        return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors_by_name.items()}

    def locals(self) -> list[torch.Tensor]:
        """Return this rank's shards as bytes."""
        return [t.reshape(-1).view(torch.uint8) for t in self.flat().values() if t.dim() and t.numel()]

    def fingerprint(self) -> int:
        """Return a sum that is the same for the same content in any layout. Collective."""
        total = torch.tensor([sum(int(t.view(torch.int32).sum(dtype=torch.int64)) for t in self.locals())])
        dist.all_reduce(total)
        return int(total)


def with_offsets(parts: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each part with its offset in their concatenation."""
    offset = 0
    for part in parts:
        yield part, offset
        offset += part.numel()


def make_manager(
    root: Path, group: ControlGroup, on_commit: Callable[[SaveResult], None] = lambda saved: None, **options: Any
) -> CheckpointManager:
    """Return a manager of the checkpoints in ``root``; ``options`` are fields of its ``CheckpointConfig``."""
    layout = {"strategy": "fsdp", "dp_shard": dist.get_world_size()}
    config = CheckpointConfig(attempt="1", layout=layout, **options)
    return CheckpointManager(root, Ranks(group), config, on_commit=on_commit)


def rank_state() -> dict[str, Any]:
    return {"random": torch.get_rng_state()}
