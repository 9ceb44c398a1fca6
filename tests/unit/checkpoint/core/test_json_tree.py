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
def test_plain_data_round_trips(value: Any) -> None:
    decoded = round_trip(value)
    assert decoded == value
    assert type(decoded) is type(value)


def test_tensors_are_named_by_their_path() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), 1], "b": {"c": torch.zeros(())}}
    encoded = json_tree.encode(value, "ema", tensors)
    assert sorted(tensors) == ["ema/a/0", "ema/b/c"]
    assert json_tree.tensor_names(encoded) == set(tensors)
    assert json_tree.decode(encoded, tensors.__getitem__)["a"][0] is tensors["ema/a/0"]


def test_arrays_keep_dtype_shape_and_bits() -> None:
    state = np.random.RandomState(3).get_state(legacy=False)
    decoded = round_trip(state)
    assert decoded["state"]["key"].dtype == np.uint32
    assert np.array_equal(decoded["state"]["key"], state["state"]["key"])
    assert round_trip(np.float64(0.1)) == 0.1


def test_value_that_needs_pickle_is_refused_with_its_path() -> None:
    with pytest.raises(CheckpointError, match=r"scheduler/fn: a function cannot be put in a checkpoint"):
        json_tree.encode({"fn": round_trip}, "scheduler", {})
