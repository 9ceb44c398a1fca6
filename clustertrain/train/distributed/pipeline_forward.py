"""Forward-only passes of micro-batches through pipeline stages.

torch's ``schedule.eval()`` (2.13) requires the shapes and number of micro-batches of training and keeps all outputs. It
raises under zbv, where it asks a stage without a backward pass for gradients, and it reduces missing gradients. Here
stage s works on micro-batch tick - s at each tick, whatever the schedule. Transfers happen between ticks, sends and
receives together, so stages that send to each other cannot deadlock. See docs/decisions/0021-evaluation.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.train.distributed.pipeline_stages import StageInfo

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class ForwardOnlyPipeline:
    """Forward passes through the stages of a pipeline, of which this rank holds some."""

    def __init__(
        self,
        model_parts: Iterable[nn.Module],
        stages: Sequence[StageInfo],
        group: dist.ProcessGroup,
        device: torch.device,
        stage_inputs: Sequence[str] = (),
    ) -> None:
        """``stage_inputs`` names the inputs that every stage takes, besides what the previous one returns."""
        self._stage_modules = {stage.index: model_part for model_part, stage in zip(model_parts, stages, strict=True)}
        self._stage_ranks = stages[0].stage_ranks
        self._group = group
        self._rank = dist.get_rank(group)
        self._device = device
        self._stage_inputs = stage_inputs
        self._shapes: dict[Any, dict[int, Shapes]] = {}  # inputs of each stage, by the shape of the pipeline's inputs

    def __call__(self, inputs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (number, output) of each micro-batch on the rank with the last stage.

        Collective over the pipeline's ranks. Each rank passes ``inputs`` of the same shape, whether or not it holds the
        first stage.
        """
        shapes = self._infer_shapes(inputs[0])
        last = len(self._stage_ranks) - 1
        received: dict[tuple[int, int], list[torch.Tensor]] = {}
        for tick in range(len(inputs) + last):
            outputs: dict[int, list[torch.Tensor]] = {}
            for stage, module in sorted(self._stage_modules.items()):
                i = tick - stage
                if not 0 <= i < len(inputs):
                    continue
                output = (
                    _call_stage(module, inputs[i])
                    if stage == 0
                    else module(*received.pop((stage, i)), **self._select_stage_inputs(inputs[i]))
                )
                if stage == last:
                    yield i, output
                else:
                    outputs[stage] = _as_list(output)
            self._send_and_receive(tick, len(inputs), outputs, received, shapes)

    def _select_stage_inputs(self, inputs: Any) -> dict[str, torch.Tensor]:
        return {k: inputs[k] for k in self._stage_inputs if k in inputs} if isinstance(inputs, dict) else {}

    def _send_and_receive(
        self,
        tick: int,
        count: int,
        outputs: dict[int, list[torch.Tensor]],
        received: dict[tuple[int, int], list[torch.Tensor]],
        shapes: dict[int, Shapes],
    ) -> None:
        ops: list[dist.P2POp] = []
        for stage in range(1, len(self._stage_ranks)):
            i = tick - (stage - 1)
            source, target = self._stage_ranks[stage - 1], self._stage_ranks[stage]
            if not 0 <= i < count or self._rank not in (source, target):
                continue
            if source == target:
                received[stage, i] = outputs[stage - 1]
            elif source == self._rank:
                ops += [self._p2p_op(dist.isend, t.contiguous(), target) for t in outputs[stage - 1]]
            else:
                received[stage, i] = [torch.empty(s, dtype=d, device=self._device) for s, d in shapes[stage]]
                ops += [self._p2p_op(dist.irecv, t, source) for t in received[stage, i]]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    def _p2p_op(self, op: Any, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, dist.get_global_rank(self._group, rank), self._group)

    def _infer_shapes(self, inputs: Any) -> dict[int, Shapes]:
        """Return the input shapes of each of this rank's stages.

        For a new shape of inputs, run zeros through the stages one after another, so that no stage waits for two
        others.
        """
        key = str(_shape_key(inputs))
        if key in self._shapes:
            return self._shapes[key]
        shapes_by_stage: dict[int, Shapes] = {}
        shapes: Shapes | None = None
        for stage, rank in enumerate(self._stage_ranks):
            if stage and self._stage_ranks[stage - 1] != rank:
                shapes = self._send_shapes(shapes, self._stage_ranks[stage - 1], rank)
            if rank != self._rank:
                continue
            if stage:
                assert shapes is not None
                shapes_by_stage[stage] = shapes
                zeros = [torch.zeros(s, dtype=d, device=self._device) for s, d in shapes]
            if stage < len(self._stage_ranks) - 1:
                output = (
                    _call_stage(self._stage_modules[stage], inputs)
                    if stage == 0
                    else self._stage_modules[stage](*zeros, **self._select_stage_inputs(inputs))
                )
                shapes = [(tuple(t.shape), t.dtype) for t in _as_list(output)]
        self._shapes[key] = shapes_by_stage
        return shapes_by_stage

    def _send_shapes(self, shapes: Shapes | None, source: int, target: int) -> Shapes | None:
        objects: list[Any] = [shapes]
        if self._rank == source:
            dist.send_object_list(objects, dist.get_global_rank(self._group, target), self._group, self._device)
        elif self._rank == target:
            dist.recv_object_list(objects, dist.get_global_rank(self._group, source), self._group, self._device)
        received: Shapes | None = objects[0]
        return received


def _call_stage(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _as_list(output: Any) -> list[torch.Tensor]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _shape_key(inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return tuple(inputs.shape), inputs.dtype
    if isinstance(inputs, dict):
        return {k: _shape_key(v) for k, v in inputs.items()}
    return [_shape_key(v) for v in inputs] if isinstance(inputs, (tuple, list)) else type(inputs)
