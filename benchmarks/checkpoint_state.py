"""What is saved: the parameters of a decoder and Adam's two moments, sharded as FSDP leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager

Shapes = dict[str, tuple[int, ...]]
_BYTES = 12  # of a parameter and its moments
_LAYERS = 6  # at least


def shapes_of(size: int) -> Shapes:
    """Of parameters that with their moments take about ``size`` bytes: layers as wide as leaves six of them, and what
    remains as the embedding."""
    count = size // _BYTES
    dim = 256
    while _LAYERS * 12 * (2 * dim) ** 2 <= count:
        dim *= 2
    layers = max(1, count * 19 // 20 // (12 * dim * dim))
    found: Shapes = {"embedding": (max(64, (count - layers * 12 * dim * dim) // dim // 64 * 64), dim)}
    for i in range(layers):
        found |= {f"layer_{i}_{name}": (dim, dim) for name in ("q", "k", "v", "o")}
        found |= {f"layer_{i}_up": (4 * dim, dim), f"layer_{i}_down": (dim, 4 * dim), f"layer_{i}_norm": (dim,)}
    return found


def bytes_in(shapes: Shapes) -> int:
    return _BYTES * sum(prod(s) for s in shapes.values())


class State:
    """``tensors`` by name are DTensors; ``objects`` are the same as a training script holds them. Sharded by ``dim``,
    those of one dimension by that one."""

    def __init__(self, shapes: Shapes, *, dim: int = 0, filled: bool = True, moments: bool = True) -> None:
        """Random numbers, or zeros. Without ``moments`` as it is before the first step. Collective."""
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
        made = zeros(shape, device_mesh=self._mesh, placements=[Shard(min(dim, len(shape) - 1))])
        local = made.to_local()
        # Zeros too are written, so that the memory is there.
        local.uniform_() if filled else local.fill_(0)
        return made

    def nested(self) -> dict[str, dict[str, Any]]:
        """As the peers take it: parameters, and by parameter what the optimizer holds of it."""
        model, optimizer = self.objects["model"], self.objects["optimizer"]
        held = {f"{n}.{k}": v for n, p in model.items() for k, v in optimizer.state[p].items()}
        return {"model": {n: p.detach() for n, p in model.items()}, "optimizer": held}

    def flat(self) -> dict[str, torch.Tensor]:
        """This rank's part as plain tensors."""
        found = {f"{key}.{n}": t for key, tensors in self.nested().items() for n, t in tensors.items()}
        return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in found.items()}

    def locals(self) -> list[torch.Tensor]:
        """The shards of this rank, as bytes."""
        return [t.reshape(-1).view(torch.uint8) for t in self.flat().values() if t.dim() and t.numel()]

    def fingerprint(self) -> int:
        """The same for the same content in any layout. Collective."""
        found = torch.tensor([sum(int(t.view(torch.int32).sum(dtype=torch.int64)) for t in self.locals())])
        dist.all_reduce(found)
        return int(found)


def places(parts: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Each with where it begins when they lie one after another."""
    at = 0
    for part in parts:
        yield part, at
        at += part.numel()


def manager_of(root: Path, group: dist.ProcessGroup, **options: Any) -> CheckpointManager:
    layout = {"strategy": "fsdp", "dp_shard": dist.get_world_size()}
    return CheckpointManager(root, Ranks(group), CheckpointConfig(attempt="1", layout=layout, **options))


def rank_state() -> dict[str, Any]:
    return {"random": torch.get_rng_state()}
