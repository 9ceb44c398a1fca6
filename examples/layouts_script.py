"""Example script for every layout: a small transformer continues sequences that grow by a fixed stride.

Only the command differs between layouts (docs/guides/layouts.md):

clustertrain submit --gpus 2 layouts_script.py                                    # ddp
clustertrain submit --gpus 2 --layout fsdp layouts_script.py
clustertrain submit --gpus 2 --tp 2 layouts_script.py
clustertrain submit --gpus 2 --cp 2 layouts_script.py
clustertrain submit --gpus 2 --pp 2 layouts_script.py
clustertrain submit --gpus 4 --layout fsdp --tp 2 layouts_script.py               # a product: 2 shards x 2
python layouts_script.py --checkpoint-dir /tmp/strides                            # one process, without a launcher
"""

import argparse
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

import clustertrain as ct
from clustertrain.train.distributed.context_parallel import SelfAttention
from clustertrain.train.distributed.dropout import Dropout

VOCABULARY, LENGTH, DIM, HEADS = 32, 16, 64, 4


def rotate(x: torch.Tensor, first: int) -> torch.Tensor:
    """Apply rotary position embeddings to ``x`` (batch, heads, length, size), which begins at position ``first``."""
    half = x.shape[-1] // 2
    position = torch.arange(first, first + x.shape[2], device=x.device)
    angle = torch.outer(position, 100.0 ** (-torch.arange(half, device=x.device) / half))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.attention = SelfAttention()  # attends to the whole sequence, even if this rank has a part of it
        self.dropout = Dropout(0.1)  # drops the same elements under every layout

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
        # Heads first, then q, k, v: with tp, a rank has all three of some heads, whose number -1 infers.
        parts = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, DIM // HEADS)).transpose(1, 2)
        q, k, v = parts.unbind(-2)
        first = self.attention.first_position(q.shape[2])
        y = self.attention(rotate(q, first), rotate(k, first), v)
        return x + self.dropout(self.out(y.transpose(1, 2).flatten(2)), samples)


class Strider(nn.Module):
    """Map tokens (batch, length) to logits (batch, length, VOCABULARY)."""

    # How tp splits each module, and where a pipeline may be split.
    tp_plan: ClassVar = {
        "embed": "embedding",
        "layers.*.norm": "sequence",
        "layers.*.qkv": "colwise",
        "layers.*.out": "rowwise",
        "norm": "sequence",
        "head": "head",
    }
    tp_divides: ClassVar = {"heads": HEADS}  # not visible in the layers' sizes
    pipeline_units = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", ("norm", "head"))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        # In a pipeline stage, the modules of other stages are None, and self.layers has only the stage's own layers.
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, samples)
        return x if self.head is None else self.head(self.norm(x))


def build_dataset() -> torch.utils.data.TensorDataset:
    """Return (tokens, next tokens) for every start and stride."""
    start, stride = torch.meshgrid(torch.arange(VOCABULARY), torch.arange(1, VOCABULARY), indexing="ij")
    sequences = (start.reshape(-1, 1) + stride.reshape(-1, 1) * torch.arange(LENGTH + 1)) % VOCABULARY
    return torch.utils.data.TensorDataset(sequences[:, :-1], sequences[:, 1:])


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        model = session.parallelize(Strider())
        optimizer = session.optimizer(torch.optim.AdamW, lr=3e-3)
        # Micro-batches fill a pipeline; under other layouts they save memory.
        data = session.loader(build_dataset(), global_batch=32, micro_batch=4)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            result = session.train_step(next(data), loss_fn, clip_norm=1.0)
            session.log(loss=result.loss, grad_norm=result.grad_norm)
            if session.is_main and step % 20 == 0:
                print(f"step {step}: loss {result.loss.item():.4f}")


if __name__ == "__main__":
    main()
