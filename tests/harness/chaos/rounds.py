"""One chaos round: a short run, its faults, and the invariants that must hold."""

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
from tests.harness.chaos.faults import ALL_RANKS, RANKS, Fault, damage, draw, inject, local_damage
from tests.ranks.rank_pool import Ranks, digest, make_run

STEPS = 8
STRATEGIES = ("ddp", "ddp", "fsdp")  # fsdp takes three times as long to start
EXIT_TIMEOUT_S = 90.0  # for the remaining processes of a killed attempt


class Broken(AssertionError):
    """A violated invariant."""


@dataclass(frozen=True)
class Reference:
    """Result of an undisturbed run: its final digest, and (loss, gradient norm) of rank 0 by step."""

    digest: str
    losses: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Plan:
    """Options and faults of a round.

    Attributes:
        local: whether there is a node-local disk.
        overlap: whether an attempt starts before the processes of the previous one have ended.
    """

    name: str
    strategy: str
    every: int
    keep: int
    local: bool
    overlap: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        options = ", local" * self.local + ", overlapping" * self.overlap
        return f"{self.strategy}, every {self.every}, keep {self.keep}{options}; {'; '.join(map(str, self.faults))}"


@dataclass
class Report:
    """Outcome of a round; ``story`` has one line per attempt, and ``broken`` is the violation, if any."""

    plan: Plan
    story: list[str] = field(default_factory=list)
    broken: str = ""


def plan_of(seed: str, number: int) -> Plan:
    rng = random.Random(f"{seed}/{number}")
    local = rng.random() < 0.3
    faults = [draw(rng, STEPS, local) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    if faults[0].kind.endswith("damage"):  # only an existing checkpoint can be damaged
        faults.insert(0, Fault("stop", ALL_RANKS, step=rng.randint(3, STEPS - 2), variant="stop file"))
    return Plan(
        name=f"{seed}/{number}",
        strategy=rng.choice(STRATEGIES),
        every=rng.randint(1, 3),
        keep=rng.randint(1, 3),
        local=local,
        overlap=rng.random() < 0.5,
        faults=tuple(faults),
    )


def undisturbed(strategy: str, folder: Path) -> Reference:
    ranks = Ranks(make_run(folder / "whole", strategy, RANKS, steps=STEPS, every=STEPS), RANKS).expect(0)
    return Reference(digest(ranks.run), ranks.losses())


def play(plan: Plan, reference: Reference, folder: Path) -> Report:
    """Play a round in ``folder``, which must not exist, and remove the folder if no invariant was violated."""
    report = Report(plan)
    try:
        _Round(plan, reference, folder, report.story).play()
    except AssertionError as e:
        report.broken = f"{type(e).__name__}: {e}"
        return report
    shutil.rmtree(folder)
    return report


class _Round:
    def __init__(self, plan: Plan, reference: Reference, folder: Path, story: list[str]) -> None:
        self.plan, self.reference, self.story = plan, reference, story
        self.rng = random.Random(f"damage/{plan.name}")
        self.local_disk = folder / "local"
        self.run = make_run(folder / "run", plan.strategy, RANKS, steps=STEPS, every=plan.every, keep=plan.keep)
        if plan.local:
            self.run.spec.write_text(f"{self.run.spec.read_text()}local = {json.dumps(str(self.local_disk))}\n")
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
            self.story.append(f"{fault.variant}: {local_damage(fault, self.local_disk, self.rng)}")
            return
        steps = damage(fault, self.run.checkpoints, self.rng)
        self.story.append(f"{fault.variant} in {steps}")
        self.completed = self.completed and not steps

    def attempt(self, fault: Fault | None) -> None:
        valid_steps = self.verified()
        if not self.plan.overlap:
            self.settle()
            valid_steps = self.verified()
        had_checkpoints = bool(index.list_checkpoint_folders(self.run.checkpoints))
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
        self.check_resumed(ranks, restored, valid_steps, had_checkpoints)
        if had_checkpoints and not valid_steps and not restored:
            self.check_no_valid_checkpoint(ranks, codes)
        elif fault is not None:
            check_ending(fault, ranks, codes)
        elif not self.completed:
            raise Broken(f"did not complete:\n{ranks.logs()}")

    def kill_node(self, ranks: Ranks) -> None:
        """Kill all processes as soon as one has stopped at its point, or the ranks have ended without reaching it."""

        def all_processes() -> list[Any]:  # multiprocessing's and psutil's
            return [*ranks.processes, *processes(self.run.path)]

        def stopped_or_ended() -> bool:
            return any(_stopped(p.pid) for p in all_processes()) or not any(p.is_alive() for p in ranks.processes)

        if not clock.wait_until(stopped_or_ended, 120.0, 0.02):
            raise Broken(f"neither ended nor reached the point:\n{ranks.logs()}")
        for process in all_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def settle(self) -> None:
        """Wait until the run has no processes."""
        if not clock.wait_until(lambda: not list(processes(self.run.path)), EXIT_TIMEOUT_S):
            remaining = [(p.pid, p.cmdline()[1:4]) for p in processes(self.run.path)]
            raise Broken(f"processes still running: {remaining}")

    def verified(self) -> list[int]:
        rows = inspect.list_checkpoints(self.run.checkpoints, verify=True)
        return [r["step"] for r in rows if r["verified"]]

    # -- invariants

    def check_resumed(
        self, ranks: Ranks, restored: list[dict[str, Any]], valid_steps: list[int], had_checkpoints: bool
    ) -> None:
        """Check that it resumed from the newest valid checkpoint, or a newer one that a writer has committed since."""
        steps = [e["step"] for e in restored]
        if valid_steps and steps and steps[0] < valid_steps[-1]:
            raise Broken(f"restored step {steps[0]}, but step {valid_steps[-1]} is valid")
        if had_checkpoints and not steps and ranks.losses():
            raise Broken(f"started over although there were checkpoints:\n{ranks.logs()}")
        first = min(ranks.losses(), default=None)
        if first is not None and first != (steps[0] if steps else 0) + 1:
            raise Broken(f"restored {steps} and continued with step {first}")

    def check_no_valid_checkpoint(self, ranks: Ranks, codes: list[int]) -> None:
        """Check that the error names the damage if no checkpoint is valid, and remove them all."""
        if codes != [78] * RANKS:
            raise Broken(f"without a valid checkpoint: exit codes {codes}")
        for result in ranks.results():
            if result["kind"] != "environment" or "no checkpoint is valid" not in result["error"]["message"]:
                raise Broken(f"without a valid checkpoint: {result}")
        shutil.rmtree(self.run.checkpoints)

    def check_losses(self, losses: dict[int, tuple[float, float]]) -> None:
        self.steps |= losses.keys()
        if different_steps := [s for s in losses if losses[s] != self.reference.losses[s]]:
            raise Broken(f"different losses or norms in steps {different_steps}")

    def check_end(self) -> None:
        if (final_digest := digest(self.run)) != self.reference.digest:
            raise Broken(f"ended with digest {final_digest}, undisturbed {self.reference.digest}")
        if missing := self.reference.losses.keys() - self.steps:
            raise Broken(f"no attempt trained steps {sorted(missing)}")
        rows = inspect.list_checkpoints(self.run.checkpoints, verify=True)
        if not all(r["verified"] for r in rows) or rows[-1]["step"] != STEPS:
            raise Broken(f"at the end: {rows}")
        # Damaged checkpoints stay until a newer one is committed, which may not happen after the last step.
        names = {p.name for p in self.run.checkpoints.iterdir()} - {
            p.name for p in index.list_damaged_folders(self.run.checkpoints)
        }
        if names != {Path(r["path"]).name for r in rows}:
            raise Broken(f"left over: {sorted(names)}")
        if local_files := list(self.local_disk.rglob("step-*")):
            raise Broken(f"left over on the local disk: {local_files}")
        if inside := [str(p) for r in rows for p in Path(r["path"]).rglob(".*")]:
            raise Broken(f"left over: {inside}")


def check_ending(fault: Fault, ranks: Ranks, codes: list[int]) -> None:
    """Check that the fault explains how the ranks ended."""
    targets = {fault.rank} if fault.rank != ALL_RANKS else {0, 1}
    killed = {"kill": targets, "orphan": targets, "kill node": {0, 1}}.get(fault.kind, set())
    for rank, code in enumerate(codes):
        if code < 0 and rank not in killed:
            raise Broken(f"rank {rank} died of signal {-code}:\n{ranks.logs()}")
    for result in ranks.results():
        category, message = result["kind"], (result["error"] or {}).get("message", "")
        if category == "error":
            raise Broken(f"an unexplained error: {result['error']['traceback']}")
        if fault.kind == "disk" and result["ending"] == "failed" and "was not saved" not in message:
            raise Broken(f"the error does not say that the save failed: {message}")
        is_full = fault.variant in ("ENOSPC", "EDQUOT")
        if fault.kind == "disk" and result["ending"] == "failed" and (result["exit_code"] == 78) != is_full:
            raise Broken(f"{fault.variant}: exit code {result['exit_code']}, {message}")
        if fault.kind == "stop" and result["ending"] not in ("stopped", "completed"):
            raise Broken(f"after a stop request: {result}")


def _stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def processes(run: Path) -> Iterator[psutil.Process]:
    """Iterate over the living processes of a run.

    Forked ranks are not included, because their environment is that of the fork server; their writer processes are.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(settings.RUN_DIR) == str(run) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
