"""A contrastive text model: two encoders that learn which passages belong together."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.config.model import ModelSpec
from clustertrain.train.models.decoder import RotaryTable, TransformerBlock, init_transformer_parameter

MAX_LOG_SCALE = math.log(100)  # Radford et al., arXiv 2103.00020, section 2.5: training is unstable beyond it


class Tower(nn.Module):
    """Encoder from token ids (batch, length) to fp32 unit embeddings (batch, embedding).

    It is a bidirectional transformer whose outputs are averaged over the text.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        table = RotaryTable(spec.head_size, spec.rope_theta)
        self.embed = nn.Embedding(spec.vocab_size, spec.dim)
        self.layers = nn.ModuleList(TransformerBlock(spec, table, causal=False) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim, eps=spec.norm_eps)
        self.project = nn.Linear(spec.dim, spec.two_tower.embedding, bias=False)

    def forward(self, tokens: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, samples)
        return F.normalize(self.project(self.norm(x).mean(dim=1)).float(), dim=-1)


class TwoTower(nn.Module):
    """Model from two token tensors (batch, length) to two unit embeddings (batch, embedding) and a scale (1,).

    The scale is the inverse of the temperature, by which the loss multiplies the cosines of first and second passages.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.first, self.second = Tower(spec), Tower(spec)
        # One element, because fully_shard rejects scalars.
        self.log_scale = nn.Parameter(torch.empty(1)) if spec.two_tower.learn_temperature else None

    def forward(
        self, first: torch.Tensor, second: torch.Tensor, samples: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.first(first, samples), self.second(second, samples), self.scale(first.device)

    def scale(self, device: torch.device) -> torch.Tensor:
        """Return the inverse of the temperature, (1,), on ``device``."""
        if self.log_scale is None:
            return torch.full((1,), 1 / self.spec.two_tower.temperature, device=device)
        scale: torch.Tensor = self.log_scale.float().clamp(max=MAX_LOG_SCALE).exp()
        return scale

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Initialize the full parameter ``name``: the scale from the temperature, others as in the decoder."""
        if name == "log_scale":
            tensor.fill_(self.spec.two_tower.log_scale)
        else:
            init_transformer_parameter(self.spec, name, tensor, generator)
