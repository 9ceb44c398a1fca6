"""Example script: two encoders learn which halves of a handwritten digit belong together.

clustertrain submit --gpus 2 digit_halves_script.py --steps 300     # or without a launcher:
python digit_halves_script.py --steps 300 --checkpoint-dir /tmp/halves
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

import clustertrain as ct

LOSS = ct.ContrastiveLoss(temperature=0.2)  # negatives: all other halves of the global batch, on all ranks


class Halves(TensorDataset):
    """Images of digits: sample i is (image (64,) from 0 to 1, i)."""

    def __init__(self) -> None:
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        super().__init__(images, torch.arange(len(images)))


class Towers(nn.Module):
    """Map images (batch, 64) to embeddings (batch, dim) of their upper halves and of their lower halves."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, dim))
            for _ in range(2)
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.upper(images[:, :32]), self.lower(images[:, 32:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    dataset = Halves()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    held_out, training = Subset(dataset, order[:360]), Subset(dataset, order[360:])

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        model = session.parallelize(Towers())
        optimizer = session.optimizer(torch.optim.AdamW, lr=args.lr)
        data = session.loader(training, global_batch=64, micro_batch=16)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            result = session.train_step(next(data), LOSS, clip_norm=1.0)
            session.log(loss=result.loss, grad_norm=result.grad_norm, lr=args.lr)
            if (step + 1) % 100 == 0:
                metrics = session.evaluate(held_out, LOSS, metrics=["recall_at_1"])
                session.log(**metrics)
                if session.is_main and metrics:
                    print(f"step {step + 1}: matching half found for {metrics['validation_recall_at_1']:.1%}")


if __name__ == "__main__":
    main()
