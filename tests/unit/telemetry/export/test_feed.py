"""Metrics of a snapshot as parsed by Prometheus's parser."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Mapping

import pytest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from clustertrain import clock
from clustertrain.run.heartbeat import PHASES
from clustertrain.telemetry import fields
from clustertrain.telemetry.export.feed import STALE_S, Feed
from clustertrain.telemetry.export.prometheus import EXTRA_METRICS, METRICS, build_registry, render
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store.writer import GpuFacts
from tests.paths import ROOT
from tests.unit.telemetry.snapshots import GIB, LABELS, full, mig_slice, snapshot

Series = tuple[str, frozenset[tuple[str, str]]]


def scrape(feed: Feed) -> dict[Series, float]:
    families = parse(render(feed).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def scrape_snapshot(snap: Snapshot) -> dict[Series, float]:
    feed = Feed(LABELS, 1.0)
    feed.observe(snap)
    return scrape(feed)


def series(name: str, /, **labels: str) -> Series:
    base = {"run": "demo-abcdef", "job_id": "4711", "attempt": "2", "node": "node1"}
    return name, frozenset((base | labels).items())


def names(metrics: Mapping[Series, float]) -> set[str]:
    return {name for name, _ in metrics}


GPU1 = {"gpu": "1", "uuid": "GPU-1", "rank": "9"}


def test_values_are_in_base_units() -> None:
    values = {
        "gpu1.utilization": 0.87,
        "gpu1.sm_clock_mhz": 1980.0,
        "gpu1.power_w": 512.5,
        "gpu1.temperature_c": 61.0,
        "gpu1.energy_j": 123456.0,
        "gpu1.pcie_tx_bytes": 5e9,
        "host.job_cpu_s": 12.5,
        "rank9.step": 120.0,
        "rank9.phase": float(PHASES.index("train")),
    }
    scraped = scrape_snapshot(snapshot(values))
    assert scraped[series("clustertrain_gpu_utilization_ratio", **GPU1)] == 0.87
    assert scraped[series("clustertrain_gpu_sm_clock_hertz", **GPU1)] == 1.98e9
    assert scraped[series("clustertrain_gpu_power_watts", **GPU1)] == 512.5
    assert scraped[series("clustertrain_gpu_temperature_celsius", **GPU1)] == 61.0
    assert scraped[series("clustertrain_gpu_energy_joules_total", **GPU1)] == 123456.0
    assert scraped[series("clustertrain_gpu_pcie_tx_bytes_total", **GPU1)] == 5e9
    assert scraped[series("clustertrain_gpu_memory_total_bytes", **GPU1)] == 80 * GIB
    assert scraped[series("clustertrain_host_job_cpu_seconds_total")] == 12.5
    assert scraped[series("clustertrain_rank_steps_total", rank="9")] == 120
    assert scraped[series("clustertrain_rank_phase", rank="9")] == PHASES.index("train")
    assert scraped[series("clustertrain_gpu_info", **GPU1, name="H100", minor="1", parent="")] == 1


def test_missing_value_is_absent_and_zero_is_kept() -> None:
    """rezolus#1196, slurm-job-exporter#53: unknown values must not be shown as 0."""
    scraped = scrape_snapshot(
        snapshot({"gpu0.utilization": math.nan, "gpu1.utilization": 0.0, "gpu0.power_w": math.nan})
    )
    assert [v for (name, _), v in scraped.items() if name == "clustertrain_gpu_utilization_ratio"] == [0.0]
    assert "clustertrain_gpu_power_watts" not in names(scraped)
    assert b"clustertrain_gpu_power_watts" not in render(Feed(LABELS, 1.0))


def test_unknown_columns_are_left_out() -> None:
    scraped = scrape_snapshot(
        snapshot({"gpu0.aura": 1.0, "gpu7.utilization": 1.0, "moon0.phase": 1.0, "rank99.step": 1.0})
    )
    assert names(scraped) == {
        "clustertrain_gpu_info",
        "clustertrain_gpu_memory_total_bytes",
        "clustertrain_sampler_samples_total",
        "clustertrain_sampler_missed_total",
        "clustertrain_sampler_last_sample_timestamp_seconds",
    }


def test_stale_snapshot_is_not_exported() -> None:
    feed = Feed(LABELS, 1.0)
    old = snapshot(full(), age_s=STALE_S + 1)
    feed.observe(old)
    scraped = scrape(feed)
    assert not any(
        name.startswith(("clustertrain_gpu", "clustertrain_rank", "clustertrain_host")) for name, _ in scraped
    )
    assert scraped[series("clustertrain_sampler_last_sample_timestamp_seconds")] == old.t
    feed.observe(snapshot(full()))
    assert series("clustertrain_gpu_utilization_ratio", **GPU1) in scrape(feed)


def test_missed_samples_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(LABELS, 2.0)
    now = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    for age_s in (10.0, 7.9, 6.1, 0.0):
        feed.observe(snapshot({}, mono=now - age_s))
    assert (feed.samples, feed.missed) == (4, 2)
    # The missed samples of a sampler that hangs in the driver are counted as time passes, and only once.
    missed = []
    for ahead_s in (1.9, 2.1, 3.9, 6.1, 7.9):
        monkeypatch.setattr(clock, "monotonic", lambda ahead_s=ahead_s: now + ahead_s)
        missed.append(feed.missed)
    assert missed == [2, 2, 2, 4, 4]
    feed.observe(snapshot({}, mono=now + 8.0))
    assert feed.missed == 5


def test_xids_are_counted_by_number() -> None:
    """dcgm-exporter#500, #190: a gauge with the last XID hides repetitions."""
    feed = Feed(LABELS, 1.0)
    feed.observe(snapshot({}))
    assert not {n for n in names(scrape(feed)) if "xid" in n}  # not watched: unknown differs from 0
    feed.watch_xids(["GPU-1"])
    assert scrape(feed)[series("clustertrain_gpu_xids_total", **GPU1)] == 0
    for xid, count in ((79, 1), (31, 1), (79, 3)):
        feed.record_xid("GPU-1", xid, count)
    feed.watch_xids(["GPU-1"])  # NVML was reopened
    scraped = scrape(feed)
    assert [v for (name, _), v in scraped.items() if name == "clustertrain_gpu_xids_total"] == [5]
    assert scraped[series("clustertrain_gpu_xids_by_number_total", **GPU1, xid="79")] == 4
    assert scraped[series("clustertrain_gpu_xids_by_number_total", **GPU1, xid="31")] == 1


def test_mig_slice_names_its_gpu() -> None:
    snap = Snapshot(1.0, snapshot({}).mono, "node1", [mig_slice("GPU-7")], [], {})
    (info,) = [dict(labels) for name, labels in scrape_snapshot(snap) if name == "clustertrain_gpu_info"]
    assert (info["uuid"], info["parent"]) == ("MIG-1", "GPU-7")


def test_unopened_gpu_is_exported_without_values() -> None:
    snap = Snapshot(1.0, snapshot({}).mono, "node1", [GpuFacts("GPU-x", reason="GPU_IS_LOST")], [], {})
    scraped = scrape_snapshot(snap)
    unknown = {"gpu": "", "uuid": "GPU-x", "rank": "", "name": "", "minor": "", "parent": ""}
    assert scraped[series("clustertrain_gpu_info", **unknown)] == 1
    assert "clustertrain_gpu_memory_total_bytes" not in names(scraped)


def test_hostile_labels_are_escaped() -> None:
    feed = Feed(LABELS.__class__('a"b\\c\nd', "", 1, "n"), 1.0)
    feed.observe(snapshot({"host.cpu": 0.5}))
    labels = [dict(labels) for name, labels in scrape(feed) if name == "clustertrain_host_cpu_ratio"]
    assert labels == [{"run": 'a"b\\c\nd', "job_id": "", "attempt": "1", "node": "n"}]


def test_every_field_has_distinct_metric() -> None:
    metric_names = [m.name for group in METRICS.values() for m in group.values()]
    assert len(metric_names) == len(set(metric_names)) == len(fields.GPU) + len(fields.HOST) + len(fields.RANK)
    assert names(scrape_snapshot(snapshot(full()))) >= set(metric_names)


def test_docs_list_extra_metrics() -> None:
    text = (ROOT / "docs" / "guides" / "metrics-export.md").read_text()
    for extra in EXTRA_METRICS:
        short = extra.metric.name.removeprefix("clustertrain_sampler")
        assert f"`{extra.metric.name}`" in text or f"`…{short}`" in text, extra.metric.name
    assert ", ".join(f"{code} {word}" for code, word in enumerate(PHASES)) in text


def test_labels_are_bounded() -> None:
    """There is one series per metric and device: labels do not change between samples."""
    feed = Feed(LABELS, 1.0)
    series_sets = []
    for step in range(3):
        feed.observe(snapshot({c: float(step) for c in full()}))
        series_sets.append(set(scrape(feed)))
    assert series_sets[0] == series_sets[1] == series_sets[2]


def feed_with_all_metrics() -> Feed:
    feed = Feed(LABELS, 1.0)
    feed.observe(snapshot(full()))
    feed.record_xid("GPU-0", 79, 1)
    return feed


def test_output_is_valid_openmetrics() -> None:
    """Prometheus requests OpenMetrics first."""
    text = openmetrics(build_registry(feed_with_all_metrics())).decode()
    families = {f.name for f in parse_openmetrics(text)}
    assert "clustertrain_gpu_energy_joules" in families and "clustertrain_gpu_utilization_ratio" in families


def test_promtool_reports_no_problems() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: slurm/install-packages")
    text = render(feed_with_all_metrics())
    argv = ["promtool", "check", "metrics"]
    result = subprocess.run(argv, input=text, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    # promtool does report errors.
    wrong = text.replace(b"_joules_total", b"_joules")
    assert subprocess.run(argv, input=wrong, capture_output=True, timeout=60, check=False).returncode != 0
