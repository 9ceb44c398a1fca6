"""Attention inside documents on a GPU: compiled ``flex_attention`` equals the masked kernels, forward and backward."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clustertrain.config.model import ModelSpec
from clustertrain.config.train import AttentionBackend
from clustertrain.train.distributed.attention_kernels import force_backend
from clustertrain.train.distributed.context_parallel import SelfAttention, prefers_cudnn
from clustertrain.train.distributed.document_masks import FlexKernel
from clustertrain.train.models.decoder import Decoder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LENGTH = 320  # more than two blocks of 128, and not a multiple


def outputs(model: Decoder, dtype: torch.dtype, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits, and the gradient of the first layer's keys."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (2, LENGTH), generator=generator).cuda()
    starts = torch.zeros(2, LENGTH, dtype=torch.int64, device="cuda")
    starts[0, 5:], starts[0, 200:], starts[1, 129:] = 5, 200, 129
    context: Any = SimpleNamespace(attention_backend=backend)
    with force_backend(context), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        logits = model(tokens, document_starts=starts).float()
        logits.square().mean().backward()
    gradient = model.get_parameter("layers.0.attention.k.weight").grad
    assert gradient is not None
    return logits.detach(), gradient


@pytest.mark.filterwarnings("ignore")  # the compiler's, about what it traces in torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_equals_masked_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    masked = Decoder(ModelSpec(vocab_size=50, dim=256, layers=2, heads=4, kv_heads=2)).cuda()
    flex = copy.deepcopy(masked)
    kernel = FlexKernel(compiled=True)
    for model in (masked, flex):
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.prefers_cudnn = prefers_cudnn(torch.device("cuda"))
                module.flex = kernel if model is flex else None
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2  # of the largest value; fp32 in the kernel may be tf32
    expected = outputs(masked, dtype, "math")
    masked.zero_grad()
    for name, model in (("flex", flex), ("masked", masked)):
        for actual, value in zip(outputs(model, dtype, "auto"), expected, strict=True):
            assert (actual - value).abs().max() < tolerance * value.abs().max(), name
