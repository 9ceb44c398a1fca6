"""A training script with a custom model built on CPU: biases, a custom norm, and a table shared by embedding and head.
It trains with SGD, which reveals gradients of the wrong scale. Arguments: samples per micro-batch, faults to inject."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import clustertrain as ct
from clustertrain.train.distributed.context_parallel import SelfAttention
from clustertrain.train.distributed.dropout import Dropout

DIM, HEADS, VOCAB_SIZE, LENGTH = 32, 4, 64, 16
MICRO_BATCH, FAULTS = int(sys.argv[1]), sys.argv[2:]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attention = SelfAttention(causal=False)
        self.dropout = nn.Dropout(0.1) if "torch-dropout" in FAULTS else Dropout(0.1)

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
        # Group the features by head, so that each shard holds q, k and v of whole heads.
        a = self.up(self.norm(x)).unflatten(-1, (-1, 3, DIM // HEADS))
        y = self.attention(*(a[:, :, :, i].transpose(1, 2) for i in range(3))).transpose(1, 2).flatten(2)
        return x + (self.dropout(self.down(y)) if "torch-dropout" in FAULTS else self.dropout(self.down(y), samples))


class Tagger(nn.Module):
    """Model with bidirectional attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB_SIZE)
        self.embed.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, samples)
        return self.head(self.norm(x))


def compute_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


PLAN = {
    "embed": "embedding",
    "layers.*.norm": "sequence",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "norm": "sequence",
    "head": "head",
}
if "norm-without-pattern" in FAULTS:
    del PLAN["norm"]
length = LENGTH + 1 if "odd-length" in FAULTS else LENGTH
tokens = torch.randint(VOCAB_SIZE, (64, length), generator=torch.Generator().manual_seed(3))

with ct.session(seed=5) as session:
    model = session.parallelize(Tagger(), tp_plan=PLAN)
    optimizer = session.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    data = session.loader(
        torch.utils.data.TensorDataset(tokens, tokens.roll(1, 0)), global_batch=8, micro_batch=MICRO_BATCH
    )
    state = {"model": model, "optimizer": optimizer, "data": data}
    for _ in session.steps(4, state, checkpoint_every=4):
        result = session.train_step(next(data), compute_loss)
        session.log(loss=result.loss, grad_norm=result.grad_norm)
