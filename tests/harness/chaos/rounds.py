"""One chaos round: a short run, its faults, and what must hold whatever they were."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from clustertrain import clock, settings
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.offline import inspect
from tests.harness.chaos.faults import EVERYBODY, RANKS, Fault, damage, draw, inject, local_damage
from tests.ranks.rank_pool import Ranks, digest, make_run

STEPS = 8
STRATEGIES = ("ddp", "ddp", "fsdp")  # the second one takes three times as long to start
GONE_S = 90.0  # for what a killed attempt has left at work


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Whole:
    """How a run ends to which nothing happens. The losses are those of rank 0, and gradient norms, by step."""

    digest: str
    losses: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Plan:
    """``local``: with a disk of the node's own. ``overlap``: the next attempt does not wait for what the one before has
    left at work."""

    name: str
    strategy: str
    every: int
    keep: int
    local: bool
    overlap: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        more = ", local" * self.local + ", overlapping" * self.overlap
        return f"{self.strategy}, every {self.every}, keep {self.keep}{more}; {'; '.join(map(str, self.faults))}"


@dataclass
class Report:
    """``story``: in a line for each attempt how it ended."""

    plan: Plan
    story: list[str] = field(default_factory=list)
    broken: str = ""


def plan_of(seed: str, number: int) -> Plan:
    rng = random.Random(f"{seed}/{number}")
    local = rng.random() < 0.3
    faults = [draw(rng, STEPS, local) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    if faults[0].kind.endswith("damage"):  # there must be something to damage
        faults.insert(0, Fault("stop", EVERYBODY, step=rng.randint(3, STEPS - 2), what="told"))
    return Plan(
        name=f"{seed}/{number}",
        strategy=rng.choice(STRATEGIES),
        every=rng.randint(1, 3),
        keep=rng.randint(1, 3),
        local=local,
        overlap=rng.random() < 0.5,
        faults=tuple(faults),
    )


def undisturbed(strategy: str, folder: Path) -> Whole:
    ranks = Ranks(make_run(folder / "whole", strategy, RANKS, steps=STEPS, every=STEPS), RANKS).expect(0)
    return Whole(digest(ranks.run), ranks.losses())


def play(plan: Plan, whole: Whole, folder: Path) -> Report:
    """``folder`` must not exist yet; it goes where nothing is broken."""
    report = Report(plan)
    try:
        _Round(plan, whole, folder, report.story).play()
    except AssertionError as e:
        report.broken = f"{type(e).__name__}: {e}"
        return report
    shutil.rmtree(folder)
    return report


class _Round:
    def __init__(self, plan: Plan, whole: Whole, folder: Path, story: list[str]) -> None:
        self.plan, self.whole, self.story = plan, whole, story
        self.rng = random.Random(f"damage/{plan.name}")
        self.near = folder / "near"
        self.run = make_run(folder / "run", plan.strategy, RANKS, steps=STEPS, every=plan.every, keep=plan.keep)
        if plan.local:
            self.run.spec.write_text(f"{self.run.spec.read_text()}local = {json.dumps(str(self.near))}\n")
        self.attempts = 0
        self.steps: set[int] = set()
        self.completed = False

    def play(self) -> None:
        for fault in self.plan.faults:
            if fault.kind.endswith("damage"):
                self.settle()
                self.damage(fault)
            elif not self.completed:
                self.attempt(fault)
        while not self.completed:
            self.attempt(None)
        self.settle()
        self.check_end()

    def damage(self, fault: Fault) -> None:
        if fault.kind == "local damage":
            self.story.append(f"{fault.what}: {local_damage(fault, self.near, self.rng)}")
            return
        steps = damage(fault, self.run.checkpoints, self.rng)
        self.story.append(f"{fault.what} in {steps}")
        self.completed = self.completed and not steps

    def attempt(self, fault: Fault | None) -> None:
        good = self.verified()
        if not self.plan.overlap:
            self.settle()
            good = self.verified()
        there = bool(index.list_checkpoint_folders(self.run.checkpoints))
        self.attempts += 1
        setup = {"setup": inject, "args": (fault,)} if fault is not None else {}
        ranks = Ranks(self.run, RANKS, self.attempts, **setup)  # type: ignore[arg-type]
        if fault is not None and fault.kind == "kill node":
            self.kill_node(ranks)
        codes = ranks.wait()
        self.check_losses(ranks.losses())
        endings = [r["ending"] for r in ranks.results()]
        self.completed = codes == [0] * RANKS and endings == ["completed"] * RANKS
        restored = ranks.events("restored")
        self.story.append(f"{fault or 'nothing'} -> {codes}, from {[e['step'] for e in restored]}")
        self.check_resumed(ranks, restored, good, there)
        if there and not good and not restored:
            self.check_hopeless(ranks, codes)
        elif fault is not None:
            check_ending(fault, ranks, codes)
        elif not self.completed:
            raise Broken(f"did not complete:\n{ranks.logs()}")

    def kill_node(self, ranks: Ranks) -> None:
        """When a process has stopped at its point, kill all of them; or they end without coming to it."""

        def all_of_them() -> list[Any]:  # of two libraries' types
            return [*ranks.processes, *processes(self.run.path)]

        def over() -> bool:
            return any(_stopped(p.pid) for p in all_of_them()) or not any(p.is_alive() for p in ranks.processes)

        if not clock.wait_until(over, 120.0, 0.02):
            raise Broken(f"neither ended nor at the point:\n{ranks.logs()}")
        for process in all_of_them():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def settle(self) -> None:
        """Wait until nothing of the run is at work."""
        if not clock.wait_until(lambda: not list(processes(self.run.path)), GONE_S):
            left = [(p.pid, p.cmdline()[1:4]) for p in processes(self.run.path)]
            raise Broken(f"still at work: {left}")

    def verified(self) -> list[int]:
        rows = inspect.list_checkpoints(self.run.checkpoints, verify=True)
        return [r["step"] for r in rows if r["verified"]]

    # -- what must hold

    def check_resumed(self, ranks: Ranks, restored: list[dict[str, Any]], good: list[int], there: bool) -> None:
        """From the newest one that verifies, or a newer one that a writer has committed since."""
        steps = [e["step"] for e in restored]
        if good and steps and steps[0] < good[-1]:
            raise Broken(f"went back to {steps[0]} where {good[-1]} verifies")
        if there and not steps and ranks.losses():
            raise Broken(f"began again where there were checkpoints:\n{ranks.logs()}")
        first = min(ranks.losses(), default=None)
        if first is not None and first != (steps[0] if steps else 0) + 1:
            raise Broken(f"restored {steps} and went on with step {first}")

    def check_hopeless(self, ranks: Ranks, codes: list[int]) -> None:
        """All checkpoints are damaged. It is said, and somebody takes them away."""
        if codes != [78] * RANKS:
            raise Broken(f"without a good checkpoint: exit codes {codes}")
        for result in ranks.results():
            if result["kind"] != "environment" or "no checkpoint is valid" not in result["error"]["message"]:
                raise Broken(f"without a good checkpoint: {result}")
        shutil.rmtree(self.run.checkpoints)

    def check_losses(self, losses: dict[int, tuple[float, float]]) -> None:
        self.steps |= losses.keys()
        if off := [s for s in losses if losses[s] != self.whole.losses[s]]:
            raise Broken(f"other losses or norms in steps {off}")

    def check_end(self) -> None:
        if (found := digest(self.run)) != self.whole.digest:
            raise Broken(f"ended with digest {found}, undisturbed {self.whole.digest}")
        if missing := self.whole.losses.keys() - self.steps:
            raise Broken(f"nobody did steps {sorted(missing)}")
        rows = inspect.list_checkpoints(self.run.checkpoints, verify=True)
        if not all(r["verified"] for r in rows) or rows[-1]["step"] != STEPS:
            raise Broken(f"at the end: {rows}")
        # What was set aside stays until a newer one is committed, and after the last step there may be none.
        names = {p.name for p in self.run.checkpoints.iterdir()} - {
            p.name for p in index.list_damaged_folders(self.run.checkpoints)
        }
        if names != {Path(r["path"]).name for r in rows}:
            raise Broken(f"left over: {sorted(names)}")
        if near := list(self.near.rglob("step-*")):
            raise Broken(f"left over on the node's own disk: {near}")
        if inside := [str(p) for r in rows for p in Path(r["path"]).rglob(".*")]:
            raise Broken(f"left over: {inside}")


def check_ending(fault: Fault, ranks: Ranks, codes: list[int]) -> None:
    """Nobody ends in a way that the fault does not explain."""
    one = {fault.rank} if fault.rank != EVERYBODY else {0, 1}
    killed = {"kill": one, "orphan": one, "kill node": {0, 1}}.get(fault.kind, set())
    for rank, code in enumerate(codes):
        if code < 0 and rank not in killed:
            raise Broken(f"rank {rank} died of signal {-code}:\n{ranks.logs()}")
    for result in ranks.results():
        kind, why = result["kind"], (result["error"] or {}).get("message", "")
        if kind == "user_error":
            raise Broken(f"an error that nobody made: {result['error']['traceback']}")
        if fault.kind == "disk" and result["ending"] == "failed" and "was not saved" not in why:
            raise Broken(f"of a disk that failed a rank says only: {why}")
        full = fault.what in ("ENOSPC", "EDQUOT")
        if fault.kind == "disk" and result["ending"] == "failed" and (result["exit_code"] == 78) != full:
            raise Broken(f"{fault.what}: exit code {result['exit_code']}, {why}")
        if fault.kind == "stop" and result["ending"] not in ("stopped", "completed"):
            raise Broken(f"told to stop: {result}")


def _stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def processes(run: Path) -> Iterator[psutil.Process]:
    """The living processes that were started for a run. Ranks that are forks are not among them, since nobody else sees
    their environment; the processes that write for them are."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(settings.RUN_DIR) == str(run) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
