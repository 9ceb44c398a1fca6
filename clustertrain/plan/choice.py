"""The layout and the batch split of a request, with what spoke for them and against others."""

from __future__ import annotations

import dataclasses

import msgspec

from clustertrain.plan import advice, checks, crossing, kinds, notes, pipeline, search, why_chosen
from clustertrain.plan import batch as batches
from clustertrain.plan import counted as counts
from clustertrain.plan import memory as memories
from clustertrain.plan import stack as stacks
from clustertrain.plan.activations import Pass
from clustertrain.plan.counted import Counted
from clustertrain.plan.layout import SHARDED, Batch, Layout, Strategy, counted, data_degrees
from clustertrain.plan.machine import gpu_of, machine_of
from clustertrain.plan.memory import SAFE_FRACTION, Memory
from clustertrain.plan.search import Candidate, Found, Problem, Wanted
from clustertrain.plan.stack import CLUSTERTRAIN
from clustertrain.plan.time import Step
from clustertrain.spec import hardware
from clustertrain.spec.cluster import ClusterProfile
from clustertrain.spec.job import RunSpec

ASSUMED_GIB = 16.0  # where the GPU is not known: the smallest memory of the data-centre GPUs in use
ASSUMED_CPU_GIB = 4.0  # a rank's share of a host's memory
_WHY_FSDP_KEEPS = (
    "reshard_after_forward off: with pp the parameters would be gathered again for each micro-batch, so a stage keeps "
    "its own whole until the step ends"
)


class Rejected(msgspec.Struct, frozen=True):
    strategy: str
    why: str


class Choice:
    """One decision in the making."""

    def __init__(self, spec: RunSpec, device: str, profile: ClusterProfile, own: Counted | None = None) -> None:
        """``own``: what was counted of a model that the planner itself knows nothing of."""
        self.spec = spec
        self.own = own
        self.device = device
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
        self.gpu_name = self.gpu.name if self.gpu else ""
        if self.gpu is not None:
            self.machine = machine_of(self.gpu, spec.job.gpus, self.precision, profile)
        self.found: Found | None = None
        self.step: Step | None = None
        self.way_out = ""
        self.layout = Layout()
        self.batch = Batch(micro_batch=0, grad_accum=0, global_batch=0, tokens_per_step=0)
        self.memory = Memory(capacity_gib=self.capacity)
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.rejected: list[Rejected] = []

    def decide(self) -> None:
        """For the built-in trainer, whose model is known."""
        wanted, why = self._wanted()
        self._explain_gpu()
        if self.decoder is not None and self.gpu is not None:
            self._by_search(wanted, why)
            self._explain_batch()
            self._explain_layout()
            if self.pp > 1:  # a pipeline that the search has taken by itself is worth its bubble
                fastest = not self.spec.recipe.train.micro_batch
                self.warnings += notes.of_bubble(self.layout, self.batch, fastest=fastest)
            self._explain_memory()
            return
        if wanted is None and self.decoder is None:
            wanted, why = "ddp", "ddp: the memory of this model is not estimated; --layout fsdp shards it"
        if wanted is None:
            self._by_memory()
        else:
            layout = self.layout_of(wanted)
            self._take(layout, why if layout.strategy == wanted else self._why_single())
        self._explain_batch()
        self._explain_layout()
        self.warnings += notes.of_bubble(self.layout, self.batch)
        self._explain_count()
        self._explain_memory()

    def _explain_memory(self) -> None:
        peak = self.memory.peak_gib or 0.0
        if self.device == "cuda" and self.gpu is None and peak > self.limit:
            self.warnings.append(f"may not fit: {peak:.1f} GiB a rank, more than {self._limit_in_words()}")
        if self.memory.fits is False:
            self.reasons.append(f"does not fit: {peak:.1f} GiB a rank of {self.capacity:g} GiB")
        elif self.capacity and peak > self.limit:
            self.warnings.append(
                f"tight: {peak:.1f} GiB a rank, more than {self._limit_in_words()}; the estimate may be off by as much"
            )

    def decide_for_script(self) -> None:
        wanted, why = self._wanted()
        self.layout = self.layout_of(wanted or "ddp")
        if self.layout.strategy == "single":
            why = self._why_single()
        elif wanted is None:
            why = "ddp: the model of a script is not known before it runs; --layout fsdp shards it"
        self.reasons.append(why)
        self._explain_layout()

    # -- which strategy

    def _wanted(self) -> tuple[Strategy | None, str]:
        """The strategy that the user asked for by name or by degrees, and those words; None: free to choose."""
        job = self.spec.job
        if job.layout != "auto":
            return job.layout, f"{job.layout}: asked for with --layout"
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
            kinds.whole(self.spec.recipe.model, layout)
        return layout

    def _by_memory(self) -> None:
        replicas = self.layout_of("ddp")
        if replicas.gradient_ranks == 1:
            self._take(replicas, self._why_single())
            return
        split, need = self._split_and_need(replicas)
        limit = self._limit_in_words()
        name = replicas.strategy
        if need <= self.limit:
            self._take(replicas, f"{name}: {need:.2f} GiB a rank is within {limit}, and it communicates least")
            self.rejected.append(
                Rejected("fsdp", f"not needed: a replica needs {need:.2f} GiB{self._what_fsdp_sends(replicas)}")
            )
            return
        why = f"a replica needs {need:.2f} GiB a rank at micro_batch {split.micro_batch}, more than {limit}"
        self.rejected.append(Rejected(name, why))
        over = replicas.gradient_ranks
        self._take(self.layout_of("fsdp"), f"fsdp: {why}; shards parameters, gradients and optimizer over {over} ranks")

    def _take(self, layout: Layout, reason: str) -> None:
        self.layout = layout
        self.batch, _ = self._split_and_need(layout)
        self.memory = self._memory(layout, self.batch.micro_batch)
        self.reasons.append(reason)

    # -- by search

    def _by_search(self, strategy: Strategy | None, why: str) -> None:
        """Take the fastest layout that fits, among those that the user leaves open."""
        if strategy is not None or self._degrees_given():
            checked = self.layout_of(strategy or "fsdp")  # refuses what cannot be
            batches.check_divides(
                self._global_batch(checked), checked.data_parallel, self.spec.recipe.train.micro_batch
            )
        problem = self._problem(strategy)
        found = search.search(problem)
        if found.best is None:  # then nearer to the border than one should go
            found = search.search(dataclasses.replace(problem, limit_gib=self.capacity or self.limit))
        if found.best is None:
            self._nothing_fits(problem, found, strategy, why)
            return
        self.found = found
        self._take_candidate(found.best)
        single = found.best.layout.strategy == "single" and (self.world == 1 or self._degrees_given())
        self.reasons += why_chosen.chosen(found, self.gpu_name, self._why_single() if single else why)
        self.rejected += [Rejected(kind, said) for kind, said in why_chosen.rejected(problem, found)]
        self.warnings += why_chosen.narrowed(problem, found.best)

    def _nothing_fits(self, problem: Problem, found: Found, strategy: Strategy | None, why: str) -> None:
        least = min(found.smallest, key=lambda c: c.peak_gib, default=None)
        if least is None:
            self._take(self.layout_of(strategy or "ddp"), why or "ddp")
            return
        self._take_candidate(least)
        self.step = None  # how fast it would be does not matter
        self.reasons.append(f"{why or least.layout.words()}: nothing fits; this needs least")
        self.rejected += [Rejected(kind, said) for kind, said in why_chosen.rejected(problem, found)]
        self.way_out = why_chosen.way_out(problem, self.gpu_name)

    def _problem(self, strategy: Strategy | None) -> Problem:
        job, recipe, parallel = self.spec.job, self.spec.recipe, self.spec.recipe.parallel
        assert self.decoder is not None and self.gpu is not None
        fixed = strategy is not None or self._degrees_given()
        stages = parallel.stages_a_rank if parallel.schedule != "auto" or parallel.split else 0
        wanted = Wanted(
            strategy=strategy,
            tp=self.tp if fixed else 0,
            cp=self.cp if fixed else 0,
            pp=self.pp if fixed else 0,
            dp_replicate=job.dp_replicate,
            dp_shard=job.dp_shard,
            micro_batch=recipe.train.micro_batch,
            recompute="" if parallel.activation_checkpointing == "auto" else parallel.activation_checkpointing,
            schedule=self._schedule() if stages else "",
            virtual_stages=stages,
        )
        unit = self.world * (recipe.train.micro_batch or 1)
        if fixed:
            whole = self._global_batch(self.layout_of(strategy or "fsdp"))
        else:
            whole = recipe.train.global_batch or batches.default_global_batch(unit)
        return Problem(
            model=self.decoder,
            world=self.world,
            gpus_per_node=job.gpus,
            seq_len=recipe.data.seq_len,
            global_batch=whole,
            compute=self.precision,
            parallel=parallel,
            machine=self.machine,
            stack=stacks.compiled(CLUSTERTRAIN) if parallel.compile else CLUSTERTRAIN,
            limit_gib=self.limit,
            wanted=wanted,
        )

    def _degrees_given(self) -> bool:
        job = self.spec.job
        return bool(job.tp or job.cp or job.pp or job.dp_replicate or job.dp_shard)

    def _take_candidate(self, best: Candidate) -> None:
        self.layout, self.step = best.layout, best.step
        whole = best.run.micro_batch * best.run.grad_accum * best.layout.data_parallel
        self.batch = Batch(
            micro_batch=best.run.micro_batch,
            grad_accum=best.run.grad_accum,
            global_batch=whole,
            tokens_per_step=whole * self.spec.recipe.data.seq_len,
        )
        self.memory = self._memory(best.layout, best.run.micro_batch)

    # -- the numbers

    def _pass(self, layout: Layout, micro_batch: int) -> Pass:
        half = self.precision in ("bf16", "fp16", "fp8")
        return Pass(
            seq_len=self.spec.recipe.data.seq_len,
            micro_batch=micro_batch,
            grad_accum=max(1, self._global_batch(layout) // (layout.data_parallel * micro_batch)),
            compute=self.precision,
            autocast=half and not layout.fully_sharded,
            device=self.device,
            parallel=self.spec.recipe.parallel,
        )

    def _global_batch(self, layout: Layout) -> int:
        train = self.spec.recipe.train
        # Of a pipeline every schedule runs a multiple of its ranks.
        return train.global_batch or batches.default_global_batch(
            layout.data_parallel * (train.micro_batch or kinds.group(self.spec.recipe.model)) * layout.pp
        )

    def _memory(self, layout: Layout, micro_batch: int) -> Memory:
        if self.own is not None:
            return counts.memory(self.own, layout, self._pass(layout, micro_batch), self.capacity)
        if self.decoder is None:
            return kinds.states(self.spec.recipe.model, layout, self.capacity)
        stack = stacks.compiled(CLUSTERTRAIN) if self.spec.recipe.parallel.compile else CLUSTERTRAIN
        return memories.of_rank(self.decoder, layout, self._pass(layout, micro_batch), self.capacity, stack)

    def _split_and_need(self, layout: Layout) -> tuple[Batch, float]:
        """The batch split under ``layout`` and the peak in GiB that goes with it."""
        recipe, whole = self.spec.recipe, self._global_batch(layout)
        batches.check_divides(whole, layout.data_parallel, recipe.train.micro_batch)
        kinds.check_groups(recipe.model, whole, recipe.train.micro_batch, layout.data_parallel)
        share, group = whole // layout.data_parallel, kinds.group(recipe.model)

        def need(micro_batch: int) -> float:
            return self._memory(layout, micro_batch).peak_gib or 0.0

        def fits(micro_batch: int) -> bool:
            if self.decoder is None:
                return micro_batch <= kinds.LARGEST_MICRO_BATCH
            return need(micro_batch) <= self.limit

        split = batches.split(
            whole,
            layout.data_parallel,
            recipe.tokens_per_sample,
            micro_batch=recipe.train.micro_batch,
            fits=fits,
            why_not=lambda n: pipeline.why_not(layout, n) or ("it splits a group" if share // n % group else ""),
            enough=pipeline.enough(layout),
            way_out="parallel.schedule = 'gpipe'" if layout.pp > 1 and recipe.parallel.virtual_stages < 2 else "",
        )
        return split, need(split.micro_batch)

    # -- the words

    def _why_single(self) -> str:
        if self.world == 1:
            return "single: one rank, nothing to share"
        return f"single: {self._model_degrees()} takes all {self.world} ranks, one data-parallel rank is left"

    def _model_degrees(self) -> str:
        return " x ".join(f"{n} {d}" for n, d in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp)) if d > 1)

    def _explain_batch(self) -> None:
        train, batch, layout = self.spec.recipe.train, self.batch, self.layout
        if train.micro_batch:
            micro = "asked for"
        elif self.found is not None:
            micro = "the fastest that fits"
        elif layout.pp > 1:
            micro = f"the largest that divides, fits and leaves {pipeline.enough(layout)} micro-batches, else 1"
        elif self.decoder is None:
            micro = f"the largest that divides, up to {kinds.LARGEST_MICRO_BATCH}: its memory is not estimated"
        else:
            micro = "the largest that divides and fits"
        named = "" if train.global_batch else "; the recipe names no global batch"
        piped = ", the pipeline's micro-batches," if layout.pp > 1 else ""
        self.reasons.append(
            f"batch: {batch.global_batch} = micro_batch {batch.micro_batch} ({micro}) x grad_accum "
            f"{batch.grad_accum}{piped} x {counted(layout.data_parallel, 'data-parallel rank')}"
            f"{advice.tokens(self.spec.recipe, batch)}{named}"
        )
        reasons, warnings = advice.of_learning_rate(self.spec.recipe, batch, layout.data_parallel)
        self.reasons += reasons
        self.warnings += warnings

    def _explain_layout(self) -> None:
        layout, job, recipe = self.layout, self.spec.job, self.spec.recipe
        if recipe.train.precision == "auto" and self.spec.script is None:
            self.reasons.append(f"precision {self.precision}: {self._why_precision()}")
        if layout.pp > 1 and layout.sharded:
            self.reasons.append(_WHY_FSDP_KEEPS)
        work = None
        if self.decoder is not None:
            work = crossing.Work(self.decoder, self._pass(layout, self.batch.micro_batch))
        self.warnings += notes.of_layout(layout, recipe.parallel, job.nodes)
        if self.spec.script is not None or recipe.model.entry:
            whose = "the model of a script" if self.spec.script is not None else f"the model of {recipe.model.entry}"
            self.warnings += notes.of_unseen_model(layout, whose)
        self.warnings += checks.of_device(self.precision, recipe.parallel, layout, self.device, self.gpu)
        self.warnings += crossing.warnings(layout, job.nodes, job.gpus, self.device, work)

    def _explain_count(self) -> None:
        if self.own is None:
            return
        model = self.spec.recipe.model
        name = model.entry or f"the {model.kind}"
        self.reasons.append(counts.words(self.own, name, self.layout, self.batch.micro_batch))
        warning = counts.warning(self.own, self.memory, self.limit, self.layout)
        self.warnings += [warning] if warning else []

    def _what_fsdp_sends(self, replicas: Layout) -> str:
        # In a pipeline the parameters stay gathered for the step: one all-gather and one reduce-scatter, an all-reduce.
        return ", and sharding sends 3/2 of ddp's volume" if replicas.pp == 1 else ""

    def _why_precision(self) -> str:
        if self.precision == "bf16":
            return "the matrix units are made for it; weights and optimizer stay fp32"
        if self.gpu is not None:
            return f"{self.gpu.name} has no bf16 in hardware; train.precision = 'fp16' is possible, with a scaled loss"
        return "bf16 is slower on CPUs"

    def _limit_in_words(self) -> str:
        share = f"{self.limit:.1f} GiB ({SAFE_FRACTION:.0%} of"
        if self.gpu:
            return f"{share} the {self.capacity:g} GiB of {self.gpu.name})"
        if self.device == "cpu":
            return f"{share} {self.assumed:g} GiB, assumed for a rank on the CPU)"
        named = f"GPU type {self.spec.job.gpu_type!r}" if self.spec.job.gpu_type else "the GPU type"
        return f"{share} {self.assumed:g} GiB, assumed because {named} is not known; say --gpu-type)"

    def _explain_gpu(self) -> None:
        if self.device == "cuda" and self.gpu is None and self.spec.job.gpu_type:
            self.warnings.append(
                f"GPU type {self.spec.job.gpu_type!r} is not known, so no speed is predicted; known are "
                f"{', '.join(gpu.name for gpu in hardware.CATALOGUE)}; another goes into the cluster profile, as [gpu] "
                "with name, memory_gib, tflops, memory_gb_s, link_gb_s and fabric_gb_s"
            )
