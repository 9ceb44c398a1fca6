"""Example script: a transformer learns to predict the next byte of the Python standard library's source.

clustertrain submit --gpus 2 text_script.py --steps 300       # or without a launcher:
python text_script.py --steps 300 --checkpoint-dir /tmp/text
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import clustertrain as ct

LENGTH = 128


class Source(Dataset):
    """Windows of a text: sample i is (bytes, the next byte of each), both (LENGTH,)."""

    def __init__(self, text: bytes) -> None:
        self.text = np.frombuffer(text, dtype=np.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(self.text[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


class LanguageModel(nn.Module):
    def __init__(self, dim: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, dim), nn.Embedding(LENGTH, dim)

        def layer() -> nn.Module:
            return nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, F.gelu, batch_first=True, norm_first=True)

        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def next_byte_loss(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum over bytes and their number, so that the mean does not depend on how a batch is split."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(f.read_bytes() for f in files)[: 4 << 20]
    training, held_out = Source(text[: -64 << 10]), Source(text[-64 << 10 :])

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        model = session.parallelize(LanguageModel())
        optimizer = session.optimizer(torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps - 20, eta_min=args.lr / 10)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[20])
        data = session.loader(training, global_batch=16, micro_batch=8)
        session.tokens_per_step = 16 * LENGTH
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            result = session.train_step(next(data), next_byte_loss, clip_norm=1.0)
            scheduler.step()
            session.log(loss=result.loss, grad_norm=result.grad_norm, lr=scheduler.get_last_lr()[0])
            if (step + 1) % 100 == 0:
                metrics = session.evaluate(held_out, next_byte_loss, metrics=["bits_per_token"], samples=256)
                session.log(**metrics)
                if session.is_main and metrics:
                    print(f"step {step + 1}: {metrics['validation_loss']:.3f} nats per byte on held-out text")


if __name__ == "__main__":
    main()
