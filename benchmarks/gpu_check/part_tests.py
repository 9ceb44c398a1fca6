"""The tests that need a GPU, ``tests/gpu``. The rehearsal only collects them, which imports all that they import."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure
from benchmarks.gpu_check.parts import Figures, run_main

LONGEST = "tests/gpu/test_gpu.py"  # last, so that the others have run if the time is over


class Outcomes:
    """Plugin that counts outcomes and remembers what failed; it has them even if pytest is interrupted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.collected = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.failed:
                self.failed.append(report.nodeid)


def run_tests(options: argparse.Namespace) -> tuple[Figures, Any]:
    os.environ["CLUSTERTRAIN_REQUIRE_GPU"] = "1"
    outcomes = Outcomes()
    files = sorted(map(str, Path("tests/gpu").glob("test_*.py")), key=lambda name: (name == LONGEST, name))
    argv = ["-m", "gpu", "-v", "-p", "no:cacheprovider", f"--junitxml={options.out / 'tests.xml'}", *files]
    if options.device == "cpu":
        argv = ["--collect-only", "-q", *argv]
    code = pytest.main(argv, plugins=[outcomes])
    figures: Figures = {
        "collected": float(outcomes.collected),
        **{outcome: float(outcomes.counts[outcome]) for outcome in ("passed", "failed", "skipped")},
        "failed_tests": ", ".join(outcomes.failed) or "none",
    }
    options.exit_code = int(code)
    return figures, {"exit_code": int(code), "failed": outcomes.failed}


def main() -> int:
    os.chdir(measure.ROOT)
    status = {"code": 0}

    def run(options: argparse.Namespace) -> tuple[Figures, Any]:
        result = run_tests(options)
        status["code"] = options.exit_code
        return result

    return run_main(run) or status["code"]


if __name__ == "__main__":
    sys.exit(main())
