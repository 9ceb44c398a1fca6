"""Play the inputs of a class: Hypothesis draws them from a seed and reduces an input that shows a fault."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, errors
from hypothesis.strategies import SearchStrategy

from clustertrain import clock
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.sandbox import Sandbox

CHUNK = 250


@dataclass(frozen=True)
class InputClass:
    """A class of inputs.

    Attributes:
        inputs: returns the strategy that draws an input.
        play: passes an input to the program in a sandbox.
        cost_ms: approximate milliseconds per input; expensive classes get fewer inputs.
    """

    name: str
    inputs: Callable[[], SearchStrategy[Any]]
    play: Callable[[Sandbox, Any], None]
    cost_ms: float = 20.0


@dataclass
class Found:
    """A fault, the smallest input that shows it, and the seed of its chunk."""

    fault: Fault
    input: Any
    seed: int


@dataclass
class Played:
    name: str
    inputs: int = 0
    seconds: float = 0.0
    found: list[Found] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)  # number of calls by exit status


def play(input_class: InputClass, box: Sandbox, *, seed: int, inputs: int, until: float | None = None) -> Played:
    """Play up to ``inputs`` inputs of the class, in chunks with successive seeds.

    Args:
        until: monotonic time after which no chunk starts.
    """
    played = Played(input_class.name)
    start = clock.monotonic()
    known: set[str] = set()
    while played.inputs < inputs and (until is None or clock.monotonic() < until):
        size = min(CHUNK, inputs - played.inputs)
        _chunk(input_class, box, seed, size, known, played)
        seed += 1
    played.seconds = clock.monotonic() - start
    played.exits = dict(sorted(box.exits.items()))
    return played


def _chunk(input_class: InputClass, box: Sandbox, seed: int, size: int, known: set[str], played: Played) -> None:
    """Play one chunk; ignore faults that are already known, so that Hypothesis continues with the other inputs."""
    last: dict[str, Any] = {}

    def play_input(drawn: Any) -> None:
        played.inputs += 1
        try:
            input_class.play(box, drawn)
        except FaultFound as e:
            if f"{e.fault.kind} {e.fault.where}" in known:
                return
            last.update(input=drawn, fault=e.fault)
            raise

    inputs_before, target = played.inputs, size
    while played.inputs - inputs_before < target:
        remaining = target - (played.inputs - inputs_before)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", errors.HypothesisWarning)
                _given(input_class, seed, remaining)(play_input)()
        except (FaultFound, errors.FlakyFailure, errors.Flaky):
            # Inputs that were played for the reduction do not count.
            fault = last["fault"]
            known.add(f"{fault.kind} {fault.where}")
            played.found.append(Found(fault, last["input"], seed))
            played.inputs = inputs_before + target
        else:
            if played.inputs - inputs_before < target:  # the class has no further inputs
                break


def _given(input_class: InputClass, seed: int, size: int) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    def decorate(test: Callable[[Any], None]) -> Callable[[], None]:
        settings = hypothesis.settings(
            max_examples=size,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        with contextlib.redirect_stdout(None):
            runnable: Callable[[], None] = hypothesis.seed(seed)(settings(hypothesis.given(input_class.inputs())(test)))
        return runnable

    return decorate
