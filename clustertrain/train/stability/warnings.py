"""Warnings about a training run, from the rows as they are written: on rank 0, with no other rank waiting for it."""

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

log = logging.getLogger(__name__)

WARNING_EVENT = "training_warning"
BAD_SAMPLES_KEY = "bad_samples"  # in a row: those of a step that was not to be, in words
REPEAT_INTERVAL_S = 600.0  # before the same is said again
CLIP_FRACTION_STEPS = 100  # the share of clipped steps is one of so many
VANISHING_STEPS = 20  # in a row
MASKED_STEPS = 5  # in a row; one may happen to be all prompt or padding
RECENT_STEPS, MAX_BASELINE_STEPS = 50, 1000  # steps whose speed is compared, and with which
MIN_BASELINE_STEPS = 100
# Below these a drop is noise, or over before anybody could look: seconds of steps that the run must have done, seconds
# that it must have been slow, and of a step.
MIN_RUN_S, MIN_SLOW_S, MIN_STEP_S = 180.0, 10.0, 0.02
WARMUP_STEPS = 5  # steps that compile, choose kernels and fill caches
MAX_DEAD_FRACTION = 0.5  # share of a layer's units

_RATE_COLUMNS = ("tokens_per_s", "samples_per_s")


@dataclass(frozen=True)
class TrainingWarning:
    code: str
    text: str
    fix: str
    value: float | None = None
    limit: float | None = None


class WarningReporter:
    """Each code is told once, and again no earlier than ten minutes after that, with how often it was held back."""

    def __init__(self, spec: StabilitySpec, emit_event: Callable[..., None]) -> None:
        self._spec = spec
        self._emit_event = emit_event
        self._last_reported: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}
        self._num_rows = 0
        self._vanishing_steps = 0
        self._masked_steps = 0
        self._norms: deque[float] = deque(maxlen=CLIP_FRACTION_STEPS)
        self._recent_rates: deque[float] = deque(maxlen=RECENT_STEPS)
        self._baseline_rates: deque[float] = deque(maxlen=MAX_BASELINE_STEPS)
        self._total_step_s = self._slow_s = 0.0

    def observe(self, row: Mapping[str, Any]) -> None:
        """One row, as it was written."""
        self._num_rows += 1
        for warning in self._find_warnings(row):
            self.report(warning, int(row["step"]))

    def report(self, warning: TrainingWarning, step: int) -> None:
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
            held_back=self._suppressed.pop(warning.code, 0),
        )
        log.warning("step %d: %s\n  fix: %s", step, warning.text, warning.fix)

    def _find_warnings(self, row: Mapping[str, Any]) -> Iterator[TrainingWarning]:
        loss, norm = _as_float(row.get("loss")), _as_float(row.get("grad_norm"))
        # Of a step that counts nothing the loss is a mean of nothing: there it says nothing that it is no number.
        is_bad = row["skipped"] and not row.get("spike") if "skipped" in row else not _is_finite(loss, norm)
        if is_bad and not row.get("overflow"):  # which fp16's loss scale takes care of
            yield self._build_nonfinite_warning(row, loss, norm)
        if row.get("spike"):
            yield TrainingWarning(
                "loss_spike",
                f"the loss is {loss:.6g}, far above its last {self._spec.spike_window} values{_format_samples(row)}",
                'stability.spike = "skip" or "roll-back" keeps such data from moving the weights; a lower learning '
                "rate or longer warmup makes spikes rarer",
                loss,
            )
        # The norm tells it from a nan that a script has logged for the loss: no target, no gradient.
        has_targets = not (row.get("skipped") == 0 and norm == 0 and loss is not None and math.isnan(loss))
        self._masked_steps = 0 if has_targets else self._masked_steps + 1
        if self._masked_steps >= MASKED_STEPS:
            yield TrainingWarning(
                "nothing_counted",
                f"no target of the last {self._masked_steps} steps counts, all are masked: nothing is learned",
                "look at the targets that the data gives: are all of them objective.ignore_index, as where a long "
                "prompt is cut off before its answer?",
            )
        elif norm is not None and math.isfinite(norm):
            yield from self._find_norm_warnings(norm, _as_float(row.get("clip_fraction")))
        yield from self._find_throughput_warnings(row)
        yield from _find_dead_unit_warnings(row)

    def _build_nonfinite_warning(
        self, row: Mapping[str, Any], loss: float | None, norm: float | None
    ) -> TrainingWarning:
        skipped = "; the step was skipped" if row.get("skipped") else ""
        return TrainingWarning(
            "non_finite",
            f"the loss is {_format_value(loss)} and the gradient norm"
            f" {_format_value(norm)}{skipped}{_format_samples(row)}",
            "look at the data of this step, a lower learning rate, bf16 in place of fp16; `clustertrain diagnose data` "
            "looks for samples that are not finite",
            norm if loss is None or math.isfinite(loss) else loss,
        )

    def _find_norm_warnings(self, norm: float, clip_fraction: float | None) -> Iterator[TrainingWarning]:
        spec = self._spec
        if spec.grad_norm_limit and norm > spec.grad_norm_limit:
            yield TrainingWarning(
                "grad_norm_high",
                f"the gradient norm is {norm:.4g}",
                "a lower learning rate or a longer warmup; clipping (optim.clip_norm) bounds what one step can do",
                norm,
                spec.grad_norm_limit,
            )
        self._norms.append(norm)
        self._vanishing_steps = self._vanishing_steps + 1 if norm < spec.vanishing else 0
        if self._vanishing_steps >= VANISHING_STEPS:
            yield TrainingWarning(
                "grad_vanishing",
                f"the gradient norm has been below {spec.vanishing:g} for {self._vanishing_steps} steps",
                "look at the columns grad_norm/… for the layer where it is lost; is the learning rate or the loss "
                "scale too low, is everything frozen, has the loss reached its floor?",
                norm,
                spec.vanishing,
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
                'steps, or set optim.clip = "adaptive". Lower the learning rate only if the loss also spikes: where it '
                "falls slowly, the rate may be too low (`clustertrain diagnose lr-range` measures it)",
                clip_fraction,
                spec.clipped_share,
            )

    def _find_throughput_warnings(self, row: Mapping[str, Any]) -> Iterator[TrainingWarning]:
        """A step's time has neither evaluation nor checkpoint in it."""
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
                " against that of those before",
                "`clustertrain telemetry` tells whether it is data, communication or the host; data_wait_s in the rows "
                "is the wait for data",
                recent_rate / baseline_rate,
                1 - self._spec.slowdown,
            )


def _find_dead_unit_warnings(row: Mapping[str, Any]) -> Iterator[TrainingWarning]:
    dead = {k.partition("/")[2]: v for k, v in row.items() if k.startswith("dead/") and isinstance(v, float)}
    name = max(dead, key=lambda n: dead[n], default=None)
    if name is not None and dead[name] > MAX_DEAD_FRACTION:
        yield TrainingWarning(
            "dead_units",
            f"{dead[name]:.0%} of the units of {name} are zero for every sample that a rank has in the step",
            "a lower learning rate, another initialisation, or an activation that does not end at zero (GELU, leaky "
            "ReLU)",
            dead[name],
            MAX_DEAD_FRACTION,
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
    """JSON has no word for what is not finite."""
    return value if value is None or math.isfinite(value) else str(value)


MAX_LISTED = 5


def build_eval_mode_warning(names: Sequence[str], *, switched: bool) -> TrainingWarning:
    """``switched``: the trainer has put them into training mode."""
    suffix = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    subject = "the model" if list(names) == [""] else ", ".join(names[:MAX_LISTED]) + suffix
    clause = f"{subject} {'was' if len(names) == 1 else 'were'}"
    if switched:
        return TrainingWarning(
            "eval_mode",
            f"{clause} in evaluation mode with parameters to train, and is now in training mode",
            "if a part has to stay in evaluation mode (a frozen batch norm), list it in optim.freeze",
        )
    return TrainingWarning(
        "eval_mode",
        f"{clause} in evaluation mode in a training step: no dropout there, and batch norms do not update",
        "call model.train() before the loop, and again after your own evaluation; freeze what has to stay as it is",
    )
