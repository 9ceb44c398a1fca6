from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.checkpoint.core import json_tree
from clustertrain.errors import CheckpointError


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(json_tree.encode(value, "s", tensors))
    return json_tree.decode(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**80,
        0.1 + 0.2,
        math.inf,
        "text",
        b"\x00\xff",
        [1, [2, (3, "x")]],
        {"a": 1, "b": {"c": (1, 2)}},
        {1: "one", (2, 3): "pair", None: 0},
        {"__tensor__": "a user's own key"},
        {},
        (),
    ],
)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_tensors_are_named_by_their_place() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), 1], "b": {"c": torch.zeros(())}}
    encoded = json_tree.encode(value, "ema", tensors)
    assert sorted(tensors) == ["ema/a/0", "ema/b/c"]
    assert json_tree.tensor_names(encoded) == set(tensors)
    assert json_tree.decode(encoded, tensors.__getitem__)["a"][0] is tensors["ema/a/0"]


def test_arrays_keep_type_shape_and_bits() -> None:
    state = np.random.RandomState(3).get_state(legacy=False)
    back = round_trip(state)
    assert back["state"]["key"].dtype == np.uint32
    assert np.array_equal(back["state"]["key"], state["state"]["key"])
    assert round_trip(np.float64(0.1)) == 0.1


def test_what_would_need_pickle_is_refused_by_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"scheduler/fn: a function cannot be put in a checkpoint"):
        json_tree.encode({"fn": round_trip}, "scheduler", {})
