"""The planner's predictions against published configurations: errors by source, memory, what fits, ranking.

The table is split by source, ``int(sha256(source)) % 2``. The constants of ``plan/cost/compute.py`` and
``plan/cost/frameworks.py`` were set on the half with 0; the figures that count are those of the half with 1.
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

from benchmarks import measure, planner_docs
from benchmarks.measure import CannotRun
from clustertrain.plan.table import predict
from clustertrain.plan.table.predict import RowPrediction

TABLE = measure.ROOT.parent / "shared" / "layout-tables.csv"
SETTING, JUDGING = 0, 1
ATYPICAL = 0.5  # an error from which on a source's row is named
SWEEP = 5  # layouts at least
NEAR = 0.05


@dataclass(frozen=True)
class Case:
    row: Mapping[str, str]
    found: RowPrediction
    calibrated: RowPrediction

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def half(self) -> int:
        return int(hashlib.sha256(self.source.encode()).hexdigest(), 16) % 2

    def ratio(self, prediction: RowPrediction) -> float | None:
        """Predicted over measured throughput."""
        measured, predicted = predict.compare_throughput(self.row, prediction)
        return predicted / measured if measured and predicted else None

    @property
    def memory_ratio(self) -> float | None:
        printed, found = self.row["peak_mem_gib"], self.found.peak_mem_gib
        return found / float(printed) if printed and found else None

    def words(self) -> str:
        row = self.row
        degrees = " ".join(f"{name} {row[name]}" for name in ("dp", "tp", "pp", "cp") if row[name] not in ("", "1"))
        return f"{row['model']}, {row['n_gpus'] or '?'} {row['gpu']}, {degrees or 'no degrees'}, seq {row['seq']}"


def cases(path: Path = TABLE) -> list[Case]:
    if not path.is_file():
        raise CannotRun(f"{path} does not exist: the table of published configurations")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    found, calibrated = predict.predict(rows), predict.predict(rows, calibrate=True)
    return [Case(*each) for each in zip(rows, found, calibrated, strict=True)]


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of one kind, by source."""

    by_source: Mapping[str, Sequence[float]]  # predicted over measured

    @classmethod
    def of(cls, these: Iterable[Case], ratio: Callable[[Case], float | None]) -> Errors:
        found: dict[str, list[float]] = {}
        for case in these:
            value = ratio(case)
            if value is not None:
                found.setdefault(case.source, []).append(value)
        return cls(found)

    @property
    def all(self) -> list[float]:
        return sorted(abs(r - 1) for ratios in self.by_source.values() for r in ratios)

    def summary(self) -> dict[str, Any]:
        errors = self.all
        medians = [statistics.median(abs(r - 1) for r in ratios) for ratios in self.by_source.values()]
        return {
            "rows": len(errors),
            "sources": len(medians),
            "median": round(statistics.median(errors), 4),
            "p90": round(errors[int(0.9 * len(errors))], 4),
            "median_of_sources": round(statistics.median(medians), 4),
        }

    def sources(self) -> list[dict[str, Any]]:
        return [
            {
                "source": source,
                "rows": len(ratios),
                "median_error": round(statistics.median(abs(r - 1) for r in ratios), 4),
                "largest_error": round(max(abs(r - 1) for r in ratios), 4),
                "median_ratio": round(statistics.median(ratios), 4),
            }
            for source, ratios in self.by_source.items()
        ]


def throughput(case: Case) -> float | None:
    return case.ratio(case.found)


def calibrated_throughput(case: Case) -> float | None:
    """Without the row that set its source's factor."""
    return None if predict.CALIBRATION_NOTE in case.calibrated.note else case.ratio(case.calibrated)


def fits(these: Sequence[Case]) -> dict[str, Any]:
    ran = [c for c in these if c.row["fits"] == "yes" and c.found.fits is not None]
    not_ran = [c for c in these if c.row["fits"] == "no" and c.found.fits is not None]
    refused, seen = [c for c in ran if not c.found.fits], [c for c in not_ran if not c.found.fits]
    return {
        "ran": len(ran),
        "ran_predicted_not_to_fit": len(refused),
        "ran_predicted_not_to_fit_share": round(len(refused) / max(1, len(ran)), 4),
        "did_not_fit": len(not_ran),
        "did_not_fit_predicted": len(seen),
        "did_not_fit_predicted_share": round(len(seen) / max(1, len(not_ran)), 4),
        "wrong": [f"{c.source[:60]}: {c.words()}: {c.found.peak_mem_gib:.0f} GiB" for c in refused]
        + [f"{c.source[:60]}: {c.words()}, did not fit" for c in not_ran if c.found.fits],
    }


def ranking(these: Sequence[Case]) -> dict[str, Any]:
    """Of each sweep, layouts of one model on the same GPUs: how much slower than the measured best the row is that is
    predicted to be the best, and Spearman's rank correlation."""
    sweeps: dict[tuple[str, ...], list[Case]] = {}
    for case in these:
        if throughput(case) is not None:
            key = tuple(case.row[name] for name in ("source", "model", "gpu", "n_gpus", "seq", "precision"))
            sweeps.setdefault(key, []).append(case)
    found = []
    for key, rows in sweeps.items():
        layouts = {tuple(c.row[n] for n in _LAYOUT) for c in rows}
        if len(layouts) < SWEEP:
            continue
        pairs = [predict.compare_throughput(c.row, c.found) for c in rows]
        measured, predicted = [float(m or 0) for m, _ in pairs], [float(p or 0) for _, p in pairs]
        best = measured[max(range(len(rows)), key=predicted.__getitem__)]
        found.append(
            {
                "sweep": f"{key[0][:60]}: {key[1]}, {key[3]} {key[2]}, seq {key[4]}",
                "layouts": len(layouts),
                "rows": len(rows),
                "slower_than_best": round(1 - best / max(measured), 4),
                "rank_correlation": round(_spearman(measured, predicted), 3),
            }
        )
    return {"sweeps": found}


_LAYOUT = ("dp", "fsdp_or_zero", "tp", "pp", "vpp", "cp", "micro_bs", "act_ckpt", "hsdp_replicate")


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    x, y = ranks(a), ranks(b)
    return statistics.correlation(x, y) if len(set(x)) > 1 and len(set(y)) > 1 else 0.0


def outliers(these: Sequence[Case]) -> list[str]:
    named = []
    for case in these:
        ratio = throughput(case)
        if ratio is not None and abs(ratio - 1) > ATYPICAL:
            named.append(f"{ratio:.2f} {case.source[:70]}: {case.words()}")
    return sorted(named)


def report(everything: Sequence[Case], took: float) -> dict[str, Any]:
    """``took``: seconds of predicting all rows twice, once with and once without calibration."""
    result: dict[str, Any] = {"rows": len(everything), "predicting_twice_s": round(took, 2)}
    measured = [c for c in everything if any(c.row[n] for n in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"))]
    left = [c for c in measured if throughput(c) is None]
    result["measured_rows"] = len(measured)
    result["not_predicted"] = [f"{c.source}: {c.row['model']}: {c.found.note}" for c in left]
    for half, name in ((JUDGING, "judging"), (SETTING, "setting")):
        these = [c for c in everything if c.half == half]
        of_memory = Errors.of(these, lambda c: c.memory_ratio)
        result[name] = {
            "throughput": Errors.of(these, throughput).summary(),
            "calibrated": Errors.of(these, calibrated_throughput).summary(),
            "memory": of_memory.summary(),
            "fits": fits(these),
            "ranking": ranking(these),
            "outliers": outliers(these),
            "by_source": Errors.of(these, throughput).sources(),
            "memory_by_source": of_memory.sources(),
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
NEAR_BEST = 0.75  # of the sweeps of both halves, since the judging one has none of five layouts


def verdicts(result: Mapping[str, Any]) -> list[tuple[str, float, str, bool]]:
    """(what, figure, goal, met) on the half that judges."""
    found = []
    for kind, figure, side, bound in GOALS:
        value = result["judging"][kind][figure]
        met = value <= bound if side == "at most" else value >= bound
        found.append((f"{kind} {figure}", value, f"{side} {bound:g}", met))
    sweeps = [s for half in ("judging", "setting") for s in result[half]["ranking"]["sweeps"]]
    near = sum(s["slower_than_best"] <= NEAR for s in sweeps) / max(1, len(sweeps))
    what = "sweeps whose best is found (both halves)"
    found.append((what, round(near, 4), f"at least {NEAR_BEST:g}", near >= NEAR_BEST))
    share = 1 - len(result["not_predicted"]) / result["measured_rows"]
    found.append(("measured rows that are predicted (both halves)", round(share, 4), "at least 0.95", share >= 0.95))
    return found


LARGE = (
    "plan", "--device", "cuda", "--nodes", "2048", "--gpus", "8", "--gpu-type", "h100", "--json",
    "--set", "model.preset=llama3.1-405b", "--set", "data.seq_len=8192", "--set", "train.global_batch=2048",
)  # fmt: skip
SEARCH_S, TABLE_S, TABLE_ROWS = 1.0, 5.0, 1250


def speed(took: float, rows: int) -> list[tuple[str, float, str, bool]]:
    """Seconds of whole commands, pinned to one core: the search for 405B on 16,384 GPUs, less what `--help` takes to
    start; and of a table of 1,250 rows, from ``took`` seconds for ``rows``."""
    env = {**os.environ, "CLUSTERTRAIN_HOME": "/nonexistent"}
    one_core = ["taskset", "-c", "0", sys.executable, "-m", "clustertrain"]
    seconds = [
        min(measure.Command(words[0], [*one_core, *words], env, measure.ROOT).run().cpu_s for _ in range(3))
        for words in (LARGE, ("--help",))
    ]
    search_s, table_s = seconds[0] - seconds[1], took / rows * TABLE_ROWS
    return [
        ("seconds to search 405B on 16,384 GPUs", round(search_s, 2), f"below {SEARCH_S:g}", search_s < SEARCH_S),
        (f"seconds for {TABLE_ROWS} rows", round(table_s, 2), f"below {TABLE_S:g}", table_s < TABLE_S),
    ]


def main() -> int:
    started = time.perf_counter()
    everything = cases()
    took = time.perf_counter() - started
    result = report(everything, took)
    checked = verdicts(result) + speed(took / 2, len(everything))
    result["speed"] = [list(each) for each in checked[-2:]]
    for what, value, goal, met in checked:
        print(f"{what:45} {value:7.3f}  {goal:14} {'met' if met else 'MISSED'}")
    context = measure.context(("clustertrain",))
    path = measure.write("planner", {**context, "result": result})
    written = [path, *planner_docs.write(everything, result, checked)]
    print("written to " + ", ".join(str(p.relative_to(measure.ROOT)) for p in written))
    return 0 if all(met for *_, met in checked) else 1
