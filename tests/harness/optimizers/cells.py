"""Every optimizer under every layout, and the largest allowed deviation from one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clustertrain.plan.layout import Layout
from tests.layouts import CP, FSDP_TP, PLAIN, PP, TP_PP

STEPS = 10
THAW_STEP = 3  # step at which layers are unfrozen in the resumed runs
GLOBAL_BATCH = 8
SEQ_LEN = 16
# Six heads of four: 24 and 64 divide by neither 4 shards nor 8, so that shards are uneven and some are empty.
MODEL = {"dim": 24, "layers": 4, "heads": 6, "kv_heads": 2, "ffn_dim": 64}
DATA = {"seq_len": SEQ_LEN, "max_bytes": 50_000}

# The [optim] table of the recipe, by name of the cell.
CELLS: Mapping[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 3e-3},
    "adam": {"name": "adam", "lr": 3e-3},
    "sgd": {"name": "sgd", "lr": 0.03},
    "sgd-nesterov": {"name": "sgd", "lr": 0.03, "nesterov": True},
    "adafactor": {"name": "adafactor", "lr": 1e-2},
    "lion": {"name": "lion", "lr": 3e-4},
    "lamb": {"name": "lamb", "lr": 1e-2},
    "lars": {"name": "lars", "lr": 1.0},
    "muon": {"name": "muon", "lr": 3e-3},
    "soap": {"name": "soap", "lr": 3e-3},
    "shampoo": {"name": "shampoo", "lr": 3e-2},
    "adamw8bit": {"name": "adamw8bit", "lr": 3e-3},
}

LAYOUTS: Mapping[str, Layout] = {
    **PLAIN,
    "pp": PP,
    "zbv": Layout(pp=2, schedule="zbv", virtual_stages=2),
    "cp": CP,
    "fsdp-cp": Layout(strategy="fsdp", dp_shard=2, cp=2),
    "fsdp-tp": FSDP_TP,
    "fsdp-pp": Layout(strategy="fsdp", dp_shard=2, pp=2, schedule="1f1b", reshard_after_forward=False),
    "ddp-tp": Layout(strategy="ddp", dp_replicate=2, tp=2),
    "tp-pp": TP_PP,
    "fsdp-tp-pp": Layout(
        strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True, pp=2, schedule="1f1b", reshard_after_forward=False
    ),
}

# The largest relative deviation of the loss in any step. Muon iterates in bf16, which magnifies the effects of another
# order of summation. SOAP rotates into eigenvectors, which are arbitrary in the null space of a first gradient of low
# rank: one process with another order of samples in the batch deviates as much. A separate test checks that updates of
# shards equal those of whole parameters, given the same gradients.
LIMITS: Mapping[str, float] = {**dict.fromkeys(CELLS, 2e-6), "muon": 1e-4, "soap": 1e-2}
