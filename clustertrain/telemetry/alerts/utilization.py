"""Alert for low GPU utilization in training, with the cause visible on the node: data, host or communication."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from clustertrain.telemetry import findings
from clustertrain.telemetry.alerts.gate import HEALTHY, AlertFinding, RuleResult
from clustertrain.telemetry.alerts.straggler import CONFIRM_S
from clustertrain.telemetry.alerts.window import RECENT_BUCKETS, GpuWindow, RankWindow, finite_or_none
from clustertrain.telemetry.fields import column_name
from clustertrain.telemetry.snapshot import Snapshot

MIN_TRAIN_S = 120.0  # training within the last five minutes; checkpoints and evaluations may take the rest
_CLEAR_MARGIN = 0.05  # above the limit, to clear the alert
_IDLE_UTILIZATION = 0.005  # another rule reports idle GPUs


class _CounterRate:
    """Combined rate of several counters over the recent minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=RECENT_BUCKETS + 1)

    def close(self, values: Mapping[str, float], columns: Sequence[str], mono: float) -> None:
        totals = [total for name in columns if (total := finite_or_none(values.get(name))) is not None]
        if len(totals) < len(columns):  # the sum of the others would fall and then jump
            return
        if self._samples and sum(totals) < self._samples[-1][1]:  # a counter restarted
            self._samples.clear()
        self._samples.append((mono, sum(totals)))

    def per_s(self) -> float | None:
        if len(self._samples) < 2:
            return None
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if end > start else None


class UtilizationRule:
    """Low-utilization rule on the node of rank 0; it fires if the mean utilization in training is below ``limit``."""

    def __init__(self, limit: float, node: str) -> None:
        self._limit = limit
        self._node = node
        self._rates: defaultdict[tuple[str, str], _CounterRate] = defaultdict(
            _CounterRate
        )  # by GPU's UUID or host, and link
        self._job_cpu = _CounterRate()
        self._cores: int | None = None
        self._cpu: deque[float] = deque(maxlen=RECENT_BUCKETS)

    def close(self, gpus: Sequence[GpuWindow], snapshot: Snapshot) -> None:
        """Record the rates of the last bucket, every ten seconds."""
        cpu = finite_or_none(snapshot.values.get(column_name("host", "cpu")))
        if cpu is not None:
            self._cpu.append(cpu)
        self._cores = snapshot.cpu_allocated
        self._job_cpu.close(snapshot.values, [column_name("host", "job_cpu_s")], snapshot.mono)
        links = [(gpu.facts.uuid, gpu.device, link) for gpu in gpus for link in ("nvlink", "pcie")]
        for owner, device, link in [("host", "host", "infiniband"), *links]:
            columns = [column_name(device, f"{link}_{direction}_bytes") for direction in ("tx", "rx")]
            self._rates[owner, link].close(snapshot.values, columns, snapshot.mono)

    def evaluate(self, gpus: Sequence[GpuWindow], ranks: Sequence[RankWindow]) -> RuleResult:
        active = [
            (gpu, mean_busy)
            for gpu in gpus
            if (mean_busy := gpu.utilization(MIN_TRAIN_S)) is not None and mean_busy >= _IDLE_UTILIZATION
        ]
        if not self._limit or not active:
            return None
        mean_busy = statistics.fmean(share for _, share in active)
        if mean_busy >= self._limit:
            return HEALTHY if mean_busy >= min(1.0, self._limit + _CLEAR_MARGIN) else None
        active_gpus = [gpu for gpu, _ in active]
        subject = (
            f"{active_gpus[0].label} of {self._node} was"
            if len(active) == 1
            else f"{len(active)} GPUs of {self._node} were"
        )
        evidence, fix = self._cause(active_gpus, ranks)
        return AlertFinding(
            code="low_utilization",
            severity=findings.WARNING,
            text=f"{subject} busy {mean_busy:.0%} of the time in training, over five minutes: {evidence}",
            fix=fix,
            value=mean_busy,
            limit=self._limit,
            confirm_s=CONFIRM_S,
        )

    def _cause(self, gpus: Sequence[GpuWindow], ranks: Sequence[RankWindow]) -> findings.Cause:
        """Return the first cause that has evidence."""
        cpu, cores_owner = self._cores_busy()
        busy_cores = ""
        if cpu is not None and cpu >= findings.HIGH_CPU_UTILIZATION:
            busy_cores = f"{cpu:.0%} of {cores_owner} busy"
        shares = [
            wait / step_s
            for rank in ranks
            if (wait := rank.per_step("data_wait_s", MIN_TRAIN_S)) is not None
            and (step_s := rank.per_step("train_s", MIN_TRAIN_S))
        ]
        if shares and (share := statistics.fmean(shares)) >= findings.HIGH_DATA_WAIT:
            return findings.waiting_for_data(share, busy_cores)
        if busy_cores:
            return busy_cores, f"{findings.FIX_CPU_CORES}, or an exclusive node"
        if busy_links := self._busy_links(gpus, single_rank=len(ranks) == 1):
            return findings.waiting_for_communication(busy_links)
        return findings.unknown_cause(["data", "processors"] if shares and cpu is not None else [])

    def _cores_busy(self) -> tuple[float | None, str]:
        """Return the busy share of the job's processors, or of the node's if the job's are unknown, and a label."""
        rate = self._job_cpu.per_s()
        if self._cores and rate is not None:
            return rate / self._cores, "the job's processors"
        if self._cores or not self._cpu:
            return None, ""
        return statistics.fmean(self._cpu), "the node's processors"

    def _busy_links(self, gpus: Sequence[GpuWindow], *, single_rank: bool) -> str:
        """Return a phrase for the busy links.

        PCIe does not count with a single rank on the node: it carries only copies to and from the host.
        """

        def mean(link: str) -> float | None:
            rates = [rate for gpu in gpus if (rate := self._rates[gpu.facts.uuid, link].per_s()) is not None]
            return statistics.fmean(rates) if rates else None

        infiniband = self._rates["host", "infiniband"].per_s()
        return findings.format_busy_links(
            nvlink=mean("nvlink"),
            pcie=None if single_rank else mean("pcie"),
            infiniband=None if infiniband is None else infiniband / len(gpus),
        )
