"""Attention inside the documents of packed samples, and forced kernels of attention."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

import clustertrain as ct
from clustertrain.config.data import DataSpec
from clustertrain.config.evaluation import EvaluationSpec
from clustertrain.config.model import ModelSpec
from clustertrain.config.recipe import Recipe
from clustertrain.config.train import TrainSpec
from clustertrain.errors import ConfigError
from clustertrain.plan.attention import AttentionChoice, choose_document_kernel
from clustertrain.plan.layout import Batch, Layout
from clustertrain.train.data.token_shards import build_token_datasets
from clustertrain.train.data.tokenize import write
from clustertrain.train.distributed import attention_kernels
from clustertrain.train.distributed.context_parallel import SelfAttention
from clustertrain.train.distributed.document_masks import FlexKernel, build_dense_mask
from clustertrain.train.models.build import build_task
from clustertrain.train.models.decoder import Decoder
from clustertrain.train.trainer import build_trainer
from tests.unit.train.single_process import build_on_cpu

LENGTH = 16
STARTS = torch.tensor(
    [
        [0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 4, 11, 11, 11, 11, 11],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 10, 10, 10, 10, 10],
    ]
)
SPEC = ModelSpec(vocab_size=50, dim=64, layers=2, heads=4, kv_heads=2, qk_norm=True)


@functools.cache
def model() -> Decoder:
    built = build_on_cpu(Decoder(SPEC))
    assert isinstance(built, Decoder)
    return built


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, STARTS.shape, generator=torch.Generator().manual_seed(seed))


def spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    ends = starts.unique(return_counts=True)[1].cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


def test_packed_logits_equal_those_of_each_document_alone() -> None:
    packed = model()(tokens(), document_starts=STARTS)
    for row in range(len(STARTS)):
        for first, end in spans(STARTS[row]):
            alone = model()(tokens()[row : row + 1, first:end])
            torch.testing.assert_close(packed[row, first:end], alone[0], rtol=1e-5, atol=2e-6)
    whole = model()(tokens())
    assert (packed[0, :3] - whole[0, :3]).abs().max() < 1e-5 < (packed[0, 4:] - whole[0, 4:]).abs().max()


def test_other_documents_change_no_bit() -> None:
    inputs = tokens()
    changed = torch.where(STARTS == 0, tokens(1), inputs)
    before, after = (model()(x, document_starts=STARTS) for x in (inputs, changed))
    assert torch.equal(before[STARTS > 0], after[STARTS > 0]) and not torch.equal(before, after)


def test_one_document_per_sample_is_plain_causal_attention() -> None:
    packed = model()(tokens(), document_starts=torch.zeros_like(STARTS))
    torch.testing.assert_close(packed, model()(tokens()), rtol=1e-5, atol=2e-6)


def with_flex(monkeypatch: pytest.MonkeyPatch, kernel: FlexKernel) -> None:
    for module in model().modules():
        if isinstance(module, SelfAttention):
            monkeypatch.setattr(module, "flex", kernel)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_mask_of_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        expected = model()(tokens(), document_starts=STARTS)
        with_flex(monkeypatch, FlexKernel(compiled=False))
        monkeypatch.setattr(F, "scaled_dot_product_attention", None)
        torch.testing.assert_close(model()(tokens(), document_starts=STARTS), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo's, about what it traces in torch
def test_flex_attention_is_compiled_once_for_all_layers_and_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FlexKernel(compiled=False)
    compiled: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(kernel, "attend", torch.compile(kernel.attend, dynamic=False, backend=count))
    monkeypatch.setattr(kernel, "_create_block_mask", torch.compile(kernel._create_block_mask, backend=count))
    with_flex(monkeypatch, kernel)
    with torch.no_grad():
        for shift in range(3):
            model()(tokens(), document_starts=(STARTS - shift).clamp(min=0))
    assert len(compiled) == 2  # the mask, and attention


def test_rank_of_a_split_sequence_has_its_rows_of_the_mask() -> None:
    dtype, part = torch.float32, STARTS[:, 8:]
    whole = build_dense_mask(STARTS, 0, dtype)
    assert torch.equal(build_dense_mask(part, 8, dtype), whole[:, :, 8:])
    block_mask = FlexKernel(compiled=False).build_mask(part, 8)
    visible = create_mask(block_mask.mask_mod, 2, 1, 8, LENGTH, device="cpu")
    assert torch.equal(visible, whole[:, :, 8:] == 0)
    attention = SelfAttention()
    attention.rank = 1
    assert torch.equal(attention.document_positions(part), torch.arange(8, LENGTH) - part)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # autocast and norms of queries
def test_mask_is_in_the_type_of_the_queries() -> None:
    """Another type would be converted, and kept, by every layer."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        masked = model()(tokens(), document_starts=STARTS)
        x = torch.zeros(1)
        documents = model()._prepare_documents(STARTS, x)
    assert documents is not None and isinstance(documents.mask, torch.Tensor)
    assert documents.mask.dtype == torch.bfloat16 and documents.cos.dtype == torch.float32
    exact = model()(tokens(), document_starts=STARTS)
    assert (masked - exact).abs().max() < 0.05


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_compiled_layers_have_no_graph_break() -> None:
    compiled = copy.deepcopy(model())
    for layer in compiled.get_submodule("layers").children():
        layer.compile(fullgraph=True, backend="eager")
    expected = model()(tokens(), document_starts=STARTS)
    torch.testing.assert_close(compiled(tokens(), document_starts=STARTS), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("changes", [{"causal": False}, {"ring": True}], ids=["not causal", "ring"])
def test_attention_without_masks_refuses_documents(changes: dict[str, bool]) -> None:
    attention = SelfAttention()
    for name, value in changes.items():
        setattr(attention, name, value)
    with pytest.raises(ConfigError, match="needs causal attention without a ring"):
        attention.document_mask(STARTS, torch.float32)


# -- through the trainer


def make_recipe(folder: Path, **train: Any) -> Recipe:
    documents = [[(7 * i + j) % 50 for j in range(3 + i % 9)] for i in range(60)]
    write(folder / "shards", documents, shard_tokens=1000)
    data = DataSpec(
        kind="tokens", path=str(folder / "shards"), pack=True, attention="document", seq_len=LENGTH, validation=0.2
    )
    return Recipe(model=SPEC, data=data, train=TrainSpec(steps=5, **train), evaluation=EvaluationSpec(micro_batch=3))


def loss_of_documents_alone(dataset: Any, trained: Any, count: int) -> float:
    """Return the mean loss of the targets of the first ``count`` samples, from a forward pass per document."""
    total, targets_seen = 0.0, 0
    for i in range(count):
        inputs, targets = dataset[i]
        for first, end in spans(inputs["document_starts"]):
            part = targets[first:end]
            if bool((part != -100).any()):
                logits = trained(inputs["tokens"][None, first:end])[0].double()
                total += F.cross_entropy(logits, part, reduction="sum").item()
                targets_seen += int((part != -100).sum())
    return total / targets_seen


def test_training_and_evaluation_use_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path)
    train, validation = build_token_datasets(recipe.data, 50, -100)
    with ct.session(seed=1, device="cpu") as session:
        trainer = build_trainer(session, recipe, Batch(global_batch=len(train), micro_batch=5))
        with torch.no_grad():
            expected = loss_of_documents_alone(train, trainer.model, len(train))
        assert trainer.step().loss.item() == pytest.approx(expected, rel=1e-5)
        measured = session.evaluate(validation, trainer.loss, micro_batch=3)
        with torch.no_grad():
            assert measured["validation_loss"] == pytest.approx(
                loss_of_documents_alone(validation, trainer.model, len(validation)), rel=1e-5
            )
    assert "attention within documents: scaled-dot-product attention with a mask" in capsys.readouterr().out


class Unaware(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def make_unaware() -> torch.nn.Module:
    return Unaware()


def test_model_without_the_argument_is_refused() -> None:
    entry = f"{__name__}:make_unaware"
    data = DataSpec(kind="custom", entry="a:b", attention="document")
    with pytest.raises(ConfigError, match=r"forward\(\) of Unaware has no argument document_starts"):
        build_task(Recipe(model=ModelSpec(entry=entry), data=data))


# -- kernels


class RecordedKernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def context(backend: str) -> Any:
    return SimpleNamespace(attention_backend=backend)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["causal", "documents"])
def test_forced_backend_is_the_only_kernel(starts: torch.Tensor | None) -> None:
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    outputs = []
    for backend, expected in (("auto", True), ("flash", True), ("math", False), ("auto", True)):
        with attention_kernels.force_backend(context(backend)), RecordedKernels() as recorded, torch.no_grad():
            outputs.append(model()(tokens(), document_starts=starts))
        assert (flash in recorded.names) == expected, backend
    torch.testing.assert_close(outputs[1], outputs[2], rtol=1e-5, atol=2e-6)


def test_missing_kernel_names_the_key() -> None:
    with attention_kernels.force_backend(context("cudnn")), pytest.raises(RuntimeError) as e:
        model()(tokens())
    attention_kernels.explain_missing_kernel(e.value, context("auto"))
    assert not hasattr(e.value, "__notes__")
    attention_kernels.explain_missing_kernel(e.value, context("cudnn"))
    assert 'train.attention_backend = "cudnn" cannot compute this attention' in e.value.__notes__[0]


@pytest.mark.parametrize(
    ("choice", "layout", "device", "has_triton", "reason"),
    [
        ({}, {}, "cuda", True, ""),
        ({"head_dim": 16}, {"tp": 2}, "cuda", True, ""),
        ({}, {}, "cpu", True, "no backward pass on CPUs"),
        ({}, {}, "cuda", False, "needs Triton"),
        ({"head_dim": 8}, {}, "cuda", True, "heads of at least 16 elements, not 8"),
        ({"backend": "efficient"}, {}, "cuda", True, '"efficient"'),
        ({}, {"pp": 2, "schedule": "zbv", "virtual_stages": 2}, "cuda", True, "cannot split a compiled backward"),
    ],
)
def test_kernel_of_documents_is_chosen_with_a_reason(
    choice: dict[str, Any], layout: dict[str, Any], device: str, has_triton: bool, reason: str
) -> None:
    kernel = choose_document_kernel(AttentionChoice(**choice), Layout(**layout), device, has_triton=has_triton)
    assert kernel.is_flex == (not reason) and reason in kernel.describe()
    assert AttentionChoice(in_documents=True, **choice).has_dense_mask(Layout(**layout), device) == (
        bool(reason) and has_triton
    )
    assert not AttentionChoice(**choice).has_dense_mask(Layout(**layout), device)


def test_every_position_attends_to_at_least_one() -> None:
    mask = build_dense_mask(STARTS, 0, torch.float32)
    assert mask.shape == (2, 1, LENGTH, LENGTH) and set(mask.unique().tolist()) == {-math.inf, 0.0}
    assert bool((mask == 0).any(-1).all())
