"""The layout of the telemetry report for synthetic summaries: sizes, widths, omissions."""

from __future__ import annotations

import functools
import io
import typing
from typing import Any

import msgspec
import pytest

from clustertrain.report import telemetry, terminal
from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    GpuSummary,
    HostSummary,
    PhaseStats,
    RankSummary,
    Summary,
    ThrottleShares,
    TimeWindow,
    TrainingSummary,
)
from tests.unit.telemetry.summaries import (
    broken,
    build_insights,
    healthy,
    host,
    idle,
    replace,
    slow,
    throttling,
    with_gpus,
)

pytestmark = pytest.mark.long


def render_text(summary: Summary, width: int = 80, show_all: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    telemetry.show(summary, terminal.make_console(out, width), show_all)
    out.flush()
    return raw.getvalue().decode(encoding)


def summary_of_1024_gpus() -> Summary:
    summary = throttling(slow(idle(healthy(128, 8), "n90", 0), "n50", 5), "n7", 3)
    return replace(summary, insights=build_insights(summary))


def cpu_summary() -> Summary:
    summary = healthy(2, 2)
    reason = "LIBRARY_NOT_FOUND: no NVIDIA driver"
    assert summary.training is not None
    training = replace(summary.training, tokens_per_s_per_gpu=None)
    hosts = [host(f"n{i}", nvml_error=reason) for i in (1, 2)]
    summary = replace(summary, gpus=[], hosts=hosts, device="cpu", training=training)
    return replace(summary, insights=build_insights(summary))


@pytest.mark.parametrize("width", [60, 80, 120, 160, 200])
@pytest.mark.parametrize(
    "summary", [broken(), summary_of_1024_gpus(), cpu_summary(), healthy(1, 1)], ids=["8", "1024", "cpu", "1"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_report_fits_any_width(summary: Summary, width: int, encoding: str) -> None:
    text = render_text(summary, width, encoding=encoding)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text
    assert text.isascii() or encoding == "utf-8"


@pytest.mark.parametrize("width", [80, 160])
def test_report_content_of_eight_gpus(width: int) -> None:
    text = " ".join(render_text(broken(), width).split())
    for expected in (
        "gpt-abc234 · completed · 1 attempt · job 4711 · by ada",
        "4 nodes · 8 GPUs allocated · NVIDIA H100 80GB HBM3 · layout hybrid-shard 4 x 2",
        "99.9% of the expected samples (57,600 of 57,600)",
        "9,000 steps · 730 ms per step (p95 780 ms) · 84,500 tokens/s per GPU · MFU 43.0% · 7.9 mJ per token",
        "while training",
        "of 64 cores",
        "p5 p95 max",
        "37%t",
        "Where the time went (goodput 84%;",
        "!! GPU 1 of n2 was not used: its utilization stayed at 0 [rank 3, GPU-n2-1-5b1]",
        "[rank 4, GPU-n3-0-5b1]",
    ):
        assert expected in text, expected


def test_large_job_shows_gpus_with_insights_and_extremes() -> None:
    text = render_text(summary_of_1024_gpus(), 80)
    assert len(text.splitlines()) < 90
    rows = [line for line in text.splitlines() if line.startswith(("n7 ", "n50 ", "n90 ")) and "/80" in line]
    assert len(rows) == 3
    assert "4 of 1,024 GPUs: those with insights and the extremes" in text
    assert "of 128 hosts: those with insights and the extremes" in text
    complete = render_text(summary_of_1024_gpus(), 80, show_all=True)
    assert sum("/80" in line for line in complete.splitlines()) == 1024


def test_hidden_insights_are_counted() -> None:
    summary = summary_of_1024_gpus()
    for number in range(8):
        for node in ("n1", "n2", "n3", "n4"):
            summary = idle(summary, node, number)
    summary = replace(summary, insights=build_insights(summary))
    text = " ".join(render_text(summary, 80).split())
    assert "of them also have insights" in text
    assert "and 30 more like these (--all shows them, --json has them)" in text
    assert "did not use 33 of 1,024 allocated GPUs" in text
    assert "more like these" not in render_text(summary, 80, show_all=True)


def test_cpu_run_has_no_gpu_sections() -> None:
    text = render_text(cpu_summary(), 80)
    assert "no GPU metrics" in text
    assert "676,000 tokens/s" in text and "tokens/s per " not in text
    assert "GPU utilization" not in text
    assert "i  2 nodes have no GPU samples" in text, "it is only information in a run on CPUs"


def test_only_named_terminal_colors_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    telemetry.show(broken(), terminal.make_console(out, 100))
    codes = {c for part in out.getvalue().split("\x1b[")[1:] for c in part.partition("m")[0].split(";")}
    assert codes <= {"0", "1", "31", "32", "33", "34", "35", "36"}, "no black, white, dim or numbered color"
    assert len(codes) > 4


def without_field(summary: Summary, name: str) -> Summary:
    """Return ``summary`` with the optional field ``name`` set to None everywhere."""

    def strip(value: Any) -> Any:
        if isinstance(value, list):
            return [strip(v) for v in value]
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items()}
        if not isinstance(value, msgspec.Struct):
            return value
        values = {f: strip(getattr(value, f)) for f in value.__struct_fields__}
        return type(value)(**{**values, **({name: None} if name in optional_fields(type(value)) else {})})

    stripped: Summary = strip(summary)
    return replace(stripped, insights=build_insights(stripped))


@functools.cache
def optional_fields(struct: type[msgspec.Struct]) -> set[str]:
    return {f.encode_name for f in msgspec.structs.fields(struct) if type(None) in typing.get_args(f.type)}


STRUCTS = (
    Summary,
    GpuSummary,
    HostSummary,
    RankSummary,
    TrainingSummary,
    AttemptSummary,
    PhaseStats,
    ThrottleShares,
    TimeWindow,
)


# A wide report has all columns of a narrow one, so the narrow one runs only with --long.
@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.long), 160])
@pytest.mark.parametrize("name", sorted(set().union(*map(optional_fields, STRUCTS))))
def test_any_optional_field_may_be_missing(name: str, width: int) -> None:
    summary = without_field(broken(), name)
    assert "gpt-abc234" in render_text(summary, width)
    codes = {n.code for n in summary.insights}
    for code, field in {"gpu_unused": "utilization", "slow_gpu": "sm_clock_mhz", "throttled": "thermal"}.items():
        assert code in codes or name == field, f"{code} does not need {name}"


def test_mig_slice_shows_sm_activity() -> None:
    summary = with_gpus(healthy(1, 2), utilization=None)
    assert "78%" in render_text(summary)


def test_cpu_and_memory_rows_name_job_or_nodes() -> None:
    text = render_text(healthy(2, 2))
    assert "Job's CPU" in text and "of 32 cores" in text and "Node's CPU" in text
    unknown = replace(healthy(2, 2), hosts=[replace(h, cpu_allocated=None, memory_allocated_gib=None) for h in
                                            healthy(2, 2).hosts])  # fmt: skip
    text = render_text(unknown)
    assert "Nodes' CPU" in text and "Nodes' memory" in text and "Job's CPU" not in text


def test_speed_without_tokens_is_in_samples() -> None:
    summary = cpu_summary()
    assert summary.training is not None
    images = replace(summary.training, tokens_per_s=None, samples_per_s=512.0)
    assert "512.0 samples/s" in render_text(replace(summary, training=images))
