"""Two runs side by side: the shape of ``telemetry compare --json``. Keys are stable, more may follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from clustertrain.errors import ConfigError
from clustertrain.run.goodput import PARTS
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.analysis.settings_diff import Setting, differences, settings_of
from clustertrain.telemetry.analysis.summarize import summarize
from clustertrain.telemetry.report_schema import GpuSummary, Note, Stats, Summary


class Side(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    job_id: str | None
    state: str | None
    nodes: int
    gpus: int
    gpu_names: list[str]
    attempts: int


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """``difference`` is b - a and ``ratio`` b / a, None where one is missing; ``missing`` says why, by side. ``better``
    is ``lower`` or ``higher``, None where neither is, or where the runs had different numbers of GPUs and the figure is
    of all of them, or batches of different sizes and it is of a step."""

    unit: str
    a: float | None
    b: float | None
    difference: float | None
    ratio: float | None
    better: str | None = None
    missing: dict[str, str] = {}


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``figures`` are of whole runs, and of one GPU, a step or tokens where they grow with those; ``goodput`` has
    shares of the wall time. ``only_a`` and ``only_b`` are the notes whose kind the other run does not have."""

    a: Side
    b: Side
    figures: dict[str, Figure]
    goodput: dict[str, Figure]
    settings: list[Setting]
    only_a: list[Note]
    only_b: list[Note]
    unknown: list[str] = []  # whose settings could not be read, and why


def of_runs(a: RunDir, b: RunDir) -> Comparison:
    """Raises what :func:`summarize` raises."""
    found = of(summarize(a), summarize(b))
    settings, unknown = [], []
    for run in (a, b):
        try:
            settings.append(settings_of(run))
        except ConfigError as e:
            unknown.append(f"{run.id}: {e}")
    if unknown:
        return msgspec.structs.replace(found, unknown=unknown)
    return msgspec.structs.replace(found, settings=differences(*settings))


def of(a: Summary, b: Summary) -> Comparison:
    """Without the settings, which a summary does not have."""
    codes = [{n.code for n in s.notes} for s in (a, b)]
    figures = {name: _figure(rule, a, b) for name, rule in FIGURES.items()}
    neither = [*(_OF_ALL_GPUS if len(a.gpus) != len(b.gpus) else ()), *(() if _steps_alike(a, b) else _OF_A_STEP)]
    figures.update({name: msgspec.structs.replace(figures[name], better=None) for name in neither})
    return Comparison(
        a=_side(a),
        b=_side(b),
        figures=figures,
        goodput={part: _figure(_share(part), a, b) for part in PARTS},
        settings=[],
        only_a=[n for n in a.notes if n.code not in codes[1]],
        only_b=[n for n in b.notes if n.code not in codes[0]],
    )


def _steps_alike(a: Summary, b: Summary) -> bool:
    of_a, of_b = _step_size(a), _step_size(b)
    return of_a is not None and of_b is not None and math.isclose(of_a, of_b, rel_tol=_SAME_SIZE)


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


class Rule(msgspec.Struct, frozen=True):
    """A figure of a summary, and why it has none; its ``title`` for people."""

    title: str
    unit: str
    better: str | None
    value: Callable[[Summary], float | None]
    why: Callable[[Summary], str]


def _figure(rule: Rule, a: Summary, b: Summary) -> Figure:
    values = rule.value(a), rule.value(b)
    missing = {side: rule.why(s) for side, s, v in zip("ab", (a, b), values, strict=True) if v is None}
    difference = ratio = None
    if values[0] is not None and values[1] is not None:
        difference = values[1] - values[0]
        ratio = values[1] / values[0] if values[0] else None
    return Figure(
        unit=rule.unit,
        a=values[0],
        b=values[1],
        difference=difference,
        ratio=ratio,
        better=rule.better,
        missing=missing,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _of_training(name: str) -> Callable[[Summary], float | None]:
    def value(s: Summary) -> float | None:
        found: Any = s.training
        for part in name.split("."):
            found = getattr(found, part, None)
        return None if found is None else float(found)

    return value


def _no_steps(s: Summary) -> str:
    if s.training is None or not s.training.steps:
        return "no step was recorded"
    return "not known for this model, data or GPU" if s.training.step_s is not None else "its steps told no times"


def _mean_of(stats: Callable[[GpuSummary], Stats | None]) -> Callable[[Summary], float | None]:
    return lambda s: _mean(None if (found := stats(g)) is None else found.mean for g in s.gpus)


def _no_gpus(*fields: str) -> Callable[[Summary], str]:
    """Why a figure of the GPUs is missing."""

    def why(s: Summary) -> str:
        if not s.gpus:
            return next((h.nvml for h in s.hosts if h.nvml), "no GPU was recorded")
        return next((g.nulls[f] for g in s.gpus for f in fields if f in g.nulls), "no sample has it")

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
    """None where a GPU does not tell what it drew, or nobody could ask it."""
    if not s.gpus or any(g.energy_j is None for g in s.gpus) or any(h.nvml for h in s.hosts):
        return None
    return s.training.energy_j if s.training is not None else sum(g.energy_j or 0.0 for g in s.gpus)


def _a_step(total: Callable[[Summary], float | None]) -> Callable[[Summary], float | None]:
    def value(s: Summary) -> float | None:
        found = total(s)
        return found / s.training.steps if found is not None and s.training is not None and s.training.steps else None

    return value


def _gpu_s(s: Summary) -> float | None:
    return None if s.waste is None else s.waste.gpu_hours * 3600


def _gpu_s_per_million_tokens(s: Summary) -> float | None:
    found = _gpu_s(s)
    return found / s.training.tokens * 1e6 if found is not None and s.training and s.training.tokens else None


def _not_by_steps(why: Callable[[Summary], str]) -> Callable[[Summary], str]:
    return lambda s: _no_steps(s) if s.training is None or not s.training.steps else why(s)


def _step_size(s: Summary) -> float | None:
    """Tokens, or of what has none samples, in a step."""
    if s.training is None or not s.training.steps:
        return None
    whole = s.training.tokens or s.training.samples
    return whole / s.training.steps if whole else None


def _host_memory_peak_gib(s: Summary) -> float | None:
    return max((h.processes.rss_gib.max for h in s.hosts if h.processes is not None), default=None)


def _goodput_ratio(s: Summary) -> float | None:
    return None if s.goodput is None else s.goodput.ratio


def _no_goodput(s: Summary) -> str:
    return "no attempt has started" if s.goodput is None else "the script has reported no steps"


# In the order in which they are shown.
FIGURES: dict[str, Rule] = {
    "step_p50_s": Rule("step time", "s", "lower", _of_training("step_s.p50"), _no_steps),
    "step_p95_s": Rule("step time, p95", "s", "lower", _of_training("step_s.p95"), _no_steps),
    "tokens_per_s_per_gpu": Rule(
        "tokens/s a GPU", "tokens/s", "higher", _of_training("tokens_per_s_per_gpu"), _no_steps
    ),
    "tokens_per_s": Rule("tokens/s", "tokens/s", "higher", _of_training("tokens_per_s"), _no_steps),
    "mfu": Rule("MFU", "ratio", "higher", _of_training("mfu"), _no_steps),
    "joules_per_token": Rule("energy a token", "J", "lower", _of_training("joules_per_token"), _no_steps),
    "data_wait_share": Rule("waiting on data", "ratio", "lower", _of_training("data_wait_share"), _no_steps),
    "steps": Rule("steps", "steps", None, _of_training("steps"), _no_steps),
    "loss": Rule("loss", "", "lower", _of_training("loss"), _no_steps),
    "utilization": Rule(
        "GPU utilization", "ratio", "higher", _mean_of(lambda g: g.utilization), _no_gpus("utilization")
    ),
    "utilization_training": Rule(
        "while training", "ratio", "higher", _training_utilization, lambda s: "no rank told its phases"
    ),
    "sm_activity": Rule("SM activity", "ratio", "higher", _mean_of(lambda g: g.sm_activity), _no_gpus("sm_activity")),
    "tensor_activity": Rule(
        "tensor activity", "ratio", "higher", _mean_of(lambda g: g.tensor_activity), _no_gpus("tensor_activity")
    ),
    "power_w": Rule("power a GPU", "W", None, _mean_of(lambda g: g.power_w), _no_gpus("power_w")),
    "energy_j": Rule("energy", "J", None, _energy_j, _no_gpus("energy_j", "power_w")),
    "energy_per_step_j": Rule(
        "energy a step", "J", "lower", _a_step(_energy_j), _not_by_steps(_no_gpus("energy_j", "power_w"))
    ),
    "energy_per_gpu_j": Rule("energy a GPU", "J", None, _energy_per_gpu_j, _no_gpus("energy_j", "power_w")),
    "sm_clock_mhz": Rule("SM clock", "MHz", None, _mean_of(lambda g: g.sm_clock_mhz), _no_gpus("sm_clock_mhz")),
    "memory_peak_gib": Rule("GPU memory, peak", "GiB", None, _memory_peak_gib, _no_gpus("memory_used_gib")),
    "host_memory_peak_gib": Rule(
        "host memory, peak", "GiB", None, _host_memory_peak_gib, lambda s: "no process was recorded"
    ),
    "gpu_hours": Rule("GPU-hours", "h", None, _gpu_hours, _no_gpus()),
    "gpu_s_per_step": Rule("GPU time a step", "s", "lower", _a_step(_gpu_s), _not_by_steps(_no_gpus())),
    "gpu_s_per_million_tokens": Rule(
        "GPU time, 1M tokens", "s", "lower", _gpu_s_per_million_tokens, _not_by_steps(_no_gpus())
    ),
    "goodput": Rule("goodput", "ratio", "higher", _goodput_ratio, _no_goodput),
}

# More GPUs make these better or worse by themselves.
_OF_ALL_GPUS = ("step_p50_s", "step_p95_s", "tokens_per_s")
# And a larger batch these.
_OF_A_STEP = ("gpu_s_per_step", "energy_per_step_j")
_SAME_SIZE = 0.02  # rows that were lost, or the last batch of an epoch


def _share(part: str) -> Rule:
    def value(s: Summary) -> float | None:
        if s.goodput is None or not s.goodput.wall_s or (part == "productive_s" and s.goodput.ratio is None):
            return None
        return float(getattr(s.goodput, part) / s.goodput.wall_s)

    return Rule(part, "ratio", "higher" if part == "productive_s" else "lower", value, _no_goodput)
