"""What each rank does: update parameters that lie in shards, and the same whole on this rank alone, with gradients that
are drawn and not computed; leaves in ``OUT`` by optimizer the largest difference and what it is of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import clustertrain as ct
from clustertrain.checkpoint.core.state_dict import is_dtensor, to_local_shard
from clustertrain.config.optim import OptimSpec
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.optim import build, registry
from clustertrain.train.optim.param_info import build_param_table
from clustertrain.train.session.session import get_runtime
from tests.harness.optimizers.cells import CELLS
from tests.unit.train.single_process import ALONE

STEPS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, 8)  # as many elements as 8-bit moments begin with
        self.odd = nn.Linear(7, 5)  # shards of 2, 2, 1 and 0 rows
        self.norm = nn.LayerNorm(24)
        self.gain = nn.Parameter(torch.ones(1))  # one element: the other ranks have none
        self.thin = nn.Linear(24, 1, bias=False)


class Model(nn.Module):
    tp_plan: ClassVar = {
        "layers.*.wide": "colwise",
        "layers.*.thin": "rowwise",
        "layers.*.odd": "replicated",
        "layers.*.norm": "replicated",
        "layers.[01]": "replicated",
        "embed": "replicated",
        "head": "replicated",
    }

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 24)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(24, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def built(session: ct.Session) -> Model:
    torch.manual_seed(5)
    # Tensor parallel would make two parameters of one that two modules hold.
    return Model(tied="tp" not in (session.mesh.mesh_dim_names or ()))


def give(p: Any, whole: torch.Tensor) -> None:
    if not is_dtensor(p):
        p.grad = whole.clone()
        return
    at = to_local_shard("", "optimizer", p)
    local = whole[tuple(slice(s, s + n) for s, n in zip(at.start, at.local_tensor.shape, strict=True))].contiguous()
    p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False)


def difference(session: ct.Session, name: str) -> tuple[float, str]:
    spec = OptimSpec(**CELLS[name])
    options = registry.build_options(spec, is_text=True, device=session.device)
    model, alone = session.parallelize(built(session)), built(session)
    get_runtime(session).state.train_step = None  # one optimizer after another, which no script has a use for
    optimizer = session.optimizer(spec.name, **options)
    groups, known = ProcessGroups(None, None, None, None), build_param_table(alone)
    plain = build.build_optimizer(
        spec.name, None, dict(options), model=alone, param_table=known, context=ALONE, groups=groups
    )
    pairs = list(zip(model.named_parameters(), alone.parameters(), strict=True))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for (n, p), q in pairs:
            whole = torch.randn(q.shape, generator=generator)
            if step == 2 and n.startswith("layers.0.odd"):
                p.grad = q.grad = None  # not used in this step
            else:
                give(p, whole)
                q.grad = whole.clone()
        for made in (optimizer, plain):
            for group in made.param_groups:
                group["lr"] = spec.lr * (step + 1) / STEPS
            made.step()
    worst = (0.0, "")
    with torch.no_grad():
        for (n, p), q in pairs:
            at = to_local_shard("", "optimizer", p)
            here = tuple(slice(s, s + k) for s, k in zip(at.start, at.local_tensor.shape, strict=True))
            apart = (
                (at.local_tensor - q[here]).abs().max() / q.abs().max() if at.local_tensor.numel() else torch.zeros(())
            )
            worst = max(worst, (float(apart), n))
    assert any(not torch.equal(q, r) for q, r in zip(alone.parameters(), built(session).parameters(), strict=True))
    return worst


with ct.session() as session:
    found = {name: difference(session, name) for name in CELLS}
    out = Path(sys.argv[1])
    out.with_suffix(f".{session.rank}").write_text(json.dumps(found))
