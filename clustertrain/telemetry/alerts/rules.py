"""Alert rules of one node during its job. The sampler passes every snapshot; alerts go to :mod:`.notify`.

A rule sees only its node. Conditions of the whole run (low utilization, slow steps, no steps) are reported only by the
node of rank 0, because all ranks step together and each node would report them. :mod:`.cross_node` compares nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run import heartbeat
from clustertrain.telemetry import xids
from clustertrain.telemetry.alerts import straggler
from clustertrain.telemetry.alerts.gate import HEALTHY, Alert, AlertFinding, AlertGate, RuleResult
from clustertrain.telemetry.alerts.straggler import CONFIRM_S, exclude_hint
from clustertrain.telemetry.alerts.utilization import UtilizationRule
from clustertrain.telemetry.alerts.window import BUCKET_S, GpuBucket, GpuWindow, RankWindow, StepTimes, finite_or_none
from clustertrain.telemetry.findings import CRITICAL, FIX_GPU_MEMORY, WARNING
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

GIB = 1 << 30
MIN_COMPARABLE = 3  # GPUs or ranks needed before one can be called slower than the others
MIN_TRAIN_S = 180.0  # training time that each of them needs
MAX_TICK_S = 10.0  # nothing is known about a longer pause between two snapshots
STARTUP_HANG_S = 1800.0  # before the first steps: the first one compiles
MIN_STEP_S = 0.02  # shorter steps vary too much
_NON_TRAINING_PHASES = (heartbeat.STARTUP, heartbeat.RESTORE, heartbeat.SHUTDOWN)  # no GPU is expected to be busy

AlertKey = tuple[str, object]


class AlertRules:
    """Alert rules of one node. Not thread-safe.

    ``remote_steps`` (step by rank) may be set by any thread; it identifies the rank that is behind when the run hangs.
    """

    def __init__(self, spec: AlertsSpec, node: str) -> None:
        self._spec = spec
        self._gate = AlertGate(node)
        self._node = node
        self._gpu_facts: list[GpuFacts] = []
        self._snapshot_ranks: list[int] = []
        self._gpus: list[GpuWindow] = []
        self._ranks: dict[int, RankWindow] = {}
        self._step_times = StepTimes()
        self._utilization = UtilizationRule(spec.utilization, node)
        self._uncorrected: dict[str, float] = {}
        self._last_mono: float | None = None
        self._bucket_s = 0.0
        self._stalled_s = 0.0
        self.remote_steps: Mapping[int, int] = {}

    def observe(self, snapshot: Snapshot) -> list[Alert]:
        """Add a snapshot and return raised and cleared alerts; the rules are evaluated every ten seconds."""
        if snapshot.gpus is not self._gpu_facts or snapshot.ranks is not self._snapshot_ranks:
            self._update_devices(snapshot)
        previous, self._last_mono = self._last_mono, snapshot.mono
        dt = snapshot.mono - previous if previous is not None else 0.0
        if not 0.0 < dt <= MAX_TICK_S:
            dt = 0.0
            self._stalled_s = 0.0
        self._add(snapshot, dt)
        self._bucket_s += dt
        if self._bucket_s < BUCKET_S:
            return []
        self._bucket_s = 0.0
        return self._close_bucket(snapshot)

    def event(self, kind: str, uuid: str, t: float, mono: float, *, xid: int | None = None) -> list[Alert]:
        """Return the alerts of a device event; kinds other than the following give none.

        ``kind`` is ``xid``, ``ecc_uncorrected``, ``gpu_lost`` or ``gpu_back``.
        """
        gpu = next((g for g in self._gpus if g.facts.uuid == uuid), None)
        rank = gpu.rank if gpu is not None else None
        where = f"{gpu.label if gpu is not None else f'GPU {uuid}'} of {self._node}"
        if kind in ("gpu_lost", "gpu_back"):
            lost = AlertFinding(
                code="gpu_lost",
                severity=CRITICAL,
                text=f"{where} no longer responds",
                fix=exclude_hint(self._node),
                uuid=uuid,
                rank=rank,
            )
            verdict: RuleResult = lost if kind == "gpu_lost" else HEALTHY
            key: AlertKey = ("gpu_lost", uuid)
        elif not self._spec.xid:
            return []
        elif kind == "xid" and xid is not None:
            verdict, key = _xid_finding(xid, where, self._node, uuid, rank), ("xid", (uuid, xid))
        elif kind == "ecc_uncorrected":
            verdict, key = _ecc_finding(where, self._node, uuid, rank), ("ecc_uncorrected", uuid)
        else:
            return []
        alert = self._gate.update(key, verdict, t, mono)
        return [] if alert is None else [alert]

    def add_finding(self, finding: AlertFinding, t: float, mono: float) -> Alert | None:
        """Return the alert of a warning from rank 0's events, if it is to be sent."""
        return self._gate.update((finding.code, "training"), finding, t, mono)

    def _update_devices(self, snapshot: Snapshot) -> None:
        """Adopt a changed list of GPUs, as after a driver restart; unchanged GPUs keep their windows."""
        unchanged = snapshot.gpus == self._gpu_facts and snapshot.ranks == self._snapshot_ranks
        self._gpu_facts, self._snapshot_ranks = snapshot.gpus, snapshot.ranks
        if unchanged:
            return
        existing = {g.facts.uuid: g for g in self._gpus}
        self._gpus = []
        for index, facts in enumerate(snapshot.gpus):
            previous = existing.get(facts.uuid)
            gpu = GpuWindow(index, facts)
            if previous is not None:
                gpu.bucket, gpu.history = previous.bucket, previous.history
                gpu.idle_s, gpu.train_power = previous.idle_s, previous.train_power
            self._gpus.append(gpu)
        self._ranks = {rank: self._ranks.get(rank) or RankWindow(rank) for rank in snapshot.ranks}

    def _add(self, snapshot: Snapshot, dt: float) -> None:
        values = snapshot.values
        progressed = not self._ranks
        for rank_id, rank in self._ranks.items():
            advanced = rank.add(values, dt)
            progressed = progressed or advanced or not rank.is_training
            if advanced and rank_id == 0 and rank.is_training and rank.step is not None:
                self._step_times.add(rank.train_s, rank.step)
        self._stalled_s = 0.0 if progressed else self._stalled_s + dt
        for gpu in self._gpus:
            window = self._ranks.get(gpu.rank) if gpu.rank is not None else None
            gpu.add(values, dt, window is not None and window.is_training, window is not None and window.is_warmed_up)

    def _close_bucket(self, snapshot: Snapshot) -> list[Alert]:
        for rank in self._ranks.values():
            rank.close(snapshot.values)
        self._step_times.close()
        alerts = []
        for key, verdict in self._evaluate_rules(snapshot):
            alert = self._gate.update(key, verdict, snapshot.t, snapshot.mono)
            if alert is not None:
                alerts.append(alert)
        return alerts

    def _evaluate_rules(self, snapshot: Snapshot) -> Iterator[tuple[AlertKey, RuleResult]]:
        for gpu in self._gpus:
            bucket, uuid = gpu.close(), gpu.facts.uuid
            yield ("gpu_idle", uuid), self._idle_gpu(gpu, bucket)
            yield ("memory_nearly_full", uuid), self._memory_nearly_full(gpu, bucket)
            yield ("throttled", uuid), self._throttled(gpu, bucket)
            yield from self._ecc_and_row_remap(gpu, snapshot.values)
        yield from self._slow_gpus_and_ranks()
        if 0 in self._ranks:
            self._utilization.close(self._gpus, snapshot)
            yield ("low_utilization", 0), self._utilization.evaluate(self._gpus, list(self._ranks.values()))
            yield ("slow_steps", 0), self._slow_steps()
            yield ("hung", 0), self._hung()

    def _rank_of(self, gpu: GpuWindow) -> RankWindow | None:
        """Return the rank of a GPU if it has sent a heartbeat."""
        rank = self._ranks.get(gpu.rank) if gpu.rank is not None else None
        return rank if rank is not None and rank.phase is not None else None

    def _idle_gpu(self, gpu: GpuWindow, bucket: GpuBucket) -> RuleResult:
        if not self._spec.idle_min or not bucket.busy_known:
            return None
        rank = self._rank_of(gpu)
        if bucket.busy_s / bucket.busy_known >= 0.005:
            gpu.idle_s = 0.0
            return HEALTHY
        if rank is not None and (not rank.has_trained or rank.phase in _NON_TRAINING_PHASES):
            return None  # training has not started, or is over
        gpu.idle_s += bucket.busy_known
        if gpu.idle_s < 60 * self._spec.idle_min:
            return None
        activity = "no rank uses it" if gpu.rank is None else f"rank {gpu.rank} runs on it"
        if rank is not None and rank.phase is not None and 0 <= rank.phase < len(heartbeat.PHASES):
            activity = f"its rank {rank.rank} is in the phase {heartbeat.PHASES[rank.phase]}"
        fix = "request fewer GPUs" if gpu.rank is None else f"see `clustertrain logs --rank {gpu.rank}`"
        text = f"{gpu.label} of {self._node} has been at 0 % for {_format_minutes(gpu.idle_s)}; {activity}"
        return _gpu_finding("gpu_idle", WARNING, text, fix, gpu, gpu.idle_s / 60, self._spec.idle_min)

    def _memory_nearly_full(self, gpu: GpuWindow, bucket: GpuBucket) -> RuleResult:
        total = gpu.facts.memory_total_bytes
        if not self._spec.memory or not total or not bucket.max_memory_bytes:
            return None
        share = bucket.max_memory_bytes / total
        if share < self._spec.memory:
            return HEALTHY if share < self._spec.memory - 0.02 else None
        usage = f"{bucket.max_memory_bytes / GIB:.1f} of {total / GIB:.1f} GiB"
        text = f"the memory of {gpu.label} of {self._node} is nearly full: {usage}"
        return _gpu_finding("memory_nearly_full", WARNING, text, FIX_GPU_MEMORY, gpu, share, self._spec.memory)

    def _throttled(self, gpu: GpuWindow, bucket: GpuBucket) -> RuleResult:
        if not self._spec.throttle_min or not bucket.throttle_known_s:
            return None
        thermal, hardware = gpu.throttled_s()
        minutes = max(thermal, hardware) / 60
        if minutes < self._spec.throttle_min:
            return HEALTHY if minutes < self._spec.throttle_min / 2 else None
        reason = "heat" if thermal >= hardware else "the hardware (power supply or power brake)"
        text = f"{gpu.label} of {self._node} was throttled by {reason} for {minutes:.1f} of the last 10 minutes"
        fix = f"notify the administrators; {exclude_hint(self._node)}"
        return _gpu_finding("throttled", WARNING, text, fix, gpu, minutes, self._spec.throttle_min, CONFIRM_S)

    def _ecc_and_row_remap(self, gpu: GpuWindow, values: Mapping[str, float]) -> Iterator[tuple[AlertKey, RuleResult]]:
        if not self._spec.xid:
            return
        uuid, where = gpu.facts.uuid, f"{gpu.label} of {self._node}"
        count = finite_or_none(values.get(gpu.uncorrected))
        if count is not None:
            previous, self._uncorrected[uuid] = self._uncorrected.get(uuid, count), count
            if count > previous:
                yield ("ecc_uncorrected", uuid), _ecc_finding(where, self._node, uuid, gpu.rank, count - previous)
        remap_failed = finite_or_none(values.get(gpu.remap_failed))
        if remap_failed is not None:
            text = f"a memory row of {where} could not be replaced: the board must be replaced"
            finding = _gpu_finding("row_remap_failed", CRITICAL, text, exclude_hint(self._node), gpu, remap_failed, 0.0)
            yield ("row_remap_failed", uuid), finding if remap_failed else HEALTHY

    def _slow_gpus_and_ranks(self) -> Iterator[tuple[AlertKey, RuleResult]]:
        """Report slow GPUs and ranks; a throttled GPU, its low clock and its late rank give a single alert."""
        if not self._spec.straggler:
            return
        throttle_limit_s = 60 * self._spec.throttle_min
        explained = {g.facts.uuid for g in self._gpus if throttle_limit_s and max(g.throttled_s()) >= throttle_limit_s}
        for peers in _group_by_model(self._gpus).values():
            clocks = {g.facts.uuid: (g, c) for g in peers if (c := g.clock_mhz(MIN_TRAIN_S)) is not None}
            if len(clocks) >= MIN_COMPARABLE:
                median = statistics.median(c for _, c in clocks.values())
                for uuid, (gpu, clock) in clocks.items():
                    suspect = straggler.Suspect(f"{gpu.label} of {self._node}", self._node, uuid, gpu.rank)
                    verdict = straggler.evaluate_clock(suspect, clock, median, self._spec.straggler)
                    if verdict is HEALTHY or uuid not in explained:
                        yield ("slow_gpu", uuid), verdict
                    if verdict:
                        explained.add(uuid)
        yield from self._slow_ranks("forward_s", straggler.evaluate_forward, explained)
        yield from self._slow_ranks("data_wait_s", straggler.evaluate_data_wait, set())

    def _slow_ranks(
        self, counter: str, rule: straggler.StragglerRule, explained: set[str]
    ) -> Iterator[tuple[AlertKey, RuleResult]]:
        """Report slow ranks, except those whose GPU is in ``explained``."""
        times = {r: s for r, w in self._ranks.items() if (s := w.per_step(counter, MIN_TRAIN_S)) is not None}
        if len(times) < MIN_COMPARABLE:
            return
        median = statistics.median(times.values())
        uuids = {g.rank: g.facts.uuid for g in self._gpus}
        for rank, seconds in times.items():
            step_s = self._ranks[rank].per_step("train_s", MIN_TRAIN_S)
            if step_s is not None:
                suspect = straggler.Suspect(f"rank {rank} on {self._node}", self._node, uuids.get(rank), rank)
                verdict = rule(suspect, seconds, median, step_s, self._spec.straggler)
                if verdict is HEALTHY or suspect.uuid not in explained:
                    yield (f"late_{counter}", rank), verdict

    def _slow_steps(self) -> RuleResult:
        recent, median = self._step_times.recent(), self._step_times.median()
        if not self._spec.slowdown or recent is None or median is None:
            return None
        limit = median * (1 + self._spec.slowdown)
        if recent < max(limit, MIN_STEP_S):
            return HEALTHY if recent < max(median * (1 + self._spec.slowdown / 2), MIN_STEP_S) else None
        text = f"a step takes {recent:.3g} s, {recent / median - 1:.0%} longer than the run's median of {median:.3g} s"
        fix = "check `clustertrain top` for the cause: data, a slow GPU or the network"
        return AlertFinding(
            code="slow_steps",
            severity=WARNING,
            text=text,
            fix=fix,
            rank=0,
            value=recent,
            limit=limit,
            confirm_s=CONFIRM_S,
        )

    def _hung(self) -> RuleResult:
        if not self._spec.hang_min:
            return None
        limit = max(60 * self._spec.hang_min, self._hang_limit_s())
        if self._stalled_s < limit:
            return HEALTHY
        slow_rank, text = self._find_slow_rank()
        gpu = next((g for g in self._gpus if slow_rank is not None and g.rank == slow_rank), None)
        logs = "clustertrain logs" if slow_rank is None else f"clustertrain logs --rank {slow_rank}"
        return AlertFinding(
            code="hung",
            severity=CRITICAL,
            text=f"no step for {_format_minutes(self._stalled_s)}, although all ranks are in training; {text}",
            fix=f"see `{logs}`; `clustertrain requeue` continues from the newest checkpoint",
            uuid=gpu.facts.uuid if gpu is not None else None,
            rank=slow_rank,
            value=self._stalled_s,
            limit=limit,
        )

    def _hang_limit_s(self) -> float:
        """Return the longest time that a healthy run may take for a step."""
        median_s, early = self._step_times.median(require_min=False), self._step_times.early()
        if median_s is not None:
            return 10 * median_s
        if early is None:
            return STARTUP_HANG_S
        early_median_s, early_max_s = early
        return max(10 * early_median_s, 2 * early_max_s)  # compiling another shape takes about as long as the first

    def _find_slow_rank(self) -> tuple[int | None, str]:
        """Return the rank that the others wait for, and a text.

        It is the rank with the lowest step; if all are at the same step, the rank whose GPU does not spin in a
        collective.
        """
        steps = {**self.remote_steps, **{r: int(w.step) for r, w in self._ranks.items() if w.step is not None}}
        spinning = [g for g in self._gpus if g.is_spinning()]
        not_spinning = [g for g in self._gpus if g.rank is not None and g not in spinning]
        waiting_text = ""
        if spinning:
            waiting_text = (
                f"; {len(spinning)} of the node's {len(self._gpus)} GPUs are at 100 % without drawing power: they wait"
            )
        low, high = min(steps.values(), default=0), max(steps.values(), default=0)
        waiting = {g.rank for g in spinning}
        late = sorted(r for r, s in steps.items() if s < high and r not in waiting)
        if late and len(late) <= len(steps) / 2:
            more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
            return late[0], f"rank {late[0]}{more} is at step {steps[late[0]]}, the others are at {high}{waiting_text}"
        step_text = f"all are at step {low}" if low == high else f"they are at steps {low} to {high}"
        if spinning and len(not_spinning) == 1:
            slow = not_spinning[0]
            return slow.rank, f"{step_text}{waiting_text} for rank {slow.rank} ({slow.label})"
        return None, f"{step_text}{waiting_text}; the rank that the others wait for is unknown"


def _group_by_model(gpus: list[GpuWindow]) -> dict[str | None, list[GpuWindow]]:
    """Group GPUs by model, because clocks of different models are not comparable."""
    groups: dict[str | None, list[GpuWindow]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.facts.name, []).append(gpu)
    return groups


def _format_minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _gpu_finding(
    code: str, severity: str, text: str, fix: str, gpu: GpuWindow, value: float, limit: float, hold_s: float = 0.0
) -> AlertFinding:
    return AlertFinding(
        code=code, severity=severity, text=text, fix=fix, uuid=gpu.facts.uuid, rank=gpu.rank, value=value, limit=limit,
        confirm_s=hold_s,
    )  # fmt: skip


def _xid_finding(number: int, where: str, node: str, uuid: str, rank: int | None) -> AlertFinding:
    xid = xids.lookup_xid(number)
    return AlertFinding(
        code="xid",
        severity=xid.severity,
        text=f"{where} {xids.format_report(number)}",
        fix=xids.format_fix(number, node),
        uuid=uuid,
        rank=rank,
        value=float(number),
        one_shot=True,
    )


def _ecc_finding(where: str, node: str, uuid: str, rank: int | None, count: float | None = None) -> AlertFinding:
    errors_text = "memory errors" if count is None else f"{count:.0f} memory error{'s' * (count != 1)}"
    return AlertFinding(
        code="ecc_uncorrected",
        severity=CRITICAL,
        text=f"{errors_text} of {where} could not be corrected",
        fix=f"results since then may be wrong; {exclude_hint(node)}",
        uuid=uuid,
        rank=rank,
        value=count,
        one_shot=True,
    )
