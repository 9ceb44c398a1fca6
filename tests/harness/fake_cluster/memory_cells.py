"""Configurations in which the plan's memory is compared with torch's tracker, drawn at random but reproducibly."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from clustertrain.config.optimizers import OptimizerName
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import PRESETS
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import Precision
from clustertrain.errors import ConfigError
from clustertrain.plan import checks, pipeline_schedules
from clustertrain.plan.cost import frameworks, memory
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.adapter_shape import find_adapter
from clustertrain.plan.cost.frameworks import Framework
from clustertrain.plan.cost.optimizer_state import estimate_adapter_state, estimate_state
from clustertrain.plan.layout import Batch, Layout, Strategy
from clustertrain.plan.optimizer_checks import check_optimizer

# Seed and number of cells of each draw. The formulas were corrected by all but the last.
DRAWS = ((20, 210), (21, 60), (22, 40))
MAX_RANKS = 512
MAX_BLOCK_PASSES, MAX_LARGE_PASSES = 80, 130  # blocks times micro-batches of a traced rank; large: above 100B

# 100 million to 405 billion parameters; besides the presets, sizes that others published (Llama 1, 2 and 3.2).
MODELS: Mapping[str, Mapping[str, Any]] = {
    "125m": PRESETS["125m"],
    "400m": {"vocab_size": 32_000, "dim": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "ffn_dim": 4096},
    "1b": PRESETS["llama3.2-1b"],
    "3b": {**PRESETS["llama3.2-1b"], "dim": 3072, "layers": 28, "heads": 24},
    "7b": {"vocab_size": 32_000, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn_dim": 11_008},
    "8b": PRESETS["llama3.1-8b"],
    "13b": {"vocab_size": 32_000, "dim": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "ffn_dim": 13_824},
    "70b": PRESETS["llama3.1-70b"],
    "405b": PRESETS["llama3.1-405b"],
}
# Pipelines with a split backward pass and a larger prediction. It adds up the gradients that wait to be reduced, those
# of outputs that wait for the weights' and the most activations: some ranks have them at different moments.
LARGER: Mapping[str, float] = {
    "13b; fsdp 64, pp 8 (zbv); 512 ranks; bf16; adamw; 16 x 1 x 2048; x2 stages": 1.112,
    "70b; ddp 2, tp 2 + sp, pp 4 (zbv); 16 ranks; bf16; adamw; 4 x 4 x 2048; recompute full; x2 stages": 1.093,
    "70b; fsdp 32, pp 2 (zbv); 64 ranks; bf16; adafactor; 2 x 1 x 8192; recompute full; x2 stages": 1.181,
    "1b; fsdp 4, tp 4 + sp, pp 2 (zero-bubble); 32 ranks; bf16; adamw; 2 x 1 x 8192; recompute full; whole logits; "
    "x2 stages": 1.107,
}
_STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "fsdp", "fsdp", "fsdp-grad-op", "hybrid-shard")
_SCHEDULES = ("1f1b", "1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
_OPTIMIZERS = ("adamw",) * 10 + get_args(OptimizerName)


@dataclass(frozen=True)
class MemoryCell:
    """A job whose peak memory is predicted and traced."""

    model: str
    recipe: Recipe
    layout: Layout
    batch: Batch
    precision: Precision
    is_held_out: bool = False
    """Whether no formula was corrected because of it."""

    @property
    def name(self) -> str:
        layout, batch, parallel = self.layout, self.batch, self.recipe.parallel
        flags = {
            f"recompute {layout.activation_checkpointing}": layout.activation_checkpointing != "none",
            "offload": layout.offload,
            "reduce each": not layout.defer_reduction,
            "whole logits": layout.tp > 1 and not parallel.loss_parallel,
            f"x{layout.virtual_stages} stages": layout.virtual_stages > 1,
        }
        parts = [
            self.model, layout.describe(), f"{layout.world_size} ranks", self.precision, self.recipe.optim.name,
            f"{batch.grad_accum} x {batch.micro_batch} x {self.recipe.data.seq_len}",
            *(flag for flag, is_set in flags.items() if is_set),
        ]  # fmt: skip
        return "; ".join(parts)

    @property
    def pass_config(self) -> PassConfig:
        return PassConfig(
            seq_len=self.recipe.data.seq_len, micro_batch=self.batch.micro_batch, grad_accum=self.batch.grad_accum,
            precision=self.precision, autocast=self.precision in ("bf16", "fp16") and not self.layout.is_fully_sharded,
            device="cuda", parallel=self.recipe.parallel,
        )  # fmt: skip

    @property
    def framework(self) -> Framework:
        optim, model = self.recipe.optim, self.recipe.model
        adapter = find_adapter(self.recipe.adapter, model)
        if adapter is not None:
            state = estimate_adapter_state(optim, model, adapter)
            return frameworks.with_adapter(frameworks.CLUSTERTRAIN, optim, adapter, state)
        return frameworks.with_optimizer(frameworks.CLUSTERTRAIN, optim, estimate_state(optim, model))

    def predict(self) -> dict[str, float]:
        """Return the plan's GiB of the rank that needs the most, by category."""
        estimate = memory.estimate_memory(self.recipe.model, self.layout, self.pass_config, None, self.framework)
        names = ("params", "grads", "optimizer", "activations", "logits", "overhead")
        return {name: getattr(estimate, f"{name}_gib") for name in names}


def draw_cells() -> list[MemoryCell]:
    """Return all cells, those held out last."""
    cells: dict[str, MemoryCell] = {}
    for seed, count in DRAWS:
        is_last = seed == DRAWS[-1][0]
        for cell in _draw_distinct(seed, count):
            cells.setdefault(cell.name, dataclasses.replace(cell, is_held_out=is_last))
    return list(cells.values())


def _draw_distinct(seed: int, count: int) -> list[MemoryCell]:
    cells: dict[str, MemoryCell] = {}
    for cell in _draw(random.Random(seed)):
        cells.setdefault(cell.name, cell)
        if len(cells) == count:
            break
    return list(cells.values())


def _draw(rng: random.Random) -> Iterator[MemoryCell]:
    while True:
        model, strategy = rng.choice((*MODELS, "70b", "405b")), rng.choice(_STRATEGIES)
        tp, cp = rng.choice((1, 1, 1, 2, 4, 8)), rng.choice((1, 1, 1, 1, 2, 4))
        pp = rng.choice((1, 1, 1, 2, 4, 8, 16))
        if rng.random() < 0.3:
            tp = cp = pp = 1
        dp, replicas = rng.choice((1, 2, 4, 8, 16, 32, 64)), rng.choice((2, 4, 8))
        schedule = rng.choice(_SCHEDULES) if pp > 1 else None
        virtual = {"interleaved": rng.choice((2, 3)), "zero-bubble": 2, "zbv": 2}.get(schedule or "", 1)
        recompute = rng.choice(("none", "none", "selective", "full"))
        micro_batch, accum = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2)) if pp == 1 else pp * rng.choice((1, 2))
        seq_len = rng.choice((1024, 2048, 4096, 8192))
        precision, optimizer = rng.choice(("bf16",) * 4 + ("fp32", "fp16")), rng.choice(_OPTIMIZERS)
        sequence_parallel, offload = rng.random() < 0.8, rng.random() < 0.12
        defer, loss_parallel = rng.random() < 0.75, rng.random() < 0.85
        replicate, shard = (dp, 1) if strategy in ("ddp", "zero1") else (1, dp)
        if strategy == "hybrid-shard":
            replicate = replicas
        layout = Layout(
            strategy=strategy if replicate * shard * cp > 1 else "single",
            dp_replicate=replicate, dp_shard=shard, zero1=strategy == "zero1",
            tp=tp, sequence_parallel=sequence_parallel and tp > 1, cp=cp, pp=pp,
            schedule=schedule, virtual_stages=virtual, activation_checkpointing=recompute,
            reshard_after_forward=strategy != "fsdp-grad-op" and pp == 1, defer_reduction=defer or pp > 1,
        )  # fmt: skip
        if offload and layout.is_fully_sharded:
            layout = Layout(**{f: getattr(layout, f) for f in Layout.__struct_fields__ if f != "offload"}, offload=True)
        parallel: dict[str, Any] = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
        if schedule:
            parallel |= {"schedule": schedule, "virtual_stages": 0 if schedule in ("1f1b", "gpipe") else virtual}
        recipe = build(
            {"model": dict(MODELS[model]), "data": {"seq_len": seq_len}, "optim": {"name": optimizer},
             "parallel": parallel},
            Recipe, "recipe",
        )  # fmt: skip
        batch = Batch(
            micro_batch=micro_batch, grad_accum=accum, global_batch=micro_batch * accum * layout.data_parallel,
            tokens_per_step=micro_batch * accum * layout.data_parallel * seq_len,
        )  # fmt: skip
        cell = MemoryCell(model, recipe, layout, batch, precision)
        if _is_valid(cell) and _is_sensible(cell):
            yield cell


def _is_valid(cell: MemoryCell) -> bool:
    """Return whether the planner accepts the cell."""
    layout, recipe = cell.layout, cell.recipe
    try:
        if layout.zero1:
            checks.check_zero1(layout.tp, layout.cp, layout.pp)
        checks.check_decoder_layout(recipe.model, recipe.data.seq_len, recipe.parallel, layout)
        checks.check_device(cell.precision, recipe.parallel, layout, "cuda", None)
        check_optimizer(recipe.optim, layout, "decoder", "cuda")
    except ConfigError:
        return False
    if (
        layout.activation_checkpointing == "selective"
        and layout.schedule in pipeline_schedules.SPLIT_BACKWARD_SCHEDULES
    ):
        return False
    return not pipeline_schedules.unsupported_reason(layout, cell.batch.grad_accum)


def _is_sensible(cell: MemoryCell) -> bool:
    """Return whether the job resembles one that somebody would run, and is quick to trace."""
    layout, parameters = cell.layout, cell.recipe.model.parameters()
    blocks = cell.recipe.model.layers / layout.pp * min(cell.batch.grad_accum, 2 if layout.pp == 1 else 10**9)
    state_bytes = 16 * parameters / layout.tp / layout.pp / (layout.dp_shard * layout.cp if layout.is_sharded else 1)
    is_small_shard = parameters / layout.world_size >= 2e6  # more ranks than a model of this size is trained on
    return (
        layout.world_size <= MAX_RANKS
        and blocks <= (MAX_LARGE_PASSES if parameters > 1e11 else MAX_BLOCK_PASSES)
        and is_small_shard
        and (state_bytes <= 200e9 or layout.offload)
        and cell.batch.micro_batch * cell.recipe.data.seq_len // layout.cp <= 16_384
    )
