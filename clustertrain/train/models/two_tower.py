"""A contrastive model of text: two encoders learn which two passages belong together."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from clustertrain.config.model import ModelSpec
from clustertrain.errors import ConfigError
from clustertrain.train.models.decoder import RotaryTable, TransformerBlock, init_transformer_parameter

MAX_LOG_SCALE = math.log(100)  # Radford et al., arXiv 2103.00020, section 2.5: beyond it training is not stable


class Tower(nn.Module):
    """Token ids (batch, length) to embeddings (batch, embedding) of length 1, in fp32: a transformer whose tokens see
    each other in both directions, averaged over the text."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        table = RotaryTable(spec.dim // spec.heads, spec.rope_theta)
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
    """Two token tensors (batch, length), first and second passages, to similarities (groups, group, group): the cosine
    of each first to each second passage of its group, divided by the temperature.

    The negatives of a passage are the others of its group: ``group`` neighbouring places in the global batch, inside
    one micro-batch. With all of a micro-batch for negatives, as is usual, the loss would depend on the micro-batch and
    on the number of ranks.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.first, self.second = Tower(spec), Tower(spec)
        # One element and not a scalar, which fully_shard refuses.
        self.log_scale = nn.Parameter(torch.empty(1)) if spec.two_tower.learn_temperature else None

    def forward(self, first: torch.Tensor, second: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        group = self.spec.two_tower.group
        if len(first) % group:
            raise ConfigError(
                f"a micro-batch of {len(first)} does not divide into groups of {group} (model.two_tower.group)",
                fix="use a train.micro_batch that is a multiple of the group, and a global batch that divides",
            )
        a: torch.Tensor = self.first(first, samples).unflatten(0, (-1, group))
        b: torch.Tensor = self.second(second, samples).unflatten(0, (-1, group))
        with torch.autocast(a.device.type, enabled=False):  # it would round the embeddings to 8 bits
            return a @ b.transpose(1, 2) * self.scale()

    def scale(self) -> torch.Tensor | float:
        """One over the temperature."""
        if self.log_scale is None:
            return 1 / self.spec.two_tower.temperature
        scale: torch.Tensor = self.log_scale.float().clamp(max=MAX_LOG_SCALE).exp()
        return scale

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the whole parameter ``name``: as the decoder's, and the scale from the temperature."""
        if name == "log_scale":
            tensor.fill_(self.spec.two_tower.log_scale)
        else:
            init_transformer_parameter(self.spec, name, tensor, generator)
