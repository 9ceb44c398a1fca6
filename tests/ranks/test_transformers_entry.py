"""A model of transformers trains as an entry as it is: raw output, with its cache and its evaluation mode."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from clustertrain import fsio
from tests.ranks.rank_pool import Ranks, make_run, one_thread

pytestmark = [pytest.mark.ranks, pytest.mark.long]  # transformers takes seconds to import

ENTRY = """
from transformers import LlamaConfig, LlamaForCausalLM

def make():
    config = LlamaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64)
    assert config.use_cache
    return LlamaForCausalLM(config).eval()  # as from_pretrained returns it
"""


def test_raw_model_trains_sharded_with_recomputed_layers(tmp_path: Path) -> None:
    (tmp_path / "language.py").write_text(ENTRY)
    run = make_run(
        tmp_path / "run", "fsdp", 2, steps=3, every=100, model={"entry": "language:make"}, data={"validation": 0.01}
    )
    plan = fsio.read_json(run.plan)
    plan["layout"]["activation_checkpointing"] = "selective"
    fsio.write_json(run.plan, plan)
    ranks = Ranks(run, 2, setup=_import_from, args=(str(tmp_path),)).expect(0)
    losses = [loss for loss, _ in ranks.losses().values()]
    assert losses[0] == pytest.approx(math.log(256), rel=0.02) and losses[2] < losses[0]
    assert "eval_mode" in [e["code"] for e in ranks.events("training_warning")]


def _import_from(folder: str) -> None:
    one_thread()
    sys.path.insert(0, folder)
