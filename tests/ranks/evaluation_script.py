"""A training script with batch norms that evaluates at its end and, with ``each-step``, also before the first step and
after each step. Each rank writes the result of the last evaluation to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import clustertrain as ct

STEPS = 3
FEATURES, CLASSES = 8, 4


class Points:
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)
    )


def main(each_step: bool) -> None:
    with ct.session() as session:
        model = session.parallelize(build_model())
        optimizer = session.optimizer(torch.optim.SGD, lr=0.1)
        data = session.loader(Points(64, 1), global_batch=16, micro_batch=4)
        validation = Points(11, 2)
        options = {"metrics": ["accuracy"]}
        if each_step:
            session.evaluate(validation, F.cross_entropy, **options)
        for _ in session.steps(STEPS, {"model": model, "optimizer": optimizer, "data": data}):
            result = session.train_step(next(data), F.cross_entropy, clip_norm=1.0)
            session.log(loss=result.loss, grad_norm=result.grad_norm)
            if each_step:
                session.log(**session.evaluate(validation, F.cross_entropy, **options))
        result = session.evaluate(validation, F.cross_entropy, **options)
        folder = Path(os.environ["CLUSTERTRAIN_RANK_DIR"])
        (folder / f"evaluation-{session.rank}.json").write_text(json.dumps(result))


main("each-step" in sys.argv[1:])
