"""A model of one's own under every layout: a small transformer continues sequences that grow by a fixed stride.

The script stays as it is; only the command changes (docs/guides/layouts.md):

clustertrain submit --gpus 2 layouts_script.py                                    # ddp
clustertrain submit --gpus 2 --layout fsdp layouts_script.py
clustertrain submit --gpus 2 --tp 2 layouts_script.py
clustertrain submit --gpus 2 --cp 2 layouts_script.py
clustertrain submit --gpus 2 --pp 2 layouts_script.py
clustertrain submit --gpus 4 --layout fsdp --tp 2 layouts_script.py               # a product: 2 shards x 2
python layouts_script.py --checkpoint-dir /tmp/strides                            # one process, no clustertrain around
"""

import argparse
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

import clustertrain as ct
from clustertrain.train.distributed.context_parallel import SelfAttention
from clustertrain.train.distributed.dropout import Dropout

WORDS, LENGTH, DIM, HEADS = 32, 16, 64, 4


def turned(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary position: ``x`` (batch, heads, length, size) begins at position ``first`` of its sequence."""
    half = x.shape[-1] // 2
    place = torch.arange(first, first + x.shape[2], device=x.device)
    angle = torch.outer(place, 100.0 ** (-torch.arange(half, device=x.device) / half))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.attention = SelfAttention()  # attends to the whole sequence, also where this rank holds a part of it
        self.dropout = Dropout(0.1)  # drops the same under every layout

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
        # By heads first and then q, k, v: with tp a rank has all three of some heads, as many as -1 finds.
        parts = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, DIM // HEADS)).transpose(1, 2)
        q, k, v = parts.unbind(-2)
        first = self.attention.first_position(q.shape[2])
        y = self.attention(turned(q, first), turned(k, first), v)
        return x + self.dropout(self.out(y.transpose(1, 2).flatten(2)), samples)


class Strider(nn.Module):
    """Tokens (batch, length) to logits (batch, length, WORDS)."""

    # Who splits what with tp, and where a pipeline may be cut.
    tp_plan: ClassVar = {
        "embed": "embedding",
        "layers.*.norm": "sequence",
        "layers.*.qkv": "colwise",
        "layers.*.out": "rowwise",
        "norm": "sequence",
        "head": "head",
    }
    tp_divides: ClassVar = {"heads": HEADS}  # which the sizes of the layers do not show
    pipeline_units = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", ("norm", "head"))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS)

    def forward(self, x: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        # In a pipeline stage the modules of the other stages are None, and its layers are those that it has.
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, samples)
        return x if self.head is None else self.head(self.norm(x))


def strides() -> torch.utils.data.TensorDataset:
    """All starts and all strides: (tokens, the tokens that follow them)."""
    start, stride = torch.meshgrid(torch.arange(WORDS), torch.arange(1, WORDS), indexing="ij")
    whole = (start.reshape(-1, 1) + stride.reshape(-1, 1) * torch.arange(LENGTH + 1)) % WORDS
    return torch.utils.data.TensorDataset(whole[:, :-1], whole[:, 1:])


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
        # Micro-batches are what fills a pipeline; without one they save memory.
        data = session.loader(strides(), global_batch=32, micro_batch=4)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            done = session.train_step(next(data), loss_fn, clip_norm=1.0)
            session.log(loss=done.loss, grad_norm=done.grad_norm)
            if session.is_main and step % 20 == 0:
                print(f"step {step}: loss {done.loss.item():.4f}")


if __name__ == "__main__":
    main()
