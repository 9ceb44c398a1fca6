"""Checks that name bad samples before they reach the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from clustertrain.errors import ConfigError
from clustertrain.train.data.sample_checks import FINITE_CHECK_BATCHES, Limits, SampleChecker, format_samples

TOKENS = torch.arange(12).view(3, 4)
KEYS = [(70, 0), (71, 1), (72, 2)]


def check(inputs: Any, target: Any, dataset: Any = None, **limits: Any) -> None:
    SampleChecker(Limits(**limits))((inputs, target), KEYS, dataset if dataset is not None else [])


def test_samples_within_limits_pass() -> None:
    check(TOKENS, TOKENS, vocab_size=12, classes=12, max_seq_len=4)
    check(TOKENS, TOKENS)
    starts = torch.tensor([[0, 0, 2, 2], [0, 1, 2, 3], [0, 0, 0, 3]])
    check({"tokens": TOKENS % 2, "document_starts": starts}, TOKENS, vocab_size=2, needs_document_starts=True)
    check(TOKENS.float(), torch.tensor([0, 1, 2]), vocab_size=1, classes=3)
    check(torch.full((3, 2, 2, 1), 255, dtype=torch.uint8), torch.rand(3, 5), vocab_size=1, classes=2)


@pytest.mark.parametrize(
    ("inputs", "target", "limits", "message"),
    [
        (TOKENS, TOKENS, {"vocab_size": 11}, r"sample 72: inputs at \(3,\) is 11: .*between 0 and 10 \(model.vocab"),
        (TOKENS, TOKENS, {"classes": 7}, r"sample 71: target at \(3,\) is 7"),
        (TOKENS, torch.tensor([0, 5, 1]), {"classes": 5}, "sample 71: target is 5: must be between 0 and 4"),
        (TOKENS, torch.tensor([0, 1, -7]), {"classes": 5}, "sample 72: target is -7"),
        (TOKENS, TOKENS, {"max_seq_len": 3}, "sample 70: inputs has length 4, more than the model's max_seq_len = 3"),
        ([TOKENS, TOKENS + 9], TOKENS, {"vocab_size": 20}, r"sample 72: inputs\[1\] at \(3,\) is 20"),
        ({"ids": TOKENS}, TOKENS, {"vocab_size": 4}, r"sample 71: inputs\['ids'\] at \(0,\) is 4"),
        (
            {"tokens": TOKENS, "document_starts": torch.tensor([[0, 0, 2, 2], [0, 2, 2, 2], [0, 0, 0, 0]])},
            TOKENS,
            {},
            "sample 71: document_starts at 1 is 2: must be 1, or 0 as before",
        ),
        (
            {"tokens": TOKENS, "document_starts": torch.tensor([[0, 0, 2, 0], [0] * 4, [0] * 4])},
            TOKENS,
            {},
            "sample 70: document_starts at 3 is 0: must be 3, or 2 as before",
        ),
        (
            {"tokens": TOKENS, "document_starts": torch.tensor([[1] * 4, [0] * 4, [0] * 4])},
            TOKENS,
            {},
            "sample 70: document_starts at 0 is 1: must be 0",
        ),
        (
            {"tokens": TOKENS, "document_starts": TOKENS.int()},
            TOKENS,
            {},
            "sample 70: document_starts is not one int64",
        ),
        (TOKENS, TOKENS, {"needs_document_starts": True}, 'sample 70: data.attention = "document", but its inputs are'),
        (torch.tensor([[1.0], [math.nan], [2.0]]), TOKENS, {}, r"sample 71: inputs holds nan"),
        (TOKENS, torch.tensor([0.0, 1.0, math.inf]), {}, "sample 72: target holds inf"),
    ],
    ids=[
        "token",
        "target token",
        "class",
        "negative class",
        "length",
        "second input",
        "named input",
        "start of a document",
        "start of an earlier document",
        "first start",
        "type of starts",
        "no starts",
        "NaN input",
        "Inf target",
    ],
)
def test_error_names_sample_value_and_limit(inputs: Any, target: Any, limits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(inputs, target, **limits)


def test_fix_names_a_sufficient_limit() -> None:
    with pytest.raises(ConfigError) as raised:
        check(TOKENS, TOKENS, vocab_size=5)
    assert raised.value.fix == "set model.vocab_size to 6 or more, or correct the data"


def test_ignore_index_is_exempt_from_the_class_limit() -> None:
    masked = torch.tensor([[-100, 3], [2, -100], [0, 1]])
    check(TOKENS, masked, classes=4)
    with pytest.raises(ConfigError, match=r"sample 70: target at \(0,\) is -100.*"):
        check(TOKENS, masked, classes=4, ignore_index=-1)


class NamedFiles(list[int]):
    def where(self, i: int) -> str:
        return f"cats/{i}.png"


def test_dataset_can_describe_its_samples() -> None:
    with pytest.raises(ConfigError, match=r"sample 71 \(cats/71.png\): target is 5"):
        check(TOKENS, torch.tensor([0, 5, 1]), NamedFiles(), classes=5)


def test_only_the_first_batches_are_checked_for_nan() -> None:
    checker, bad = SampleChecker(Limits()), (torch.full((3, 1), math.nan), TOKENS)
    for _ in range(FINITE_CHECK_BATCHES):
        checker((torch.ones(3, 1), TOKENS), KEYS, [])
    checker(bad, KEYS, [])  # later batches are left to the loss
    with pytest.raises(ConfigError, match="holds nan"):
        SampleChecker(Limits())(bad, KEYS, [])
    SampleChecker(Limits(), check_finite=False)(bad, KEYS, [])


def test_overflowing_sum_is_not_reported() -> None:
    check(torch.full((3, 4), 3e38), torch.zeros(3))


def test_long_sample_lists_are_truncated() -> None:
    text = format_samples(NamedFiles(), range(10, 110))
    assert text.startswith("sample 10 (cats/10.png), sample 11 (cats/11.png), ")
    assert text.endswith(", 72, 73 and 36 more") and format_samples([], [5, 6]) == "sample 5, sample 6"
