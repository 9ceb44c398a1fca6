"""A training script of one's own: a convolutional network learns scikit-learn's handwritten digits.

clustertrain submit --gpus 2 digits_script.py --steps 300     # or, with no clustertrain around it:
python digits_script.py --steps 300 --checkpoint-dir /tmp/digits
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import clustertrain as ct


def digits() -> TensorDataset:
    """Sample i is (image (1, 8, 8) from 0 to 1, class)."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(images, torch.tensor(found.target))


def network() -> nn.Module:
    # Group norms look at one image at a time: batch norms would mix those that happen to be on one rank.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.GroupNorm(4, 64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="only needed outside clustertrain submit")
    args = parser.parse_args()

    everything = digits()
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0)).tolist()
    kept_apart, learned = Subset(everything, order[:360]), Subset(everything, order[360:])

    with ct.session(checkpoint_dir=args.checkpoint_dir) as session:
        model = session.parallelize(network())
        optimizer = session.optimizer(torch.optim.AdamW, lr=args.lr)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)
        data = session.loader(learned, global_batch=64, micro_batch=16)
        state = {"model": model, "optimizer": optimizer, "rate": rate, "data": data}
        for step in session.steps(args.steps, state, checkpoint_every=args.checkpoint_every):
            done = session.train_step(next(data), F.cross_entropy, clip_norm=1.0)
            rate.step()
            session.log(loss=done.loss, grad_norm=done.grad_norm, lr=rate.get_last_lr()[0])
            if (step + 1) % 100 == 0:
                found = session.evaluate(kept_apart, F.cross_entropy, metrics=["accuracy"])
                session.log(**found)
                if session.is_main and found:
                    print(
                        f"step {step + 1}: {found['validation_accuracy']:.1%} of the digits kept apart are told right"
                    )


if __name__ == "__main__":
    main()
