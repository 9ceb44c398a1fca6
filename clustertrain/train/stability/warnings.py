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

EVENT = "training_warning"
BAD_SAMPLES = "bad_samples"  # in a row: those of a step that was not to be, in words
REST_S = 600.0  # before the same is said again
SHARE_STEPS = 100  # the share of clipped steps is one of so many
VANISHED_STEPS = 20  # in a row
UNCOUNTED_STEPS = 5  # in a row; one may happen to be all prompt or padding
RECENT, KNOWN = 50, 1000  # steps whose speed is compared, and with which
LEAST_KNOWN = 100
# Below these a drop is noise, or over before anybody could look: seconds of steps that the run must have done, seconds
# that it must have been slow, and of a step.
LEAST_RUN_S, LEAST_SLOW_S, LEAST_STEP_S = 180.0, 10.0, 0.02
WARM_UP = 5  # steps that compile, choose kernels and fill caches
DEAD = 0.5  # share of a layer's units

_RATES = ("tokens_per_s", "samples_per_s")


@dataclass(frozen=True)
class Warning:
    code: str
    text: str
    fix: str
    value: float | None = None
    limit: float | None = None


class Warnings:
    """Each code is told once, and again no earlier than ten minutes after that, with how often it was held back."""

    def __init__(self, spec: StabilitySpec, event: Callable[..., None]) -> None:
        self._spec = spec
        self._event = event
        self._told: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._seen = 0
        self._vanished = 0
        self._uncounted = 0
        self._norms: deque[float] = deque(maxlen=SHARE_STEPS)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._known: deque[float] = deque(maxlen=KNOWN)
        self._steps_s = self._slow_s = 0.0

    def see(self, row: Mapping[str, Any]) -> None:
        """One row, as it was written."""
        self._seen += 1
        for warning in self._found(row):
            self.tell(warning, int(row["step"]))

    def tell(self, warning: Warning, step: int) -> None:
        now = clock.monotonic()
        last = self._told.get(warning.code)
        if last is not None and now - last < REST_S:
            self._held[warning.code] = self._held.get(warning.code, 0) + 1
            return
        self._told[warning.code] = now
        self._event(
            EVENT,
            code=warning.code,
            step=step,
            text=warning.text,
            fix=warning.fix,
            value=_plain(warning.value),
            limit=warning.limit,
            held_back=self._held.pop(warning.code, 0),
        )
        log.warning("step %d: %s\n  fix: %s", step, warning.text, warning.fix)

    def _found(self, row: Mapping[str, Any]) -> Iterator[Warning]:
        loss, norm = _number(row.get("loss")), _number(row.get("grad_norm"))
        # Of a step that counts nothing the loss is a mean of nothing: there it says nothing that it is no number.
        bad = row["skipped"] and not row.get("spike") if "skipped" in row else not _is_finite(loss, norm)
        if bad and not row.get("overflow"):  # which fp16's loss scale takes care of
            yield self._non_finite(row, loss, norm)
        if row.get("spike"):
            yield Warning(
                "loss_spike",
                f"the loss is {loss:.6g}, far above its last {self._spec.spike_window} values{_samples(row)}",
                'stability.spike = "skip" or "roll-back" keeps such data from moving the weights; a lower learning '
                "rate or longer warmup makes spikes rarer",
                loss,
            )
        # The norm tells it from a nan that a script has logged for the loss: no target, no gradient.
        counts = not (row.get("skipped") == 0 and norm == 0 and loss is not None and math.isnan(loss))
        self._uncounted = 0 if counts else self._uncounted + 1
        if self._uncounted >= UNCOUNTED_STEPS:
            yield Warning(
                "nothing_counted",
                f"no target of the last {self._uncounted} steps counts, all are masked: nothing is learned",
                "look at the targets that the data gives: are all of them objective.ignore_index, as where a long "
                "prompt is cut off before its answer?",
            )
        elif norm is not None and math.isfinite(norm):
            yield from self._of_norm(norm, _number(row.get("clip_fraction")))
        yield from self._of_speed(row)
        yield from _of_units(row)

    def _non_finite(self, row: Mapping[str, Any], loss: float | None, norm: float | None) -> Warning:
        skipped = "; the step was skipped" if row.get("skipped") else ""
        return Warning(
            "non_finite",
            f"the loss is {_words(loss)} and the gradient norm {_words(norm)}{skipped}{_samples(row)}",
            "look at the data of this step, a lower learning rate, bf16 in place of fp16; `clustertrain diagnose data` "
            "looks for samples that are not finite",
            norm if loss is None or math.isfinite(loss) else loss,
        )

    def _of_norm(self, norm: float, share: float | None) -> Iterator[Warning]:
        spec = self._spec
        if spec.grad_norm_limit and norm > spec.grad_norm_limit:
            yield Warning(
                "grad_norm_high",
                f"the gradient norm is {norm:.4g}",
                "a lower learning rate or a longer warmup; clipping (optim.clip_norm) bounds what one step can do",
                norm,
                spec.grad_norm_limit,
            )
        self._norms.append(norm)
        self._vanished = self._vanished + 1 if norm < spec.vanishing else 0
        if self._vanished >= VANISHED_STEPS:
            yield Warning(
                "grad_vanishing",
                f"the gradient norm has been below {spec.vanishing:g} for {self._vanished} steps",
                "look at the columns grad_norm/… for the layer where it is lost; is the learning rate or the loss "
                "scale too low, is everything frozen, has the loss reached its floor?",
                norm,
                spec.vanishing,
            )
        if share is not None and spec.clipped_share and self._seen >= SHARE_STEPS and share > spec.clipped_share:
            yield Warning(
                "clipping_often",
                f"the gradient was clipped in {share:.0%} of the last {SHARE_STEPS} steps",
                f"raise optim.clip_norm above {statistics.median(self._norms):.3g}, the median gradient norm of these "
                'steps, or set optim.clip = "adaptive". Lower the learning rate only if the loss also spikes: where it '
                "falls slowly, the rate may be too low (`clustertrain diagnose lr-range` measures it)",
                share,
                spec.clipped_share,
            )

    def _of_speed(self, row: Mapping[str, Any]) -> Iterator[Warning]:
        """A step's time has neither evaluation nor checkpoint in it."""
        rate = next((r for name in _RATES if (r := _number(row.get(name)))), None)
        step_s = _number(row.get("step_s"))
        if rate is None and step_s:
            rate = 1 / step_s
        if rate is None or step_s is None or self._seen <= WARM_UP or not self._spec.slowdown:
            return
        self._steps_s += step_s
        if len(self._recent) == RECENT:
            self._known.append(self._recent[0])
        self._recent.append(rate)
        if len(self._known) < LEAST_KNOWN:
            return
        now, usual = statistics.median(self._recent), statistics.median(self._known)
        limit = usual * (1 - self._spec.slowdown)
        self._slow_s = self._slow_s + step_s if now < limit else 0.0
        if self._steps_s >= LEAST_RUN_S and self._slow_s >= LEAST_SLOW_S and step_s >= LEAST_STEP_S:
            yield Warning(
                "throughput_drop",
                f"throughput fell by {1 - now / usual:.0%}: the median of the last {RECENT} steps against that of "
                "those before",
                "`clustertrain telemetry` tells whether it is data, communication or the host; data_wait_s in the rows "
                "is the wait for data",
                now / usual,
                1 - self._spec.slowdown,
            )


def _of_units(row: Mapping[str, Any]) -> Iterator[Warning]:
    dead = {k.partition("/")[2]: v for k, v in row.items() if k.startswith("dead/") and isinstance(v, float)}
    name = max(dead, key=lambda n: dead[n], default=None)
    if name is not None and dead[name] > DEAD:
        yield Warning(
            "dead_units",
            f"{dead[name]:.0%} of the units of {name} are zero for every sample that a rank has in the step",
            "a lower learning rate, another initialisation, or an activation that does not end at zero (GELU, leaky "
            "ReLU)",
            dead[name],
            DEAD,
        )


def _samples(row: Mapping[str, Any]) -> str:
    return f"; {row[BAD_SAMPLES]}" if BAD_SAMPLES in row else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_finite(*values: float | None) -> bool:
    return all(math.isfinite(v) for v in values if v is not None)


def _words(value: float | None) -> str:
    return "not logged" if value is None else f"{value:.6g}"


def _plain(value: float | None) -> float | str | None:
    """JSON has no word for what is not finite."""
    return value if value is None or math.isfinite(value) else str(value)


LISTED = 5


def eval_mode_warning(names: Sequence[str], *, switched: bool) -> Warning:
    """``switched``: the trainer has put them into training mode."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    which = "the model" if list(names) == [""] else ", ".join(names[:LISTED]) + more
    was = f"{which} {'was' if len(names) == 1 else 'were'}"
    if switched:
        return Warning(
            "eval_mode",
            f"{was} in evaluation mode with parameters to train, and is now in training mode",
            "if a part has to stay in evaluation mode (a frozen batch norm), list it in optim.freeze",
        )
    return Warning(
        "eval_mode",
        f"{was} in evaluation mode in a training step: no dropout there, and batch norms do not update",
        "call model.train() before the loop, and again after your own evaluation; freeze what has to stay as it is",
    )
