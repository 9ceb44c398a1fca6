"""What the built-in trainer minimises: each returns a sum in fp32 and how many terms it has."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Of ``logits`` (..., classes) and the right classes ``targets`` (...): tokens of a text, or images."""
    loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
    return loss, targets.numel()


def contrastive(similarities: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The symmetric NT-Xent: cross-entropy of telling which second view belongs to a first one, and the reverse,
    averaged (Chen et al., arXiv 2002.05709, equation 1; between two encoders as Radford et al., arXiv 2103.00020,
    figure 3).

    Args:
        similarities: (groups, group, group), of each first view to each second view of its group, already divided by
            the temperature. The log-sum-exp subtracts the largest, so that a low temperature does not overflow.
        texts: (groups * group,): which text a pair was taken from. Where the order of the samples begins anew, a group
            may hold one text twice; it is no negative of itself.
    """
    groups, size, _ = similarities.shape
    names = texts.view(groups, size)
    own = torch.eye(size, dtype=torch.bool, device=texts.device)
    again = (names[:, :, None] == names[:, None, :]) & ~own
    logits = similarities.float().masked_fill(again, -torch.inf)
    right = torch.arange(size, device=texts.device).repeat(groups)
    forth = F.cross_entropy(logits.flatten(0, 1), right, reduction="sum")
    back = F.cross_entropy(logits.transpose(1, 2).flatten(0, 1), right, reduction="sum")
    return (forth + back) / 2, texts.numel()
