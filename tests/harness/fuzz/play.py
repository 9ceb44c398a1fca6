"""Plays the inputs of a class: Hypothesis draws them from a seed, and reduces one that fails to a small one."""

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
    """One kind of input: what draws it, and what hands it to the program in a sandbox.

    ``cost`` is how many milliseconds one takes, about: a run with a number of inputs gives each class its part,
    and dear ones fewer.
    """

    name: str
    inputs: Callable[[], SearchStrategy[Any]]
    play: Callable[[Sandbox, Any], None]
    cost_ms: float = 20.0


@dataclass
class Found:
    """A fault with the smallest input that showed it, and the seed of its chunk."""

    fault: Fault
    input: Any
    seed: int


@dataclass
class Played:
    name: str
    inputs: int = 0
    seconds: float = 0.0
    found: list[Found] = field(default_factory=list)
    exits: dict[int, int] = field(default_factory=dict)  # calls by exit status: how far the inputs came


def play(of: InputClass, box: Sandbox, *, seed: int, inputs: int, until: float | None = None) -> Played:
    """Up to ``inputs`` of the class, in chunks with a seed each: ``seed`` and the ones after it.

    Args:
        until: by the monotonic clock; no chunk begins after it.
    """
    played = Played(of.name)
    began = clock.monotonic()
    known: set[str] = set()
    while played.inputs < inputs and (until is None or clock.monotonic() < until):
        size = min(CHUNK, inputs - played.inputs)
        _chunk(of, box, seed, size, known, played)
        seed += 1
    played.seconds = clock.monotonic() - began
    played.exits = dict(sorted(box.exits.items()))
    return played


def _chunk(of: InputClass, box: Sandbox, seed: int, size: int, known: set[str], played: Played) -> None:
    """The same fault again is no news: what is known by its place is let through, so that the rest is seen."""
    last: dict[str, Any] = {}

    def one(drawn: Any) -> None:
        played.inputs += 1
        try:
            of.play(box, drawn)
        except FaultFound as e:
            if f"{e.fault.kind} {e.fault.where}" in known:
                return
            last.update(input=drawn, fault=e.fault)
            raise

    begun, counted = played.inputs, size
    while played.inputs - begun < counted:
        left = counted - (played.inputs - begun)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", errors.HypothesisWarning)
                _given(of, seed, left)(one)()
        except (FaultFound, errors.FlakyFailure, errors.Flaky):
            # Reducing played more inputs, which count for nothing.
            fault = last["fault"]
            known.add(f"{fault.kind} {fault.where}")
            played.found.append(Found(fault, last["input"], seed))
            played.inputs = begun + counted
        else:
            if played.inputs - begun < counted:  # the class has no more different inputs
                break


def _given(of: InputClass, seed: int, size: int) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
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
            made: Callable[[], None] = hypothesis.seed(seed)(settings(hypothesis.given(of.inputs())(test)))
        return made

    return decorate
