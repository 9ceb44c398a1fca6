"""Micro-batches through the stages of a pipeline, forward and no more.

torch's ``schedule.eval()`` (2.13) takes as many micro-batches of the same shape as the training step, keeps all of
their outputs, raises under zbv, where it asks a stage without a backward pass for its gradients, and reduces gradients
that are not there. Here at each tick stage s works on micro-batch tick - s, whatever the schedule; what is handed on
travels between two ticks, sends and receives together, so that stages that send to each other both ways cannot wait
for each other. docs/decisions/0021-evaluation.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clustertrain.train.distributed.pipeline_stages import Stage

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class ForwardOnly:
    def __init__(
        self, parts: Iterable[nn.Module], at: Sequence[Stage], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._parts = {a.index: part for part, a in zip(parts, at, strict=True)}
        self._rank_of = at[0].rank_of
        self._group = group
        self._own = dist.get_rank(group)
        self._device = device
        self._shapes: dict[Any, dict[int, Shapes]] = {}  # of what comes to a stage, by the shape of the inputs

    def __call__(self, inputs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """The output of each micro-batch with its number, where the last stage is this rank's. Collective over the
        pipeline's ranks, which all know ``inputs``: of one shape, whether this rank has the first stage or not."""
        shapes = self._learned(inputs[0])
        last = len(self._rank_of) - 1
        here: dict[tuple[int, int], list[torch.Tensor]] = {}
        for tick in range(len(inputs) + last):
            left: dict[int, list[torch.Tensor]] = {}
            for stage, part in sorted(self._parts.items()):
                i = tick - stage
                if not 0 <= i < len(inputs):
                    continue
                output = _called(part, inputs[i]) if stage == 0 else part(*here.pop((stage, i)))
                if stage == last:
                    yield i, output
                else:
                    left[stage] = _as_list(output)
            self._hand_on(tick, len(inputs), left, here, shapes)

    def _hand_on(
        self,
        tick: int,
        count: int,
        left: dict[int, list[torch.Tensor]],
        here: dict[tuple[int, int], list[torch.Tensor]],
        shapes: dict[int, Shapes],
    ) -> None:
        ops: list[dist.P2POp] = []
        for stage in range(1, len(self._rank_of)):
            i = tick - (stage - 1)
            source, target = self._rank_of[stage - 1], self._rank_of[stage]
            if not 0 <= i < count or self._own not in (source, target):
                continue
            if source == target:
                here[stage, i] = left[stage - 1]
            elif source == self._own:
                ops += [self._op(dist.isend, t.contiguous(), target) for t in left[stage - 1]]
            else:
                here[stage, i] = [torch.empty(s, dtype=d, device=self._device) for s, d in shapes[stage]]
                ops += [self._op(dist.irecv, t, source) for t in here[stage, i]]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    def _op(self, what: Any, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(what, tensor, dist.get_global_rank(self._group, rank), self._group)

    def _learned(self, inputs: Any) -> dict[int, Shapes]:
        """What comes to each stage of this rank. The first time that inputs of a shape come, one pass of zeros tells:
        each stage in its turn, so that nobody waits for two."""
        key = str(_shapes_of(inputs))
        if key in self._shapes:
            return self._shapes[key]
        found: dict[int, Shapes] = {}
        told: Shapes | None = None
        for stage, rank in enumerate(self._rank_of):
            if stage and self._rank_of[stage - 1] != rank:
                told = self._tell(told, self._rank_of[stage - 1], rank)
            if rank != self._own:
                continue
            if stage:
                assert told is not None
                found[stage] = told
                given = [torch.zeros(s, dtype=d, device=self._device) for s, d in told]
            if stage < len(self._rank_of) - 1:
                output = _called(self._parts[stage], inputs) if stage == 0 else self._parts[stage](*given)
                told = [(tuple(t.shape), t.dtype) for t in _as_list(output)]
        self._shapes[key] = found
        return found

    def _tell(self, shapes: Shapes | None, source: int, target: int) -> Shapes | None:
        words: list[Any] = [shapes]
        if self._own == source:
            dist.send_object_list(words, dist.get_global_rank(self._group, target), self._group, self._device)
        elif self._own == target:
            dist.recv_object_list(words, dist.get_global_rank(self._group, source), self._group, self._device)
        found: Shapes | None = words[0]
        return found


def _called(part: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return part(**inputs)
    return part(*inputs) if isinstance(inputs, (tuple, list)) else part(inputs)


def _as_list(output: Any) -> list[torch.Tensor]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _shapes_of(inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return tuple(inputs.shape), inputs.dtype
    if isinstance(inputs, dict):
        return {k: _shapes_of(v) for k, v in inputs.items()}
    return [_shapes_of(v) for v in inputs] if isinstance(inputs, (tuple, list)) else type(inputs)
