"""Checks of adapters at submission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from clustertrain.checkpoint.format import adapter_files
from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.huggingface import families, tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError, NotFound
from clustertrain.submit.preflight import adapter
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import SubmitRequest
from tests.paths import ROOT

pytestmark = [pytest.mark.usefixtures("fake_slurm"), pytest.mark.long]
MODEL = ModelSpec(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=48)
SPEC = AdapterSpec(kind="lora", rank=4, alpha=8.0, target_modules=("*.q",))
KEYS = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.target_modules=['*.q']")


def write_base(folder: Path, value: float = 0.0) -> None:
    folder.mkdir(exist_ok=True)
    shapes = dict(tensor_names.list_tensors(MODEL).values())
    save_file({name: np.full(shape, value, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(families.build_config(MODEL, 256, "float32")))


def write_adapter(folder: Path, base_sha256: str) -> None:
    folder.mkdir()
    layer = "model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (4, 32), "lora_B": (32, 4)}
    tensors = {adapter_files.peft_name(layer, own): np.ones(shape, np.float32) for own, shape in shapes.items()}
    save_file(tensors, folder / adapter_files.WEIGHTS_FILE, {adapter_files.BASE_HASH: base_sha256})
    config = adapter_files.to_peft_config(SPEC, [layer], [layer], "base", "CAUSAL_LM")
    (folder / adapter_files.CONFIG_FILE).write_text(json.dumps(config))


def prepare_run(cwd: Path, *assignments: str, **kw: Any) -> PreparedRun:
    return prepare(SubmitRequest(cwd=cwd, assignments=("model.init=base", *KEYS, *assignments), **kw))


def test_adapter_to_start_from_is_noted_and_its_base_compared(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    assert adapter.check_adapter(prepare_run(tmp_path)) is None
    base_sha256 = adapter._hash_base(prepare_run(tmp_path).spec.recipe)
    assert base_sha256 is not None
    write_adapter(tmp_path / "start", base_sha256)
    prepared = prepare_run(tmp_path, "adapter.init=start")
    assert prepared.spec.recipe.adapter.init == str(tmp_path / "start")
    assert adapter.check_adapter(prepared) == f"adapter: lora of rank 4 from {tmp_path / 'start'}"
    write_base(tmp_path / "base", 0.5)
    with pytest.raises(ConfigError, match=r"was trained on a different base"):
        adapter.check_adapter(prepared)


def test_large_base_is_compared_when_the_job_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "start", "12" * 32)
    monkeypatch.setattr(adapter, "MAX_HASHED_BYTES", 10)
    note = adapter.check_adapter(prepare_run(tmp_path, "adapter.init=start"))
    assert note is not None and "is checked when the job starts" in note


def test_missing_or_unsuitable_adapters_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    with pytest.raises(NotFound, match=r"adapter.init = 'nowhere': no such folder"):
        prepare_run(tmp_path, "adapter.init=nowhere").spec  # noqa: B018 - read when it is first needed
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=r"has no file adapter_config.json"):
        adapter.check_adapter(prepare_run(tmp_path, "adapter.init=empty"))
    write_adapter(tmp_path / "start", "")
    with pytest.raises(ConfigError, match=r"v_proj.lora_A.weight is missing"):
        adapter.check_adapter(prepare_run(tmp_path, "adapter.init=start", "adapter.target_modules=['*.q', '*.v']"))


def test_dropout_under_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    prepared = prepare_run(tmp_path, "adapter.dropout=0.1", job={"gpus": 2, "tp": 2})
    with pytest.raises(ConfigError, match=r"adapter.dropout = 0.1 with tp 2"):
        adapter.check_adapter(prepared)


def test_example_can_be_planned(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    prepared = prepare(SubmitRequest(target=str(ROOT / "examples" / "adapt.toml"), cwd=tmp_path))
    assert prepared.spec.recipe.model.init == str(tmp_path / "base")
