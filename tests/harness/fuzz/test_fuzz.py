"""A small part of `make fuzz` with a fixed seed, so that a fault comes from the change under test."""

from __future__ import annotations

import pytest

from tests.harness.fuzz.__main__ import play_in_process
from tests.harness.fuzz.catalog import CLASSES, shares

SEED = 18
INPUTS = 1500  # of all classes together: a minute of one core


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSES)
def test_inputs_of_each_class_show_no_fault(name: str) -> None:
    inputs = shares(INPUTS, list(CLASSES))[name]
    played = play_in_process(name, SEED, inputs, None)
    assert played.inputs >= inputs
    replay = f"replay: make fuzz FUZZ='--class {name} --seed"
    faults = [
        f"{fault_found.fault}\ninput: {repr(fault_found.input)[:1000]}\n{replay} {fault_found.seed}'"
        for fault_found in played.found
    ]
    assert not faults, "\n".join(faults)
