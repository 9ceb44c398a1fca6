"""Samples that cannot be trained on are named before they reach the device."""

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


def test_what_is_within_the_limits_passes() -> None:
    check(TOKENS, TOKENS, vocab_size=12, classes=12, max_seq_len=4)
    check(TOKENS, TOKENS)
    check(TOKENS.float(), torch.tensor([0, 1, 2]), vocab_size=1, classes=3)
    check(torch.full((3, 2, 2, 1), 255, dtype=torch.uint8), torch.rand(3, 5), vocab_size=1, classes=2)


@pytest.mark.parametrize(
    ("inputs", "target", "limits", "said"),
    [
        (TOKENS, TOKENS, {"vocab_size": 11}, r"sample 72: inputs at \(3,\) is 11, .*between 0 and 10 \(model.vocab"),
        (TOKENS, TOKENS, {"classes": 7}, r"sample 71: target at \(3,\) is 7"),
        (TOKENS, torch.tensor([0, 5, 1]), {"classes": 5}, "sample 71: target is 5, and must lie between 0 and 4"),
        (TOKENS, torch.tensor([0, 1, -7]), {"classes": 5}, "sample 72: target is -7"),
        (TOKENS, TOKENS, {"max_seq_len": 3}, "sample 70: inputs is 4 long, and the model takes 3"),
        ([TOKENS, TOKENS + 9], TOKENS, {"vocab_size": 20}, r"sample 72: inputs\[1\] at \(3,\) is 20"),
        ({"ids": TOKENS}, TOKENS, {"vocab_size": 4}, r"sample 71: inputs\['ids'\] at \(0,\) is 4"),
        (torch.tensor([[1.0], [math.nan], [2.0]]), TOKENS, {}, r"sample 71: inputs holds nan"),
        (TOKENS, torch.tensor([0.0, 1.0, math.inf]), {}, "sample 72: target holds inf"),
    ],
)
def test_the_sample_its_value_and_the_limit_are_named(inputs: Any, target: Any, limits: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(inputs, target, **limits)


def test_the_fix_is_what_would_do() -> None:
    with pytest.raises(ConfigError) as found:
        check(TOKENS, TOKENS, vocab_size=5)
    assert found.value.fix == "set model.vocab_size to 6 or more, or mend the data"


def test_targets_that_count_nothing_may_have_any_value_that_says_so() -> None:
    masked = torch.tensor([[-100, 3], [2, -100], [0, 1]])
    check(TOKENS, masked, classes=4)
    with pytest.raises(ConfigError, match=r"sample 70: target at \(0,\) is -100.*"):
        check(TOKENS, masked, classes=4, ignore_index=-1)


class Files(list[int]):
    def where(self, i: int) -> str:
        return f"cats/{i}.png"


def test_a_data_set_may_name_its_samples() -> None:
    with pytest.raises(ConfigError, match=r"sample 71 \(cats/71.png\): target is 5"):
        check(TOKENS, torch.tensor([0, 5, 1]), Files(), classes=5)


def test_numbers_that_are_not_finite_are_looked_for_in_the_first_batches() -> None:
    seen, bad = SampleChecker(Limits()), (torch.full((3, 1), math.nan), TOKENS)
    for _ in range(FINITE_CHECK_BATCHES):
        seen((torch.ones(3, 1), TOKENS), KEYS, [])
    seen(bad, KEYS, [])  # by now the loss tells
    with pytest.raises(ConfigError, match="holds nan"):
        SampleChecker(Limits())(bad, KEYS, [])
    SampleChecker(Limits(), check_finite=False)(bad, KEYS, [])


def test_a_large_sum_is_no_infinity() -> None:
    check(torch.full((3, 4), 3e38), torch.zeros(3))


def test_of_many_samples_some_are_listed() -> None:
    words = format_samples(Files(), range(10, 110))
    assert words.startswith("sample 10 (cats/10.png), sample 11 (cats/11.png), ")
    assert words.endswith(", 72, 73 and 36 more") and format_samples([], [5, 6]) == "sample 5, sample 6"
