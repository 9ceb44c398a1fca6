"""GPUs that have little to do while they train, and why as far as their node tells: data, host or communication."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from clustertrain.telemetry import causes
from clustertrain.telemetry.alerts.gate import WARNING, WELL, Finding, Verdict
from clustertrain.telemetry.alerts.straggler import CONFIRM_S
from clustertrain.telemetry.alerts.window import RECENT, GpuWindow, RankWindow, finite
from clustertrain.telemetry.fields import column
from clustertrain.telemetry.snapshot import Snapshot

SEEN_S = 120.0  # of the last five minutes must have been training; checkpoints and evaluations may take the others
_BETTER = 0.05  # by so much above the limit all is well
_IDLE = 0.005  # that a GPU does nothing at all is another rule's to say


class _Rate:
    """What counters grew by together in a second over the recent minutes."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)

    def close(self, values: Mapping[str, float], columns: Sequence[str], mono: float) -> None:
        totals = [total for name in columns if (total := finite(values.get(name))) is not None]
        if len(totals) < len(columns):  # the sum of the others would fall, and then jump
            return
        if self._marks and sum(totals) < self._marks[-1][1]:  # it began anew
            self._marks.clear()
        self._marks.append((mono, sum(totals)))

    def per_s(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - begin) if end > begin else None


class Utilization:
    """The rule, on the node of rank 0. ``limit``: the mean share of time, in training, below which it is told."""

    def __init__(self, limit: float, node: str) -> None:
        self._limit = limit
        self._node = node
        self._rates: defaultdict[tuple[str, str], _Rate] = defaultdict(_Rate)  # by GPU's UUID or host, and link
        self._job_cpu = _Rate()
        self._cores: int | None = None
        self._cpu: deque[float] = deque(maxlen=RECENT)

    def close(self, gpus: Sequence[GpuWindow], snapshot: Snapshot) -> None:
        """Once in ten seconds."""
        cpu = finite(snapshot.values.get(column("host", "cpu")))
        if cpu is not None:
            self._cpu.append(cpu)
        self._cores = snapshot.cpu_allocated
        self._job_cpu.close(snapshot.values, [column("host", "job_cpu_s")], snapshot.mono)
        links = [(gpu.facts.uuid, gpu.device, link) for gpu in gpus for link in ("nvlink", "pcie")]
        for whose, device, link in [("host", "host", "infiniband"), *links]:
            columns = [column(device, f"{link}_{way}_bytes") for way in ("tx", "rx")]
            self._rates[whose, link].close(snapshot.values, columns, snapshot.mono)

    def verdict(self, gpus: Sequence[GpuWindow], ranks: Sequence[RankWindow]) -> Verdict:
        told = [(gpu, busy) for gpu in gpus if (busy := gpu.utilization(SEEN_S)) is not None and busy >= _IDLE]
        if not self._limit or not told:
            return None
        busy = statistics.fmean(share for _, share in told)
        if busy >= self._limit:
            return WELL if busy >= min(1.0, self._limit + _BETTER) else None
        working = [gpu for gpu, _ in told]
        who = f"{working[0].where} of {self._node} was" if len(told) == 1 else f"{len(told)} GPUs of {self._node} were"
        why, fix = self._cause(working, ranks)
        return Finding(
            code="low_utilization",
            severity=WARNING,
            text=f"{who} busy {busy:.0%} of the time in training, over five minutes: {why}",
            fix=fix,
            value=busy,
            limit=self._limit,
            hold_s=CONFIRM_S,
        )

    def _cause(self, gpus: Sequence[GpuWindow], ranks: Sequence[RankWindow]) -> tuple[str, str]:
        """The evidence, and what helps. The first cause that has evidence is told."""
        cpu, whose = self._cores_busy()
        cores = f"{cpu or 0.0:.0%} of {whose} busy"
        no_cores_left = cpu is not None and cpu >= causes.CORES_BUSY
        shares = [
            wait / step_s
            for rank in ranks
            if (wait := rank.per_step("data_wait_s", SEEN_S)) is not None
            and (step_s := rank.per_step("train_s", SEEN_S))
        ]
        if shares and (share := statistics.fmean(shares)) >= causes.DATA:
            why = f"training waits for its data for {share:.0%} of a step"
            if not no_cores_left:
                return why, causes.FASTER_DATA
            return f"{why}, with {cores}", f"{causes.MORE_CORES}; else {causes.FASTER_DATA}"
        if no_cores_left:
            return cores, f"{causes.MORE_CORES}, or a node of one's own"
        if busy := self._links(gpus, alone=len(ranks) == 1):
            return f"waiting on communication, with {causes.listed(busy, 'and')} a GPU", causes.LESS_TRAFFIC
        if not shares or cpu is None:
            return "nothing that is recorded says why", causes.LARGER_KERNELS
        why = "not for data or the processors, so the kernels may be too small, or Python too slow for them"
        return why, causes.LARGER_KERNELS

    def _cores_busy(self) -> tuple[float | None, str]:
        """The share of the processors that are busy, and of which ones: of those that the job has, as far as that is
        known, or, where it has not only some of them, of the node."""
        rate = self._job_cpu.per_s()
        if self._cores and rate is not None:
            return rate / self._cores, "the job's processors"
        if self._cores or not self._cpu:
            return None, ""
        return statistics.fmean(self._cpu), "the node's processors"

    def _links(self, gpus: Sequence[GpuWindow], *, alone: bool) -> list[str]:
        """``alone``: one rank on its node, whose PCIe carries what it copies from and to the host."""

        def mean(link: str) -> float | None:
            rates = [rate for gpu in gpus if (rate := self._rates[gpu.facts.uuid, link].per_s()) is not None]
            return statistics.fmean(rates) if rates else None

        ports = self._rates["host", "infiniband"].per_s()
        return causes.links(
            [
                ("NVLink", mean("nvlink"), causes.NVLINK),
                ("PCIe", None if alone else mean("pcie"), causes.PCIE),
                ("InfiniBand", None if ports is None else ports / len(gpus), causes.INFINIBAND),
            ]
        )
