"""The planner's estimate of activation memory, compared with the tensors that autograd saves on CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clustertrain.config.model import ModelSpec
from clustertrain.plan.cost.memory import PassConfig, activation_bytes
from clustertrain.train.models.decoder import Decoder

pytestmark = pytest.mark.ranks
BATCH, LENGTH = 2, 128
MODELS = {
    "grouped": ModelSpec(vocab_size=500, dim=128, layers=4, heads=4, kv_heads=2),
    "full": ModelSpec(vocab_size=100, dim=256, layers=2, heads=8, kv_heads=8, ffn_dim=512),
    "tied": ModelSpec(vocab_size=100, dim=128, layers=3, heads=2, kv_heads=1, tie_embeddings=True),
    "dropout": ModelSpec(vocab_size=100, dim=128, layers=3, heads=4, kv_heads=4, dropout=0.1),
}


def saved_bytes(model: Decoder, *, autocast: bool) -> int:
    """Return the bytes of all tensors that autograd saves in a forward pass with loss, without parameters."""
    parameter_storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # references, so that no address is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, model.spec.vocab_size, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="sum")
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("mode", ["fp32", "autocast", "cast"])
@pytest.mark.parametrize("name", MODELS)
def test_counted_activations_match_autograd(name: str, mode: str) -> None:
    spec = MODELS[name]
    model = Decoder(spec).train()
    if mode == "cast":
        model = model.to(torch.bfloat16)
    run = PassConfig(LENGTH, BATCH, precision="fp32" if mode == "fp32" else "bf16", autocast=mode == "autocast")
    # Autograd also saves the log-softmax in fp32 and autocast's copies of the weights, which the plan counts elsewhere.
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim > 1 and (n != "embed.weight" or not model.head)
    )
    counted_elsewhere = BATCH * LENGTH * spec.vocab_size * 4 + (2 * matrices if mode == "autocast" else 0)
    assert activation_bytes(spec, run) + counted_elsewhere == pytest.approx(
        saved_bytes(model, autocast=mode == "autocast"), rel=0.01
    )
