"""A script that updates sharded parameters, and whole copies of them on each rank, with the same random gradients. Each
rank writes the largest difference and its parameter to ``OUT``, by optimizer."""

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
        self.wide = nn.Linear(512, 8)  # just enough elements for 8-bit moments
        self.odd = nn.Linear(7, 5)  # shards of 2, 2, 1 and 0 rows
        self.norm = nn.LayerNorm(24)
        self.gain = nn.Parameter(torch.ones(1))  # one element: the shards of the other ranks are empty
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


def build_model(session: ct.Session) -> Model:
    torch.manual_seed(5)
    # Tensor parallelism would split a tied parameter into two.
    return Model(tied="tp" not in (session.mesh.mesh_dim_names or ())).to(session.device)


def set_grad(p: Any, whole: torch.Tensor) -> None:
    if not is_dtensor(p):
        p.grad = whole.clone()
        return
    shard = to_local_shard("", "optimizer", p)
    local = whole[
        tuple(slice(s, s + n) for s, n in zip(shard.start, shard.local_tensor.shape, strict=True))
    ].contiguous()
    p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False)


def difference(session: ct.Session, name: str) -> tuple[float, str]:
    spec = OptimSpec(**CELLS[name])
    options = registry.build_options(spec, is_text=True, device=session.device)
    model, whole_model = session.parallelize(build_model(session)), build_model(session)
    get_runtime(session).state.train_step = None  # several optimizers in one session, which scripts cannot have
    optimizer = session.optimizer(spec.name, **options)
    groups, whole_table = ProcessGroups(None, None, None, None), build_param_table(whole_model)
    plain = build.build_optimizer(
        spec.name, None, dict(options), model=whole_model, param_table=whole_table, context=ALONE, groups=groups
    )
    pairs = list(zip(model.named_parameters(), whole_model.parameters(), strict=True))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for (n, p), q in pairs:
            whole = torch.randn(q.shape, generator=generator).to(session.device)
            if step == 2 and n.startswith("layers.0.odd"):
                p.grad = q.grad = None  # not used in this step
            else:
                set_grad(p, whole)
                q.grad = whole.clone()
        for each_optimizer in (optimizer, plain):
            for group in each_optimizer.param_groups:
                group["lr"] = spec.lr * (step + 1) / STEPS
            each_optimizer.step()
    worst = (0.0, "")
    with torch.no_grad():
        for (n, p), q in pairs:
            shard = to_local_shard("", "optimizer", p)
            local_slices = tuple(slice(s, s + k) for s, k in zip(shard.start, shard.local_tensor.shape, strict=True))
            deviation = (
                (shard.local_tensor - q[local_slices]).abs().max() / q.abs().max()
                if shard.local_tensor.numel()
                else torch.zeros(())
            )
            worst = max(worst, (float(deviation), n))
    assert any(
        not torch.equal(q, r) for q, r in zip(whole_model.parameters(), build_model(session).parameters(), strict=True)
    )
    return worst


with ct.session() as session:
    results = {name: difference(session, name) for name in CELLS}
    out = Path(sys.argv[1])
    out.with_suffix(f".{session.rank}").write_text(json.dumps(results))
