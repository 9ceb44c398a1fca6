"""What to train. A recipe is a TOML file with these tables; every key has a default, unknown keys and those that
nothing reads (:mod:`clustertrain.config.unused_keys`) fail.

The same file may carry ``[job]`` (see :mod:`clustertrain.config.job`) and ``[env]``; options of the command line win.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from clustertrain import settings
from clustertrain.config import cross_checks
from clustertrain.config.contract import ContractSpec, MetricMode
from clustertrain.config.data import BUILT_IN_DATASETS, DataKind, DataSpec
from clustertrain.config.durations import parse_duration_s
from clustertrain.config.evaluation import (
    HIGHER_IS_BETTER,
    SLICE_SEPARATOR,
    VALIDATION_PREFIX,
    EvaluationSpec,
    MetricName,
)
from clustertrain.config.model import DATA_KINDS_BY_MODEL, ConvnetSpec, ModelKind, TwoTowerSpec
from clustertrain.config.objective import ObjectiveKind, ObjectiveSpec
from clustertrain.config.optim import OptimSpec
from clustertrain.config.parallel import ParallelSpec
from clustertrain.config.parsing import did_you_mean
from clustertrain.config.presets import PRESETS
from clustertrain.config.ranges import check_entry, check_positive, check_range
from clustertrain.config.schedule import ScheduleSpec
from clustertrain.config.stability import StabilitySpec
from clustertrain.config.storage_paths import check_node_folder, is_url
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.config.tracking import TrackingSpec

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]
CheckpointEngine = Literal["raw", "dcp", "torchsnapshot"]

AUTO = "auto"
KEEP_BEST_AUTO = -1  # of checkpoint.keep_best


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[model]`` table. A decoder is Llama-style: RMSNorm, RoPE, SwiGLU, grouped-query attention; so is each
    encoder of a two-tower model, and has these sizes. What does not belong to the kind in use is refused.

    ``preset`` names sizes (:mod:`clustertrain.config.presets`) which ``submit`` has put under those of the recipe.
    """

    kind: ModelKind = "decoder"
    preset: str = ""
    entry: str = ""  # "package.module:function", which is called with args and returns the module to train
    args: dict[str, Any] = {}
    convnet: ConvnetSpec = ConvnetSpec()
    two_tower: TwoTowerSpec = TwoTowerSpec()
    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn_dim: int = 0  # 0: 8/3 of dim, rounded up to a multiple of 64
    max_seq_len: int = 0  # longer samples are refused; 0: no limit, as of rotary embeddings; an entry has its own
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0  # on residual branches and embeddings

    def __post_init__(self) -> None:
        self._check_names()
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "rope_theta", "norm_eps"):
            check_positive(name, getattr(self, name))
        if self.dim % self.heads:
            raise ValueError(f"dim = {self.dim} is not divisible by heads = {self.heads}")
        if self.dim // self.heads % 2:
            raise ValueError(f"dim / heads = {self.dim // self.heads} is odd: rotary embeddings need an even head size")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}")
        if self.ffn_dim < 0:
            raise ValueError(f"ffn_dim = {self.ffn_dim}: must be 0 (derived) or more")
        if self.max_seq_len < 0:
            raise ValueError(f"max_seq_len = {self.max_seq_len}: must be 0 (no limit) or more")
        check_range("dropout", self.dropout, 0.0, 0.9)

    def _check_names(self) -> None:
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"preset = {self.preset!r}: {did_you_mean(self.preset, list(PRESETS))}")
        if self.preset and (self.entry or self.kind == "convnet"):
            raise ValueError(f"preset = {self.preset!r} is one of the transformers: leave it out")
        if self.entry:
            check_entry(self.entry)
        if self.entry and self.kind != "decoder":
            raise ValueError(f"entry and kind = {self.kind!r}: the entry makes the model, leave the kind out")
        if self.args and not self.entry:
            raise ValueError("args are those of an entry, and there is none")

    @property
    def is_decoder(self) -> bool:
        return self.kind == "decoder" and not self.entry

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_dim or -(-(8 * self.dim // 3) // 64) * 64

    @property
    def gated(self) -> bool:
        return True  # SwiGLU

    def block_parameters(self) -> int:
        """Of one layer: attention, feed-forward and two norms."""
        head_dim = self.dim // self.heads
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * head_dim
        return attention + 3 * self.dim * self.hidden + 2 * self.dim

    def parameters(self) -> int:
        """Number of parameters, counted from the shapes; an entry's are not known."""
        if self.kind == "convnet":
            return self.convnet.parameters()
        if self.kind == "two-tower":
            tower = self.vocab_size * self.dim + self.layers * self.block_parameters() + self.dim
            return 2 * (tower + self.dim * self.two_tower.embedding) + self.two_tower.learn_temperature
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.layers * self.block_parameters() + embeddings + self.dim


class TrainSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps: int = 200
    global_batch: int = 0  # sequences an optimizer step, whatever the number of ranks; 0: chosen by the plan
    micro_batch: int = 0  # sequences a rank and forward pass; 0: chosen by the plan
    seed: int = 1
    precision: Precision = "auto"  # auto: bf16 on GPUs that have it, else fp32; weights and optimizer are always fp32
    log_every: int = 10
    deterministic: bool = False  # algorithms that give the same bits each time, slower: for debugging
    profile: str = ""  # "10:20": steps 10 to 19 of the run are profiled, on rank 0

    def __post_init__(self) -> None:
        for name in ("steps", "log_every"):
            check_positive(name, getattr(self, name))
        for name in ("global_batch", "micro_batch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (chosen by the plan) or more")
        check_range("seed", self.seed, 0, 2**63 - 1)
        if self.profile:
            match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", self.profile)
            if match is None or int(match[1]) >= int(match[2]):
                raise ValueError(
                    f'profile = {self.profile!r}: must be "first:end" with first < end; "10:20" are steps 10 to 19'
                )


class CheckpointSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[checkpoint]`` table. What was saved because the run was told to stop counts apart: it pushes out nothing,
    and goes when the next one is there."""

    every: int | str = (
        100  # steps; or a time, "10min"; or "auto": from the cost of a save and the time between failures
    )
    keep: int = 3  # newest ones
    keep_every: int = 0  # those of its multiples, in steps, are made and stay for ever; 0: none
    # The best ones by the scalar ``best``, besides the newest; -1: one where there are evaluations, else none.
    keep_best: int = KEEP_BEST_AUTO
    best: str = ""  # a logged scalar, of which the last value before the save counts; "": what the contract names
    best_mode: MetricMode = "auto"  # auto: as the contract says, or max for accuracy, top5 and recall_at_1, else min
    engine: CheckpointEngine = "raw"  # what writes the bytes; reading is the same for all
    background: bool = True  # training goes on while the bytes are written
    local: str = ""  # a folder on each node's own disk, where each rank's part goes first; $NAME and {job} in it
    remote: str = ""  # a URL that committed ones are copied to, as s3://bucket/prefix
    remote_keep: int = 0  # newest ones there; 0: as many as here

    def __post_init__(self) -> None:
        check_interval("every", self.every)
        self._check_locations()
        check_positive("keep", self.keep)
        if self.keep_every < 0:
            raise ValueError(f"keep_every = {self.keep_every}: must be 0 (none) or more")
        if self.keep_best < KEEP_BEST_AUTO:
            raise ValueError(f"keep_best = {self.keep_best}: must be 0 (none) or more, or -1 (chosen)")
        if self.keep_best < 1 and (self.best or self.best_mode != "auto"):
            setting = f"best = {self.best!r}" if self.best else f"best_mode = {self.best_mode!r}"
            raise ValueError(f"{setting} has no effect without keep_best: set keep_best = 1 or more, or leave it out")

    def _check_locations(self) -> None:
        if self.local:
            check_node_folder("local", self.local)
        if self.remote and not is_url(self.remote):
            raise ValueError(f"remote = {self.remote!r}: must be a URL, as s3://bucket/prefix or file:///folder")
        if self.remote_keep < 0:
            raise ValueError(f"remote_keep = {self.remote_keep}: must be 0 (as keep) or more")
        if self.remote_keep and not self.remote:
            raise ValueError(f"remote_keep = {self.remote_keep} has no effect without remote")
        for name in ("local", "remote"):
            if getattr(self, name) and not self.background:
                raise ValueError(f"{name} needs background = true: the processes that write then make the copies")


def _is_higher_better(metric: str) -> bool:
    """Whether more of it is better, by its name."""
    return metric.removeprefix(VALIDATION_PREFIX).partition(SLICE_SEPARATOR)[0] in HIGHER_IS_BETTER


def check_interval(name: str, every: int | str) -> None:
    """Raises ValueError where ``every`` is no number of steps, no time and not ``"auto"``."""
    if isinstance(every, int):
        check_positive(name, every)
    elif every != AUTO and parse_interval_s(name, every) <= 0:
        raise ValueError(f"{name} = {every!r}: must be greater than 0")


def parse_interval_s(name: str, text: str) -> float:
    """A length of time in seconds.

    Raises:
        ValueError: it is none; names ``name``.
    """
    seconds = parse_duration_s(text)
    if seconds is None:
        raise ValueError(f'{name} = {text!r}: must be a number of steps, a time ("30s", "10min", "2h") or "auto"')
    return seconds


class RehearsalSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Preemptions on purpose, delivered by the local backend as Slurm would: a warning, a grace time, a kill."""

    preempt_at_steps: tuple[int, ...] = ()
    grace_s: float = 20.0

    def __post_init__(self) -> None:
        for step in self.preempt_at_steps:
            check_positive("preempt_at_steps", step)
        check_positive("grace_s", self.grace_s)


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    contract: ContractSpec = ContractSpec()
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    optim: OptimSpec = OptimSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    parallel: ParallelSpec = ParallelSpec()
    train: TrainSpec = TrainSpec()
    stability: StabilitySpec = StabilitySpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    telemetry: TelemetrySpec = TelemetrySpec()
    tracking: TrackingSpec = TrackingSpec()
    rehearsal: RehearsalSpec = RehearsalSpec()

    def __post_init__(self) -> None:
        cross_checks.check_recipe(self)

    @property
    def data_kind(self) -> DataKind:
        """Never auto."""
        return DATA_KINDS_BY_MODEL[self.model.kind][0] if self.data.kind == "auto" else self.data.kind

    @property
    def data_path(self) -> Path | None:
        """The file or folder that the data is read from; None: it needs none."""
        return self._resolve_path("path")

    @property
    def validation_path(self) -> Path | None:
        """That of the validation data; None: it needs none, or there is none."""
        return self._resolve_path("validation_path")

    def _resolve_path(self, key: str) -> Path | None:
        path: str = getattr(self.data, key)
        is_built_in = self.data.entry or not path or path in BUILT_IN_DATASETS.get(self.data_kind, ())
        return None if is_built_in else settings.expand_user_path(path, f"data.{key}")

    @property
    def tokens_per_sample(self) -> int:
        """0 for images and for data of one's own."""
        sequences = {"text": 1, "tokens": 1, "pairs": 2}
        return sequences.get(self.data_kind, 0) * self.data.seq_len

    @property
    def is_text(self) -> bool:
        """Whether the model reads tokens, so that what holds for language models holds for it."""
        return self.data_kind in ("text", "tokens", "pairs")

    @property
    def objective_kind(self) -> ObjectiveKind:
        """Never auto; of an entry with a loss of its own it does not count."""
        if self.objective.kind != "auto":
            return self.objective.kind
        return "nt-xent" if self.model.kind == "two-tower" else "cross-entropy"

    @property
    def evaluated_metrics(self) -> tuple[MetricName, ...]:
        """What an evaluation gives besides the loss."""
        return self.evaluation.metrics or cross_checks.default_metrics(self.objective_kind, is_text=self.is_text)

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations, at least 1; there are none unless ``data.validates``."""
        return self.evaluation.every or max(1, self.train.steps // 10)

    @property
    def deciding_metric(self) -> str:
        """The name in the rows of the scalar by which the run is judged."""
        return self.contract.metric or (f"{VALIDATION_PREFIX}loss" if self.data.has_validation else "loss")

    @property
    def higher_is_better(self) -> bool:
        """Of the deciding metric."""
        if self.contract.mode != "auto":
            return self.contract.mode == "max"
        return _is_higher_better(self.deciding_metric)

    @property
    def best_mode(self) -> Literal["min", "max"]:
        """Of what decides which checkpoints are the best."""
        checkpoint = self.checkpoint
        if checkpoint.best_mode != AUTO:
            return "max" if checkpoint.best_mode == "max" else "min"
        if checkpoint.best in ("", self.deciding_metric):
            return "max" if self.higher_is_better else "min"
        return "max" if _is_higher_better(checkpoint.best) else "min"

    @property
    def profiled_steps(self) -> range:
        """Of ``train.profile``; empty where nothing is."""
        first, _, end = self.train.profile.partition(":")
        return range(int(first), int(end)) if self.train.profile else range(0)
