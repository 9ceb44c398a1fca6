"""The rules that watch a node while its job runs. The sampler hands in every snapshot; what is found goes to
:mod:`.notify`.

A rule sees its own node. What is true of the run as a whole (GPUs have little to do, steps become slow, or none is done
any more) only the node of rank 0 says, as all ranks step together: a job of a hundred nodes would say it a hundred
times. What takes other nodes to compare with is :mod:`.across`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run import heartbeat
from clustertrain.telemetry import xids
from clustertrain.telemetry.alerts import straggler
from clustertrain.telemetry.alerts.gate import CRITICAL, WARNING, WELL, Alert, Finding, Gate, Verdict
from clustertrain.telemetry.alerts.straggler import CONFIRM_S, leave_out
from clustertrain.telemetry.alerts.utilization import Utilization
from clustertrain.telemetry.alerts.window import BUCKET_S, GpuBucket, GpuWindow, RankWindow, StepTimes, finite
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

GIB = 1 << 30
COMPARABLE = 3  # so many are needed before one of them can be called slower than the others
SEEN_S = 180.0  # and each must have trained for so long
LATEST_TICK_S = 10.0  # a longer pause between two snapshots tells nothing of what was in between
NO_MEDIAN_HANG_S = 1800.0  # until steps have been seen: the first one compiles
LEAST_STEP_S = 0.02  # shorter steps are a toy's, and vary
_NOT_IDLE = (heartbeat.STARTUP, heartbeat.RESTORE, heartbeat.SHUTDOWN)  # where nobody expects a GPU to be busy

Key = tuple[str, object]


class Alerts:
    """The alerts of one node. Not thread-safe: one thread calls :meth:`observe` and :meth:`event`, or a lock is held.

    ``elsewhere`` (rank -> step) may be set from any thread; it names the rank that is behind when the run hangs.
    """

    def __init__(self, spec: AlertsSpec, node: str) -> None:
        self._spec = spec
        self._gate = Gate(node)
        self._node = node
        self._facts: list[GpuFacts] = []
        self._rank_list: list[int] = []
        self._gpus: list[GpuWindow] = []
        self._ranks: dict[int, RankWindow] = {}
        self._times = StepTimes()
        self._utilization = Utilization(spec.utilization, node)
        self._uncorrected: dict[str, float] = {}
        self._mono: float | None = None
        self._in_bucket = 0.0
        self._stalled_s = 0.0
        self.elsewhere: Mapping[int, int] = {}

    def observe(self, snapshot: Snapshot) -> list[Alert]:
        """What has begun or ended to be wrong. Adds up; the rules are asked every ten seconds."""
        if snapshot.gpus is not self._facts or snapshot.ranks is not self._rank_list:
            self._renew(snapshot)
        before, self._mono = self._mono, snapshot.mono
        dt = snapshot.mono - before if before is not None else 0.0
        if not 0.0 < dt <= LATEST_TICK_S:
            dt = 0.0
            self._stalled_s = 0.0
        self._add(snapshot, dt)
        self._in_bucket += dt
        if self._in_bucket < BUCKET_S:
            return []
        self._in_bucket = 0.0
        return self._close(snapshot)

    def event(self, kind: str, uuid: str, t: float, mono: float, *, xid: int | None = None) -> list[Alert]:
        """What the sampler is told by the driver: ``xid``, ``ecc_uncorrected``, ``gpu_lost`` or ``gpu_back``.
        What else it tells is no alert."""
        gpu = next((g for g in self._gpus if g.facts.uuid == uuid), None)
        rank = gpu.rank if gpu is not None else None
        where = f"{gpu.where if gpu is not None else f'GPU {uuid}'} of {self._node}"
        if kind in ("gpu_lost", "gpu_back"):
            lost = Finding(
                code="gpu_lost",
                severity=CRITICAL,
                text=f"{where} does not answer any more",
                fix=leave_out(self._node),
                uuid=uuid,
                rank=rank,
            )
            verdict: Verdict = lost if kind == "gpu_lost" else WELL
            key: Key = ("gpu_lost", uuid)
        elif not self._spec.xid:
            return []
        elif kind == "xid" and xid is not None:
            verdict, key = _xid(xid, where, self._node, uuid, rank), ("xid", (uuid, xid))
        elif kind == "ecc_uncorrected":
            verdict, key = _ecc(where, self._node, uuid, rank), ("ecc_uncorrected", uuid)
        else:
            return []
        found = self._gate.judge(key, verdict, t, mono)
        return [] if found is None else [found]

    def happened(self, finding: Finding, t: float, mono: float) -> Alert | None:
        """What rank 0 has written among its events."""
        return self._gate.judge((finding.code, "training"), finding, t, mono)

    def _renew(self, snapshot: Snapshot) -> None:
        """Other GPUs, as after the driver came back; those that stayed keep what is known of them."""
        same = snapshot.gpus == self._facts and snapshot.ranks == self._rank_list
        self._facts, self._rank_list = snapshot.gpus, snapshot.ranks
        if same:
            return
        known = {g.facts.uuid: g for g in self._gpus}
        self._gpus = []
        for number, facts in enumerate(snapshot.gpus):
            old = known.get(facts.uuid)
            gpu = GpuWindow(number, facts)
            if old is not None:
                gpu.bucket, gpu.past = old.bucket, old.past
                gpu.idle_s, gpu.power_trained = old.idle_s, old.power_trained
            self._gpus.append(gpu)
        self._ranks = {rank: self._ranks.get(rank) or RankWindow(rank) for rank in snapshot.ranks}

    def _add(self, snapshot: Snapshot, dt: float) -> None:
        values = snapshot.values
        moved = not self._ranks
        for number, rank in self._ranks.items():
            advanced = rank.add(values, dt)
            moved = moved or advanced or not rank.training
            if advanced and number == 0 and rank.training and rank.step is not None:
                self._times.advanced(rank.train_s, rank.step)
        self._stalled_s = 0.0 if moved else self._stalled_s + dt
        for gpu in self._gpus:
            rank_of = self._ranks.get(gpu.rank) if gpu.rank is not None else None
            gpu.add(values, dt, rank_of is not None and rank_of.training, rank_of is not None and rank_of.warm)

    def _close(self, snapshot: Snapshot) -> list[Alert]:
        for rank in self._ranks.values():
            rank.close(snapshot.values)
        self._times.close()
        found = []
        for key, verdict in self._verdicts(snapshot):
            alert = self._gate.judge(key, verdict, snapshot.t, snapshot.mono)
            if alert is not None:
                found.append(alert)
        return found

    def _verdicts(self, snapshot: Snapshot) -> Iterator[tuple[Key, Verdict]]:
        for gpu in self._gpus:
            bucket, uuid = gpu.close(), gpu.facts.uuid
            yield ("gpu_idle", uuid), self._idle(gpu, bucket)
            yield ("memory_nearly_full", uuid), self._memory(gpu, bucket)
            yield ("throttled", uuid), self._throttled(gpu, bucket)
            yield from self._memory_errors(gpu, snapshot.values)
        yield from self._stragglers()
        if 0 in self._ranks:
            self._utilization.close(self._gpus, snapshot)
            yield ("low_utilization", 0), self._utilization.verdict(self._gpus, list(self._ranks.values()))
            yield ("slow_steps", 0), self._slow()
            yield ("hung", 0), self._hang()

    def _phase_of(self, gpu: GpuWindow) -> RankWindow | None:
        """The rank of a GPU, where it says something of itself."""
        rank = self._ranks.get(gpu.rank) if gpu.rank is not None else None
        return rank if rank is not None and rank.phase is not None else None

    def _idle(self, gpu: GpuWindow, bucket: GpuBucket) -> Verdict:
        if not self._spec.idle_min or not bucket.busy_known:
            return None
        rank = self._phase_of(gpu)
        if bucket.busy / bucket.busy_known >= 0.005:
            gpu.idle_s = 0.0
            return WELL
        if rank is not None and (not rank.begun or rank.phase in _NOT_IDLE):
            return None  # training has not begun, or is over
        gpu.idle_s += bucket.busy_known
        if gpu.idle_s < 60 * self._spec.idle_min:
            return None
        doing = "no rank uses it" if gpu.rank is None else f"rank {gpu.rank} runs on it"
        if rank is not None and rank.phase is not None and 0 <= rank.phase < len(heartbeat.PHASES):
            doing = f"its rank {rank.rank} is in the phase {heartbeat.PHASES[rank.phase]}"
        fix = "ask for fewer GPUs" if gpu.rank is None else f"see `clustertrain logs --rank {gpu.rank}`"
        text = f"{gpu.where} of {self._node} has been at 0 % for {_minutes(gpu.idle_s)}; {doing}"
        return _finding("gpu_idle", WARNING, text, fix, gpu, gpu.idle_s / 60, self._spec.idle_min)

    def _memory(self, gpu: GpuWindow, bucket: GpuBucket) -> Verdict:
        total = gpu.facts.memory_total_bytes
        if not self._spec.memory or not total or not bucket.memory:
            return None
        share = bucket.memory / total
        if share < self._spec.memory:
            return WELL if share < self._spec.memory - 0.02 else None
        used = f"{bucket.memory / GIB:.1f} of {total / GIB:.1f} GiB"
        text = f"the memory of {gpu.where} of {self._node} is nearly full: {used}"
        fix = "a smaller micro batch, activation checkpointing, or more sharding, before a longer batch runs out"
        return _finding("memory_nearly_full", WARNING, text, fix, gpu, share, self._spec.memory)

    def _throttled(self, gpu: GpuWindow, bucket: GpuBucket) -> Verdict:
        if not self._spec.throttle_min or not bucket.held_known:
            return None
        thermal, hardware = gpu.held_s()
        minutes = max(thermal, hardware) / 60
        if minutes < self._spec.throttle_min:
            return WELL if minutes < self._spec.throttle_min / 2 else None
        by = "heat" if thermal >= hardware else "the hardware (power supply or power brake)"
        text = f"{gpu.where} of {self._node} was held down by {by} for {minutes:.1f} of the last 10 minutes"
        fix = f"tell the administrators; {leave_out(self._node)}"
        return _finding("throttled", WARNING, text, fix, gpu, minutes, self._spec.throttle_min, CONFIRM_S)

    def _memory_errors(self, gpu: GpuWindow, values: Mapping[str, float]) -> Iterator[tuple[Key, Verdict]]:
        if not self._spec.xid:
            return
        uuid, where = gpu.facts.uuid, f"{gpu.where} of {self._node}"
        count = finite(values.get(gpu.uncorrected))
        if count is not None:
            before, self._uncorrected[uuid] = self._uncorrected.get(uuid, count), count
            if count > before:
                yield ("ecc_uncorrected", uuid), _ecc(where, self._node, uuid, gpu.rank, count - before)
        failed = finite(values.get(gpu.remap_failed))
        if failed is not None:
            text = f"a memory row of {where} could not be replaced: the board is to be exchanged"
            finding = _finding("row_remap_failed", CRITICAL, text, leave_out(self._node), gpu, failed, 0.0)
            yield ("row_remap_failed", uuid), finding if failed else WELL

    def _stragglers(self) -> Iterator[tuple[Key, Verdict]]:
        """A GPU that throttles is slower, and its rank is late: that is one thing to say and not three."""
        if not self._spec.straggler:
            return
        limit_s = 60 * self._spec.throttle_min
        said = {g.facts.uuid for g in self._gpus if limit_s and max(g.held_s()) >= limit_s}
        for alike in _by_name(self._gpus).values():
            clocks = {g.facts.uuid: (g, c) for g in alike if (c := g.clock_mhz(SEEN_S)) is not None}
            if len(clocks) >= COMPARABLE:
                usual = statistics.median(c for _, c in clocks.values())
                for uuid, (gpu, clock) in clocks.items():
                    who = straggler.Who(f"{gpu.where} of {self._node}", self._node, uuid, gpu.rank)
                    verdict = straggler.of_clock(who, clock, usual, self._spec.straggler)
                    if verdict is WELL or uuid not in said:
                        yield ("slow_gpu", uuid), verdict
                    if verdict:
                        said.add(uuid)
        yield from self._slow_ranks("forward_s", straggler.of_forward, said)
        yield from self._slow_ranks("data_wait_s", straggler.of_data_wait, set())

    def _slow_ranks(self, figure: str, rule: straggler.OfRank, said: set[str]) -> Iterator[tuple[Key, Verdict]]:
        """``said``: the GPUs of which a cause has been named."""
        times = {r: s for r, w in self._ranks.items() if (s := w.per_step(figure, SEEN_S)) is not None}
        if len(times) < COMPARABLE:
            return
        usual = statistics.median(times.values())
        uuids = {g.rank: g.facts.uuid for g in self._gpus}
        for rank, seconds in times.items():
            step_s = self._ranks[rank].per_step("train_s", SEEN_S)
            if step_s is not None:
                who = straggler.Who(f"rank {rank} on {self._node}", self._node, uuids.get(rank), rank)
                verdict = rule(who, seconds, usual, step_s, self._spec.straggler)
                if verdict is WELL or who.uuid not in said:
                    yield (f"late_{figure}", rank), verdict

    def _slow(self) -> Verdict:
        recent, usual = self._times.recent(), self._times.median()
        if not self._spec.slowdown or recent is None or usual is None:
            return None
        limit = usual * (1 + self._spec.slowdown)
        if recent < max(limit, LEAST_STEP_S):
            return WELL if recent < max(usual * (1 + self._spec.slowdown / 2), LEAST_STEP_S) else None
        text = (
            f"a step takes {recent:.3g} s, {recent / usual - 1:.0%} longer than the run's own median of {usual:.3g} s"
        )
        fix = "see `clustertrain top` for what it waits on: data, a slow GPU, the network"
        return Finding(
            code="slow_steps",
            severity=WARNING,
            text=text,
            fix=fix,
            rank=0,
            value=recent,
            limit=limit,
            hold_s=CONFIRM_S,
        )

    def _hang(self) -> Verdict:
        if not self._spec.hang_min:
            return None
        limit = max(60 * self._spec.hang_min, self._longest_pause_s())
        if self._stalled_s < limit:
            return WELL
        behind, text = self._who_is_behind()
        gpu = next((g for g in self._gpus if behind is not None and g.rank == behind), None)
        logs = "clustertrain logs" if behind is None else f"clustertrain logs --rank {behind}"
        return Finding(
            code="hung",
            severity=CRITICAL,
            text=f"no step for {_minutes(self._stalled_s)}, though all ranks are in training; {text}",
            fix=f"see `{logs}`; `clustertrain requeue` goes on from the newest checkpoint",
            uuid=gpu.facts.uuid if gpu is not None else None,
            rank=behind,
            value=self._stalled_s,
            limit=limit,
        )

    def _longest_pause_s(self) -> float:
        """How long a run that is well may go without a step."""
        usual, early = self._times.median(enough=False), self._times.early()
        if usual is not None:
            return 10 * usual
        if early is None:
            return NO_MEDIAN_HANG_S
        median, longest = early
        return max(10 * median, 2 * longest)  # another shape compiles about as long as the first one did

    def _who_is_behind(self) -> tuple[int | None, str]:
        """By its step; where all are at the same step by its GPU, as those that wait for it spin in a collective."""
        steps = {**self.elsewhere, **{r: int(w.step) for r, w in self._ranks.items() if w.step is not None}}
        spinning = [g for g in self._gpus if g.spins()]
        others = [g for g in self._gpus if g.rank is not None and g not in spinning]
        waits = ""
        if spinning:
            waits = (
                f"; {len(spinning)} of the node's {len(self._gpus)} GPUs are at 100 % without drawing power: they wait"
            )
        low, high = min(steps.values(), default=0), max(steps.values(), default=0)
        waiting = {g.rank for g in spinning}
        late = sorted(r for r, s in steps.items() if s < high and r not in waiting)
        if late and len(late) <= len(steps) / 2:
            many = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
            return late[0], f"rank {late[0]}{many} is at step {steps[late[0]]}, the others are at {high}{waits}"
        where = f"all are at step {low}" if low == high else f"they are at steps {low} to {high}"
        if spinning and len(others) == 1:
            return others[0].rank, f"{where}{waits} for rank {others[0].rank} ({others[0].where})"
        return None, f"{where}{waits}; which rank the others wait for is not known"


def _by_name(gpus: list[GpuWindow]) -> dict[str | None, list[GpuWindow]]:
    """Clocks of two models of GPU say nothing of each other."""
    groups: dict[str | None, list[GpuWindow]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.facts.name, []).append(gpu)
    return groups


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _finding(
    code: str, severity: str, text: str, fix: str, gpu: GpuWindow, value: float, limit: float, hold_s: float = 0.0
) -> Finding:
    return Finding(
        code=code, severity=severity, text=text, fix=fix, uuid=gpu.facts.uuid, rank=gpu.rank, value=value, limit=limit,
        hold_s=hold_s,
    )  # fmt: skip


def _xid(number: int, where: str, node: str, uuid: str, rank: int | None) -> Finding:
    xid = xids.of(number)
    return Finding(
        code="xid",
        severity=xid.severity,
        text=f"{where} reported XID {number}: {xid.name}, {xid.meaning}",
        fix=xids.advice(number, node),
        uuid=uuid,
        rank=rank,
        value=float(number),
        moment=True,
    )


def _ecc(where: str, node: str, uuid: str, rank: int | None, count: float | None = None) -> Finding:
    many = "memory errors" if count is None else f"{count:.0f} memory error{'s' * (count != 1)}"
    return Finding(
        code="ecc_uncorrected",
        severity=CRITICAL,
        text=f"{many} of {where} could not be corrected",
        fix=f"what was computed since is in doubt; {leave_out(node)}",
        uuid=uuid,
        rank=rank,
        value=count,
        moment=True,
    )
