"""How fast a loader gives batches when nothing is computed in between: more than the steps need, or they wait."""

from __future__ import annotations

import statistics

import msgspec

from clustertrain import clock
from clustertrain.train.data import Loader
from clustertrain.train.samples import tensors


class ReadingSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank. ``first_s`` is the first batch, with the start of the workers in it; the rest is without it."""

    samples_per_s: float
    batch_s_p50: float
    batch_s_p95: float
    first_s: float
    batch_bytes: int  # of one item, all its micro-batches
    batches: int


def measure(loader: Loader, batches: int = 50) -> ReadingSpeed:
    """Read ``batches`` items (two at least) from where ``loader`` is, and leave it there, without workers.

    What has been read ahead while the first one was waited for counts as free, so take several times as many as the
    workers hold ready.
    """
    before, taken = loader.state_dict(), []
    samples = 0
    try:
        for _ in range(max(2, batches)):
            began = clock.monotonic()
            item = next(loader)
            taken.append(clock.monotonic() - began)
            samples += sum(int((p >= 0).sum()) for p in loader.places)
    finally:
        loader.load_state_dict(before)
    rest = taken[1:]
    size = sum(t.nbytes for part in (item if isinstance(item, list) else [item]) for _, t in tensors(part))
    return ReadingSpeed(
        samples_per_s=samples / len(taken) * len(rest) / max(sum(rest), 1e-9),
        batch_s_p50=statistics.median(rest),
        batch_s_p95=sorted(rest)[min(len(rest) - 1, int(0.95 * len(rest)))],
        first_s=taken[0],
        batch_bytes=size,
        batches=len(taken),
    )
