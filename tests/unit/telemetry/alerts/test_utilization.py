"""Alert for low GPU utilization in training: when it is raised, and its cause."""

from __future__ import annotations

import pytest

from clustertrain.config.telemetry import AlertsSpec
from clustertrain.run import heartbeat
from clustertrain.telemetry.alerts.rules import AlertRules
from tests.unit.telemetry.alerts.test_rules import Change, Job, codes

FIVE_GB = 5e9


@pytest.fixture
def alerts() -> AlertRules:
    return AlertRules(AlertsSpec(), "n1")


def busy(
    share: float, *, wait: float = 0.0, cpu: float | None = 0.3, job_cores: float | None = None, **per_s: float
) -> Change:
    """Return a change of the samples to a given utilization.

    ``wait`` is the share of a step spent waiting for data, ``job_cores`` the busy ones of eight cores, ``per_s`` the
    bytes/s of a GPU's link or of ``infiniband``.
    """

    def change(now: float, values: dict[str, float]) -> None:
        for name in [name for name in values if name.endswith(".utilization")]:
            values[name] = share
        for name in [name for name in values if name.endswith(".data_wait_s")]:
            values[name] = wait * now
        if cpu is not None:
            values["host.cpu"] = cpu
        if job_cores is not None:
            values["host.job_cpu_s"] = job_cores * now
        for link, rate in per_s.items():
            for device in ["host"] if link == "infiniband" else ["gpu0", "gpu1"]:
                values |= {f"{device}.{link}_tx_bytes": rate * now / 2, f"{device}.{link}_rx_bytes": rate * now / 2}

    return change


def _values(change: Change) -> dict[str, float]:
    values: dict[str, float] = {}
    change(1.0, values)
    return values


def test_alert_is_raised_after_minutes_and_cleared(alerts: AlertRules) -> None:
    job = Job(2)
    assert job.run(alerts, 300, busy(0.43)) == []  # including three minutes of warm-up
    (alert,) = job.run(alerts, 120, busy(0.43))
    assert (alert.code, alert.severity, alert.node, alert.uuid) == ("low_utilization", "warning", "n1", None)
    assert alert.value == pytest.approx(0.43) and alert.limit == 0.7
    assert alert.text.startswith("2 GPUs of n1 were busy 43% of the time in training, over five minutes: ")
    assert job.run(alerts, 1000, busy(0.43)) == []
    assert codes(job.run(alerts, 600, busy(0.9))) == [("low_utilization", "cleared")]


@pytest.mark.parametrize(
    ("change", "cause", "fix"),
    [
        (busy(0.5, wait=0.3), "training waits for data during 30% of a step", "more data-loader workers"),
        (
            busy(0.5, wait=0.3, cpu=0.97),
            "waits for data during 30% of a step, with 97% of the node's processors busy",
            "more cores with --cpus-per-gpu; otherwise use more data-loader workers",
        ),
        (busy(0.5, cpu=0.97), "97% of the node's processors busy", "more cores with --cpus-per-gpu"),
        (
            busy(0.5, nvlink=60e9, infiniband=2 * FIVE_GB),
            "waiting for communication, with NVLink at 60.0 GB/s and InfiniBand at 5.0 GB/s per GPU",
            "a larger micro batch, more gradient accumulation",
        ),
        (busy(0.5, pcie=FIVE_GB), "with PCIe at 5.0 GB/s per GPU", "/explanation/nccl/"),
        (busy(0.5, pcie=1e9), "data and processors are not the cause; kernels may be too small", "compile = true"),
        (busy(0.5, cpu=None), "the recorded data does not show the cause", "a larger micro batch"),
        # On a node with many more processors than the job's eight.
        (busy(0.5, cpu=0.04, job_cores=7.9), "99% of the job's processors busy", "more cores with --cpus-per-gpu"),
        (busy(0.5, cpu=0.97, job_cores=2), "data and processors are not the cause", "a larger micro batch"),
    ],
    ids=["data", "data-and-cpu", "cpu", "two-links", "pcie", "kernels", "unknown", "job-cpu", "other-jobs-cpu"],
)  # fmt: skip
def test_likely_cause_is_named(alerts: AlertRules, change: Change, cause: str, fix: str) -> None:
    job = Job(2)
    job.cores = 8 if "host.job_cpu_s" in _values(change) else None
    (alert,) = job.run(alerts, 480, change)
    assert cause in alert.text and alert.fix is not None and fix in alert.fix


def test_single_gpu_per_node_waits_for_others(alerts: AlertRules) -> None:
    """PCIe alone is no evidence, because it also carries copies from the host."""
    (alert,) = Job(1).run(alerts, 480, busy(0.5, infiniband=4 * FIVE_GB, pcie=FIVE_GB))
    assert "waiting for communication, with InfiniBand at 20.0 GB/s per GPU" in alert.text
    (alert,) = Job(1).run(AlertRules(AlertsSpec(), "n1"), 480, busy(0.5, pcie=FIVE_GB))
    assert "GB/s" not in alert.text


def test_missing_counter_is_no_traffic(alerts: AlertRules) -> None:
    since_boot, change = 5e15, busy(0.5, nvlink=1e9)

    def one_direction_missing(now: float, values: dict[str, float]) -> None:
        change(now, values)
        for gpu in ("gpu0", "gpu1"):
            values[f"{gpu}.nvlink_tx_bytes"] += since_boot
            values[f"{gpu}.nvlink_rx_bytes"] += float("nan") if 305 <= now < 335 else since_boot

    (alert,) = Job(2).run(alerts, 480, one_direction_missing)
    assert "GB/s" not in alert.text


def test_counter_reset_is_no_traffic(alerts: AlertRules) -> None:
    job = Job(2)
    job.run(alerts, 230, busy(0.5, nvlink=60e9))
    (alert,) = job.run(alerts, 300, lambda now, values: busy(0.5, nvlink=1e6)(now - 230, values))
    assert alert.code == "low_utilization" and "GB/s" not in alert.text


def test_time_outside_training_does_not_count(alerts: AlertRules) -> None:
    """Evaluations and checkpoints take three of five minutes; in training the GPUs are busy."""
    job, reported = Job(2), []
    for _ in range(10):
        job.phase = heartbeat.TRAIN
        reported += job.run(alerts, 120)
        job.phase = heartbeat.EVALUATION
        reported += job.run(alerts, 100, busy(0.1))
        job.phase = heartbeat.CHECKPOINT
        reported += job.run(alerts, 80, busy(0.01))
    assert reported == []
    for _ in range(4):
        job.phase = heartbeat.TRAIN
        reported += job.run(alerts, 150, busy(0.5))
        job.phase = heartbeat.EVALUATION
        reported += job.run(alerts, 150, busy(1.0))
    assert codes(reported) == [("low_utilization", "raised")]


def test_only_rank_0_node_reports_and_0_disables(alerts: AlertRules) -> None:
    assert Job(2, first=8).run(alerts, 1000, busy(0.5)) == []
    assert Job(2).run(AlertRules(AlertsSpec(utilization=0.0), "n1"), 1000, busy(0.5)) == []
    one_of_two = Job(2, ranks=1)
    reported = one_of_two.run(AlertRules(AlertsSpec(idle_min=0), "n1"), 480, busy(0.5))
    assert reported[0].text.startswith("GPU 0 of n1 was busy 50% of the time in training")
    # An idle GPU has its alert and does not lower the utilization of the others.
    idle, alerts = Job(2), AlertRules(AlertsSpec(), "n1")
    assert codes(idle.run(alerts, 700, lambda _, v: v.update({"gpu1.utilization": 0.0}))) == [("gpu_idle", "raised")]
