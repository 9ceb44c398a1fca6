from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest

from clustertrain import fsio
from clustertrain.report import telemetry_compare as report
from clustertrain.report import terminal
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.analysis import compare
from clustertrain.telemetry.analysis.settings_diff import ConfigDiff, load_settings
from clustertrain.telemetry.report_schema import ProcessSummary, Summary
from tests.unit.telemetry.runs import busy, gpu, new_attempt, new_run, record
from tests.unit.telemetry.summaries import broken, build_notes, healthy, replace, stats, with_gpus

SPEC = """
version = 1
[job]
nodes = 2
gpus = 4
mem = "{mem}"
[recipe.optim]
lr = {lr}
[recipe.telemetry]
interval_s = {interval}
[env]
SECRET_{name} = "{name}"
"""
LAYOUT = {"strategy": "fsdp", "dp_shard": 8}


def a_run(home: Path, name: str, lr: float, mem: str, micro_batch: int, interval: float = 1.0) -> RunDir:
    run = new_run(home, name)
    run.spec.write_text(SPEC.format(lr=lr, mem=mem, interval=interval, name=name.partition("-")[0].upper()))
    plan = {"nodes": 2, "precision": "bf16", "layout": LAYOUT, "batch": {"micro_batch": micro_batch}, "reasons": [name]}
    fsio.write_json(run.plan, plan)
    return run


def test_differences_and_ratios() -> None:
    b = healthy()
    assert b.training is not None
    b = replace(b, training=replace(b.training, step_s=stats(0.365), joules_per_token=0.004))
    found = compare.compare_summaries(healthy(), b)
    step = found.figures["step_p50_s"]
    assert (step.a, step.b, step.difference, step.ratio, step.better) == (0.73, 0.365, -0.365, 0.5, "lower")
    assert found.figures["mfu"].ratio == 1.0
    assert found.goodput["productive_s"].a == pytest.approx(6600 / 7805)
    assert sum(f.a or 0.0 for f in found.goodput.values()) == pytest.approx(1.0)


def test_different_sizes_are_compared_per_gpu() -> None:
    found = compare.compare_summaries(healthy(4), healthy(8))
    assert (found.a.gpus, found.b.gpus) == (8, 16)
    assert found.figures["tokens_per_s_per_gpu"].ratio == 0.5
    assert found.figures["energy_per_gpu_j"].ratio == 1.0
    assert found.figures["tokens_per_s"].better is None, "it depends on the number of GPUs"
    assert found.figures["tokens_per_s_per_gpu"].better == "higher"


def longer(factor: float, gpus: int = 8) -> Summary:
    """Return the healthy run with ``factor`` times the steps, at the same cost per step."""
    found = healthy(gpus)
    assert found.training is not None and found.waste is not None and found.training.tokens is not None
    more = replace(
        found.training,
        steps=int(found.training.steps * factor),
        tokens=found.training.tokens * factor,
        energy_j=1000.0 * found.training.steps * factor,
        joules_per_token=0.25,
    )
    waste = replace(found.waste, gpu_hours=found.waste.gpu_hours * factor)
    return replace(with_gpus(found, energy_j=1000.0), training=more, waste=waste)


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
    some = longer(1)
    some = replace(some, gpus=[replace(some.gpus[0], energy_j=None), *some.gpus[1:]])
    figures = compare.compare_summaries(longer(1), some).figures
    assert figures["energy_per_step_j"].b is None and figures["energy_per_step_j"].missing
    assert figures["energy_j"].b is None


def test_missing_metric_has_reason() -> None:
    bare = replace(with_gpus(healthy(), power_w=None, missing={"power_w": "NOT_SUPPORTED: no"}), training=None)
    found = compare.compare_summaries(healthy(), bare)
    power = found.figures["power_w"]
    assert (power.b, power.difference, power.ratio, power.missing) == (None, None, None, {"b": "NOT_SUPPORTED: no"})
    assert found.figures["mfu"].missing == {"b": "no step was recorded"}
    no_gpus = replace(healthy(), gpus=[], hosts=[replace(h, nvml_error="no driver") for h in healthy().hosts])
    assert compare.compare_summaries(no_gpus, healthy()).figures["utilization"].missing == {"a": "no driver"}


def test_notes_of_only_one_run() -> None:
    good = replace(healthy(), insights=build_notes(healthy()))
    found = compare.compare_summaries(broken(), good)
    assert {n.code for n in found.only_a} == {"gpu_unused", "slow_gpu", "throttled", "gpu_hours_wasted"}
    assert found.only_b == []


def test_relevant_settings(tmp_path: Path) -> None:
    a = a_run(tmp_path, "one-aaaaaa", 3e-4, "100G", 4, interval=1.0)
    b = a_run(tmp_path, "two-bbbbbb", 1e-4, "100G", 8, interval=5.0)
    for run in (a, b):
        record(new_attempt(run), [(gpu(i), busy()) for i in range(2)])
    found = compare.compare_runs(a, b)
    assert [(s.key, s.a, s.b) for s in found.settings] == [
        ("batch.micro_batch", 4, 8),
        ("recipe.optim.lr", 3e-4, 1e-4),
        ("env", ["SECRET_ONE"], ["SECRET_TWO"]),
    ]
    assert load_settings(a)["layout"] == "fsdp"
    assert '"ONE"' not in json.dumps(msgspec.to_builtins(found)), "a variable's value may be a secret"


@pytest.mark.parametrize(
    ("more", "there", "not_there"),
    [
        (
            '[script]\npath = "train.py"\nargs = ["--lr", "1"]\ncwd = "/"\n',
            {"script.args", "recipe.train.seed", "recipe.checkpoint.keep"},
            {"recipe.optim.lr", "recipe.optim.name", "recipe.model.dim", "recipe.train.steps", "recipe.data.seq_len"},
        ),
        (
            '[recipe.model]\nentry = "mine:Net"\nargs = { dim = 3 }\n',
            {"recipe.model.entry", "recipe.model.args.dim", "recipe.optim.lr"},
            {"recipe.model.dim", "recipe.model.layers", "recipe.model.convnet.width"},
        ),
    ],
)
def test_only_effective_settings_are_compared(more: str, there: set[str], not_there: set[str], tmp_path: Path) -> None:
    run = a_run(tmp_path, "one-aaaaaa", 3e-4, "", 4)
    with run.spec.open("a") as file:
        file.write(more)
    found = load_settings(run).keys()
    assert there <= found and not not_there & found


def test_unreadable_spec_is_reported(tmp_path: Path) -> None:
    a, b = (a_run(tmp_path, name, 3e-4, "", 4) for name in ("one-aaaaaa", "two-bbbbbb"))
    b.spec.write_text("job = 3")
    found = compare.compare_runs(a, b)
    assert found.settings == []
    assert found.unknown[0].startswith("two-bbbbbb:")
    assert "The settings cannot be compared" in render_text(found, 80)


def render_text(found: compare.TelemetryComparison, width: int) -> str:
    out = io.StringIO()
    report.show(found, terminal.make_console(out, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_text_output(width: int) -> None:
    good = healthy(8)
    assert good.training is not None
    good = replace(good, training=replace(good.training, mfu=None), run="a-longer-name-of-a-run-xyz234")
    found = replace(
        compare.compare_summaries(broken(), good), settings=[ConfigDiff("layout", "fsdp", "hybrid-shard 4 x 2")]
    )
    text = render_text(found, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text
    for words in ("8 and 16 GPUs", "tokens/s per GPU", "worse", "B: unknown for this model", "Notes only in A"):
        assert words in text
    assert ("B - A" in text) == (width >= 76)


def find_row(found: compare.TelemetryComparison, title: str) -> list[str]:
    """Return the cells of a row of the printed table."""
    (line,) = (x for x in render_text(found, 160).splitlines() if x.startswith(f"{title}  "))
    return [cell for cell in line.removeprefix(title).split("  ") if cell]


def test_row_has_one_unit_and_enough_digits() -> None:
    a, b = with_gpus(healthy(), energy_j=7560.0), with_gpus(healthy(), energy_j=9461.0)
    hosts = [replace(h, processes=ProcessSummary(stats(0.5, most=0.8902), None, 1)) for h in a.hosts]
    found = compare.compare_summaries(replace(a, hosts=hosts), replace(b, hosts=hosts))
    assert [c.strip() for c in find_row(found, "energy per GPU")][:3] == ["2.10 Wh", "2.63 Wh", "+0.53 Wh"]
    assert [c.strip() for c in find_row(found, "host memory, peak")][:2] == ["0.89 GiB", "0.89 GiB"]
    assert b.training is not None
    slower = replace(b, training=replace(b.training, step_s=stats(1.25), joules_per_token=2e-6))
    found = compare.compare_summaries(a, slower)
    assert [c.strip() for c in find_row(found, "step time")][:3] == ["0.73 s", "1.25 s", "+0.52 s"]
    assert [c.strip() for c in find_row(found, "energy per token")][:2] == ["7.90 mJ", "0.002 mJ"], (
        "no value is rounded to 0"
    )


def test_unequal_lengths_give_scaling_warning() -> None:
    same = render_text(compare.compare_summaries(healthy(), healthy()), 160)
    assert "not scaled" not in same
    b = healthy(2)
    assert b.training is not None
    b = replace(b, training=replace(b.training, steps=450))
    text = " ".join(render_text(compare.compare_summaries(healthy(), b), 80).split())
    assert "8 and 4 GPUs, 9,000 and 450 steps: steps, GPU-hours and energy per GPU are totals of the run" in text
