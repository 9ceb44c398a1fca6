"""The table of tests that do not run on the emulated device names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.cuda_emulation import unsupported
from tests.paths import ROOT


@pytest.mark.parametrize("start", unsupported.UNSUPPORTED)
def test_entry_names_ranks_tests(start: str) -> None:
    file, _, name = start.partition("::")
    text = (ROOT / file).read_text()
    assert "mark.ranks" in text
    assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}", text, re.MULTILINE)


def test_reason_is_found_by_beginning_of_id() -> None:
    start, reason = next(iter(unsupported.UNSUPPORTED.items()))
    assert unsupported.reason(f"{start}[fsdp 2]") == reason
    assert unsupported.reason("tests/ranks/test_stop.py::test_stop_before_first_step_trains_nothing") is None
