"""Exported models load and compute the same values in the programs that they are for."""

from __future__ import annotations

import json
import os
import resource
import signal
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from clustertrain.checkpoint.format import dtypes
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint
from clustertrain.checkpoint.offline import export as exporting
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.config.huggingface import families, tensor_names
from clustertrain.errors import CheckpointError, ConfigError, NotFound, UsageError
from clustertrain.train.models.decoder import Decoder
from tests.unit.checkpoint.saved import change_index, decoder, recipe_of, save

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoints", 3, {"model": decoder(recipe_of())}, recipe=recipe_of())


def names_in(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


# -- transformers


def test_export_of_a_pretrained_model_has_its_tokenizer_and_token_ids(tmp_path: Path) -> None:
    init, tokenizer = tmp_path / "init", tmp_path / "tokenizer"
    files = {
        init / "config.json": '{"bos_token_id": 1, "eos_token_id": [2, 3], "hidden_size": 7}',
        init / "generation_config.json": '{"eos_token_id": 2}',
        init / "tokenizer.json": "of the model",
        init / "unrelated.py": "print()",
        tokenizer / "tokenizer.json": "of the data",
        tokenizer / "chat_template.jinja": "{{ messages }}",
    }
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    os.mkfifo(init / "vocab.json")  # not a file: left out
    recipe = recipe_of(init=str(init))
    data = msgspec.structs.replace(recipe.data, tokenizer=str(tokenizer), kind="chat", path="x.jsonl")
    recipe = msgspec.structs.replace(recipe, data=data)
    checkpoint = save(tmp_path / "checkpoints", 3, {"model": decoder(recipe_of())}, recipe=recipe)
    for _ in range(2):  # an export replaces an earlier one with these files
        export_checkpoint(ExportRequest(checkpoint, tmp_path / "out", force=True))
    out = tmp_path / "out"
    expected = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert names_in(out) == expected and (out / "tokenizer.json").read_text() == "of the data"
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 3], None)
    assert config["hidden_size"] != 7


@pytest.mark.ranks  # transformers takes seconds to import
@pytest.mark.parametrize(
    ("sizes", "shard_bytes"),
    [
        ({"rope_theta": 500_000.0, "norm_eps": 1e-2}, 5_000_000_000),
        ({"tie_embeddings": True, "kv_heads": 4, "ffn_dim": 320, "vocab_size": 300}, 500_000),
    ],
    ids=["grouped-query", "tied-sharded"],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, sizes: dict[str, Any], shard_bytes: int) -> None:
    from transformers import AutoModelForCausalLM

    recipe = recipe_of(**sizes)
    ours = decoder(recipe).eval()
    folder = save(tmp_path / "checkpoints", 3, {"model": ours}, recipe=recipe)
    result = export_checkpoint(ExportRequest(folder, tmp_path / "out", shard_bytes=shard_bytes))
    assert (result.step, result.names, result.bytes) == (3, "huggingface", sum(p.nbytes for p in ours.parameters()))
    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    tokens = torch.randint(recipe.model.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = ours(tokens)
        assert logits.std() > 0.5  # otherwise the comparison below would prove little
        assert (theirs.eval()(tokens).logits - logits).abs().max() < 1e-5


@pytest.mark.parametrize("preset", ["llama3.1-8b", "llama3.2-1b"])
def test_names_and_shapes_match_transformers(preset: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    recipe = recipe_of(preset=preset)
    tensors = tensor_names.list_tensors(recipe.model)
    config = LlamaConfig.from_dict(families.build_config(recipe.model, recipe.data.seq_len, "float32"))
    with torch.device("meta"):
        ours, theirs = Decoder(recipe.model), LlamaForCausalLM(config)
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == {k: shape for k, (_, shape) in tensors.items()}
    expected = {k: tuple(v.shape) for k, v in theirs.named_parameters()}  # tied parameters appear once
    assert dict(tensors.values()) == expected


def test_shard_index_has_the_format_of_transformers(tmp_path: Path, folder: Path) -> None:
    shard_limit = 700_000
    result = export_checkpoint(ExportRequest(folder, tmp_path / "out", shard_bytes=shard_limit))
    document = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [f"model-{i:05}-of-00006.safetensors" for i in range(1, 7)]
    assert result.files == (*files, "model.safetensors.index.json", "config.json")
    assert names_in(tmp_path / "out") == sorted(result.files)
    assert document["metadata"]["total_size"] == result.bytes
    assert set(document["weight_map"].values()) == set(files)
    from safetensors import safe_open

    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as f:
            assert set(f.keys()) == {name for name, where in document["weight_map"].items() if where == file}
            assert sum(f.get_tensor(k).nbytes for k in f.keys()) <= shard_limit  # noqa: SIM118
            assert f.metadata() == {"format": "pt"}


def test_oversized_tensor_gets_its_own_shard(tmp_path: Path, folder: Path) -> None:
    result = export_checkpoint(ExportRequest(folder, tmp_path / "out", shard_bytes=1, names="own"))
    assert len(result.files) == result.tensors + 1
    assert tensors_of(tmp_path / "out").keys() == decoder(recipe_of()).state_dict().keys()


# -- formats and dtypes


class ModuleWithAllDtypes(nn.Module):
    """A module with buffers of every dtype and extra state that other programs do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        all_dtypes = [
            torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
        ]  # fmt: skip
        for i, dtype in enumerate(all_dtypes):
            self.register_buffer(f"b{i}", torch.randint(0, 2, (i, 3)).to(dtype))
        self.register_buffer("scalar", torch.tensor(2.5))

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": torch.ones(2), "n": 1}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        pass


def bits(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.detach().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_every_dtype_round_trips_bit_by_bit(tmp_path: Path, form: Any) -> None:
    model = ModuleWithAllDtypes()
    folder = save(tmp_path / "checkpoints", 1, {"net": model, "note": {"weights": torch.ones(3)}})
    export_checkpoint(ExportRequest(folder, tmp_path / "out", form))
    if form == "torch":
        loaded = torch.load(tmp_path / "out", weights_only=True)
        mapped = torch.load(tmp_path / "out", weights_only=True, mmap=True)
        assert all(bits(loaded[k]) == bits(mapped[k]) for k in loaded)
        assert all(t.data_ptr() % 64 == 0 for t in mapped.values() if t.numel())
    else:
        loaded = tensors_of(tmp_path / "out")
        assert names_in(tmp_path / "out") == ["model.safetensors"]
        data = (tmp_path / "out" / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        offsets = {k: v["data_offsets"][0] for k, v in json.loads(data[8 : 8 + length]).items() if k in loaded}
        assert length % 8 == 0 and all(at % loaded[k].element_size() == 0 for k, at in offsets.items())
    expected = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    assert loaded.keys() == expected.keys()
    assert [k for k in expected if bits(loaded[k]) != bits(expected[k])] == []


def test_exported_state_dict_loads_into_module(tmp_path: Path, folder: Path) -> None:
    export_checkpoint(ExportRequest(folder, tmp_path / "model.pt", "torch"))
    other = decoder(recipe_of(), seed=1)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    tokens = torch.arange(20)[None]
    assert torch.equal(other(tokens), decoder(recipe_of())(tokens))


def test_names_of_several_modules_start_with_their_keys(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", 1, {"a": nn.Linear(2, 2), "b": nn.Linear(2, 3, bias=False)})
    export_checkpoint(ExportRequest(folder, tmp_path / "out"))
    assert tensors_of(tmp_path / "out").keys() == {"a.weight", "a.bias", "b.weight"}


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_only_floating_tensors_are_converted(tmp_path: Path, form: Any) -> None:
    model = ModuleWithAllDtypes()
    folder = save(tmp_path / "checkpoints", 1, {"model": model})
    export_checkpoint(ExportRequest(folder, tmp_path / "out", form, dtype="bfloat16"))
    loaded = torch.load(tmp_path / "out", weights_only=True) if form == "torch" else tensors_of(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            assert bits(loaded[name]) == bits(expected), name


def test_config_names_the_written_dtype(tmp_path: Path, folder: Path) -> None:
    export_checkpoint(ExportRequest(folder, tmp_path / "out", dtype="bfloat16"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


def test_value_beyond_format_or_dtype_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scales", torch.ones(2).to(torch.float8_e8m0fnu))
    folder = save(tmp_path / "checkpoints", 1, {"model": model})
    with pytest.raises(CheckpointError, match="scales: a safetensors file cannot hold float8_e8m0fnu"):
        export_checkpoint(ExportRequest(folder, tmp_path / "out"))
    with torch.no_grad():
        model.weight.fill_(1e5)
    folder = save(tmp_path / "checkpoints", 2, {"model": model})
    with pytest.raises(CheckpointError, match=r"weight: 1e\+05 is more than float16 can hold"):
        export_checkpoint(ExportRequest(folder, tmp_path / "out", "torch", dtype="float16"))
    assert names_in(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_export_holds_one_tensor_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any, dtype: str | None
) -> None:
    monkeypatch.setattr(dtypes, "BLOCK_ELEMENTS", 10_000)
    folder = save(tmp_path / "checkpoints", 1, {"model": nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)))})
    tracemalloc.start()
    try:
        export_checkpoint(ExportRequest(folder, tmp_path / "out", form, dtype=dtype))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * 512 * 512 * 4  # of 24


# -- naming of tensors


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (None, "is not a checkpoint of the built-in decoder"),
        (recipe_of(preset="", kind="two-tower"), "is not a checkpoint of the built-in decoder"),
        (recipe_of(), r"bias has shape \(2,\), but none in the recipe"),  # the model of a training script
    ],
    ids=["no recipe", "two towers", "another model"],
)
def test_model_unknown_to_transformers_keeps_its_names(tmp_path: Path, form: Any, recipe: Any, reason: str) -> None:
    folder = save(tmp_path / "checkpoints", 1, {"model": nn.Linear(2, 2)}, recipe=recipe)
    request = ExportRequest(folder, tmp_path / "out", form)
    with pytest.raises(UsageError, match=reason):
        export_checkpoint(replace(request, names="huggingface"))
    assert export_checkpoint(request).names == "own"


def test_recipe_of_another_version_still_exports(tmp_path: Path, folder: Path) -> None:
    recipe = index.read_manifest(folder).about["recipe"]
    change_index(folder, about={"recipe": {**recipe, "model": {**recipe["model"], "experts": 8}}})
    assert export_checkpoint(ExportRequest(folder, tmp_path / "out")).names == "own"
    with pytest.raises(ConfigError, match=r"unknown key 'model\.experts'"):
        export_checkpoint(ExportRequest(folder, tmp_path / "other", names="huggingface"))


def test_layers_are_in_numeric_order(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", 1, {"model": nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))})
    export_checkpoint(ExportRequest(folder, tmp_path / "model.pt", "torch"))
    names = list(torch.load(tmp_path / "model.pt", weights_only=True))
    assert [n for n in names if n.endswith("weight")] == [f"{i}.weight" for i in range(12)]


def test_checkpoint_without_module_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", 1, {"weights": nn.Linear(2, 2).state_dict()})
    with pytest.raises(CheckpointError, match="contains no model"):
        export_checkpoint(ExportRequest(folder, tmp_path / "out"))


# -- output path


def test_force_replaces_only_an_earlier_export(tmp_path: Path, folder: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    export_checkpoint(ExportRequest(folder, output, shard_bytes=700_000))  # into an empty folder: nothing can be lost
    with pytest.raises(UsageError, match="already exists"):
        export_checkpoint(ExportRequest(folder, output))
    export_checkpoint(ExportRequest(folder, output, force=True))
    assert names_in(output) == ["config.json", "model.safetensors"]
    (output / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"contains notes\.txt, which is not part of an export"):
        export_checkpoint(ExportRequest(folder, output, force=True))
    assert names_in(tmp_path) == ["checkpoints", "out"]


def test_force_replaces_a_file(tmp_path: Path, folder: Path) -> None:
    output = tmp_path / "model.pt"
    output.write_bytes(b"mine")
    with pytest.raises(UsageError, match="already exists"):
        export_checkpoint(ExportRequest(folder, output, "torch"))
    with pytest.raises(UsageError, match="is a file"):
        export_checkpoint(ExportRequest(folder, output, force=True))
    assert output.read_bytes() == b"mine"
    export_checkpoint(ExportRequest(folder, output, "torch", force=True))
    assert len(torch.load(output, weights_only=True)) == 39
    with pytest.raises(UsageError, match="is a folder"):
        export_checkpoint(ExportRequest(folder, tmp_path, "torch", force=True))
    with pytest.raises(NotFound, match="does not exist"):
        export_checkpoint(ExportRequest(folder, tmp_path / "a" / "b"))


def export_earlier(tmp_path: Path, folder: Path, form: Any) -> bytes:
    """Export ``folder`` and return the content that later failures must keep."""
    export_checkpoint(ExportRequest(folder, tmp_path / "out", form))
    return content(tmp_path / "out")


def content(output: Path) -> bytes:
    return (output / "model.safetensors" if output.is_dir() else output).read_bytes()


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel refuses to let a file grow beyond 1 MiB, even in the middle of a write."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_failed_write_leaves_nothing(tmp_path: Path, folder: Path, form: Any, small_files: None) -> None:
    with pytest.raises(CheckpointError, match="out: cannot be written: File too large; nothing was left behind"):
        export_checkpoint(ExportRequest(folder, tmp_path / "out", form))
    assert names_in(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_interrupt_keeps_earlier_export(tmp_path: Path, folder: Path, form: Any) -> None:
    before = export_earlier(tmp_path, folder, form)
    other = save(tmp_path / "checkpoints", 4, {"model": decoder(recipe_of(), seed=1)})
    tensors = len(index.read_manifest(other).tensors)
    for stop in (1, 20, tensors):
        calls: list[int] = []

        def interrupt(done: int, total: int, calls: list[int] = calls, stop: int = stop) -> None:
            calls.append(done)
            if len(calls) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(ExportRequest(other, tmp_path / "out", form, force=True), interrupt)
        assert names_in(tmp_path) == ["checkpoints", "out"]
        assert content(tmp_path / "out") == before
    export_checkpoint(ExportRequest(other, tmp_path / "out", form, force=True))
    assert content(tmp_path / "out") != before


def test_failed_rename_restores_earlier_export(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = export_earlier(tmp_path, folder, "safetensors")

    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CheckpointError, match="cannot be written: Permission denied") as e:
        export_checkpoint(ExportRequest(folder, tmp_path / "out", force=True))
    assert "that you may write to" in str(e.value)
    assert names_in(tmp_path) == ["checkpoints", "out"]
    assert content(tmp_path / "out") == before


def test_insufficient_space_is_reported_before_writing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = list(os.statvfs(tmp_path))
    values[4] = 3  # f_bavail
    monkeypatch.setattr(exporting.os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(CheckpointError, match=rf"[\d,]+ bytes are needed, {3 * values[1]:,} are free(.|\n)*make room"):
        export_checkpoint(ExportRequest(folder, tmp_path / "out"))
    assert names_in(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_damage_is_reported_and_leaves_nothing(tmp_path: Path, folder: Path, form: Any) -> None:
    record = index.read_manifest(folder).tensors[-1].shards[0]
    path = folder / record.file
    data = bytearray(path.read_bytes())
    data[record.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=path.name):
        export_checkpoint(ExportRequest(folder, tmp_path / "out", form))
    assert names_in(tmp_path) == ["checkpoints"]


def test_files_are_synced_before_rename(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def record_fsync(fd: int) -> None:
        events.append(Path(f"/proc/self/fd/{fd}").readlink().name.split(".")[-1])
        fsync(fd)

    def record_rename(self: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_rename)
    export_checkpoint(ExportRequest(folder, tmp_path / "out", shard_bytes=2_000_000))
    assert events[:4] == ["safetensors", "safetensors", "json", "json"]
    assert events[5:] == ["renamed", tmp_path.name]
    events.clear()
    export_checkpoint(ExportRequest(folder, tmp_path / "model.pt", "torch"))
    assert len(events) == 3 and events[1:] == ["renamed", tmp_path.name]
