"""The reference for every layout: one process that trains on the whole global batch with plain torch.

It shares only the model, its initial values and the order of the samples with the package. Forward and backward pass,
clipping and update are plain torch, without micro-batches.

Results in bf16 depend on where values are rounded. The layouts have two policies for this, each with its own reference:

- ``autocast``: weights are fp32, and ``torch.autocast`` rounds the inputs of matmuls. Norms and the residual stream
  stay fp32. This is the policy of layouts without ``fully_shard``.
- ``cast``: ``fully_shard`` gathers the parameters in bf16, so the whole forward and backward pass is in bf16, and
  gradients are rounded to bf16 before they are summed in fp32. On one process, this means to call the model with its
  parameters cast, and to differentiate with respect to the fp32 parameters.

fp16 has the same policies, with a loss scale of 2**16, which is halved until the step does not overflow. The reference
also skips the steps that the layout skipped, because the trajectories would differ otherwise. But each skip must have
been necessary: plain fp16 must overflow in that step too, per micro-batch and at the same scale.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
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
from tests.harness.parity.documents import DocumentText

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEED = TrainSpec().seed
FIRST_SCALE = 2.0**16


class NeedlessSkip(Exception):
    """Error for a skipped step in which plain fp16 does not overflow."""


@dataclass(frozen=True)
class Summation:
    """A change of the order of summation, which affects only rounding.

    Attributes:
        shuffle: seed of the order of samples within a batch, 0 for the original order.
        parts: number of parts of the batch whose losses and gradients are summed.
    """

    shuffle: int = 0
    parts: int = 1


SUMMATIONS = (Summation(shuffle=1), Summation(shuffle=2), Summation(shuffle=3, parts=4), Summation(parts=GLOBAL_BATCH))
# Skipped steps with which fp16's floor is measured: some that layouts have skipped, and some that they have not.
SKIPS = tuple(map(frozenset, ((), (1,), (1, 2), (1, 2, 3), (1, 10), (1, 2, 5, 9), (1, 2, 14, 15))))


@cache
def losses_and_norms(
    policy: str,
    setting: str,
    skipped: frozenset[int] = frozenset(),
    micro_batch: int | None = None,
    summation: Summation = Summation(),
    *,
    documents: bool = False,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm before clipping) of the steps not in ``skipped``, which are counted from 1.

    Args:
        setting: optimizer setting, a key of ``OPTIMIZERS``.
        micro_batch: samples per micro-batch with which a skipped step must overflow. None: any step may be skipped.
        documents: samples are packed documents; the model is called for each document alone.

    Raises:
        NeedlessSkip: a skipped step does not overflow.
    """
    model = _model()
    spec = OptimSpec(**OPTIMIZERS[setting])
    optimizer = _optimizer(model, setting, spec)
    data = DocumentText(DataSpec(**DATA)) if documents else ByteText(DataSpec(**DATA))
    results: list[tuple[float, float]] = []
    for step in range(STEPS):
        indices = permutation.samples_at(SEED, len(data), step * GLOBAL_BATCH, GLOBAL_BATCH)
        if summation.shuffle:
            random.Random(f"{summation.shuffle} {step}").shuffle(indices)
        inputs, targets = (torch.stack(side) for side in zip(*(_read(data, i) for i in indices), strict=True))
        if step + 1 in skipped:
            if micro_batch is None:
                continue
            # Every earlier skip has halved the layout's scale. Test twice that scale, for values close to overflow.
            scale = 2 * FIRST_SCALE / 2 ** (step - len(results))
            parts = zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True)
            if policy.startswith("fp16") and all(_finite(_gradients(model, policy, *p, scale)[1]) for p in parts):
                raise NeedlessSkip(f"step {step + 1} was skipped, but plain fp16 does not overflow in it")
            continue
        loss = _accumulate(model, policy, inputs, targets, summation.parts)
        norm = nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm or math.inf)
        optimizer.step()
        results.append((loss, norm.item()))
    return results


def _read(data: ByteText | DocumentText, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, targets) of sample ``i``; inputs with documents are tokens and starts, (2, length)."""
    if isinstance(data, ByteText):
        return data[i]
    inputs, targets = data[i]
    return torch.stack((inputs["tokens"], inputs["document_starts"])), targets


def _model() -> Decoder:
    """Return the model with initial values, which depend only on the seed and the parameter's name."""
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


def _accumulate(model: Decoder, policy: str, inputs: torch.Tensor, targets: torch.Tensor, parts: int) -> float:
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
    """Return the mean loss and the parameters' gradients, multiplied by ``scale``."""
    model.zero_grad()
    loss = F.cross_entropy(_logits(model, policy, inputs).flatten(0, 1).float(), targets.flatten())
    (loss * scale).backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def _finite(grads: list[torch.Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in grads)


def _logits(model: Decoder, policy: str, inputs: torch.Tensor) -> torch.Tensor:
    if policy == "fp32":
        return _call(model, inputs)
    precision, _, kind = policy.partition("-")
    dtype = _DTYPES[precision]
    if kind == "autocast":
        with torch.autocast("cpu", dtype=dtype):
            return _logits(model, "fp32", inputs)
    cast = {name: p.to(dtype) for name, p in model.named_parameters()}
    return _call(lambda tokens: torch.func.functional_call(model, cast, (tokens,)), inputs)


def _call(model: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of ``inputs``, of each document alone if there are documents."""
    if inputs.dim() == 2:
        return model(inputs)
    rows = []
    for tokens, starts in inputs:
        lengths = starts.unique(return_counts=True)[1].tolist()
        rows.append(torch.cat([model(document[None]) for document in tokens.split(lengths)], dim=1))
    return torch.cat(rows)


def largest_deviations(
    actual: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Return the largest relative deviations of (loss, norm) over all steps."""
    worst = [0.0, 0.0]
    for pair in zip(actual, expected, strict=True):
        for i, (a, b) in enumerate(zip(*pair, strict=True)):
            deviation = abs(a - b) / abs(b)
            # NaN would be ignored by max().
            worst[i] = max(worst[i], deviation if math.isfinite(deviation) else math.inf)
    return worst[0], worst[1]


def floor(policy: str, setting: str, skipped: frozenset[int] = frozenset()) -> tuple[float, float]:
    """Return the largest deviations of the reference from itself if only the order of summation changes."""
    expected = losses_and_norms(policy, setting, skipped)
    reordered = [losses_and_norms(policy, setting, skipped, summation=s) for s in SUMMATIONS]
    deviations = [largest_deviations(o, expected) for o in reordered]
    return max(loss for loss, _ in deviations), max(norm for _, norm in deviations)
