"""Comparison of the planner's predictions with published configurations: throughput, memory, fit and ranking.

Two tables: the survey ``layout-tables.csv``, split by source, ``int(sha256(source)) % 2``, and
``published_layouts.csv``, collected later and split the same way by publisher. The constants of
``plan/cost/compute.py`` and ``plan/cost/frameworks.py`` were fitted on half 0 of them; the goals apply to half 1. No
prediction reads a column of the outcome (``OUTCOME``).
"""

from __future__ import annotations

import csv
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure, planner_docs, planner_sets
from benchmarks.measure import CannotRun
from clustertrain.plan.table import predict
from clustertrain.plan.table.predict import RowPrediction

TABLE = measure.ROOT.parent / "shared" / "layout-tables.csv"
FURTHER_TABLE = measure.ROOT / "benchmarks" / "published_layouts.csv"
OUTCOME = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "peak_mem_gib", "fits")
FITTING, HELD_OUT = 0, 1
OUTLIER_ERROR = 0.5  # rows with a larger error are listed
MIN_SWEEP_LAYOUTS = 5
NEAR_BEST = 0.05  # at most this much slower than the best


@dataclass(frozen=True)
class Case:
    """A row of the table with its predictions."""

    row: Mapping[str, str]
    predicted: RowPrediction
    calibrated: RowPrediction

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def half(self) -> int:
        key = self.row.get("publisher") or self.source
        return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2

    def ratio(self, prediction: RowPrediction) -> float | None:
        """Return predicted over measured throughput, None if one is unknown."""
        measured, predicted = predict.compare_throughput(self.row, prediction)
        return predicted / measured if measured and predicted else None

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over published peak memory, None if one is unknown."""
        published, predicted = self.row["peak_mem_gib"], self.predicted.peak_mem_gib
        return predicted / float(published) if published and predicted else None

    def describe(self) -> str:
        row = self.row
        degrees = " ".join(f"{name} {row[name]}" for name in ("dp", "tp", "pp", "cp") if row[name] not in ("", "1"))
        return f"{row['model']}, {row['n_gpus'] or '?'} {row['gpu']}, {degrees or 'no degrees'}, seq {row['seq']}"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a table. Raise CannotRun if it does not exist."""
    if not path.is_file():
        raise CannotRun(f"{path} does not exist: a table of published configurations")
    return list(csv.DictReader(path.read_text().splitlines()))


def predict_rows(rows: Sequence[Mapping[str, str]], hidden: Sequence[str] = ()) -> list[Case]:
    """Predict rows, with the columns ``hidden`` and the outcome blanked."""
    blank = dict.fromkeys((*OUTCOME, *hidden), "")
    predicted = predict.predict([{**row, **blank} for row in rows])
    calibrated = predict.predict(rows, calibrate=True)
    return [Case(*fields) for fields in zip(rows, predicted, calibrated, strict=True)]


def load_cases(path: Path = TABLE) -> list[Case]:
    """Read and predict all rows. Raise CannotRun without the table."""
    return predict_rows(read_rows(path))


@dataclass(frozen=True)
class Errors:
    """Errors of one quantity, by source."""

    ratios: Mapping[str, Sequence[float]]
    """Predicted over measured, by source."""

    @classmethod
    def collect(cls, cases: Iterable[Case], ratio: Callable[[Case], float | None]) -> Errors:
        ratios: dict[str, list[float]] = {}
        for case in cases:
            value = ratio(case)
            if value is not None:
                ratios.setdefault(case.source, []).append(value)
        return cls(ratios)

    @property
    def absolute(self) -> list[float]:
        """Absolute relative errors of all rows, sorted."""
        return sorted(abs(r - 1) for ratios in self.ratios.values() for r in ratios)

    def summarize(self) -> dict[str, Any]:
        errors = self.absolute
        medians = [statistics.median(abs(r - 1) for r in ratios) for ratios in self.ratios.values()]
        if not errors:
            return {"rows": 0, "sources": 0, "median": None, "p90": None, "median_of_sources": None}
        return {
            "rows": len(errors),
            "sources": len(medians),
            "median": round(statistics.median(errors), 4),
            "p90": round(errors[int(0.9 * len(errors))], 4),
            "median_of_sources": round(statistics.median(medians), 4),
        }

    def summarize_sources(self) -> list[dict[str, Any]]:
        return [
            {
                "source": source,
                "rows": len(ratios),
                "median_error": round(statistics.median(abs(r - 1) for r in ratios), 4),
                "largest_error": round(max(abs(r - 1) for r in ratios), 4),
                "median_ratio": round(statistics.median(ratios), 4),
            }
            for source, ratios in self.ratios.items()
        ]


def throughput_ratio(case: Case) -> float | None:
    return case.ratio(case.predicted)


def calibrated_ratio(case: Case) -> float | None:
    """Return the ratio with calibration, None for the row that determined its source's factor."""
    return None if predict.CALIBRATION_NOTE in case.calibrated.note else case.ratio(case.calibrated)


def summarize_fits(cases: Sequence[Case]) -> dict[str, Any]:
    """Compare whether a configuration was predicted to fit with whether it ran."""
    ran = [c for c in cases if c.row["fits"] == "yes" and c.predicted.fits is not None]
    failed = [c for c in cases if c.row["fits"] == "no" and c.predicted.fits is not None]
    refused, detected = [c for c in ran if not c.predicted.fits], [c for c in failed if not c.predicted.fits]
    return {
        "ran": len(ran),
        "ran_predicted_not_to_fit": len(refused),
        "ran_predicted_not_to_fit_share": round(len(refused) / max(1, len(ran)), 4),
        "did_not_fit": len(failed),
        "did_not_fit_predicted": len(detected),
        "did_not_fit_predicted_share": round(len(detected) / max(1, len(failed)), 4),
        "wrong": [f"{c.source[:60]}: {c.describe()}: {c.predicted.peak_mem_gib:.0f} GiB" for c in refused]
        + [f"{c.source[:60]}: {c.describe()}, did not fit" for c in failed if c.predicted.fits],
    }


def rank_sweeps(cases: Sequence[Case]) -> dict[str, Any]:
    """Compare the predicted with the measured ranking in each sweep: layouts of one model on the same GPUs.

    ``slower_than_best``: how much slower the predicted best is than the measured best.
    ``rank_correlation``: Spearman's.
    """
    sweeps: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        if throughput_ratio(case) is not None:
            key = tuple(case.row[name] for name in ("source", "model", "gpu", "n_gpus", "seq", "precision"))
            sweeps.setdefault(key, []).append(case)
    summaries = []
    for key, rows in sweeps.items():
        layouts = {tuple(c.row[n] for n in _LAYOUT) for c in rows}
        if len(layouts) < MIN_SWEEP_LAYOUTS:
            continue
        pairs = [predict.compare_throughput(c.row, c.predicted) for c in rows]
        measured, predicted = [float(m or 0) for m, _ in pairs], [float(p or 0) for _, p in pairs]
        best = measured[max(range(len(rows)), key=predicted.__getitem__)]
        summaries.append(
            {
                "sweep": f"{key[0][:60]}: {key[1]}, {key[3]} {key[2]}, seq {key[4]}",
                "layouts": len(layouts),
                "rows": len(rows),
                "slower_than_best": round(1 - best / max(measured), 4),
                "rank_correlation": round(_spearman(measured, predicted), 3),
            }
        )
    return {"sweeps": summaries}


_LAYOUT = ("dp", "fsdp_or_zero", "tp", "pp", "vpp", "cp", "micro_bs", "act_ckpt", "hsdp_replicate")


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    x, y = ranks(a), ranks(b)
    return statistics.correlation(x, y) if len(set(x)) > 1 and len(set(y)) > 1 else 0.0


def list_outliers(cases: Sequence[Case]) -> list[str]:
    lines = []
    for case in cases:
        ratio = throughput_ratio(case)
        if ratio is not None and abs(ratio - 1) > OUTLIER_ERROR:
            lines.append(f"{ratio:.2f} {case.source[:70]}: {case.describe()}")
    return sorted(lines)


def build_report(cases: Sequence[Case], predict_twice_s: float) -> dict[str, Any]:
    """Return all figures. ``predict_twice_s``: seconds to predict all rows twice, with and without calibration."""
    result: dict[str, Any] = {"rows": len(cases), "predicting_twice_s": round(predict_twice_s, 2)}
    measured = [c for c in cases if any(c.row[n] for n in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"))]
    not_predicted = [c for c in measured if throughput_ratio(c) is None]
    result["measured_rows"] = len(measured)
    result["not_predicted"] = [f"{c.source}: {c.row['model']}: {c.predicted.note}" for c in not_predicted]
    for half, name in ((HELD_OUT, "judging"), (FITTING, "setting")):
        half_cases = [c for c in cases if c.half == half]
        throughput = Errors.collect(half_cases, throughput_ratio)
        memory = Errors.collect(half_cases, lambda c: c.memory_ratio)
        result[name] = {
            "throughput": throughput.summarize(),
            "calibrated": Errors.collect(half_cases, calibrated_ratio).summarize(),
            "memory": memory.summarize(),
            "fits": summarize_fits(half_cases),
            "ranking": rank_sweeps(half_cases),
            "outliers": list_outliers(half_cases),
            "by_source": throughput.summarize_sources(),
            "memory_by_source": memory.summarize_sources(),
        }
    return result


GOALS: tuple[tuple[str, str, str, float], ...] = (
    ("throughput", "median", "at most", 0.18),
    ("throughput", "p90", "at most", 0.50),
    ("calibrated", "median", "at most", 0.12),
    ("calibrated", "p90", "at most", 0.35),
    ("memory", "median", "at most", 0.10),
    ("memory", "p90", "at most", 0.25),
    ("fits", "ran_predicted_not_to_fit_share", "at most", 0.03),
    ("fits", "did_not_fit_predicted_share", "at least", 0.70),
)
MIN_NEAR_BEST_SHARE = 0.75  # over both halves: the held-out half has no sweep of five layouts


def check_goals(result: Mapping[str, Any]) -> list[tuple[str, float, str, bool]]:
    """Return (name, value, goal, met) of each goal; on the held-out half unless the name says otherwise."""
    checked = []
    for kind, figure, side, bound in GOALS:
        value = result["judging"][kind][figure]
        met = value <= bound if side == "at most" else value >= bound
        checked.append((f"{kind} {figure}", value, f"{side} {bound:g}", met))
    sweeps = [s for half in ("judging", "setting") for s in result[half]["ranking"]["sweeps"]]
    near = sum(s["slower_than_best"] <= NEAR_BEST for s in sweeps) / max(1, len(sweeps))
    name = "sweeps with a predicted best near the best (both halves)"
    checked.append((name, round(near, 4), f"at least {MIN_NEAR_BEST_SHARE:g}", near >= MIN_NEAR_BEST_SHARE))
    share = 1 - len(result["not_predicted"]) / result["measured_rows"]
    checked.append(("measured rows with a prediction (both halves)", round(share, 4), "at least 0.95", share >= 0.95))
    return checked


LARGE_PLAN = (
    "plan", "--device", "cuda", "--nodes", "2048", "--gpus", "8", "--gpu-type", "h100", "--json",
    "--set", "model.preset=llama3.1-405b", "--set", "data.seq_len=8192", "--set", "train.global_batch=2048",
)  # fmt: skip
SEARCH_S, TABLE_S, TABLE_ROWS = 1.0, 5.0, 1250


def check_speed(predict_s: float, rows: int) -> list[tuple[str, float, str, bool]]:
    """Return (name, seconds, goal, met) of the search and of a table.

    The search is the whole command for 405B on 16,384 GPUs, minus the time of `--help`, on one core. The time of a
    table of 1,250 rows follows from ``predict_s`` for ``rows``.
    """
    env = {**os.environ, "CLUSTERTRAIN_HOME": "/nonexistent"}
    one_core = ["taskset", "-c", "0", sys.executable, "-m", "clustertrain"]
    seconds = [
        min(measure.Command(args[0], [*one_core, *args], env, measure.ROOT).run().cpu_s for _ in range(3))
        for args in (LARGE_PLAN, ("--help",))
    ]
    search_s, table_s = seconds[0] - seconds[1], predict_s / rows * TABLE_ROWS
    return [
        ("seconds to search 405B on 16,384 GPUs", round(search_s, 2), f"below {SEARCH_S:g}", search_s < SEARCH_S),
        (f"seconds for {TABLE_ROWS} rows", round(table_s, 2), f"below {TABLE_S:g}", table_s < TABLE_S),
    ]


def main() -> int:
    started = time.perf_counter()
    cases = load_cases()
    predict_twice_s = time.perf_counter() - started
    result = build_report(cases, predict_twice_s)
    speed = check_speed(predict_twice_s / 2, len(cases))
    result["speed"] = [list(entry) for entry in speed]
    further = load_cases(FURTHER_TABLE)
    result["sets"] = planner_sets.summarize(cases, further)
    checked = check_goals(result) + planner_sets.check_goals(result["sets"]) + speed
    for name, value, goal, met in checked:
        print(f"{name:56} {value:7.3f}  {goal:14} {'met' if met else 'MISSED'}")
    print("\n".join(["", *planner_sets.format_table(result["sets"])]))
    context = measure.context(("clustertrain",))
    path = measure.write("planner", {**context, "result": result})
    written = [path, *planner_docs.write([*cases, *further], result, checked)]
    print("written to " + ", ".join(str(p.relative_to(measure.ROOT)) for p in written))
    return 0 if all(met for *_, met in checked) else 1
