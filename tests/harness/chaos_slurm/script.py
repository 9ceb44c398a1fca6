"""The training script of a storm. In addition to the session's files it writes a log, from which the invariants are
checked: one line at the start of a rank, with the newest committed step at that moment, and one line per step.

Arguments: a folder for the logs, and the number of steps. The file ``pace`` in the run's subfolder contains the seconds
that each step sleeps.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import clustertrain as ct

EVERY = 5
TIMEOUT_S = 30.0  # timeout of collectives

run = Path(os.environ["CLUSTERTRAIN_RUN_DIR"])
folder, total = Path(sys.argv[1], run.name), int(sys.argv[2])
attempt, rank = int(os.environ["CLUSTERTRAIN_ATTEMPT"]), int(os.environ["RANK"])
folder.mkdir(exist_ok=True)
log = os.open(folder / f"attempt-{attempt}-rank-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def write(**line: Any) -> None:
    data = {"attempt": attempt, "rank": rank, "pid": os.getpid(), "wall": time.time(), **line}
    os.write(log, json.dumps(data).encode() + b"\n")


def committed() -> int:
    return max((int(p.parent.name[5:]) for p in run.glob("checkpoints/step-*/COMMITTED")), default=0)


def pace() -> float:
    try:
        return float((folder / "pace").read_text())
    except (OSError, ValueError):
        return 0.0


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(512, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


write(begin=time.monotonic(), committed=committed())
with ct.session(timeout_s=TIMEOUT_S) as session:
    model = session.parallelize(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = session.loader(Numbers(), global_batch=16)
    state = {"model": model, "optimizer": optimizer, "data": data}
    for _ in session.steps(total, state, checkpoint_every=EVERY):
        start = time.monotonic()
        x, y = next(data)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=session.mean(loss))
        time.sleep(pace())
        write(step=session.step + 1, start=start, end=time.monotonic())
