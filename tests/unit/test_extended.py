"""The list of tests that `make test` leaves out."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.extended import EXTENDED, KEPT_CASES, is_extended
from tests.paths import ROOT


@pytest.mark.long
def test_every_test_in_the_lists_exists() -> None:
    """Otherwise a test that was renamed would run again, or a case that should run would not."""
    names = {*EXTENDED, *(f"{test}[{case}]" for test, cases in KEPT_CASES.items() for case in cases)}
    files = sorted({name.partition("::")[0] for name in names})
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    collected = set(result.stdout.splitlines())
    functions = {re.sub(r"\[.*", "", nodeid) for nodeid in collected}
    assert names - collected - functions - {nodeid.partition("::")[0] for nodeid in collected} == set()


def test_file_function_and_case_are_recognized() -> None:
    assert is_extended("tests/ranks/test_reshape.py::test_anything[ddp]")
    assert is_extended("tests/slurm/test_containers.py::test_main_job")
    case = "tests/ranks/test_parity.py::test_losses_and_norms_match_one_process"
    assert not is_extended(f"{case}[ddp/fp32/1/none/adamw]") and is_extended(f"{case}[hsdp/fp32/4/selective/sgd]")
    assert not is_extended("tests/ranks/test_faults.py::test_kill_at_any_point_of_a_save_keeps_older_checkpoint")
