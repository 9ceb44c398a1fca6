"""A fixed share of what `make fuzz` plays, with a fixed seed: a fault here comes from the change under test."""

from __future__ import annotations

import pytest

from tests.harness.fuzz.__main__ import apart
from tests.harness.fuzz.catalog import CLASSES, shares

SEED = 18
INPUTS = 1500  # of all classes together: a minute of one core


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSES)
def test_no_input_of_the_class_shows_a_fault(name: str) -> None:
    inputs = shares(INPUTS, list(CLASSES))[name]
    played = apart(name, SEED, inputs, None)
    assert played.inputs >= inputs
    again = f"play it again: make fuzz FUZZ='--class {name} --seed"
    shown = [f"{found.fault}\ninput: {repr(found.input)[:1000]}\n{again} {found.seed}'" for found in played.found]
    assert not shown, "\n".join(shown)
