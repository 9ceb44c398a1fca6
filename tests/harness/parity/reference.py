"""One process that trains on the whole global batch with nothing but torch: what every layout must agree with.

It shares with the product what the comparison is about and no more: the model, its initial values, the order of the
samples. Forward, backward, clipping and update are plain torch, without micro-batches.

A number in bf16 depends on where it is rounded, and the layouts round in two places, so there are two policies, each
with a reference of its own:

- ``autocast``: weights are fp32, and ``torch.autocast`` rounds what goes into a matmul. Norms and the residual stream
  of embeddings stay fp32. Layouts without ``fully_shard``.
- ``cast``: ``fully_shard`` gathers the parameters in bf16, so all of the forward and backward pass is bf16, and a
  gradient is rounded to bf16 before it is summed in fp32. In one process that is the model called with its parameters
  cast, differentiated with respect to the fp32 ones.

fp16 likewise, with the loss multiplied by 2**16. A step in which that overflows is tried again with half of it. The
steps that the product skipped are left out here too, since another trajectory could not be compared; but each must have
been worth skipping: plain fp16 overflows there as well, micro-batch by micro-batch and at the same scale.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.config.data import DataSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.train import TrainSpec
from clustertrain.train.core import seeds
from clustertrain.train.data import permutation
from clustertrain.train.data.text import ByteText
from clustertrain.train.models.decoder import Decoder
from tests.harness.parity.cells import DATA, GLOBAL_BATCH, MODEL, OPTIMIZERS, STEPS

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEED = TrainSpec().seed
FIRST_SCALE = 2.0**16


class NeedlessSkip(Exception):
    """The product threw a step away in which plain fp16 does not overflow."""


@dataclass(frozen=True)
class Summation:
    """What changes rounding and nothing else: the order of a batch's samples (``shuffle`` is its seed, 0 leaves them as
    they are drawn), and into how many parts the batch is cut whose losses and gradients are added up."""

    shuffle: int = 0
    parts: int = 1


SUMMATIONS = (Summation(shuffle=1), Summation(shuffle=2), Summation(shuffle=3, parts=4), Summation(parts=GLOBAL_BATCH))
# Steps to leave out when fp16's floor is measured: those that layouts were seen to skip, and some that they were not.
SKIPS = tuple(map(frozenset, ((), (1,), (1, 2), (1, 2, 3), (1, 10), (1, 2, 5, 9), (1, 2, 14, 15))))


@cache
def losses_and_norms(
    policy: str,
    setting: str,
    skipped: frozenset[int] = frozenset(),
    micro_batch: int | None = None,
    summation: Summation = Summation(),
) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of the steps not in ``skipped``, which counts from 1.

    Args:
        setting: of the optimizer, a key of ``OPTIMIZERS``.
        micro_batch: the product's, in samples, at which a skipped step must overflow. None: any step may be skipped.

    Raises:
        NeedlessSkip: see the class.
    """
    model = _model()
    spec = OptimSpec(**OPTIMIZERS[setting])
    update = _optimizer(model, setting, spec)
    data = ByteText(DataSpec(**DATA))
    found: list[tuple[float, float]] = []
    for step in range(STEPS):
        places = permutation.samples_at(SEED, len(data), step * GLOBAL_BATCH, GLOBAL_BATCH)
        if summation.shuffle:
            random.Random(f"{summation.shuffle} {step}").shuffle(places)
        inputs, targets = (torch.stack(side) for side in zip(*(data[i] for i in places), strict=True))
        if step + 1 in skipped:
            if micro_batch is None:
                continue
            # Every skip before this one has halved the product's scale. Twice that scale, for what is at the edge.
            scale = 2 * FIRST_SCALE / 2 ** (step - len(found))
            parts = zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True)
            if policy.startswith("fp16") and all(_finite(_gradients(model, policy, *p, scale)[1]) for p in parts):
                raise NeedlessSkip(f"step {step + 1} was skipped, and plain fp16 does not overflow in it")
            continue
        loss = _summed(model, policy, inputs, targets, summation.parts)
        norm = nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm or math.inf)
        update.step()
        found.append((loss, norm.item()))
    return found


def _model() -> Decoder:
    """Each parameter filled from (seed, name), whatever the layout."""
    model = Decoder(ModelSpec(**MODEL))
    with torch.no_grad():
        for name, p in model.named_parameters():
            model.init_parameter(name, p, torch.Generator().manual_seed(seeds.derive_seed(SEED, "init", name)))
    return model


def _optimizer(model: Decoder, name: str, spec: OptimSpec) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=spec.lr)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or n.startswith("embed")]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.resolve_betas(is_text=True), eps=spec.eps)


def _summed(model: Decoder, policy: str, inputs: torch.Tensor, targets: torch.Tensor, parts: int) -> float:
    """Leave the gradient of the mean loss in the parameters, computed in equal ``parts``, and return that loss."""
    loss, total = 0.0, [torch.zeros_like(p) for p in model.parameters()]
    for part in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        loss += _backward(model, policy, *part) / parts
        for t, p in zip(total, model.parameters(), strict=True):
            t.add_(p.grad, alpha=1 / parts)
    for t, p in zip(total, model.parameters(), strict=True):
        p.grad = t
    return loss


def _backward(model: Decoder, policy: str, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Leave the gradient of the mean loss in the parameters and return that loss."""
    scale = FIRST_SCALE if policy.startswith("fp16") else 1.0
    loss, grads = _gradients(model, policy, inputs, targets, scale)
    while not _finite(grads):
        if scale <= 1.0:
            raise ArithmeticError(f"{policy}: the reference itself overflows")
        scale /= 2
        loss, grads = _gradients(model, policy, inputs, targets, scale)
    torch._foreach_div_(grads, scale)
    return loss


def _gradients(
    model: Decoder, policy: str, inputs: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[float, list[torch.Tensor]]:
    """The mean loss, and its gradient times ``scale``, which shares its memory with the parameters' own."""
    model.zero_grad()
    loss = F.cross_entropy(_logits(model, policy, inputs).flatten(0, 1).float(), targets.flatten())
    (loss * scale).backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def _finite(grads: list[torch.Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in grads)


def _logits(model: Decoder, policy: str, inputs: torch.Tensor) -> torch.Tensor:
    if policy == "fp32":
        out: torch.Tensor = model(inputs)
        return out
    precision, _, kind = policy.partition("-")
    dtype = _DTYPES[precision]
    if kind == "autocast":
        with torch.autocast("cpu", dtype=dtype):
            return _logits(model, "fp32", inputs)
    cast = {name: p.to(dtype) for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, cast, (inputs,))
    return out


def apart(got: Sequence[tuple[float, float]], wanted: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The largest relative deviations of (loss, norm) over all steps."""
    worst = [0.0, 0.0]
    for pair in zip(got, wanted, strict=True):
        for i, (a, b) in enumerate(zip(*pair, strict=True)):
            deviation = abs(a - b) / abs(b)
            # A NaN would lose every comparison and so pass.
            worst[i] = max(worst[i], deviation if math.isfinite(deviation) else math.inf)
    return worst[0], worst[1]


def floor(policy: str, setting: str, skipped: frozenset[int] = frozenset()) -> tuple[float, float]:
    """How far the reference is from itself where only the order of summation changes: the least to ask of a layout."""
    wanted = losses_and_norms(policy, setting, skipped)
    others = [losses_and_norms(policy, setting, skipped, summation=s) for s in SUMMATIONS]
    found = [apart(o, wanted) for o in others]
    return max(loss for loss, _ in found), max(norm for _, norm in found)
