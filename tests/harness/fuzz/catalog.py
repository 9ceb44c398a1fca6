"""All classes of input by name."""

from __future__ import annotations

import sys

from tests.harness.fuzz.inputs import (
    commands,
    documents,
    meanwhile,
    outputs,
    repositories,
    requeues,
    run_files,
    scripts,
    surroundings,
    tables,
)
from tests.harness.fuzz.play import InputClass, Played, play
from tests.harness.fuzz.sandbox import sandbox

CLASSES: dict[str, InputClass] = {
    of.name: of
    for module in (
        documents,
        commands,
        run_files,
        tables,
        repositories,
        scripts,
        surroundings,
        outputs,
        requeues,
        meanwhile,
    )
    for of in module.CLASSES
}


def shares(inputs: int, names: list[str]) -> dict[str, int]:
    """How many of ``inputs`` each class gets: in the square root of its speed, so that slow ones still get many."""
    weights = {name: CLASSES[name].cost_ms ** -0.5 for name in names}
    whole = sum(weights.values())
    return {name: max(1, round(inputs * weight / whole)) for name, weight in weights.items()}


def play_class(name: str, seed: int, inputs: int, until: float | None = None) -> Played:
    """Up to ``inputs`` of the class, in a sandbox of their own."""
    sys.dont_write_bytecode = True  # a module compiled on import is no write of the input
    with sandbox() as box:
        return play(CLASSES[name], box, seed=seed, inputs=inputs, until=until)
