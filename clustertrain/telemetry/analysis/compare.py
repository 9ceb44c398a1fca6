"""Comparison of the telemetry of two runs, in the shape of ``clustertrain compare --json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from clustertrain.run.usage.goodput import TIME_CATEGORIES
from clustertrain.telemetry.report_schema import GpuSummary, Insight, Stats, Summary


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    run: str
    """Id of the run."""
    job_id: str | None
    """Its newest job; null before the first one."""
    state: str | None
    """Why its last attempt ended, such as `completed`; null until that is recorded."""
    nodes: int
    """Number of nodes with telemetry."""
    gpus: int
    """Number of GPUs with telemetry."""
    gpu_names: list[str]
    """Their model names, each once."""
    attempts: int
    """Number of attempts."""


class MetricComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of both runs."""

    unit: str
    """Unit of the values, such as `s`, `tokens/s` or `ratio` (0 to 1); empty for the loss."""
    a: float | None
    """The value of run a; null if it is missing."""
    b: float | None
    """The value of run b; null if it is missing."""
    difference: float | None
    """b - a; null if a value is missing."""
    ratio: float | None
    """b / a; null if a value is missing or a is 0."""
    better: str | None = None
    """``lower`` or ``higher``; null if neither, or if the number of GPUs or the batch size makes them incomparable."""
    missing: dict[str, str] = {}
    """Why a value is missing, by side (``a``, ``b``)."""


class TelemetryComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the telemetry of two runs."""

    a: Side
    """The first run."""
    b: Side
    """The second run."""
    figures: dict[str, MetricComparison]
    """Metrics of the whole runs by name, some normalized per GPU, step or token."""
    goodput: dict[str, MetricComparison]
    """Share of the wall time by category, such as `productive_s`, 0 to 1."""
    only_a: list[Insight]
    """Insights of a with a code that b lacks."""
    only_b: list[Insight]
    """Insights of b with a code that a lacks."""


def compare_summaries(a: Summary, b: Summary) -> TelemetryComparison:
    """Compare two summaries."""
    codes = [{n.code for n in s.insights} for s in (a, b)]
    figures = {name: _compare_metric(rule, a, b) for name, rule in METRIC_RULES.items()}
    unjudged = [
        *(_GPU_COUNT_DEPENDENT if len(a.gpus) != len(b.gpus) else ()),
        *(() if _have_equal_steps(a, b) else _BATCH_SIZE_DEPENDENT),
    ]
    figures.update({name: msgspec.structs.replace(figures[name], better=None) for name in unjudged})
    return TelemetryComparison(
        a=_side(a),
        b=_side(b),
        figures=figures,
        goodput={part: _compare_metric(_goodput_rule(part), a, b) for part in TIME_CATEGORIES},
        only_a=[n for n in a.insights if n.code not in codes[1]],
        only_b=[n for n in b.insights if n.code not in codes[0]],
    )


def _have_equal_steps(a: Summary, b: Summary) -> bool:
    size_a, size_b = _step_size(a), _step_size(b)
    return size_a is not None and size_b is not None and math.isclose(size_a, size_b, rel_tol=_STEP_SIZE_TOLERANCE)


def _side(s: Summary) -> Side:
    names = sorted({g.name for g in s.gpus if g.name})
    return Side(
        run=s.run,
        job_id=s.job_id,
        state=s.state,
        nodes=len(s.hosts),
        gpus=len(s.gpus),
        gpu_names=names,
        attempts=len(s.attempts),
    )


class MetricRule(msgspec.Struct, frozen=True):
    """Display name and unit of a metric, and functions for its value and the reason why it is missing."""

    title: str  # for display
    unit: str
    better: str | None
    value: Callable[[Summary], float | None]
    missing_reason: Callable[[Summary], str]


def _compare_metric(rule: MetricRule, a: Summary, b: Summary) -> MetricComparison:
    values = rule.value(a), rule.value(b)
    missing = {side: rule.missing_reason(s) for side, s, v in zip("ab", (a, b), values, strict=True) if v is None}
    difference = ratio = None
    if values[0] is not None and values[1] is not None:
        difference = values[1] - values[0]
        ratio = values[1] / values[0] if values[0] else None
    return MetricComparison(
        unit=rule.unit,
        a=values[0],
        b=values[1],
        difference=difference,
        ratio=ratio,
        better=rule.better,
        missing=missing,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None


def _training_value(name: str) -> Callable[[Summary], float | None]:
    def value(s: Summary) -> float | None:
        current: Any = s.training
        for part in name.split("."):
            current = getattr(current, part, None)
        return None if current is None else float(current)

    return value


def _why_no_steps(s: Summary) -> str:
    if s.training is None or not s.training.steps:
        return "no step was recorded"
    return "unknown for this model, data or GPU" if s.training.step_s is not None else "no step time was recorded"


def _gpu_mean(stats: Callable[[GpuSummary], Stats | None]) -> Callable[[Summary], float | None]:
    return lambda s: _mean(None if (gpu_stats := stats(g)) is None else gpu_stats.mean for g in s.gpus)


def _why_no_gpu_value(*fields: str) -> Callable[[Summary], str]:
    """Return a function that gives the reason why a GPU metric is missing."""

    def why(s: Summary) -> str:
        if not s.gpus:
            return next((h.nvml_error for h in s.hosts if h.nvml_error), "no GPU was recorded")
        return next((g.missing[f] for g in s.gpus for f in fields if f in g.missing), "no sample has it")

    return why


def _training_utilization(s: Summary) -> float | None:
    return _mean(g.phases["train"].utilization for g in s.gpus if "train" in g.phases)


def _memory_peak_gib(s: Summary) -> float | None:
    return max((g.memory_used_gib.max for g in s.gpus if g.memory_used_gib is not None), default=None)


def _energy_per_gpu_j(s: Summary) -> float | None:
    return _mean(g.energy_j for g in s.gpus)


def _gpu_hours(s: Summary) -> float | None:
    return None if s.waste is None else s.waste.gpu_hours


def _energy_j(s: Summary) -> float | None:
    """Return the energy of all GPUs; None if any of them was not measured."""
    if not s.gpus or any(g.energy_j is None for g in s.gpus) or any(h.nvml_error for h in s.hosts):
        return None
    return s.training.energy_j if s.training is not None else sum(g.energy_j or 0.0 for g in s.gpus)


def _per_step(total: Callable[[Summary], float | None]) -> Callable[[Summary], float | None]:
    def value(s: Summary) -> float | None:
        amount = total(s)
        return amount / s.training.steps if amount is not None and s.training is not None and s.training.steps else None

    return value


def _gpu_s(s: Summary) -> float | None:
    return None if s.waste is None else s.waste.gpu_hours * 3600


def _gpu_s_per_million_tokens(s: Summary) -> float | None:
    gpu_s = _gpu_s(s)
    return gpu_s / s.training.tokens * 1e6 if gpu_s is not None and s.training and s.training.tokens else None


def _why_not_per_step(reason: Callable[[Summary], str]) -> Callable[[Summary], str]:
    return lambda s: _why_no_steps(s) if s.training is None or not s.training.steps else reason(s)


def _step_size(s: Summary) -> float | None:
    """Return the tokens per step, or the samples for data without tokens."""
    if s.training is None or not s.training.steps:
        return None
    total = s.training.tokens or s.training.samples
    return total / s.training.steps if total else None


def _host_memory_peak_gib(s: Summary) -> float | None:
    return max((h.processes.rss_gib.max for h in s.hosts if h.processes is not None), default=None)


def _goodput_ratio(s: Summary) -> float | None:
    return None if s.goodput is None else s.goodput.ratio


def _why_no_goodput(s: Summary) -> str:
    return "no attempt has started" if s.goodput is None else "the program has reported no steps"


# In display order.
METRIC_RULES: dict[str, MetricRule] = {
    "step_p50_s": MetricRule("step time", "s", "lower", _training_value("step_s.p50"), _why_no_steps),
    "step_p95_s": MetricRule("step time, p95", "s", "lower", _training_value("step_s.p95"), _why_no_steps),
    "tokens_per_s_per_gpu": MetricRule(
        "tokens/s per GPU", "tokens/s", "higher", _training_value("tokens_per_s_per_gpu"), _why_no_steps
    ),
    "tokens_per_s": MetricRule("tokens/s", "tokens/s", "higher", _training_value("tokens_per_s"), _why_no_steps),
    "mfu": MetricRule("MFU", "ratio", "higher", _training_value("mfu"), _why_no_steps),
    "joules_per_token": MetricRule(
        "energy per token", "J", "lower", _training_value("joules_per_token"), _why_no_steps
    ),
    "data_wait_share": MetricRule(
        "waiting for data", "ratio", "lower", _training_value("data_wait_share"), _why_no_steps
    ),
    "steps": MetricRule("steps", "steps", None, _training_value("steps"), _why_no_steps),
    "loss": MetricRule("loss", "", "lower", _training_value("loss"), _why_no_steps),
    "utilization": MetricRule(
        "GPU utilization", "ratio", "higher", _gpu_mean(lambda g: g.utilization), _why_no_gpu_value("utilization")
    ),
    "utilization_training": MetricRule(
        "while training", "ratio", "higher", _training_utilization, lambda s: "no rank reported its phases"
    ),
    "sm_activity": MetricRule(
        "SM activity", "ratio", "higher", _gpu_mean(lambda g: g.sm_activity), _why_no_gpu_value("sm_activity")
    ),
    "tensor_activity": MetricRule(
        "tensor activity",
        "ratio",
        "higher",
        _gpu_mean(lambda g: g.tensor_activity),
        _why_no_gpu_value("tensor_activity"),
    ),
    "power_w": MetricRule("power per GPU", "W", None, _gpu_mean(lambda g: g.power_w), _why_no_gpu_value("power_w")),
    "energy_j": MetricRule("energy", "J", None, _energy_j, _why_no_gpu_value("energy_j", "power_w")),
    "energy_per_step_j": MetricRule(
        "energy per step",
        "J",
        "lower",
        _per_step(_energy_j),
        _why_not_per_step(_why_no_gpu_value("energy_j", "power_w")),
    ),
    "energy_per_gpu_j": MetricRule(
        "energy per GPU", "J", None, _energy_per_gpu_j, _why_no_gpu_value("energy_j", "power_w")
    ),
    "sm_clock_mhz": MetricRule(
        "SM clock", "MHz", None, _gpu_mean(lambda g: g.sm_clock_mhz), _why_no_gpu_value("sm_clock_mhz")
    ),
    "memory_peak_gib": MetricRule(
        "GPU memory, peak", "GiB", None, _memory_peak_gib, _why_no_gpu_value("memory_used_gib")
    ),
    "host_memory_peak_gib": MetricRule(
        "host memory, peak", "GiB", None, _host_memory_peak_gib, lambda s: "no process was recorded"
    ),
    "gpu_hours": MetricRule("GPU-hours", "h", None, _gpu_hours, _why_no_gpu_value()),
    "gpu_s_per_step": MetricRule(
        "GPU time per step", "s", "lower", _per_step(_gpu_s), _why_not_per_step(_why_no_gpu_value())
    ),
    "gpu_s_per_million_tokens": MetricRule(
        "GPU time, 1M tokens", "s", "lower", _gpu_s_per_million_tokens, _why_not_per_step(_why_no_gpu_value())
    ),
    "goodput": MetricRule("goodput", "ratio", "higher", _goodput_ratio, _why_no_goodput),
}

# Incomparable between different numbers of GPUs.
_GPU_COUNT_DEPENDENT = ("step_p50_s", "step_p95_s", "tokens_per_s")
# Incomparable between different batch sizes.
_BATCH_SIZE_DEPENDENT = ("gpu_s_per_step", "energy_per_step_j")
_STEP_SIZE_TOLERANCE = 0.02  # for lost rows, or the last batch of an epoch


def _goodput_rule(part: str) -> MetricRule:
    def value(s: Summary) -> float | None:
        if s.goodput is None or not s.goodput.wall_s or (part == "productive_s" and s.goodput.ratio is None):
            return None
        return float(getattr(s.goodput, part) / s.goodput.wall_s)

    return MetricRule(part, "ratio", "higher" if part == "productive_s" else "lower", value, _why_no_goodput)
