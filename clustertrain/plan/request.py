"""A planning request (job, device, model), and what follows from it for a given layout."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustertrain.config.checks import adapter_checks
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import RunSpec
from clustertrain.config.parsing import presets
from clustertrain.plan import checks, non_decoder, optimizer_checks, pipeline_schedules
from clustertrain.plan.attention import AttentionChoice
from clustertrain.plan.batch import DEFAULT_GLOBAL_BATCH, check_divides, default_global_batch, split_batch
from clustertrain.plan.cost import adapter_shape, frameworks, memory, optimizer_state, user_model
from clustertrain.plan.cost.activations import PassConfig
from clustertrain.plan.cost.frameworks import CLUSTERTRAIN
from clustertrain.plan.cost.hardware_rates import build_machine, find_gpu_type
from clustertrain.plan.cost.memory import SAFE_FRACTION, MemoryEstimate
from clustertrain.plan.cost.optimizer_state import OptimizerStateSize
from clustertrain.plan.cost.user_model import ModelStats
from clustertrain.plan.layout import (
    SHARDED_STRATEGIES,
    Batch,
    Layout,
    Strategy,
    format_checkpointing,
    resolve_dp_degrees,
)
from clustertrain.plan.search.problem import SearchConstraints, SearchProblem

DEFAULT_GPU_GIB = 16.0  # for an unknown GPU: the smallest memory of data-center GPUs in use
DEFAULT_CPU_GIB = 4.0  # a rank's share of a host's memory


class PlanRequest:
    """A planning request.

    Args of the constructor:
        model_stats: statistics of a model entry, whose shapes the planner does not know.
    """

    def __init__(
        self, spec: RunSpec, device: str, profile: ClusterProfile, model_stats: ModelStats | None = None
    ) -> None:
        self.spec = spec
        self.model_stats = model_stats
        self.device = device
        self.profile = profile
        self.world_size = spec.job.nodes * spec.job.gpus
        self.precision = spec.recipe.train.precision
        self.gpu = find_gpu_type(spec.job.gpu_type, profile) if device == "cuda" else None
        if self.precision == "auto":
            self.precision = "bf16" if device == "cuda" and (self.gpu is None or self.gpu.bf16) else "fp32"
        self.capacity_gib = self.gpu.capacity_gib if self.gpu else None
        self.assumed_gib = DEFAULT_CPU_GIB if device == "cpu" else DEFAULT_GPU_GIB
        self.limit_gib = SAFE_FRACTION * (self.capacity_gib or self.assumed_gib)
        model = spec.recipe.model
        self.decoder = (
            model if spec.script is None and model.is_decoder else None
        )  # None: memory is not estimated from shapes
        self.model_kind = "" if model.entry else model.kind
        self.gpu_name = self.gpu.name if self.gpu else ""
        self.adapter = adapter_shape.find_adapter(spec.recipe.adapter, model) if self.decoder is not None else None
        self.optimizer_state = self._size_optimizer_state()
        if spec.script is None and self.decoder is None and self.model_kind:
            optimizer_checks.check_modules(spec.recipe.optim, optimizer_checks.list_modules(model))
        framework = frameworks.with_compiled_blocks(CLUSTERTRAIN) if spec.recipe.parallel.compile else CLUSTERTRAIN
        framework = replace(framework, whole_logits=spec.recipe.objective.label_smoothing > 0)
        if self.attention.backend == "math":
            framework = replace(framework, plain_attention=True)
        if self.optimizer_state is None:
            self.framework = framework
        elif self.adapter is not None:
            self.framework = frameworks.with_adapter(framework, spec.recipe.optim, self.adapter, self.optimizer_state)
        else:
            self.framework = frameworks.with_optimizer(framework, spec.recipe.optim, self.optimizer_state)

    def _size_optimizer_state(self) -> OptimizerStateSize | None:
        optim = self.spec.recipe.optim
        if self.decoder is None:
            return None
        if self.adapter is None:
            return optimizer_state.estimate_state(optim, self.decoder)
        return optimizer_state.estimate_adapter_state(optim, self.decoder, self.adapter)

    def requested_strategy(self) -> tuple[Strategy | None, str]:
        """Return the strategy that the user requested by name or degrees, and the reason; (None, '') if none."""
        job = self.spec.job
        if job.layout != "auto":
            return job.layout, f"{job.layout}: requested with --layout or job.layout"
        if not job.dp_replicate and not job.dp_shard:
            return None, ""
        dp_ranks = self.world_size // (self.tp * self.cp * self.pp)
        shard = job.dp_shard or dp_ranks // job.dp_replicate
        replicate = job.dp_replicate or dp_ranks // job.dp_shard
        strategy: Strategy = "ddp" if shard == 1 else "fsdp" if replicate == 1 else "hybrid-shard"
        return strategy, f"{strategy}: follows from --dp-replicate and --dp-shard for {dp_ranks} data-parallel ranks"

    @property
    def attention(self) -> AttentionChoice:
        return AttentionChoice.of(self.spec.recipe)

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample of the decoder. The estimates treat a pair of answers as one sequence of twice the length,
        which has the same activations and slightly more attention."""
        return self.spec.recipe.data.seq_len * self.spec.recipe.sequences_per_sample

    @property
    def tp(self) -> int:
        return self.spec.job.tp or 1

    @property
    def cp(self) -> int:
        return self.spec.job.cp or 1

    @property
    def pp(self) -> int:
        return self.spec.job.pp or 1

    def _pipeline_schedule(self) -> str:
        schedule = self.spec.recipe.parallel.schedule
        return "1f1b" if schedule == "auto" else schedule

    def _activation_checkpointing(self) -> str:
        mode = self.spec.recipe.parallel.activation_checkpointing
        return "none" if mode == "auto" else format_checkpointing(mode)

    def has_degrees(self) -> bool:
        """Return whether the user requested any degree of parallelism."""
        job = self.spec.job
        return bool(job.tp or job.cp or job.pp or job.dp_replicate or job.dp_shard)

    def build_layout(self, strategy: Strategy) -> Layout:
        """Return the layout with ``strategy`` for the data-parallel ranks, checked against model and device.

        Raises:
            ConfigError: the layout is impossible.
        """
        job, parallel = self.spec.job, self.spec.recipe.parallel
        if strategy == "zero1":
            checks.check_zero1(self.tp, self.cp, self.pp)
        replicate, shard = resolve_dp_degrees(
            strategy, self.world_size, job.gpus,
            tp=self.tp, cp=self.cp, pp=self.pp, dp_replicate=job.dp_replicate, dp_shard=job.dp_shard,
        )  # fmt: skip
        # Parameters may also be sharded over only the ranks that share a sequence.
        if replicate * shard == 1 and not (strategy in SHARDED_STRATEGIES and self.cp > 1):
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
            schedule=self._pipeline_schedule() if self.pp > 1 else None,
            virtual_stages=parallel.stages_per_rank if self.pp > 1 else 1,
            activation_checkpointing=self._activation_checkpointing(),
            defer_reduction=parallel.defer_reduction is not False,
            reshard_after_forward=strategy != "fsdp-grad-op" and self.pp == 1,
        )
        layout = msgspec.structs.replace(layout, offload=parallel.offload and layout.is_fully_sharded)
        if self.decoder is not None:
            checks.check_decoder_layout(self.decoder, self.spec.recipe.data.seq_len, parallel, layout)
            adapter_checks.check_base(self.spec.recipe, layout.tp)
            checks.check_objective(self.spec.recipe.objective_kind, layout)
        elif self.spec.script is None:
            non_decoder.check_not_split(self.spec.recipe.model, layout)
            non_decoder.check_comparable(self.spec.recipe, layout)
        if self.spec.script is None:
            optimizer_checks.check_optimizer(self.spec.recipe.optim, layout, self.model_kind, self.device)
        return layout

    def build_search_problem(self, strategy: Strategy | None) -> SearchProblem | None:
        """Return the problem for a search; None unless the model's shapes and the GPU's rates are known."""
        job, recipe, parallel = self.spec.job, self.spec.recipe, self.spec.recipe.parallel
        if self.decoder is None or self.gpu is None:
            return None
        is_fixed = strategy is not None or self.has_degrees()
        virtual_stages = parallel.stages_per_rank if parallel.schedule != "auto" or parallel.split else 0
        constraints = SearchConstraints(
            strategy=strategy,
            tp=self.tp if is_fixed else 0,
            cp=self.cp if is_fixed else 1 if recipe.objective_kind == "dpo" else 0,
            # parallel.split requires an explicitly requested pipeline.
            pp=self.pp if is_fixed or parallel.split else 0,
            dp_replicate=job.dp_replicate,
            dp_shard=job.dp_shard,
            micro_batch=recipe.train.micro_batch,
            activation_checkpointing=""
            if parallel.activation_checkpointing == "auto"
            else format_checkpointing(parallel.activation_checkpointing),
            schedule=self._pipeline_schedule() if virtual_stages else "",
            virtual_stages=virtual_stages,
        )
        unit = self.world_size * (recipe.train.micro_batch or 1)
        if is_fixed:
            global_batch = self.resolve_global_batch(self.build_layout(strategy or "fsdp"))
        else:
            global_batch = recipe.train.global_batch or default_global_batch(unit, self.min_global_batch)
        return SearchProblem(
            model=self.decoder,
            world_size=self.world_size,
            gpus_per_node=job.gpus,
            seq_len=self.sample_tokens,
            global_batch=global_batch,
            precision=self.precision,
            parallel=parallel,
            machine=build_machine(self.gpu, job.gpus, self.precision, self.profile),
            framework=self.framework,
            limit_gib=self.limit_gib,
            constraints=constraints,
            attention=self.attention,
            sequences_per_sample=recipe.sequences_per_sample,
        )

    def build_pass_config(self, layout: Layout, micro_batch: int) -> PassConfig:
        """Return the configuration of one forward and backward pass."""
        is_half = self.precision in ("bf16", "fp16", "fp8")
        return PassConfig(
            seq_len=self.sample_tokens,
            micro_batch=micro_batch,
            grad_accum=max(1, self.resolve_global_batch(layout) // (layout.data_parallel * micro_batch)),
            precision=self.precision,
            autocast=is_half and not layout.is_fully_sharded,
            device=self.device,
            parallel=self.spec.recipe.parallel,
            has_document_mask=self.attention.has_dense_mask(layout, self.device),
            is_attention_plain=self.attention.backend == "math",
        )

    def resolve_global_batch(self, layout: Layout) -> int:
        """Return the recipe's global batch, or the default for ``layout``."""
        train = self.spec.recipe.train
        # Every pipeline schedule supports multiples of its ranks.
        return train.global_batch or default_global_batch(
            layout.data_parallel * (train.micro_batch or non_decoder.group_size(self.spec.recipe)) * layout.pp,
            self.min_global_batch,
        )

    @property
    def min_global_batch(self) -> int:
        """Smallest default for sequences per step: the preset's, otherwise a small one."""
        model = self.spec.recipe.model
        defaults = presets.find_training_defaults(model.preset, model.kind)
        return defaults.global_batch if defaults is not None else DEFAULT_GLOBAL_BATCH

    def estimate_memory(self, layout: Layout, micro_batch: int) -> MemoryEstimate:
        """Return the memory estimate of one rank."""
        if self.model_stats is not None:
            return user_model.estimate_user_model(
                self.model_stats, layout, self.build_pass_config(layout, micro_batch), self.capacity_gib
            )
        if self.decoder is None:
            return non_decoder.estimate_states(self.spec.recipe, layout, self.capacity_gib)
        return memory.estimate_memory(
            self.decoder, layout, self.build_pass_config(layout, micro_batch), self.capacity_gib, self.framework
        )

    def split_and_estimate(self, layout: Layout) -> tuple[Batch, float]:
        """Return the batch split under ``layout`` and its peak memory in GiB."""
        recipe, global_batch = self.spec.recipe, self.resolve_global_batch(layout)
        check_divides(global_batch, layout.data_parallel, recipe.train.micro_batch)
        non_decoder.check_groups(recipe, global_batch, recipe.train.micro_batch, layout.data_parallel)
        rank_batch, group = global_batch // layout.data_parallel, non_decoder.group_size(recipe)

        def estimate_peak(micro_batch: int) -> float:
            return self.estimate_memory(layout, micro_batch).peak_gib or 0.0

        def fits(micro_batch: int) -> bool:
            if self.decoder is None:
                return micro_batch <= non_decoder.MAX_UNESTIMATED_MICRO_BATCH
            return estimate_peak(micro_batch) <= self.limit_gib

        batch = split_batch(
            global_batch,
            layout.data_parallel,
            recipe.tokens_per_sample,
            micro_batch=recipe.train.micro_batch,
            fits=fits,
            unsupported_reason=lambda n: (
                pipeline_schedules.unsupported_reason(layout, n)
                or ("it splits a group" if rank_batch // n % group else "")
            ),
            min_micro_batches=pipeline_schedules.min_micro_batches(layout),
            alternative="parallel.schedule = 'gpipe'" if layout.pp > 1 and recipe.parallel.virtual_stages < 2 else "",
        )
        return batch, estimate_peak(batch.micro_batch)

    def may_not_fit(self, peak_gib: float | None) -> bool:
        """Return whether a rank needs more than the limit on a GPU whose memory is only assumed."""
        is_assumed = self.device == "cuda" and self.gpu is None
        return is_assumed and peak_gib is not None and peak_gib > self.limit_gib

    def format_limit(self) -> str:
        """Return the memory limit of a rank and its origin as text."""
        prefix = f"{self.limit_gib:.1f} GiB ({SAFE_FRACTION:.0%} of"
        if self.gpu:
            return f"{prefix} the {self.capacity_gib:g} GiB of {self.gpu.name})"
        if self.device == "cpu":
            return f"{prefix} {self.assumed_gib:g} GiB, assumed for a CPU rank)"
        if self.spec.job.gpu_type:
            reason = f"GPU type {self.spec.job.gpu_type!r} is unknown"
        else:
            reason = "the GPU type is unknown; set --gpu-type"
        return f"{prefix} {self.assumed_gib:g} GiB, assumed because {reason})"
