"""All input classes by name."""

from __future__ import annotations

import sys

from tests.harness.fuzz.inputs import (
    commands,
    concurrent_changes,
    documents,
    environments,
    outputs,
    repositories,
    requeues,
    run_files,
    scripts,
    tables,
)
from tests.harness.fuzz.play import InputClass, Played, play
from tests.harness.fuzz.sandbox import sandbox

CLASSES: dict[str, InputClass] = {
    input_class.name: input_class
    for module in (
        documents,
        commands,
        run_files,
        tables,
        repositories,
        scripts,
        environments,
        outputs,
        requeues,
        concurrent_changes,
    )
    for input_class in module.CLASSES
}


def shares(inputs: int, names: list[str]) -> dict[str, int]:
    """Return how many of ``inputs`` each class gets: in proportion to the square root of its speed."""
    weights = {name: CLASSES[name].cost_ms ** -0.5 for name in names}
    total = sum(weights.values())
    return {name: max(1, round(inputs * weight / total)) for name, weight in weights.items()}


def play_class(name: str, seed: int, inputs: int, until: float | None = None) -> Played:
    """Play up to ``inputs`` inputs of a class in a new sandbox."""
    sys.dont_write_bytecode = True  # a module compiled on import is not a write of the input
    with sandbox() as box:
        return play(CLASSES[name], box, seed=seed, inputs=inputs, until=until)
