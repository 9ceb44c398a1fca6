"""Write the planner benchmark's results into docs/explanation/planner.md: tables between two marks, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import measure, planner_sets
from clustertrain import fsio

if TYPE_CHECKING:
    from benchmarks.planner import Case

PAGE = measure.ROOT / "docs" / "explanation" / "planner.md"
PICTURE = measure.ROOT / "docs" / "pictures" / "planner.png"
BEGIN, END = "<!-- begin: written by python -m benchmarks planner -->", "<!-- end -->"

LABELS = {
    "throughput median": "throughput, median error",
    "throughput p90": "throughput, 90th percentile",
    "calibrated median": "calibrated throughput, median error",
    "calibrated p90": "calibrated throughput, 90th percentile",
    "memory median": "peak memory, median error",
    "memory p90": "peak memory, 90th percentile",
    "fits ran_predicted_not_to_fit_share": "runs that fit: share predicted not to fit",
    "fits did_not_fit_predicted_share": "runs that did not fit: share predicted not to fit",
    "sweeps with a predicted best near the best (both halves)": (
        "sweeps with a predicted best within 5 % of the best (both halves)"
    ),
}

Checked = Sequence[tuple[str, float, str, bool]]  # name, value, goal, met


def write(cases: Sequence[Case], result: Mapping[str, Any], checked: Checked) -> list[Path]:
    """Write the page and the picture; return their paths."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    fsio.write_text(PAGE, head + "\n".join([BEGIN, "", *_lines(result, checked), "", END]) + tail, mode=0o644)
    draw(cases)
    return [PAGE, PICTURE]


def _lines(result: Mapping[str, Any], checked: Checked) -> Iterator[str]:
    yield f"{result['rows']} rows, {result['measured_rows']} of them with a measured throughput."
    yield ""
    yield "| held-out half (unless marked otherwise) | result | goal | |"
    yield "|---|---|---|---|"
    for name, value, goal, met in checked:
        yield f"| {LABELS.get(name, name)} | {value:.3f} | {goal} | {'met' if met else '**missed**'} |"
    yield ""
    yield "### All sets"
    yield ""
    yield from planner_sets.format_table(result["sets"])
    for half, title in (("judging", "Held-out half"), ("setting", "Fitting half")):
        yield ""
        yield f"### {title}"
        yield ""
        yield "| | rows | sources | median error | 90th percentile | median of source medians |"
        yield "|---|---|---|---|---|---|"
        for kind in ("throughput", "calibrated", "memory"):
            s = result[half][kind]
            yield (
                f"| {kind} | {s['rows']} | {s['sources']} | {s['median']:.1%} | {s['p90']:.1%} "
                f"| {s['median_of_sources']:.1%} |"
            )
        yield from _sources(result[half]["by_source"], "throughput")
        yield from _sources(result[half]["memory_by_source"], "peak memory")
        yield from _sweeps(result[half]["ranking"]["sweeps"])
        yield from _list("Errors above 50 % (predicted / measured)", result[half]["outliers"])
        yield from _list("Wrong predictions of whether it fits", result[half]["fits"]["wrong"])
    yield ""
    yield "### Both halves"
    yield from _list("Measured rows without a prediction", result["not_predicted"])


def _sources(sources: Sequence[Mapping[str, Any]], quantity: str) -> Iterator[str]:
    yield ""
    yield f"| source of {quantity} | rows | median error | largest | median of predicted / measured |"
    yield "|---|---|---|---|---|"
    for s in sources:
        yield (
            f"| {s['source'].replace('|', '/')[:110]} | {s['rows']} | {s['median_error']:.1%} "
            f"| {s['largest_error']:.1%} | {s['median_ratio']:.2f} |"
        )


def _sweeps(sweeps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield ""
    if not sweeps:
        yield "No sweep in this half has five layouts of one model on the same GPUs."
        return
    yield "| sweep | layouts | best predicted layout slower than best measured by | rank correlation |"
    yield "|---|---|---|---|"
    for s in sweeps:
        yield f"| {s['sweep']} | {s['layouts']} | {s['slower_than_best']:.1%} | {s['rank_correlation']:.2f} |"


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"{title}:"
        yield ""
        yield from (f"- {line}" for line in lines)


def draw(cases: Sequence[Case], path: Path = PICTURE) -> None:
    """Plot predicted against published throughput (TFLOP/s per GPU) and peak memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2))
    for half, label, color in ((0, "fitting half", "#9db8d2"), (1, "held-out half", "#c0392b")):
        speed = [(p, m) for c in cases if c.half == half and (pair := _tflops(c)) for m, p in [pair]]
        size = [
            (c.predicted.peak_mem_gib, float(c.row["peak_mem_gib"])) for c in cases if c.half == half and c.memory_ratio
        ]
        for axes, points in ((left, speed), (right, size)):
            axes.scatter([m for _, m in points], [p for p, _ in points], s=11, c=color, label=label, alpha=0.8)
    for axes, title, unit in ((left, "Throughput", "TFLOP/s per GPU"), (right, "Peak memory", "GiB")):
        low, high = axes.get_xlim()[0], max(axes.get_xlim()[1], axes.get_ylim()[1])
        low = max(low, high / 1000)
        axes.plot([low, high], [low, high], c="#444444", lw=0.8)
        axes.plot([low, high], [1.25 * low, 1.25 * high], c="#999999", lw=0.6, ls=":")
        axes.plot([low, high], [0.8 * low, 0.8 * high], c="#999999", lw=0.6, ls=":")
        axes.set(title=title, xlabel=f"published, {unit}", ylabel=f"predicted, {unit}", xscale="log", yscale="log")
    right.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _tflops(case: Case) -> tuple[float, float] | None:
    """Return (published, predicted) in TFLOP/s per GPU, whatever the row's own unit."""
    from clustertrain.plan.table import predict

    measured, predicted = predict.compare_throughput(case.row, case.predicted)
    if not measured or not predicted or not case.predicted.tflops_per_gpu:
        return None
    return case.predicted.tflops_per_gpu * measured / predicted, case.predicted.tflops_per_gpu
