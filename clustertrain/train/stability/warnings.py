"""Warnings about a training run, derived from its metrics rows on rank 0 without blocking other ranks."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertrain import clock
from clustertrain.config.stability import StabilitySpec
from clustertrain.train.stability.loss_trend import LossTrend

log = logging.getLogger(__name__)

WARNING_EVENT = "training_warning"
BAD_SAMPLES_KEY = "bad_samples"  # key in a row: text that names the samples of a bad step
REPEAT_INTERVAL_S = 600.0  # minimum time before a warning is repeated
CLIP_FRACTION_STEPS = 100  # steps over which the clipped fraction is computed
VANISHING_STEPS = 20  # consecutive steps
MASKED_STEPS = 5  # consecutive steps; a single one may be all prompt or padding
RECENT_STEPS, MAX_BASELINE_STEPS = 50, 1000  # steps whose speed is compared, and the steps before them
MIN_BASELINE_STEPS = 100
# Below these limits a drop is noise or too short to act on: seconds of steps in the run, seconds of slow steps, and
# seconds per step.
MIN_RUN_S, MIN_SLOW_S, MIN_STEP_S = 180.0, 10.0, 0.02
WARMUP_STEPS = 5  # steps that compile, choose kernels and fill caches
MIN_UNIT_RATIO = 1e-6  # of a unit's gradient norm to the largest one
MAX_DEAD_FRACTION = 0.5  # of a layer's units
MAX_SATURATED_FRACTION = 0.5  # of the outputs of a sigmoid or tanh
MAX_LISTED_MODULES = 5

_RATE_COLUMNS = ("tokens_per_s", "samples_per_s")


@dataclass(frozen=True)
class TrainingWarning:
    """A warning with its fix, and the value that exceeded a limit if there is one."""

    code: str
    text: str
    fix: str
    value: float | None = None
    limit: float | None = None


class WarningReporter:
    """Reporter of each warning code at most once per ten minutes, with the number of suppressed repetitions."""

    def __init__(self, spec: StabilitySpec, emit_event: Callable[..., None]) -> None:
        self._spec = spec
        self._emit_event = emit_event
        self._last_reported: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}
        self._trend = LossTrend()
        self._num_rows = 0
        self._vanishing_steps = 0
        self._masked_steps = 0
        self._norms: deque[float] = deque(maxlen=CLIP_FRACTION_STEPS)
        self._recent_rates: deque[float] = deque(maxlen=RECENT_STEPS)
        self._baseline_rates: deque[float] = deque(maxlen=MAX_BASELINE_STEPS)
        self._total_step_s = self._slow_s = 0.0

    def finalize(self, row: dict[str, Any]) -> None:
        """Add the columns that follow from earlier rows, before ``row`` is written."""
        self._trend.add_gap(row)

    def observe(self, row: Mapping[str, Any]) -> None:
        """Check one metrics row when it is written."""
        self._num_rows += 1
        for warning in self._find_warnings(row):
            self.report(warning, int(row["step"]))

    def report(self, warning: TrainingWarning, step: int) -> None:
        """Emit and log ``warning``, unless its code was reported recently."""
        now = clock.monotonic()
        last = self._last_reported.get(warning.code)
        if last is not None and now - last < REPEAT_INTERVAL_S:
            self._suppressed[warning.code] = self._suppressed.get(warning.code, 0) + 1
            return
        self._last_reported[warning.code] = now
        self._emit_event(
            WARNING_EVENT,
            code=warning.code,
            step=step,
            text=warning.text,
            fix=warning.fix,
            value=_to_json_value(warning.value),
            limit=warning.limit,
            suppressed=self._suppressed.pop(warning.code, 0),
        )
        log.warning("step %d: %s\n  fix: %s", step, warning.text, warning.fix)

    def _find_warnings(self, row: Mapping[str, Any]) -> Iterator[TrainingWarning]:
        loss, norm = _as_float(row.get("loss")), _as_float(row.get("grad_norm"))
        # If all targets are masked, the loss is the mean of an empty set, and NaN is not an error.
        is_bad = row["skipped"] and not row.get("spike") if "skipped" in row else not _is_finite(loss, norm)
        if is_bad and not row.get("overflow"):  # fp16's loss scale handles overflows
            yield self._build_nonfinite_warning(row, loss, norm)
        if row.get("spike"):
            yield TrainingWarning(
                "loss_spike",
                f"the loss is {loss:.6g}, far above its last {self._spec.spike_window} values{_format_samples(row)}",
                'set stability.spike = "skip" or "roll-back" to keep such data from changing the weights; a lower '
                "learning rate or longer warmup makes spikes rarer",
                loss,
            )
        # Without targets there is no gradient; the norm distinguishes this from a NaN loss logged by a script.
        has_targets = not (row.get("skipped") == 0 and norm == 0 and loss is not None and math.isnan(loss))
        self._masked_steps = 0 if has_targets else self._masked_steps + 1
        if self._masked_steps >= MASKED_STEPS:
            yield TrainingWarning(
                "nothing_counted",
                f"all targets of the last {self._masked_steps} steps are masked: nothing is learned",
                "check the targets in the data: all are objective.ignore_index, as when a long prompt is truncated "
                "before its answer",
            )
        elif norm is not None and math.isfinite(norm):
            yield from self._find_norm_warnings(norm, _as_float(row.get("clip_fraction")))
        yield from self._find_throughput_warnings(row)
        findings = list(self._trend.observe(row))
        yield from (TrainingWarning(*finding) for finding in findings if self._spec.loss_trend)
        yield from _find_dead_unit_warnings(row)
        yield from _find_vanishing_layer_warnings(row) if self._spec.grad_norm_min else ()

    def _build_nonfinite_warning(
        self, row: Mapping[str, Any], loss: float | None, norm: float | None
    ) -> TrainingWarning:
        skipped = "; the step was skipped" if row.get("skipped") else ""
        return TrainingWarning(
            "non_finite",
            f"the loss is {_format_value(loss)} and the gradient norm"
            f" {_format_value(norm)}{skipped}{_format_samples(row)}",
            "check the data of this step (`clustertrain diagnose data` finds NaN and Inf), lower the learning rate, or "
            "use bf16 instead of fp16",
            norm if loss is None or math.isfinite(loss) else loss,
        )

    def _find_norm_warnings(self, norm: float, clip_fraction: float | None) -> Iterator[TrainingWarning]:
        spec = self._spec
        if spec.grad_norm_max and norm > spec.grad_norm_max:
            yield TrainingWarning(
                "grad_norm_high",
                f"the gradient norm is {norm:.4g}",
                "lower the learning rate or lengthen warmup; clipping (optim.clip_norm) bounds the effect of one step",
                norm,
                spec.grad_norm_max,
            )
        self._norms.append(norm)
        self._vanishing_steps = self._vanishing_steps + 1 if norm < spec.grad_norm_min else 0
        if self._vanishing_steps >= VANISHING_STEPS:
            yield TrainingWarning(
                "grad_vanishing",
                f"the gradient norm has been below {spec.grad_norm_min:g} for {self._vanishing_steps} steps",
                "find the layer where the gradient vanishes in the columns grad_norm/…; check for a learning rate or "
                "loss scale that is too low, frozen parameters, and a loss at its minimum",
                norm,
                spec.grad_norm_min,
            )
        if (
            clip_fraction is not None
            and spec.clipped_share
            and self._num_rows >= CLIP_FRACTION_STEPS
            and clip_fraction > spec.clipped_share
        ):
            yield TrainingWarning(
                "clipping_often",
                f"the gradient was clipped in {clip_fraction:.0%} of the last {CLIP_FRACTION_STEPS} steps",
                f"raise optim.clip_norm above {statistics.median(self._norms):.3g}, the median gradient norm of these "
                'steps, or set optim.clip = "adaptive". Lower the learning rate only if the loss also spikes: if it '
                "falls slowly, the rate may be too low (`clustertrain diagnose lr-range` measures it)",
                clip_fraction,
                spec.clipped_share,
            )
        elif len(self._norms) == CLIP_FRACTION_STEPS and 0 < spec.grad_norm_usual < statistics.median(self._norms):
            median = statistics.median(self._norms)
            yield TrainingWarning(
                "grad_norm_elevated",
                f"the median gradient norm of the last {CLIP_FRACTION_STEPS} steps is {median:.3g}; 0.5 to 2 is usual",
                "lower the learning rate, lengthen warmup or normalize the inputs and targets; if the loss falls as it "
                "should, raise stability.grad_norm_usual",
                median,
                spec.grad_norm_usual,
            )

    def _find_throughput_warnings(self, row: Mapping[str, Any]) -> Iterator[TrainingWarning]:
        """Yield a warning if throughput dropped; the time of a step excludes evaluations and checkpoints."""
        rate = next((r for name in _RATE_COLUMNS if (r := _as_float(row.get(name)))), None)
        step_s = _as_float(row.get("step_s"))
        if rate is None and step_s:
            rate = 1 / step_s
        if rate is None or step_s is None or self._num_rows <= WARMUP_STEPS or not self._spec.slowdown:
            return
        self._total_step_s += step_s
        if len(self._recent_rates) == RECENT_STEPS:
            self._baseline_rates.append(self._recent_rates[0])
        self._recent_rates.append(rate)
        if len(self._baseline_rates) < MIN_BASELINE_STEPS:
            return
        recent_rate, baseline_rate = statistics.median(self._recent_rates), statistics.median(self._baseline_rates)
        limit = baseline_rate * (1 - self._spec.slowdown)
        self._slow_s = self._slow_s + step_s if recent_rate < limit else 0.0
        if self._total_step_s >= MIN_RUN_S and self._slow_s >= MIN_SLOW_S and step_s >= MIN_STEP_S:
            yield TrainingWarning(
                "throughput_drop",
                f"throughput fell by {1 - recent_rate / baseline_rate:.0%}: the median of the last {RECENT_STEPS} steps"
                " compared to the steps before",
                "run `clustertrain telemetry` to see whether data, communication or the host is the cause; data_wait_s "
                "in the rows is the wait for data",
                recent_rate / baseline_rate,
                1 - self._spec.slowdown,
            )


def _find_dead_unit_warnings(row: Mapping[str, Any]) -> Iterator[TrainingWarning]:
    name, share = _find_largest(row, "dead/")
    if share > MAX_DEAD_FRACTION:
        yield TrainingWarning(
            "dead_units",
            f"{share:.0%} of the units of {name} are zero for every sample of a rank in the step",
            "lower the learning rate, change the initialization, or use an activation without a zero region (GELU, "
            "leaky ReLU)",
            share,
            MAX_DEAD_FRACTION,
        )
    name, share = _find_largest(row, "saturated/")
    if share > MAX_SATURATED_FRACTION:
        yield TrainingWarning(
            "saturated_units",
            f"{share:.0%} of the outputs of {name} are saturated: it passes almost no gradient there",
            "normalize the inputs of the layer, use smaller initial weights or a lower learning rate, or an activation "
            "without bounds (GELU, SiLU)",
            share,
            MAX_SATURATED_FRACTION,
        )


def _find_largest(row: Mapping[str, Any], prefix: str) -> tuple[str, float]:
    """Return the module with the largest value whose column starts with ``prefix``, and this value; 0 without any."""
    shares = {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix) and isinstance(v, float)}
    name = max(shares, key=lambda n: shares[n], default="")
    return name, shares.get(name, 0.0)


def _find_vanishing_layer_warnings(row: Mapping[str, Any]) -> Iterator[TrainingWarning]:
    """Yield a warning if a layer's gradient is far smaller than the others', in a row with the columns of layers."""
    norms = {k.partition("/")[2]: v for k, v in row.items() if k.startswith("grad_norm/") and isinstance(v, float)}
    # Frozen layers have a norm of 0, and no update. Weight decay updates a layer whose gradients are 0.
    trained = {
        name: norm
        for name, norm in norms.items()
        if math.isfinite(norm) and (norm > 0 or (_as_float(row.get(f"update_ratio/{name}")) or 0.0) > 0)
    }
    smallest, largest = min(trained, key=trained.__getitem__, default=""), max(trained.values(), default=0.0)
    if trained and trained[smallest] < MIN_UNIT_RATIO * largest:
        yield TrainingWarning(
            "layer_vanishing",
            f"the gradient norm of {smallest} is {trained[smallest]:.2g}, that of the largest layer {largest:.2g}:"
            f" {smallest} hardly learns",
            "use normalization layers, residual connections or an activation that does not saturate; `clustertrain "
            "diagnose layers` shows where the gradient vanishes",
            trained[smallest] / largest,
            MIN_UNIT_RATIO,
        )


def _format_samples(row: Mapping[str, Any]) -> str:
    return f"; {row[BAD_SAMPLES_KEY]}" if BAD_SAMPLES_KEY in row else ""


def _as_float(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_finite(*values: float | None) -> bool:
    return all(math.isfinite(v) for v in values if v is not None)


def _format_value(value: float | None) -> str:
    return "not logged" if value is None else f"{value:.6g}"


def _to_json_value(value: float | None) -> float | str | None:
    """Return ``value``, with NaN and Inf as text because JSON numbers cannot represent them."""
    return value if value is None or math.isfinite(value) else str(value)


def build_eval_mode_warning(names: Sequence[str], *, switched: bool) -> TrainingWarning:
    """Return the warning about modules in evaluation mode.

    ``switched``: the trainer has put the modules into training mode.
    """
    suffix = f" and {len(names) - MAX_LISTED_MODULES} more" if len(names) > MAX_LISTED_MODULES else ""
    subject = "the model" if list(names) == [""] else ", ".join(names[:MAX_LISTED_MODULES]) + suffix
    was, is_now = ("was", "is now") if len(names) == 1 else ("were", "are now")
    clause = f"{subject} {was}"
    if switched:
        return TrainingWarning(
            "eval_mode",
            f"{clause} in evaluation mode with parameters to train, and {is_now} in training mode",
            "list modules that must stay in evaluation mode (a frozen batch norm) in optim.freeze",
        )
    return TrainingWarning(
        "eval_mode",
        f"{clause} in evaluation mode in a training step: no dropout there, and batch norms do not update",
        "call model.train() before the loop and after each evaluation; freeze modules that must stay unchanged",
    )
