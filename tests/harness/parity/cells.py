"""The parity table: which layouts, crossed with what, and how far each cell may be from one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from clustertrain.plan.layout import Layout
from tests.layouts import CP, FSDP_TP, PLAIN, PP, TP_PP

STEPS = 20
FEW_STEPS = 6  # in the subset of the test suite
GLOBAL_BATCH = 16
SEQ_LEN = 16
# Four layers, since an interleaved schedule on two ranks has four stages.
MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2}
DATA = {"seq_len": SEQ_LEN, "max_bytes": 100_000}
# Clipping hides a wrong scale from SGD as Adam's division does, so SGD goes without. Its rate is what one process alone
# can bear: at 0.3 two references that differ in the order of a batch's samples drift apart by 2e-2 in the norm, at 0.03
# by 9e-7 (docs/reference/parity.md), and only what a reference agrees upon with itself can be asked of a layout. fp16
# has its own AdamW for the same reason: the ordinary one is up to 4e-1 from itself after steps that overflowed. With a
# larger eps an update that is off by half is seen too.
OPTIMIZERS = {
    "adamw": {"lr": 3e-3, "clip_norm": 1.0},
    "adamw-fp16": {"lr": 1e-3, "eps": 1e-2, "clip_norm": 1.0},
    "sgd": {"lr": 0.03, "clip_norm": 0.0},
}

LAYOUTS: dict[str, Layout] = {
    **PLAIN,
    "pp-1f1b": PP,
    "pp-interleaved": Layout(pp=2, schedule="interleaved", virtual_stages=2),
    "pp-zero-bubble": Layout(pp=2, schedule="zero-bubble", virtual_stages=2),
    "cp": CP,
    "fsdp-tp": FSDP_TP,
    "hsdp-tp": Layout(strategy="hybrid-shard", dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=True),
    "tp-pp": TP_PP,
    "ddp-tp-pp": Layout(strategy="ddp", dp_replicate=2, tp=2, sequence_parallel=True, pp=2, schedule="1f1b"),
}
PRECISIONS = ("fp32", "bf16", "fp16")
CHECKPOINTING = ("none", "full")


@dataclass(frozen=True)
class Limit:
    """The largest relative deviation of the loss and of the gradient norm in any step."""

    loss: float
    norm: float


# fp16 has three bits more than bf16 and no limit of its own in the requirement; it gets bf16's.
LIMITS = {"fp32": Limit(2e-6, 5e-6), "bf16": Limit(2e-3, 3e-2), "fp16": Limit(2e-3, 3e-2)}
# More would leave too little to compare. That each skip is one that fp16 needs is checked by itself.
MOST_SKIPPED = 5


@dataclass(frozen=True)
class Cell:
    """``micro_batches`` is the number that a data-parallel rank (or a pipeline) cuts its share of the batch into."""

    layout: str
    precision: str
    micro_batches: int
    checkpointing: str
    optimizer: str

    @property
    def id(self) -> str:
        return f"{self.layout}/{self.precision}/{self.micro_batches}/{self.checkpointing}/{self.optimizer}"

    @property
    def shape(self) -> Layout:
        fields = {f: getattr(LAYOUTS[self.layout], f) for f in Layout.__struct_fields__}
        return Layout(**{**fields, "activation_checkpointing": self.checkpointing})

    @property
    def micro_batch(self) -> int:
        """Samples a micro-batch."""
        return GLOBAL_BATCH // self.shape.data_parallel // self.micro_batches

    @property
    def setting(self) -> str:
        """Of the optimizer: a key of ``OPTIMIZERS``."""
        own = f"{self.optimizer}-{self.precision}"
        return own if own in OPTIMIZERS else self.optimizer

    @property
    def policy(self) -> str:
        """Which numeric policy the reference follows: see :mod:`tests.harness.parity.reference`."""
        if self.precision == "fp32":
            return "fp32"
        return f"{self.precision}-{'cast' if self.shape.is_fully_sharded else 'autocast'}"

    @property
    def limit(self) -> Limit:
        return LIMITS[self.precision]

    @property
    def slow(self) -> bool:
        """Tensor parallel's products on few cores."""
        return self.shape.tp > 1 and self.shape.world_size > 2

    def factors(self) -> dict[str, Any]:
        """What is to be covered in pairs."""
        many = self.micro_batches == accumulations(self.layout)[1]
        return {
            "precision": self.precision,
            "accumulation": "more" if many else "less",
            "checkpointing": self.checkpointing != "none",
            "optimizer": self.optimizer,
        }


def accumulations(layout: str) -> tuple[int, int]:
    """1 and 4; for a pipeline, which fills its stages with micro-batches, twice and four times as many as stages."""
    return (4, 8) if LAYOUTS[layout].pp > 1 else (1, 4)


def table() -> list[Cell]:
    """Every layout with AdamW in every combination, and once with SGD, in fp32 where the limits are tight. That one
    has selective checkpointing, which the others leave out; not so zero-bubble, whose backward is in two parts where
    torch's selective checkpointing allows one. Two layouts, one of each numeric policy, have SGD in the lower
    precisions too."""
    cells = [
        Cell(layout, precision, n, checkpointing, "adamw")
        for layout in LAYOUTS
        for precision in PRECISIONS
        for n in accumulations(layout)
        for checkpointing in CHECKPOINTING
    ]
    for layout, shape in LAYOUTS.items():
        kind = "full" if shape.schedule == "zero-bubble" else "selective"
        cells.append(Cell(layout, "fp32", accumulations(layout)[1], kind, "sgd"))
    cells += [Cell(layout, p, 1, "none", "sgd") for layout in ("ddp", "fsdp") for p in PRECISIONS[1:]]
    return cells


def pairs(cells: Iterable[Cell]) -> set[frozenset[tuple[str, Any]]]:
    """All pairs of two factors' values that occur together in a cell."""
    found: set[frozenset[tuple[str, Any]]] = set()
    for cell in cells:
        items = list(cell.factors().items())
        found |= {frozenset((a, b)) for i, a in enumerate(items) for b in items[i + 1 :]}
    return found


def covering() -> list[Cell]:
    """A subset for every change: each layout once in fp32, its combination of the other factors taken in turn (of slow
    ones the cheapest), and then the cheapest cells that bring pairs not met so far. Those are cp's, of the numeric
    policy ``cast``, and DDP's, of ``autocast``."""
    every = table()
    chosen = []
    for i, layout in enumerate(LAYOUTS):
        own = [c for c in every if c.layout == layout and c.precision == "fp32"]
        chosen.append(own[0] if own[0].slow else own[i % len(own)])
    missing = pairs(every) - pairs(chosen)
    while missing:
        best = max(every, key=lambda c: (len(pairs([c]) & missing), c.shape.tp == 1, -c.shape.world_size, c.shape.cp))
        chosen.append(best)
        missing -= pairs([best])
    return chosen
