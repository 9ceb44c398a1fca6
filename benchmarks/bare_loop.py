"""A bare PyTorch training loop: the baseline of :mod:`benchmarks.step_overhead`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from clustertrain.config.recipe import Recipe
from clustertrain.plan.layout import Batch, Layout
from clustertrain.train.data.text import ByteText
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.optim import registry
from clustertrain.train.optim.lr_schedule import LearningRate
from clustertrain.train.optim.param_groups import groups_for_unsharded


class BareLoop:
    """A training loop without clustertrain's session and trainer, with the same model, data and tuning."""

    def __init__(self, recipe: Recipe, layout: Layout, batch: Batch, device: torch.device, precision: str) -> None:
        self._recipe, self._layout, self._batch, self._device = recipe, layout, batch, device
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(0)
        with device:
            model = Decoder(recipe.model)
        if recipe.parallel.compile:
            for block in model.layers.values():
                block.compile(fullgraph=True)
        sharded = layout.strategy == "fsdp"
        dtype = torch.bfloat16 if precision == "bf16" else None
        if sharded:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for block in model.layers.values():
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        groups = groups_for_unsharded(model, recipe.optim.weight_decay)
        self._optimizer = torch.optim.AdamW(groups, **registry.build_options(recipe.optim, is_text=True, device=device))
        self._model: Any = model
        if layout.strategy == "ddp":
            self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._autocast_dtype = None if sharded else dtype
        self._data = ByteText(recipe.data)
        self._position = 0
        self._step = 0
        self._rate = LearningRate(recipe.schedule, peak=recipe.optim.lr, total=recipe.train.steps)

    def step(self) -> torch.Tensor:
        """Train one step and return the loss of this rank's samples."""
        self._set_lr()
        parts = [self._micro_batch() for _ in range(self._batch.grad_accum)]
        total = torch.zeros((), device=self._device)
        for i, (inputs, targets) in enumerate(parts):
            with self._gradient_sync(last=i == len(parts) - 1):
                with self._autocast():
                    logits = self._model(inputs)
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / len(parts)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.optim.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def _set_lr(self) -> None:
        self._step += 1
        self._rate.apply(self._optimizer, self._step)

    def _micro_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        n = self._batch.micro_batch
        first = self._position + self._rank * n
        self._position += n * self._layout.world_size
        samples = [self._data[i % len(self._data)] for i in range(first, first + n)]
        inputs, targets = (self._to_device(torch.stack(column)) for column in zip(*samples, strict=True))
        return inputs, targets

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # From pageable memory the copy would wait for all kernels before it, and a good bare loop does not.
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, dtype=self._autocast_dtype) if self._autocast_dtype else nullcontext()

    def _gradient_sync(self, *, last: bool) -> Any:
        if self._layout.strategy == "ddp" and not last:
            return self._model.no_sync()
        if self._layout.strategy == "fsdp":
            self._model.set_requires_gradient_sync(last)
        return nullcontext()
