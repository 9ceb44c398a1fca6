"""Alert rules of a node: each rule, a healthy day without alerts, and input of broken drivers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run import heartbeat
from clustertrain.telemetry import fields
from clustertrain.telemetry.alerts.gate import MAX_PER_HOUR, Alert
from clustertrain.telemetry.alerts.rules import AlertRules
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts

GIB = 1 << 30
T0 = 1_790_000_000.0
NAN = float("nan")
Change = Callable[[float, dict[str, float]], None]


def facts(count: int, ranks: int | None = None) -> list[GpuFacts]:
    rank_count = count if ranks is None else ranks
    return [
        GpuFacts(f"GPU-{i}", i, i, "H100", 80 * GIB, ranks=[i] if i < rank_count else [])
        for i in range(count)
    ]  # fmt: skip


class Job:
    """A node whose ranks train together with steps of ``step_s``, with noise in all values."""

    def __init__(
        self, gpus: int = 4, ranks: int | None = None, *, step_s: float = 0.5, seed: int = 0, first: int = 0
    ) -> None:
        self.gpus = facts(gpus, ranks)
        self.ranks = [first + i for i in range(gpus if ranks is None else ranks)]
        for i, f in enumerate(self.gpus):
            f.ranks[:] = [first + i] if i < len(self.ranks) else []
        self.step_s, self.random = step_s, random.Random(seed)
        self.now = self.done = self.waited = self.forward = 0.0
        self.phase = heartbeat.TRAIN
        self.cores: int | None = None  # of the job

    def tick(self, dt: float = 1.0) -> dict[str, float]:
        self.now += dt
        training = self.phase == heartbeat.TRAIN
        if training:
            steps = dt / (self.step_s * self.random.gauss(1.0, 0.03))
            self.done += steps
            self.waited += steps * 0.004
            self.forward += steps * self.step_s * 0.3
        values: dict[str, float] = {}
        for i in range(len(self.gpus)):
            busy = i < len(self.ranks)
            values |= {
                f"gpu{i}.utilization": min(1.0, self.random.gauss(0.95, 0.05)) if busy and training else 0.2 * busy,
                f"gpu{i}.memory_used_bytes": 60 * GIB + self.random.gauss(0, GIB / 10),
                f"gpu{i}.power_w": self.random.gauss(550.0 if training else 130.0, 30.0) if busy else 75.0,
                f"gpu{i}.sm_clock_mhz": self.random.gauss(1900.0, 40.0),
                f"gpu{i}.throttle_thermal": 1.0 if self.random.random() < 0.01 else 0.0,
                f"gpu{i}.throttle_hardware": 0.0,
                f"gpu{i}.ecc_uncorrected": 3.0,
                f"gpu{i}.remap_failed": 0.0,
            }
        for r in self.ranks:
            values |= {
                f"rank{r}.step": float(int(self.done)),
                f"rank{r}.phase": float(self.phase),
                f"rank{r}.data_wait_s": self.waited * self.random.gauss(1, 0.01),
                f"rank{r}.forward_s": self.forward * self.random.gauss(1, 0.0001),
            }
        return values

    def snapshot(self, values: Mapping[str, float]) -> Snapshot:
        return Snapshot(T0 + self.now, self.now, "n1", self.gpus, self.ranks, values, self.cores)

    def run(self, alerts: AlertRules, seconds: float, change: Change | None = None, dt: float = 1.0) -> list[Alert]:
        reported = []
        for _ in range(int(seconds / dt)):
            values = self.tick(dt)
            if change is not None:
                change(self.now, values)
            reported += alerts.observe(self.snapshot(values))
        return reported


def codes(alerts: Sequence[Alert]) -> list[tuple[str, str]]:
    return [(a.code, a.state) for a in alerts]


@pytest.fixture
def alerts() -> AlertRules:
    return AlertRules(AlertsSpec(), "n1")


@pytest.mark.parametrize(
    ("gpus", "hours"),
    [(4, 1), pytest.param(4, 4, marks=pytest.mark.long), pytest.param(8, 24, marks=pytest.mark.long)],
)
def test_healthy_hours_raise_nothing(alerts: AlertRules, gpus: int, hours: int) -> None:
    job = Job(gpus, seed=3)
    reported = job.run(
        alerts, 120, lambda now, v: v.update({k: float(heartbeat.STARTUP) for k in v if k.endswith("phase")})
    )
    while job.now < 3600 * hours:
        job.phase = heartbeat.TRAIN
        reported += job.run(alerts, 1680, dt=2.0)
        job.phase = heartbeat.CHECKPOINT
        reported += job.run(alerts, 40, dt=2.0)
        job.phase = heartbeat.EVALUATION
        reported += job.run(alerts, 80, dt=2.0)
    assert reported == []


def test_gpu_unused_by_its_rank(alerts: AlertRules) -> None:
    job = Job(4)
    reported = job.run(alerts, 590, lambda _, v: v.update({"gpu2.utilization": 0.0}))
    assert reported == []
    reported = job.run(alerts, 600, lambda _, v: v.update({"gpu2.utilization": 0.0}))
    assert codes(reported) == [("gpu_idle", "raised")]
    assert (reported[0].uuid, reported[0].rank, reported[0].node, reported[0].limit) == ("GPU-2", 2, "n1", 10.0)
    reported = job.run(alerts, 120)
    assert codes(reported) == [("gpu_idle", "cleared")]
    assert reported[0].lasted_s == pytest.approx(600, abs=20)


def test_gpu_without_rank_is_reported_during_startup(alerts: AlertRules) -> None:
    job = Job(3, ranks=2)
    job.phase = heartbeat.STARTUP

    def starting(_: float, v: dict[str, float]) -> None:
        v |= {"gpu0.utilization": 0.0, "gpu1.utilization": 0.0}

    reported = job.run(alerts, 1200, starting)
    assert [(a.code, a.uuid, a.rank) for a in reported] == [("gpu_idle", "GPU-2", None)]


def test_silent_ranks_do_not_hide_idle_gpus(alerts: AlertRules) -> None:
    def silent(_: float, v: dict[str, float]) -> None:
        for name in list(v):
            if name.startswith("rank"):
                v[name] = NAN
        v["gpu1.utilization"] = 0.0

    reported = Job(2).run(alerts, 900, silent)
    assert [(a.code, a.uuid) for a in reported] == [("gpu_idle", "GPU-1")]


def test_flapping_memory_alert_is_raised_once(alerts: AlertRules) -> None:
    def flapping(now: float, v: dict[str, float]) -> None:
        v["gpu0.memory_used_bytes"] = (79 if int(now / 30) % 2 else 60) * GIB

    reported = Job(2).run(alerts, 3600, flapping)
    assert codes(reported) == [("memory_nearly_full", "raised")]


@pytest.mark.long
def test_slow_flapping_is_rate_limited(alerts: AlertRules) -> None:
    def flapping(now: float, v: dict[str, float]) -> None:
        v["gpu0.memory_used_bytes"] = (79 if int(now / 200) % 2 else 60) * GIB

    reported = Job(1).run(alerts, 86_400, flapping, dt=5.0)
    raised = [a for a in reported if a.state == "raised"]
    assert 20 < len(raised) < 24 * 6
    assert len(reported) - len(raised) in (len(raised), len(raised) - 1)
    assert sum(a.suppressed for a in raised) + len(raised) == pytest.approx(86_400 / 400, abs=2)


@pytest.mark.long
def test_many_gpus_are_limited_per_hour(alerts: AlertRules) -> None:
    job = Job(16)
    full = {f"gpu{i}.memory_used_bytes": 79.9 * GIB for i in range(16)}
    assert len(job.run(alerts, 60, lambda _, v: v.update(full))) == MAX_PER_HOUR
    later = job.run(alerts, 3700, lambda _, v: v.update(full), dt=2.0)
    assert len(later) == 16 - MAX_PER_HOUR
    assert later[0].suppressed == 16 - MAX_PER_HOUR - 1


@pytest.mark.parametrize(("column", "word"), [("throttle_thermal", "heat"), ("throttle_hardware", "hardware")])
def test_throttled_gpu(alerts: AlertRules, column: str, word: str) -> None:
    def hot(now: float, v: dict[str, float]) -> None:
        v[f"gpu3.{column}"] = 1.0 if now % 3 < 1 else 0.0

    reported = Job(4).run(alerts, 900, hot)
    assert [(a.code, a.uuid, word in a.text) for a in reported] == [("throttled", "GPU-3", True)]
    assert reported[0].value is not None and reported[0].value >= 2.0


def test_gpu_with_lower_clock_than_others(alerts: AlertRules) -> None:
    reported = Job(4).run(alerts, 900, lambda _, v: v.update({"gpu1.sm_clock_mhz": 1500.0}))
    assert [(a.code, a.uuid, a.rank) for a in reported] == [("slow_gpu", "GPU-1", 1)]
    assert reported[0].limit == pytest.approx(1900 * 0.9, rel=0.01)


def test_throttled_slow_late_gpu_is_reported_once(alerts: AlertRules) -> None:
    job = Job(4)

    def hot(_: float, v: dict[str, float]) -> None:
        v |= {"gpu1.throttle_thermal": 1.0, "gpu1.sm_clock_mhz": 1200.0, "rank1.forward_s": job.forward * 1.5}

    assert [(a.code, a.uuid) for a in job.run(alerts, 1500, hot)] == [("throttled", "GPU-1")]


def test_two_gpus_are_not_compared(alerts: AlertRules) -> None:
    assert Job(2).run(alerts, 900, lambda _, v: v.update({"gpu1.sm_clock_mhz": 1500.0})) == []


def test_rank_waiting_for_data(alerts: AlertRules) -> None:
    job = Job(4)
    reported = job.run(alerts, 900, lambda _, v: v.update({"rank2.data_wait_s": job.done * 0.2}))
    assert [(a.code, a.uuid, a.rank) for a in reported] == [("straggler_data", "GPU-2", 2)]
    assert "data" in reported[0].text


def test_rank_with_slow_forward_pass(alerts: AlertRules) -> None:
    job = Job(4)
    reported = job.run(alerts, 900, lambda _, v: v.update({"rank0.forward_s": job.forward * 1.3}))
    assert [(a.code, a.rank) for a in reported] == [("straggler", 0)]
    assert "forward" in reported[0].text


def test_short_wait_is_no_straggler(alerts: AlertRules) -> None:
    job = Job(4)
    assert job.run(alerts, 900, lambda _, v: v.update({"rank2.data_wait_s": job.waited * 3})) == []


def test_millisecond_steps_give_no_stragglers(alerts: AlertRules) -> None:
    job = Job(4)
    job.step_s = 0.004
    odd = {"rank2.data_wait_s": 0.001, "rank0.forward_s": 0.0025}

    def vary(_: float, v: dict[str, float]) -> None:
        for r in range(4):
            v |= {f"rank{r}.data_wait_s": job.done * 0.0001, f"rank{r}.forward_s": job.done * 0.0012}
        v |= {name: job.done * seconds for name, seconds in odd.items()}

    assert job.run(alerts, 900, vary) == []


def test_slower_millisecond_steps_are_not_reported(alerts: AlertRules) -> None:
    job = Job(2)
    job.step_s = 0.004
    assert job.run(alerts, 3600) == []
    job.step_s = 0.008
    assert job.run(alerts, 900) == []


def test_steps_become_slow(alerts: AlertRules) -> None:
    job = Job(2)
    assert job.run(alerts, 3600) == []
    job.step_s = 0.8
    reported = job.run(alerts, 900)
    assert codes(reported) == [("slow_steps", "raised")]
    assert reported[0].value is not None and reported[0].limit == pytest.approx(0.65, rel=0.04)
    job.step_s = 0.5
    assert codes(job.run(alerts, 900)) == [("slow_steps", "cleared")]


def test_slow_steps_of_minutes(alerts: AlertRules) -> None:
    job = Job(1, step_s=90.0)
    assert job.run(alerts, 4 * 3600, dt=5.0) == []
    job.step_s = 180.0
    assert codes(job.run(alerts, 2 * 3600, dt=5.0)) == [("slow_steps", "raised")]


def test_warmup_and_evaluation_do_not_slow_steps(alerts: AlertRules) -> None:
    job = Job(2, step_s=20.0)
    reported = job.run(alerts, 170)
    job.step_s = 0.5
    reported += job.run(alerts, 1800)
    for phase in (heartbeat.EVALUATION, heartbeat.CHECKPOINT, heartbeat.RESTORE):
        job.phase = phase
        reported += job.run(alerts, 700)
        job.phase = heartbeat.TRAIN
        reported += job.run(alerts, 400)
    assert reported == []


def test_only_rank_0_node_reports_the_run() -> None:
    job, alerts = Job(2, first=2), AlertRules(AlertsSpec(), "n2")
    job.run(alerts, 2000)
    job.step_s = 5.0
    assert job.run(alerts, 900) == []


def test_hang_names_awaited_rank(alerts: AlertRules) -> None:
    job = Job(4)
    job.run(alerts, 1000)
    frozen_steps = {f"rank{r}.step": float(int(job.done)) for r in range(4)}

    def hung(_: float, v: dict[str, float]) -> None:
        v |= (
            frozen_steps | {f"gpu{i}.utilization": 1.0 for i in range(4)} | {f"gpu{i}.power_w": 150.0 for i in range(4)}
        )
        v["gpu2.utilization"] = 0.0

    reported = job.run(alerts, 320, hung)
    assert [(a.code, a.rank, a.uuid, a.severity) for a in reported] == [("hung", 2, "GPU-2", "critical")]
    assert "3 of the node's 4 GPUs" in reported[0].text
    job.done += 1000
    assert codes(job.run(alerts, 120)) == [("hung", "cleared")]


def test_hang_names_remote_rank_behind(alerts: AlertRules) -> None:
    job = Job(2)
    job.run(alerts, 1000)
    step = int(job.done)
    alerts.remote_steps = {0: step - 500, 1: step - 500, 2: step, 3: step - 1}
    frozen_steps = {f"rank{r}.step": float(step) for r in range(2)}
    reported = job.run(alerts, 320, lambda _, v: v.update(frozen_steps))
    assert [(a.code, a.rank) for a in reported] == [("hung", 3)]


def test_long_first_compilation_is_no_hang(alerts: AlertRules) -> None:
    job = Job(2)
    assert job.run(alerts, 1200, lambda _, v: v.update({"rank0.step": 0.0, "rank1.step": 0.0})) == []
    assert codes(job.run(alerts, 900, lambda _, v: v.update({"rank0.step": 0.0, "rank1.step": 0.0}))) == [
        ("hung", "raised")
    ]


def freeze_steps(job: Job) -> Change:
    steps = {f"rank{r}.step": float(int(job.done)) for r in job.ranks}
    return lambda _, v: v.update(steps)


@pytest.mark.parametrize("trained_s", [20, 60, 150])
def test_early_hang_is_reported_before_collective_timeout(alerts: AlertRules, trained_s: int) -> None:
    job = Job(2)
    assert job.run(alerts, trained_s) == []
    reported = job.run(alerts, 330, freeze_steps(job))
    assert [(a.code, a.rank, a.limit) for a in reported] == [("hung", None, 300.0)]
    assert "the rank that the others wait for is unknown" in reported[0].text
    assert "--rank" not in (reported[0].fix or "")


def test_recompilation_is_no_hang(alerts: AlertRules) -> None:
    job = Job(2, step_s=1e9)
    assert job.run(alerts, 170) == []
    job.step_s = 1.0
    assert job.run(alerts, 6) == []
    job.step_s = 1e9
    assert job.run(alerts, 335) == []
    assert codes(job.run(alerts, 30)) == [("hung", "raised")]


def test_early_evaluation_and_checkpoint_are_no_hang(alerts: AlertRules) -> None:
    job = Job(2)
    for phase in (
        heartbeat.STARTUP,
        heartbeat.RESTORE,
        heartbeat.TRAIN,
        heartbeat.EVALUATION,
        heartbeat.TRAIN,
        heartbeat.CHECKPOINT,
    ):
        job.phase = phase
        assert job.run(alerts, 30 if phase == heartbeat.TRAIN else 900) == []


def test_rank_waiting_in_collective_is_not_blamed(alerts: AlertRules) -> None:
    job = Job(4)
    job.run(alerts, 1000)
    frozen_steps = {f"rank{r}.step": float(int(job.done) - (r == 3)) for r in range(4)}

    def hung(_: float, v: dict[str, float]) -> None:
        v |= (
            frozen_steps | {f"gpu{i}.utilization": 1.0 for i in range(4)} | {f"gpu{i}.power_w": 150.0 for i in range(4)}
        )
        v["gpu2.utilization"] = 0.0

    assert [(a.code, a.rank) for a in job.run(alerts, 330, hung)] == [("hung", 2)]


def test_long_steps_are_no_hang(alerts: AlertRules) -> None:
    assert Job(1, step_s=400.0).run(alerts, 6 * 3600, dt=5.0) == []


def test_delayed_sampler_is_no_hang(alerts: AlertRules) -> None:
    job = Job(2)
    reported = job.run(alerts, 600)
    job.now += 3000
    assert reported + job.run(alerts, 60) == []


def test_each_xid_is_reported_once(alerts: AlertRules) -> None:
    job = Job(2)
    job.run(alerts, 20)
    first = alerts.event("xid", "GPU-1", T0, 20.0, xid=79)
    assert [(a.code, a.severity, a.uuid, a.rank, a.value) for a in first] == [("xid", "critical", "GPU-1", 1, 79.0)]
    assert [alerts.event("xid", "GPU-1", T0, 20.0 + i, xid=79) for i in range(300)] == [[]] * 300
    assert alerts.event("xid", "GPU-1", T0, 700.0, xid=79)[0].suppressed == 300
    assert alerts.event("xid", "GPU-0", T0, 701.0, xid=31)[0].severity == "warning"
    assert alerts.event("xid", "GPU-9", T0, 702.0, xid=999)[0].rank is None


def test_xids_can_be_disabled_but_not_lost_gpus() -> None:
    alerts = AlertRules(AlertsSpec(xid=False), "n1")
    Job(1).run(alerts, 20)
    assert alerts.event("xid", "GPU-0", T0, 20.0, xid=79) == []
    assert codes(alerts.event("gpu_lost", "GPU-0", T0, 21.0)) == [("gpu_lost", "raised")]


def test_gpu_lost_and_recovered(alerts: AlertRules) -> None:
    Job(1).run(alerts, 20)
    assert codes(alerts.event("gpu_lost", "GPU-0", T0, 20.0)) == [("gpu_lost", "raised")]
    assert alerts.event("gpu_lost", "GPU-0", T0, 25.0) == []
    alerts.event("gpu_back", "GPU-0", T0, 30.0)
    assert codes(alerts.event("gpu_back", "GPU-0", T0, 95.0)) == [("gpu_lost", "cleared")]


def test_memory_errors_count_from_job_start(alerts: AlertRules) -> None:
    job = Job(2)
    assert job.run(alerts, 60) == []
    reported = job.run(alerts, 60, lambda _, v: v.update({"gpu1.ecc_uncorrected": 5.0}))
    assert [(a.code, a.uuid, a.value) for a in reported] == [("ecc_uncorrected", "GPU-1", 2.0)]
    reported = job.run(alerts, 60, lambda _, v: v.update({"gpu1.ecc_uncorrected": 5.0, "gpu0.remap_failed": 1.0}))
    assert [(a.code, a.uuid) for a in reported] == [("row_remap_failed", "GPU-0")]


def test_limit_0_disables_rule() -> None:
    spec = AlertsSpec(
        idle_min=0, utilization=0, slowdown=0, memory=0, straggler=0, throttle_min=0, xid=False, hang_min=0
    )
    job, alerts = Job(4), AlertRules(spec, "n1")
    job.run(alerts, 1000)
    frozen_steps = {f"rank{r}.step": float(int(job.done)) for r in range(4)}

    def all_wrong(_: float, v: dict[str, float]) -> None:
        v |= frozen_steps | {"gpu0.utilization": 0.0, "gpu1.memory_used_bytes": 80.0 * GIB, "gpu2.sm_clock_mhz": 300.0}
        v |= {"gpu3.throttle_thermal": 1.0, "gpu3.ecc_uncorrected": 99.0}

    assert job.run(alerts, 2000, all_wrong) == []


@pytest.mark.parametrize("seed", range(6))
def test_arbitrary_snapshots_never_raise(seed: int) -> None:
    """Snapshots have invalid values, missing columns, changing GPUs and ranks, and clocks that step back."""
    rng = random.Random(seed)
    alerts = AlertRules(AlertsSpec(idle_min=0.1, throttle_min=0.1), "n1")
    job = Job(4, seed=seed)
    odd = [NAN, math.inf, -math.inf, -1.0, 0.0, 1e30, 1e-320, 2.5]
    mono, alert_count = 0.0, 0
    for _ in range(1000):
        values = {k: rng.choice(odd) if rng.random() < 0.2 else v for k, v in job.tick().items() if rng.random() > 0.1}
        gpus = job.gpus if rng.random() < 0.8 else rng.sample(job.gpus, rng.randrange(5))
        ranks = job.ranks if rng.random() < 0.9 else rng.sample(range(6), rng.randrange(4))
        mono += rng.choice([1.0, 1.0, 1.0, 1.0, 0.0, -50.0, 500.0, 0.001])
        alert_count += len(alerts.observe(Snapshot(T0 + rng.uniform(-1e6, 1e6), mono, "n1", gpus, ranks, values)))
        alerts.event(
            rng.choice(["xid", "ecc_uncorrected", "gpu_lost", "gpu_back", "?"]),
            f"GPU-{rng.randrange(6)}",
            T0,
            mono,
            xid=rng.choice([None, 79]),
        )
    assert alert_count < 1000


def test_rules_read_only_recorded_columns() -> None:
    columns_read: set[str] = set()

    class Values(dict[str, float]):
        def get(self, key: str, default: float | None = None) -> float | None:  # type: ignore[override]
            columns_read.add(key)
            return super().get(key, default)

    job, alerts = Job(2), AlertRules(AlertsSpec(), "n1")
    for _ in range(60):
        alerts.observe(job.snapshot(Values(job.tick())))
    assert len(columns_read) > 15
    assert columns_read <= set(fields.column_names(2, [0, 1], fields.FAST)) | set(
        fields.column_names(2, [0, 1], fields.SLOW)
    )
