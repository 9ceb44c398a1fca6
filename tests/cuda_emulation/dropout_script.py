"""A training script that draws random numbers on the device. The argument is the number of steps."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import clustertrain as ct

with ct.session() as session:
    model = session.parallelize(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1)))
    optimizer = session.optimizer("sgd", lr=0.1)
    for _ in session.steps(total=int(sys.argv[1]), state={"model": model, "optimizer": optimizer}):
        x = torch.ones(4, 8, device=session.device)
        session.train_step((x, x[:, :1]), F.mse_loss)
