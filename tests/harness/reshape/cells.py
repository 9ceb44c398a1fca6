"""The reshape table: layouts that save a checkpoint, and layouts and numbers of ranks that load it."""

from __future__ import annotations

from dataclasses import dataclass

from clustertrain.plan.layout import Layout
from tests.layouts import FSDP_TP, PLAIN, TP_PP

SAVED_AT, STEPS = 3, 8  # five steps after the restore are compared
RESAVED_AT = 4  # the restored state is saved again before the next step
GLOBAL_BATCH = 24  # divides by 2, 3 and 4 ranks
SEQ_LEN = 16
# Four layers and heads, for tensor parallelism and pipelines on four ranks. Two stages share the tied embedding, and a
# changed dropout mask after the restore would change the losses.
MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "tie_embeddings": True, "dropout": 0.1}
DATA = {"seq_len": SEQ_LEN, "max_bytes": 100_000}

SOURCE_RANKS = 4
# By name and number of ranks. Combined layouts need four ranks.
LAYOUTS: dict[tuple[str, int], Layout] = {
    **{("ddp", n): Layout(strategy="ddp", dp_replicate=n) for n in (2, 3, 4)},
    **{("fsdp", n): Layout(strategy="fsdp", dp_shard=n) for n in (2, 3, 4)},
    ("hsdp", 4): PLAIN["hsdp"],
    **{("tp", n): Layout(tp=n, sequence_parallel=True) for n in (2, 4)},
    ("fsdp-tp", 4): FSDP_TP,
    **{("pp", n): Layout(pp=n, schedule="1f1b") for n in (2, 4)},
    ("tp-pp", 4): TP_PP,
}
SOURCES = tuple(name for name, ranks in LAYOUTS if ranks == SOURCE_RANKS)

# The largest relative deviation of a loss from the uninterrupted run, which has another layout. In fp16, layouts round
# at different places: see tests/harness/parity.
LIMITS = {"fp32": 1e-6, "fp16": 2e-3}


def micro_batch(layout: Layout) -> int:
    """Return the samples per micro-batch: few large micro-batches are faster, but four stages need four of them."""
    return GLOBAL_BATCH // layout.data_parallel // (4 if layout.pp > 1 else 2)


@dataclass(frozen=True)
class Source:
    """An uninterrupted run of ``SOURCE_RANKS`` ranks that saves a checkpoint."""

    layout: str
    precision: str = "fp32"

    @property
    def id(self) -> str:
        return f"{self.layout}-{self.precision}"

    @property
    def shape(self) -> Layout:
        return LAYOUTS[self.layout, SOURCE_RANKS]


@dataclass(frozen=True)
class Target:
    layout: str
    ranks: int

    @property
    def id(self) -> str:
        return f"{self.layout}-{self.ranks}"

    @property
    def shape(self) -> Layout:
        return LAYOUTS[self.layout, self.ranks]


@dataclass(frozen=True)
class Cell:
    source: Source
    target: Target

    @property
    def id(self) -> str:
        return f"{self.source.id}/{self.target.id}"

    @property
    def same(self) -> bool:
        """Return whether the layout and the ranks are the same, so that losses must be bitwise equal."""
        return (self.source.layout, SOURCE_RANKS) == (self.target.layout, self.target.ranks)

    @property
    def limit(self) -> float:
        return 0.0 if self.same else LIMITS[self.source.precision]


def table() -> list[Cell]:
    """Return every source with every target in fp32, and two sources in fp16, each with the same and another layout."""
    cells = [Cell(Source(s), Target(*t)) for t in LAYOUTS for s in SOURCES]
    half = {"ddp": (("ddp", 4), ("pp", 2)), "fsdp": (("fsdp", 4), ("ddp", 3))}
    return cells + [Cell(Source(s, "fp16"), Target(*t)) for s, targets in half.items() for t in targets]


def covering() -> list[Cell]:
    """Return the subset that the test suite runs.

    Each layout saves and loads at least once, and 2, 3 and 4 ranks load. DDP and FSDP also continue unchanged, and fp16
    continues with its loss scale.
    """
    return [
        Cell(Source(s, p), Target(t, n))
        for s, p, t, n in (
            ("ddp", "fp32", "ddp", 4),
            ("fsdp", "fp32", "fsdp", 4),
            ("hsdp", "fp32", "fsdp", 3),
            ("fsdp-tp", "fp32", "ddp", 2),
            ("pp", "fp32", "tp", 2),
            ("tp", "fp32", "pp", 2),
            ("tp-pp", "fp32", "hsdp", 4),
            ("fsdp", "fp32", "tp-pp", 4),
            ("ddp", "fp32", "fsdp-tp", 4),
            ("ddp", "fp16", "ddp", 4),
        )
    ]
