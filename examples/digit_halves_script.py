"""A training script of one's own: two networks learn which halves of a handwritten digit belong together.

clustertrain submit --gpus 2 digit_halves_script.py --steps 300     # or, with no clustertrain around it:
python digit_halves_script.py --steps 300 --checkpoint-dir /tmp/halves
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import clustertrain as ct

GROUP = 8  # each half is told from seven others; a micro-batch holds whole groups, on any number of ranks


class Halves(TensorDataset):
    """Sample i is (image (64,) from 0 to 1, i)."""

    def __init__(self) -> None:
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        super().__init__(images, torch.arange(len(images)))


class Towers(nn.Module):
    """Images (batch, 64) to similarities (groups, GROUP, GROUP) of upper to lower halves."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, dim))
            for _ in range(2)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        upper, lower = (
            F.normalize(tower(half).float(), dim=-1).unflatten(0, (-1, GROUP))
            for tower, half in ((self.upper, images[:, :32]), (self.lower, images[:, 32:]))
        )
        return upper @ lower.transpose(1, 2) / 0.2


def nt_xent(similarities: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Telling the lower half from the upper one and the reverse, averaged: the sum, and how many pairs it is of."""
    right = torch.arange(GROUP).to(similarities.device).repeat(len(similarities))
    there = F.cross_entropy(similarities.flatten(0, 1), right, reduction="sum")
    back = F.cross_entropy(similarities.transpose(1, 2).flatten(0, 1), right, reduction="sum")
    return (there + back) / 2, len(right)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    everything = Halves()
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0)).tolist()
    kept_apart, learned = Subset(everything, order[:360]), Subset(everything, order[360:])

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        model = session.parallelize(Towers())
        optimizer = session.optimizer(torch.optim.AdamW, lr=args.lr)
        data = session.loader(learned, global_batch=64, micro_batch=16)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            done = session.train_step(next(data), nt_xent, clip_norm=1.0)
            session.log(loss=done.loss, grad_norm=done.grad_norm, lr=args.lr)
            if (step + 1) % 100 == 0:
                found = session.evaluate(kept_apart, nt_xent, metrics=["recall_at_1"], group=GROUP, micro_batch=16)
                session.log(**found)
                if session.is_main and found:
                    print(f"step {step + 1}: the right half of eight for {found['validation_recall_at_1']:.1%}")


if __name__ == "__main__":
    main()
