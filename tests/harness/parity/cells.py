"""The parity table: layouts, crossed with other factors, and the largest allowed deviation from one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from clustertrain.plan.layout import Layout
from tests.layouts import CP, FSDP_TP, PLAIN, PP, TP_PP

STEPS = 20
FEW_STEPS = 4  # in the subset of the test suite
GLOBAL_BATCH = 16
SEQ_LEN = 16
# Four layers, because an interleaved schedule on two ranks has four stages.
MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2}
DATA = {"seq_len": SEQ_LEN, "max_bytes": 100_000}
# Clipping would hide a wrong gradient scale from SGD, as Adam's division does, so SGD has none. A layout cannot be
# closer to the reference than the reference is to itself, which determines SGD's rate: at 0.3, two references with
# another order of samples in the batch differ by 2e-2 in the norm, at 0.03 by 9e-7 (docs/reference/parity.md). fp16 has
# a separate AdamW for the same reason: the usual one differs from itself by up to 4e-1 after overflows. The larger eps
# also reveals an update of the wrong scale.
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


# fp16 has three more bits of precision than bf16 but the same limits.
LIMITS = {"fp32": Limit(2e-6, 5e-6), "bf16": Limit(2e-3, 3e-2), "fp16": Limit(2e-3, 3e-2)}
# With more skipped steps, too few would remain to compare. The reference checks that each skip was necessary.
MAX_SKIPPED = 5


@dataclass(frozen=True)
class Cell:
    """One cell; ``micro_batches`` is their number per step and data-parallel rank, or per pipeline."""

    layout: str
    precision: str
    micro_batches: int
    checkpointing: str
    optimizer: str
    documents: bool = False
    """Samples are packed documents that attend only to themselves. The reference computes each document alone."""

    @property
    def id(self) -> str:
        suffix = "/documents" if self.documents else ""
        return f"{self.layout}/{self.precision}/{self.micro_batches}/{self.checkpointing}/{self.optimizer}{suffix}"

    @property
    def shape(self) -> Layout:
        fields = {f: getattr(LAYOUTS[self.layout], f) for f in Layout.__struct_fields__}
        return Layout(**{**fields, "activation_checkpointing": self.checkpointing})

    @property
    def micro_batch(self) -> int:
        """Return the samples per micro-batch."""
        return GLOBAL_BATCH // self.shape.data_parallel // self.micro_batches

    @property
    def setting(self) -> str:
        """Return the optimizer setting, a key of ``OPTIMIZERS``."""
        specific = f"{self.optimizer}-{self.precision}"
        return specific if specific in OPTIMIZERS else self.optimizer

    @property
    def policy(self) -> str:
        """Return the numeric policy of the reference, see :mod:`tests.harness.parity.reference`."""
        if self.precision == "fp32":
            return "fp32"
        return f"{self.precision}-{'cast' if self.shape.is_fully_sharded else 'autocast'}"

    @property
    def limit(self) -> Limit:
        return LIMITS[self.precision]

    @property
    def slow(self) -> bool:
        """Return whether the cell is slow on few cores, because of tensor parallelism."""
        return self.shape.tp > 1 and self.shape.world_size > 2

    def factors(self) -> dict[str, Any]:
        """Return the factors whose pairs of values the subset must cover."""
        many = self.micro_batches == accumulations(self.layout)[1]
        return {
            "precision": self.precision,
            "accumulation": "more" if many else "less",
            "checkpointing": self.checkpointing != "none",
            "optimizer": self.optimizer,
        }


def accumulations(layout: str) -> tuple[int, int]:
    """Return the numbers of micro-batches of a layout: 1 and 4; for a pipeline, twice and four times the stages."""
    return (4, 8) if LAYOUTS[layout].pp > 1 else (1, 4)


# One layout per kind of parallelism, with checkpointing and with the policy "cast" in between.
DOCUMENT_CELLS = (
    Cell("ddp", "fp32", 1, "none", "sgd", documents=True),
    Cell("fsdp", "bf16", 4, "selective", "adamw", documents=True),
    Cell("fsdp-tp", "fp32", 1, "none", "adamw", documents=True),
    Cell("pp-interleaved", "fp32", 4, "full", "adamw", documents=True),
    Cell("pp-zero-bubble", "fp32", 4, "none", "sgd", documents=True),
    Cell("cp", "fp32", 1, "full", "sgd", documents=True),
)


def table() -> list[Cell]:
    """Return all cells."""
    return [*text_cells(), *DOCUMENT_CELLS]


def text_cells() -> list[Cell]:
    """Return the cells with windows of a text.

    Every layout has AdamW in every combination, and once SGD, in fp32, where the limits are tight. The cells with SGD
    have selective checkpointing, except zero-bubble, whose split backward pass torch's selective checkpointing does not
    support. Two layouts, one per numeric policy, also have SGD in the lower precisions.
    """
    cells = [
        Cell(layout, precision, n, checkpointing, "adamw")
        for layout in LAYOUTS
        for precision in PRECISIONS
        for n in accumulations(layout)
        for checkpointing in CHECKPOINTING
    ]
    for layout, shape in LAYOUTS.items():
        checkpointing = "full" if shape.schedule == "zero-bubble" else "selective"
        cells.append(Cell(layout, "fp32", accumulations(layout)[1], checkpointing, "sgd"))
    cells += [Cell(layout, p, 1, "none", "sgd") for layout in ("ddp", "fsdp") for p in PRECISIONS[1:]]
    return cells


def pairs(cells: Iterable[Cell]) -> set[frozenset[tuple[str, Any]]]:
    """Return all pairs of values of two factors that occur together in a cell."""
    value_pairs: set[frozenset[tuple[str, Any]]] = set()
    for cell in cells:
        items = list(cell.factors().items())
        value_pairs |= {frozenset((a, b)) for i, a in enumerate(items) for b in items[i + 1 :]}
    return value_pairs


def covering() -> list[Cell]:
    """Return the subset that the test suite runs.

    Each layout occurs once in fp32, with combinations of the other factors in turn (the cheapest one for slow layouts);
    the cheapest cells with missing pairs complete it: those of cp for the policy ``cast``, of DDP for ``autocast``. Of
    the cells with documents, there is one for each way in which the starts of the documents reach the layers.
    """
    all_cells = text_cells()
    selected = []
    for i, layout in enumerate(LAYOUTS):
        layout_cells = [c for c in all_cells if c.layout == layout and c.precision == "fp32"]
        selected.append(layout_cells[0] if layout_cells[0].slow else layout_cells[i % len(layout_cells)])
    missing = pairs(all_cells) - pairs(selected)
    while missing:
        best = max(
            all_cells, key=lambda c: (len(pairs([c]) & missing), c.shape.tp == 1, -c.shape.world_size, c.shape.cp)
        )
        selected.append(best)
        missing -= pairs([best])
    return [*selected, *(c for c in DOCUMENT_CELLS if c.layout in ("fsdp-tp", "pp-interleaved", "cp"))]
