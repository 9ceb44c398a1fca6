"""GPUs that have little to do while they train, and why as far as their node tells: data, host or communication."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from clustertrain.telemetry import causes
from clustertrain.telemetry.alerts.gate import HEALTHY, WARNING, AlertFinding, RuleResult
from clustertrain.telemetry.alerts.straggler import CONFIRM_S
from clustertrain.telemetry.alerts.window import RECENT_BUCKETS, GpuWindow, RankWindow, finite_or_none
from clustertrain.telemetry.fields import column_name
from clustertrain.telemetry.snapshot import Snapshot

MIN_TRAIN_S = 120.0  # of the last five minutes must have been training; checkpoints and evaluations may take the others
_CLEAR_MARGIN = 0.05  # by so much above the limit all is well
_IDLE_UTILIZATION = 0.005  # that a GPU does nothing at all is another rule's to say


class _CounterRate:
    """What counters grew by together in a second over the recent minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=RECENT_BUCKETS + 1)

    def close(self, values: Mapping[str, float], columns: Sequence[str], mono: float) -> None:
        totals = [total for name in columns if (total := finite_or_none(values.get(name))) is not None]
        if len(totals) < len(columns):  # the sum of the others would fall, and then jump
            return
        if self._samples and sum(totals) < self._samples[-1][1]:  # it began anew
            self._samples.clear()
        self._samples.append((mono, sum(totals)))

    def per_s(self) -> float | None:
        if len(self._samples) < 2:
            return None
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - start) if end > start else None


class UtilizationRule:
    """The rule, on the node of rank 0. ``limit``: the mean share of time, in training, below which it is told."""

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
        """Once in ten seconds."""
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
            severity=WARNING,
            text=f"{subject} busy {mean_busy:.0%} of the time in training, over five minutes: {evidence}",
            fix=fix,
            value=mean_busy,
            limit=self._limit,
            confirm_s=CONFIRM_S,
        )

    def _cause(self, gpus: Sequence[GpuWindow], ranks: Sequence[RankWindow]) -> tuple[str, str]:
        """The evidence, and what helps. The first cause that has evidence is told."""
        cpu, cores_owner = self._cores_busy()
        cores_text = f"{cpu or 0.0:.0%} of {cores_owner} busy"
        cores_saturated = cpu is not None and cpu >= causes.HIGH_CPU_UTILIZATION
        shares = [
            wait / step_s
            for rank in ranks
            if (wait := rank.per_step("data_wait_s", MIN_TRAIN_S)) is not None
            and (step_s := rank.per_step("train_s", MIN_TRAIN_S))
        ]
        if shares and (share := statistics.fmean(shares)) >= causes.HIGH_DATA_WAIT:
            evidence = f"training waits for its data for {share:.0%} of a step"
            if not cores_saturated:
                return evidence, causes.FIX_DATA_LOADING
            return f"{evidence}, with {cores_text}", f"{causes.FIX_CPU_CORES}; else {causes.FIX_DATA_LOADING}"
        if cores_saturated:
            return cores_text, f"{causes.FIX_CPU_CORES}, or a node of one's own"
        if busy_links := self._busy_links(gpus, single_rank=len(ranks) == 1):
            return f"waiting on communication, with {causes.join_words(busy_links, 'and')} a GPU", causes.FIX_NETWORK
        if not shares or cpu is None:
            return "nothing that is recorded says why", causes.FIX_SMALL_KERNELS
        evidence = "not for data or the processors, so the kernels may be too small, or Python too slow for them"
        return evidence, causes.FIX_SMALL_KERNELS

    def _cores_busy(self) -> tuple[float | None, str]:
        """The share of the processors that are busy, and of which ones: of those that the job has, as far as that is
        known, or, where it has not only some of them, of the node."""
        rate = self._job_cpu.per_s()
        if self._cores and rate is not None:
            return rate / self._cores, "the job's processors"
        if self._cores or not self._cpu:
            return None, ""
        return statistics.fmean(self._cpu), "the node's processors"

    def _busy_links(self, gpus: Sequence[GpuWindow], *, single_rank: bool) -> list[str]:
        """``single_rank``: one rank on its node, whose PCIe carries what it copies from and to the host."""

        def mean(link: str) -> float | None:
            rates = [rate for gpu in gpus if (rate := self._rates[gpu.facts.uuid, link].per_s()) is not None]
            return statistics.fmean(rates) if rates else None

        infiniband = self._rates["host", "infiniband"].per_s()
        return causes.format_busy_links(
            [
                ("NVLink", mean("nvlink"), causes.NVLINK_BUSY),
                ("PCIe", None if single_rank else mean("pcie"), causes.PCIE_BUSY),
                ("InfiniBand", None if infiniband is None else infiniband / len(gpus), causes.INFINIBAND_BUSY),
            ]
        )
