"""Errors of the planner on each set of published rows, and with less known about each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import planner

if TYPE_CHECKING:
    from benchmarks.planner import Case

# What a table may lack besides the outcome: each row's framework, or all text that names it.
HIDDEN: Mapping[str, tuple[str, ...]] = {
    "all columns": (),
    "no framework": ("framework",),
    "no framework, source and note": ("framework", "source", "note"),
}
SURVEY_FITTING, SURVEY_HELD_OUT = "survey, fitting half", "survey, held-out half"
FURTHER_TUNING, FURTHER_HELD_OUT = "further rows, tuning", "further rows, held out"
# For rows that nobody here has seen; the held-out further rows are the nearest to them.
GOALS = (
    ("throughput", "median", 0.12),
    ("memory", "median", 0.08),
    ("memory", "p90", 0.30),
    ("rejected", "share", 0.03),
)
MIN_NEAR_BEST_SHARE = 0.9


def summarize(survey: Sequence[Case], further: Sequence[Case]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures by set and by what is hidden, for the cases of both tables."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, cases, half in (
        (SURVEY_FITTING, survey, planner.FITTING),
        (SURVEY_HELD_OUT, survey, planner.HELD_OUT),
        (FURTHER_TUNING, further, planner.FITTING),
        (FURTHER_HELD_OUT, further, planner.HELD_OUT),
    ):
        rows = [case.row for case in cases if case.half == half]
        result[name] = {label: _summarize_set(planner.predict_rows(rows, hidden)) for label, hidden in HIDDEN.items()}
    return result


def _summarize_set(cases: Sequence[Case]) -> dict[str, Any]:
    fits, sweeps = planner.summarize_fits(cases), planner.rank_sweeps(cases)["sweeps"]
    return {
        "rows": len(cases),
        "throughput": planner.Errors.collect(cases, planner.throughput_ratio).summarize(),
        "memory": planner.Errors.collect(cases, lambda c: c.memory_ratio).summarize(),
        "rejected": {"rows": fits["ran_predicted_not_to_fit"], "of": fits["ran"],
                     "share": fits["ran_predicted_not_to_fit_share"]},
        "did_not_fit": {"rows": fits["did_not_fit_predicted"], "of": fits["did_not_fit"]},
        "sweeps": {"near_best": sum(s["slower_than_best"] <= planner.NEAR_BEST for s in sweeps), "of": len(sweeps)},
    }  # fmt: skip


def check_goals(sets: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, float, str, bool]]:
    """Return (name, value, goal, met) of each goal for the held-out further rows; sweeps over both halves of them."""
    held_out, tuning = sets[FURTHER_HELD_OUT]["all columns"], sets[FURTHER_TUNING]["all columns"]
    checked = [
        (
            f"further rows: {kind} {figure}",
            held_out[kind][figure],
            f"at most {bound:g}",
            held_out[kind][figure] <= bound,
        )
        for kind, figure, bound in GOALS
    ]
    near, of = (held_out["sweeps"][name] + tuning["sweeps"][name] for name in ("near_best", "of"))
    share = near / max(1, of)
    checked.append(
        ("further rows: sweeps near the best (both halves)", round(share, 4), f"at least {MIN_NEAR_BEST_SHARE:g}",
         share >= MIN_NEAR_BEST_SHARE)
    )  # fmt: skip
    return checked


def format_table(sets: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of all sets."""
    titles = ("set", "known", "rows", "throughput, median", "p90", "memory, median", "p90", "ran, said not to fit",
              "did not fit, said so", "sweeps near the best")  # fmt: skip
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for name, by_known in sets.items():
        for known, s in by_known.items():
            cells = [f"{s[kind][figure]:.1%}" if s[kind]["rows"] else "" for kind in ("throughput", "memory")
                     for figure in ("median", "p90")]  # fmt: skip
            counts = [f"{s['rejected']['rows']} of {s['rejected']['of']}",
                      f"{s['did_not_fit']['rows']} of {s['did_not_fit']['of']}",
                      f"{s['sweeps']['near_best']} of {s['sweeps']['of']}"]  # fmt: skip
            yield f"| {' | '.join([name, known, str(s['rows']), *cells, *counts])} |"
