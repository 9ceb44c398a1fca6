"""What a plan is made for: the request, the device and the model, and what follows from them for any one layout."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustertrain.config import presets
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import RunSpec
from clustertrain.plan import batch as batches
from clustertrain.plan import checks, non_decoder, pipeline_schedules
from clustertrain.plan.cost import frameworks as stacks
from clustertrain.plan.cost import memory as memories
from clustertrain.plan.cost import optimizer_state as states
from clustertrain.plan.cost import user_model as counts
from clustertrain.plan.cost.activations import Pass
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN
from clustertrain.plan.cost.hardware_rates import gpu_of, machine_of
from clustertrain.plan.cost.memory import SAFE_FRACTION, Memory
from clustertrain.plan.cost.user_model import Counted
from clustertrain.plan.layout import SHARDED, Batch, Layout, Strategy, data_degrees
from clustertrain.plan.search.layouts import Problem, Wanted

ASSUMED_GIB = 16.0  # where the GPU is not known: the smallest memory of the data-centre GPUs in use
ASSUMED_CPU_GIB = 4.0  # a rank's share of a host's memory


class Given:
    """Of one request. ``own``: what was counted of a model that the planner itself knows nothing of."""

    def __init__(self, spec: RunSpec, device: str, profile: ClusterProfile, own: Counted | None = None) -> None:
        self.spec = spec
        self.own = own
        self.device = device
        self.profile = profile
        self.world = spec.job.nodes * spec.job.gpus
        self.precision = spec.recipe.train.precision
        self.gpu = gpu_of(spec.job.gpu_type, profile) if device == "cuda" else None
        if self.precision == "auto":
            self.precision = "bf16" if device == "cuda" and (self.gpu is None or self.gpu.bf16) else "fp32"
        self.capacity = self.gpu.capacity_gib if self.gpu else None
        self.assumed = ASSUMED_CPU_GIB if device == "cpu" else ASSUMED_GIB
        self.limit = SAFE_FRACTION * (self.capacity or self.assumed)
        model = spec.recipe.model
        self.decoder = model if spec.script is None and model.is_decoder else None  # whose memory can be estimated
        self.kind = "" if model.entry else model.kind
        self.gpu_name = self.gpu.name if self.gpu else ""
        self.state = states.of_decoder(spec.recipe.optim, self.decoder) if self.decoder is not None else None
        if spec.script is None and self.decoder is None and self.kind:
            states.check_modules(spec.recipe.optim, states.modules(model))
        stack = stacks.compiled_blocks(CLUSTERTRAIN) if spec.recipe.parallel.compile else CLUSTERTRAIN
        stack = replace(stack, whole_logits=spec.recipe.objective.label_smoothing > 0)
        self.stack = stacks.updated_by(stack, spec.recipe.optim, self.state) if self.state is not None else stack

    def wanted(self) -> tuple[Strategy | None, str]:
        """The strategy that the user asked for by name or by degrees, and those words; None: free to choose."""
        job = self.spec.job
        if job.layout != "auto":
            return job.layout, f"{job.layout}: asked for with --layout or job.layout"
        if not job.dp_replicate and not job.dp_shard:
            return None, ""
        data = self.world // (self.tp * self.cp * self.pp)
        shard = job.dp_shard or data // job.dp_replicate
        replicate = job.dp_replicate or data // job.dp_shard
        strategy: Strategy = "ddp" if shard == 1 else "fsdp" if replicate == 1 else "hybrid-shard"
        return strategy, f"{strategy}: what --dp-replicate and --dp-shard make of {data} data-parallel ranks"

    @property
    def tp(self) -> int:
        return self.spec.job.tp or 1

    @property
    def cp(self) -> int:
        return self.spec.job.cp or 1

    @property
    def pp(self) -> int:
        return self.spec.job.pp or 1

    def _schedule(self) -> str:
        wanted = self.spec.recipe.parallel.schedule
        return "1f1b" if wanted == "auto" else wanted

    def _recompute(self) -> str:
        wanted = self.spec.recipe.parallel.activation_checkpointing
        return "none" if wanted == "auto" else wanted

    def degrees_given(self) -> bool:
        job = self.spec.job
        return bool(job.tp or job.cp or job.pp or job.dp_replicate or job.dp_shard)

    def layout_of(self, strategy: Strategy) -> Layout:
        """The whole layout with ``strategy`` for the data-parallel ranks, checked against model and device.

        Raises:
            ConfigError: it cannot be.
        """
        job, parallel = self.spec.job, self.spec.recipe.parallel
        if strategy == "zero1":
            checks.zero1(self.tp, self.cp, self.pp)
        replicate, shard = data_degrees(
            strategy, self.world, job.gpus,
            tp=self.tp, cp=self.cp, pp=self.pp, dp_replicate=job.dp_replicate, dp_shard=job.dp_shard,
        )  # fmt: skip
        # Parameters may be sharded over the ranks that share a sequence, where those are all there are.
        if replicate * shard == 1 and not (strategy in SHARDED and self.cp > 1):
            strategy = "single"
        layout = Layout(
            strategy=strategy,
            dp_replicate=replicate,
            dp_shard=shard,
            zero1=strategy == "zero1",
            tp=self.tp,
            sequence_parallel=parallel.sequence_parallel and self.tp > 1,
            cp=self.cp,
            pp=self.pp,
            schedule=self._schedule() if self.pp > 1 else None,
            virtual_stages=parallel.stages_a_rank if self.pp > 1 else 1,
            activation_checkpointing=self._recompute(),
            defer_reduction=parallel.defer_reduction is not False,
            reshard_after_forward=strategy != "fsdp-grad-op" and self.pp == 1,
        )
        layout = msgspec.structs.replace(layout, offload=parallel.offload and layout.fully_sharded)
        if self.decoder is not None:
            checks.of_model(self.decoder, self.spec.recipe.data.seq_len, parallel, layout)
        elif self.spec.script is None:
            non_decoder.whole(self.spec.recipe.model, layout)
        if self.spec.script is None:
            states.refuse(self.spec.recipe.optim, layout, self.kind, self.device)
        return layout

    def problem(self, strategy: Strategy | None) -> Problem | None:
        """For a search; None where there is no model or no GPU whose rates are known."""
        job, recipe, parallel = self.spec.job, self.spec.recipe, self.spec.recipe.parallel
        if self.decoder is None or self.gpu is None:
            return None
        fixed = strategy is not None or self.degrees_given()
        stages = parallel.stages_a_rank if parallel.schedule != "auto" or parallel.split else 0
        wanted = Wanted(
            strategy=strategy,
            tp=self.tp if fixed else 0,
            cp=self.cp if fixed else 0,
            # Names of modules that begin stages are for a pipeline that is asked for.
            pp=self.pp if fixed or parallel.split else 0,
            dp_replicate=job.dp_replicate,
            dp_shard=job.dp_shard,
            micro_batch=recipe.train.micro_batch,
            recompute="" if parallel.activation_checkpointing == "auto" else parallel.activation_checkpointing,
            schedule=self._schedule() if stages else "",
            virtual_stages=stages,
        )
        unit = self.world * (recipe.train.micro_batch or 1)
        if fixed:
            whole = self.global_batch(self.layout_of(strategy or "fsdp"))
        else:
            whole = recipe.train.global_batch or batches.default_global_batch(unit, self.least_batch)
        return Problem(
            model=self.decoder,
            world=self.world,
            gpus_per_node=job.gpus,
            seq_len=recipe.data.seq_len,
            global_batch=whole,
            compute=self.precision,
            parallel=parallel,
            machine=machine_of(self.gpu, job.gpus, self.precision, self.profile),
            stack=self.stack,
            limit_gib=self.limit,
            wanted=wanted,
        )

    def pass_of(self, layout: Layout, micro_batch: int) -> Pass:
        half = self.precision in ("bf16", "fp16", "fp8")
        return Pass(
            seq_len=self.spec.recipe.data.seq_len,
            micro_batch=micro_batch,
            grad_accum=max(1, self.global_batch(layout) // (layout.data_parallel * micro_batch)),
            compute=self.precision,
            autocast=half and not layout.fully_sharded,
            device=self.device,
            parallel=self.spec.recipe.parallel,
        )

    def global_batch(self, layout: Layout) -> int:
        train = self.spec.recipe.train
        # Of a pipeline every schedule runs a multiple of its ranks.
        return train.global_batch or batches.default_global_batch(
            layout.data_parallel * (train.micro_batch or non_decoder.group(self.spec.recipe.model)) * layout.pp,
            self.least_batch,
        )

    @property
    def least_batch(self) -> int:
        """Sequences of a step where the recipe does not say it: what its preset is trained with, else a few."""
        model = self.spec.recipe.model
        trained = presets.training(model.preset, model.kind)
        return trained.global_batch if trained is not None else batches.DEFAULT_GLOBAL_BATCH

    def memory(self, layout: Layout, micro_batch: int) -> Memory:
        if self.own is not None:
            return counts.memory(self.own, layout, self.pass_of(layout, micro_batch), self.capacity)
        if self.decoder is None:
            return non_decoder.states(self.spec.recipe, layout, self.capacity)
        return memories.of_rank(self.decoder, layout, self.pass_of(layout, micro_batch), self.capacity, self.stack)

    def split_and_need(self, layout: Layout) -> tuple[Batch, float]:
        """The batch split under ``layout`` and the peak in GiB that goes with it."""
        recipe, whole = self.spec.recipe, self.global_batch(layout)
        batches.check_divides(whole, layout.data_parallel, recipe.train.micro_batch)
        non_decoder.check_groups(recipe.model, whole, recipe.train.micro_batch, layout.data_parallel)
        share, group = whole // layout.data_parallel, non_decoder.group(recipe.model)

        def need(micro_batch: int) -> float:
            return self.memory(layout, micro_batch).peak_gib or 0.0

        def fits(micro_batch: int) -> bool:
            if self.decoder is None:
                return micro_batch <= non_decoder.LARGEST_MICRO_BATCH
            return need(micro_batch) <= self.limit

        split = batches.split(
            whole,
            layout.data_parallel,
            recipe.tokens_per_sample,
            micro_batch=recipe.train.micro_batch,
            fits=fits,
            why_not=lambda n: (
                pipeline_schedules.why_not(layout, n) or ("it splits a group" if share // n % group else "")
            ),
            enough=pipeline_schedules.enough(layout),
            way_out="parallel.schedule = 'gpipe'" if layout.pp > 1 and recipe.parallel.virtual_stages < 2 else "",
        )
        return split, need(split.micro_batch)

    def limit_in_words(self) -> str:
        share = f"{self.limit:.1f} GiB ({SAFE_FRACTION:.0%} of"
        if self.gpu:
            return f"{share} the {self.capacity:g} GiB of {self.gpu.name})"
        if self.device == "cpu":
            return f"{share} {self.assumed:g} GiB, assumed for a rank on the CPU)"
        named = f"GPU type {self.spec.job.gpu_type!r}" if self.spec.job.gpu_type else "the GPU type"
        return f"{share} {self.assumed:g} GiB, assumed because {named} is not known; say --gpu-type)"
