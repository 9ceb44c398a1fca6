"""A vision-language model trained in stages: each run starts from the weights that earlier runs have exported."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.checkpoint.offline.inspect import find_checkpoint
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from tests.paths import ROOT
from tests.ranks.rank_pool import Ranks, make_run, write_plan

pytestmark = [pytest.mark.ranks, pytest.mark.long]

EXAMPLE = ROOT / "examples" / "vision_language"
# Fewer steps than in the recipes, and other layouts.
STEPS = {"tower": 120, "text": 70, "projector": 20, "whole": 40}
LAYOUTS = {"tower": ("single", 1), "text": ("single", 1), "projector": ("fsdp", 2), "whole": ("ddp", 2)}
# Without the image, a caption of 20 bytes has a loss of at least ln 10 / 20 = 0.115.
LIMITS = {"tower": 1.5, "text": 0.3, "projector": 0.4, "whole": 0.11}
UNFROZEN_AT = 10


def one_thread() -> None:
    """Setup: use one thread, and the import path that job.sh sets for modules next to a recipe."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(EXAMPLE))


def run_stage(folder: Path, stage: str) -> tuple[RunDir, Ranks]:
    """Train one stage, export its weights as the file ``stages`` does, and return the run."""
    strategy, ranks = LAYOUTS[stage]
    run = make_run(folder / f"run-{stage}", strategy, ranks)
    recipe: dict[str, Any] = tomllib.loads((EXAMPLE / f"{stage}.toml").read_text())
    del recipe["job"]
    recipe["train"] |= {"steps": STEPS[stage], "global_batch": 32}
    recipe["checkpoint"] = {"every": STEPS[stage]}
    recipe.setdefault("evaluation", {})["every"] = STEPS[stage]
    if recipe["data"].get("validation") is None:
        del recipe["evaluation"]
    for unfreeze in recipe["optim"].get("unfreeze", ()):
        unfreeze["step"] = UNFROZEN_AT
    if stage == "whole":
        recipe["optim"]["lr"] = 3e-3
    model = recipe["model"]
    if "init" in model:
        model["init"] = str(folder / model["init"])
    if "init_parts" in model:
        # The text as exported for others, with the names of Hugging Face.
        model["init_parts"] = {part: str(folder / path) for part, path in model["init_parts"].items()}
    run.spec.write_text(tomli_w.dumps({"recipe": recipe}))
    write_plan(run, strategy, ranks, global_batch=32, micro_batch=32 // ranks)
    done = Ranks(run, ranks, setup=one_thread).expect(0)
    (folder / "weights").mkdir(exist_ok=True)
    checkpoint = find_checkpoint(run.checkpoints, None)
    export_checkpoint(ExportRequest(checkpoint, folder / "weights" / stage))
    return run, done


def load(folder: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights" / stage / "model.safetensors")


def test_stages_start_from_the_weights_of_earlier_ones(tmp_path: Path) -> None:
    runs = {stage: run_stage(tmp_path, stage) for stage in STEPS}
    losses = {}
    for stage, (run, _) in runs.items():
        rows = metrics.load_rows(run)
        losses[stage] = [row["loss"] for row in rows]
        assert losses[stage][-1] < LIMITS[stage], (stage, losses[stage])
    assert losses["projector"][0] < 2  # a decoder that has never seen a caption starts at 5.5
    assert losses["whole"][0] < 0.3
    events = [Path(e["path"]).name for e in runs["projector"][1].events("pretrained_loaded")]
    assert events == ["tower", "text"]
    tower, projected, whole = (load(tmp_path, stage) for stage in ("tower", "projector", "whole"))
    for name, tensor in tower.items():  # frozen in stage 3, except the head trained in stage 4
        assert torch.equal(projected[f"tower.{name}"], tensor), name
        assert torch.equal(whole[f"tower.{name}"], tensor) == name.startswith("head."), name
    text = load(tmp_path, "text")
    assert torch.equal(projected["decoder.embed.weight"], text["model.embed_tokens.weight"])
    assert not torch.equal(whole["decoder.embed.weight"], text["model.embed_tokens.weight"])
