"""The programs that are interrupted: as their users write them, with a checkpoint every ``EVERY`` steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clustertrain import clock
from clustertrain.scheduler.sockets import find_free_port
from tests.harness.interruptions.steps import Steps, read_steps
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "programs"
TOTAL = 1000  # steps of a run
EVERY = 20
PACE_S = 0.02  # that each step of a fixture takes at least
RANKS = 2
REFERENCE_TIMEOUT_S = 1800.0  # of a minute's work, beside other work


@dataclass(frozen=True)
class Program:
    """A program and the edits that a user makes to it. Each edit replaces a text that occurs once."""

    name: str
    file: str
    edits: Mapping[str, str] = field(default_factory=dict)
    """For both: the interval of its checkpoints."""
    alone: Mapping[str, str] = field(default_factory=dict)
    """Only without clustertrain: its framework's own answer to a preemption, and its resume."""
    sbatch: tuple[str, ...] = ()
    """Options of sbatch that the framework's documentation asks for, without clustertrain."""
    needs_torchrun: bool = True
    stops_at_any_step: bool = True
    """Saves at the step of the stop. Otherwise it resumes from its last periodic checkpoint."""
    has_exact_resume: bool = True
    has_own_answer: bool = True
    """Can be compared without clustertrain."""

    def write(self, folder: Path, *, alone: bool, pace: float = PACE_S) -> Path:
        """Write the program into ``folder``, with steps of at least ``pace`` seconds; return its path."""
        text = (FIXTURES / self.file).read_text()
        edits = {**self.edits, **(self.alone if alone else {}), f"time.sleep({PACE_S})": f"time.sleep({pace})"}
        for old, new in edits.items():
            if text.count(old) != 1:
                raise ValueError(f"{self.file}: {old!r} occurs {text.count(old)} times, not once")
            text = text.replace(old, new)
        path = folder / self.file
        path.write_text(text)
        return path

    def run_uninterrupted(self, folder: Path) -> list[Steps]:
        """Run all steps under torchrun and return the losses of each rank."""
        (folder / "out").mkdir()
        argv = [sys.executable, str(self.write(folder, alone=False)), str(folder / "out"), str(TOTAL)]
        port = str(find_free_port())
        sizes = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
        common = {
            **os.environ,
            **{k: str(v) for k, v in sizes.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        common |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "reference"}
        processes = []
        for rank in range(RANKS):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(argv, env=env, cwd=folder, stdout=log, stderr=log))
        deadline = clock.monotonic() + REFERENCE_TIMEOUT_S
        try:
            codes = [p.wait(max(1.0, deadline - clock.monotonic())) for p in processes]
        finally:
            for p in processes:
                p.kill()
        if any(codes):
            raise RuntimeError(f"{self.name} without an interruption: exit codes {codes}, see {folder}")
        return [read_steps(folder / f"rank-{rank}.log") for rank in range(RANKS)]


_HF_RESUME = "trainer.train(resume_from_checkpoint=resume or None)"
_HF_NEWEST = "trainer.train(resume_from_checkpoint=__import__('transformers').trainer_utils.get_last_checkpoint(out))"
_LIGHTNING_LOGGER = "enable_progress_bar=False, logger=False,"
_LIGHTNING_SAVES = (
    f"{_LIGHTNING_LOGGER} callbacks=[pl.callbacks.ModelCheckpoint(every_n_train_steps={EVERY}, save_last=True)],"
)
_LIGHTNING_FIT = "num_workers=1))"
_DCP_NEWEST = (
    "os.path.dirname(max(__import__('glob').glob(f'{out}/step_*/.metadata'), "
    "key=lambda p: int(p.split('/')[-2].removeprefix('step_')), default=''))"
)
_LIGHTNING_DEVICES = 'devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"])'

PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "HF Trainer",
            "transformers_trainer.py",
            edits={"save_steps=1000": f"save_steps={EVERY}, save_total_limit=3"},
            alone={"use_cpu=True": "use_cpu=True, enable_jit_checkpoint=True", _HF_RESUME: _HF_NEWEST},
        ),
        Program(
            "Lightning",
            "lightning_trainer.py",
            edits={_LIGHTNING_LOGGER: _LIGHTNING_SAVES},
            alone={
                _LIGHTNING_DEVICES: 'devices=1, num_nodes=int(os.environ["SLURM_NNODES"])',
                _LIGHTNING_FIT: 'num_workers=1), ckpt_path="last")',
            },
            sbatch=("--signal=SIGUSR1@30",),
            needs_torchrun=False,
            has_exact_resume=False,  # its data loader starts its epoch again, as its own warning says
        ),
        Program(
            "Accelerate",
            "accelerate_loop.py",
            edits={"step % 10 == 0": f"step % {EVERY} == 0"},
            alone={
                'os.environ.get("CLUSTERTRAIN_CHECKPOINT")': "max(__import__('glob').glob(f'{out}/step_*'), "
                "key=lambda p: int(p.rpartition('_')[2]), default='')"
            },
            stops_at_any_step=False,
        ),
        Program(
            "loop with ct.attach",
            "attached_loop.py",
            edits={"load=load)": f"load=load, every={EVERY})"},
            has_own_answer=False,
        ),
        Program("DDP with a handler", "ddp_handler.py"),
        Program(
            "FSDP2 with DCP",
            "fsdp2_dcp.py",
            edits={"step % 40 == 0": f"step % {EVERY} == 0"},
            alone={'os.environ.get("CLUSTERTRAIN_CHECKPOINT")': _DCP_NEWEST},
        ),
    )
}
