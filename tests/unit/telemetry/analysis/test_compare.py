from __future__ import annotations

import io

import pytest

from clustertrain.report import terminal
from clustertrain.report.runs import compare_telemetry
from clustertrain.telemetry.analysis import compare
from clustertrain.telemetry.report_schema import ProcessSummary, Summary
from tests.unit.telemetry.summaries import broken, build_insights, healthy, replace, stats, with_gpus


def test_differences_and_ratios() -> None:
    b = healthy()
    assert b.training is not None
    b = replace(b, training=replace(b.training, step_s=stats(0.365), joules_per_token=0.004))
    comparison = compare.compare_summaries(healthy(), b)
    step = comparison.figures["step_p50_s"]
    assert (step.a, step.b, step.difference, step.ratio, step.better) == (0.73, 0.365, -0.365, 0.5, "lower")
    assert comparison.figures["mfu"].ratio == 1.0
    assert comparison.goodput["productive_s"].a == pytest.approx(6600 / 7805)
    assert sum(f.a or 0.0 for f in comparison.goodput.values()) == pytest.approx(1.0)


def test_different_sizes_are_compared_per_gpu() -> None:
    comparison = compare.compare_summaries(healthy(4), healthy(8))
    assert (comparison.a.gpus, comparison.b.gpus) == (8, 16)
    assert comparison.figures["tokens_per_s_per_gpu"].ratio == 0.5
    assert comparison.figures["energy_per_gpu_j"].ratio == 1.0
    assert comparison.figures["tokens_per_s"].better is None, "it depends on the number of GPUs"
    assert comparison.figures["tokens_per_s_per_gpu"].better == "higher"


def longer(factor: float, gpus: int = 8) -> Summary:
    """Return the healthy run with ``factor`` times the steps, at the same cost per step."""
    summary = healthy(gpus)
    assert summary.training is not None and summary.waste is not None and summary.training.tokens is not None
    training = replace(
        summary.training,
        steps=int(summary.training.steps * factor),
        tokens=summary.training.tokens * factor,
        energy_j=1000.0 * summary.training.steps * factor,
        joules_per_token=0.25,
    )
    waste = replace(summary.waste, gpu_hours=summary.waste.gpu_hours * factor)
    return replace(with_gpus(summary, energy_j=1000.0), training=training, waste=waste)


def test_cost_per_step_and_token_of_different_lengths() -> None:
    figures = compare.compare_summaries(longer(1), longer(4)).figures
    assert figures["gpu_hours"].ratio == pytest.approx(4.0) and figures["energy_j"].ratio == pytest.approx(4.0)
    for name in ("gpu_s_per_step", "gpu_s_per_million_tokens", "energy_per_step_j", "joules_per_token"):
        assert figures[name].ratio == pytest.approx(1.0), name
        assert figures[name].better == "lower", name
    assert figures["energy_per_step_j"].a == pytest.approx(1000.0)
    first = longer(1)
    assert first.waste is not None and first.training is not None
    assert figures["gpu_s_per_step"].a == pytest.approx(first.waste.gpu_hours * 3600 / first.training.steps)


def test_steps_of_different_sizes_have_no_better() -> None:
    large = longer(1)
    assert large.training is not None
    large = replace(large, training=replace(large.training, steps=large.training.steps // 2))
    figures = compare.compare_summaries(longer(1), large).figures
    assert figures["gpu_s_per_step"].better is None and figures["energy_per_step_j"].better is None
    assert figures["gpu_s_per_million_tokens"].better == "lower"


def test_incomplete_energy_gives_no_energy_per_step() -> None:
    incomplete = longer(1)
    incomplete = replace(incomplete, gpus=[replace(incomplete.gpus[0], energy_j=None), *incomplete.gpus[1:]])
    figures = compare.compare_summaries(longer(1), incomplete).figures
    assert figures["energy_per_step_j"].b is None and figures["energy_per_step_j"].missing
    assert figures["energy_j"].b is None


def test_missing_metric_has_reason() -> None:
    bare = replace(with_gpus(healthy(), power_w=None, missing={"power_w": "NOT_SUPPORTED: no"}), training=None)
    comparison = compare.compare_summaries(healthy(), bare)
    power = comparison.figures["power_w"]
    assert (power.b, power.difference, power.ratio, power.missing) == (None, None, None, {"b": "NOT_SUPPORTED: no"})
    assert comparison.figures["mfu"].missing == {"b": "no step was recorded"}
    no_gpus = replace(healthy(), gpus=[], hosts=[replace(h, nvml_error="no driver") for h in healthy().hosts])
    assert compare.compare_summaries(no_gpus, healthy()).figures["utilization"].missing == {"a": "no driver"}


def test_notes_of_only_one_run() -> None:
    good = replace(healthy(), insights=build_insights(healthy()))
    comparison = compare.compare_summaries(broken(), good)
    assert {n.code for n in comparison.only_a} == {"gpu_unused", "slow_gpu", "throttled", "gpu_hours_wasted"}
    assert comparison.only_b == []


def render_text(comparison: compare.TelemetryComparison, width: int) -> str:
    out = io.StringIO()
    blocks = compare_telemetry.render(comparison, width)
    terminal.emit(terminal.make_console(out, width), *(part for block in blocks for part in block))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_text_output(width: int) -> None:
    healthy_run = healthy(8)
    assert healthy_run.training is not None
    healthy_run = replace(
        healthy_run, training=replace(healthy_run.training, mfu=None), run="a-longer-name-of-a-run-xyz234"
    )
    comparison = compare.compare_summaries(broken(), healthy_run)
    text = render_text(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text
    for words in ("8 and 16 GPUs", "tokens/s per GPU", "worse", "B: unknown for this model", "Insights only for A"):
        assert words in text
    assert ("B - A" in text) == (width >= 76)


def find_row(comparison: compare.TelemetryComparison, title: str) -> list[str]:
    """Return the cells of a row of the printed table."""
    (line,) = (x for x in render_text(comparison, 160).splitlines() if x.startswith(f"{title}  "))
    return [cell for cell in line.removeprefix(title).split("  ") if cell]


def test_row_has_one_unit_and_enough_digits() -> None:
    a, b = with_gpus(healthy(), energy_j=7560.0), with_gpus(healthy(), energy_j=9461.0)
    hosts = [replace(h, processes=ProcessSummary(stats(0.5, most=0.8902), None, 1)) for h in a.hosts]
    comparison = compare.compare_summaries(replace(a, hosts=hosts), replace(b, hosts=hosts))
    assert [c.strip() for c in find_row(comparison, "energy per GPU")][:3] == ["2.10 Wh", "2.63 Wh", "+0.53 Wh"]
    assert [c.strip() for c in find_row(comparison, "host memory, peak")][:2] == ["0.89 GiB", "0.89 GiB"]
    assert b.training is not None
    slower = replace(b, training=replace(b.training, step_s=stats(1.25), joules_per_token=2e-6))
    comparison = compare.compare_summaries(a, slower)
    assert [c.strip() for c in find_row(comparison, "step time")][:3] == ["0.73 s", "1.25 s", "+0.52 s"]
    assert [c.strip() for c in find_row(comparison, "energy per token")][:2] == ["7.90 mJ", "0.002 mJ"], (
        "no value is rounded to 0"
    )


@pytest.mark.parametrize(("startup_s", "verdict"), [(260.0, []), (400.0, ["worse"])])
def test_share_of_lost_time_is_judged_from_one_percent_on(startup_s: float, verdict: list[str]) -> None:
    a = healthy()
    assert a.goodput is not None
    b = replace(a, goodput=replace(a.goodput, startup_s=startup_s))  # 2.8% of the time in A; 3.3% and 5.0% in B
    cells = [cell.strip() for cell in find_row(compare.compare_summaries(a, b), "start-up")]
    assert cells[4:] == verdict


def test_unequal_lengths_give_scaling_warning() -> None:
    same = render_text(compare.compare_summaries(healthy(), healthy()), 160)
    assert "not scaled" not in same
    b = healthy(2)
    assert b.training is not None
    b = replace(b, training=replace(b.training, steps=450))
    text = " ".join(render_text(compare.compare_summaries(healthy(), b), 80).split())
    assert "8 and 4 GPUs, 9,000 and 450 steps: steps, GPU-hours and energy per GPU are totals of the run" in text
