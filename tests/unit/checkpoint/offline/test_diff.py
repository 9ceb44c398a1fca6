"""Comparison of two checkpoints: which parts differ, and by how much."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from clustertrain.checkpoint.format import dtypes
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint
from clustertrain.checkpoint.offline.diff import CheckpointDiff, TensorDiff, ValueDiff, compare_checkpoints
from tests.unit.checkpoint.saved import change_index, save


def save_and_compare(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> CheckpointDiff:
    return compare_checkpoints(save(tmp_path / "a", 1, a), save(tmp_path / "b", 1, b))


def only_tensor(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> TensorDiff:
    diff = save_and_compare(tmp_path, {"w": a}, {"w": b})
    assert not diff.equal
    assert not (diff.values or diff.forms or diff.only_a or diff.only_b)
    (difference,) = diff.bytes
    return difference


def train_state(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "data": {"position": steps}}


def test_engine_and_layout_do_not_count_as_difference(tmp_path: Path) -> None:
    a, b = (save(tmp_path / name, 3, train_state(2), {"random": torch.get_rng_state()}) for name in "ab")
    change_index(b, engine="dcp", layout={"strategy": "fsdp", "dp_shard": 2})
    diff = compare_checkpoints(a, b)
    assert diff.equal and diff.ranks_compared
    assert diff.tensors == len(index.read_manifest(a).tensors)
    assert diff.saved == (
        ValueDiff(name="engine", a="raw", b="dcp"),
        ValueDiff(name="layout/dp_shard", only="b", b=2),
        ValueDiff(name="layout/strategy", a="single", b="fsdp"),
    )


def test_rank_state_is_compared_if_world_sizes_match(tmp_path: Path) -> None:
    folders = [
        save(tmp_path / n, 3, train_state(1), {"random": torch.full((4,), i), "n": i}) for i, n in enumerate("ab")
    ]
    diff = compare_checkpoints(*folders)
    assert [t.name for t in diff.bytes] == ["rank-0/random"]
    assert diff.values == (ValueDiff(name="ranks/0/n", a=0, b=1),)
    change_index(folders[1], world_size=2)
    diff = compare_checkpoints(*folders)
    assert diff.equal and not diff.ranks_compared
    assert diff.saved == (ValueDiff(name="world_size", a=1, b=2),)


def test_list_with_nan_is_one_value_like_a_list_without(tmp_path: Path) -> None:
    a, b = {"window": [math.nan, 1.0], "n": 2**80, "x": math.inf}, {"window": [0.0, 1.0], "n": 2**80 + 1, "x": "inf"}
    diff = compare_checkpoints(save(tmp_path / "a", 1, {"guard": a}), save(tmp_path / "b", 1, {"guard": b}))
    assert diff.values == (
        ValueDiff(name="guard/n", a=hex(2**80), b=hex(2**80 + 1)),
        ValueDiff(name="guard/window", a=["nan", 1.0], b=[0.0, 1.0]),
        ValueDiff(name="guard/x", a={"__float__": "inf"}, b="inf"),  # the number and the text
    )
    msgspec.json.encode(diff)


def test_integer_of_thousands_of_digits_is_compared(tmp_path: Path) -> None:
    a, b = (save(tmp_path / n, 1, {"big": {"n": 2**20_000, "v": [2**20_000 + i]}}) for i, n in enumerate("ab"))
    diff = compare_checkpoints(a, b)
    assert diff.values == (ValueDiff(name="big/v", a=[hex(2**20_000)], b=[hex(2**20_000 + 1)]),)


def test_diff_of_consecutive_steps(tmp_path: Path) -> None:
    diff = compare_checkpoints(save(tmp_path, 1, train_state(1)), save(tmp_path, 2, train_state(2)))
    assert diff.values == (
        ValueDiff(name="data/position", a=1, b=2),
        ValueDiff(name="step", a=1, b=2),
    )
    kinds = [t.kind for t in diff.bytes]
    assert kinds == sorted(kinds) and set(kinds) == {"model", "optimizer"}  # those of the model first
    model = [t.max_abs for t in diff.bytes if t.kind == "model"]
    assert model == sorted(model, key=lambda n: -(n or 0.0))
    steps = [t for t in diff.bytes if t.name.endswith("/step")]
    assert {(t.max_abs, t.relative, t.differing) for t in steps} == {(1.0, 0.5, 1)}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int8, torch.uint8, torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
def test_max_difference_for_every_dtype(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "BLOCK_ELEMENTS", 7)  # several blocks, of which the largest difference counts
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(1, 100, (5, 6), generator=generator).to(torch.float64).to(dtype)
    b = a.clone()
    b[0, 0], b[3, 4], b[4, 5] = 3, 27, 5
    numbers = [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in (a, b)]
    expected = (numbers[0] - numbers[1]).abs().max().item()
    diff = only_tensor(tmp_path, a, b)
    assert (diff.name, diff.kind, diff.elements, diff.differing, diff.not_finite) == ("w", "other", 30, 3, 0)
    assert diff.max_abs == expected > 0
    assert diff.relative == pytest.approx(expected / max(n.abs().max().item() for n in numbers))


def test_booleans_differ_by_one(tmp_path: Path) -> None:
    a = torch.tensor([True, False, True])
    assert only_tensor(tmp_path, a, ~a) == TensorDiff(
        name="w", kind="other", elements=3, differing=3, max_abs=1.0, relative=1.0
    )


def test_nan_and_inf_are_counted_separately(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, nan, inf, -inf, 1.0, 4.0, 2.0])
    b = torch.tensor([nan, 1.0, inf, inf, inf, 3.0, 2.0])
    diff = only_tensor(tmp_path, a, b)
    assert (diff.differing, diff.not_finite, diff.max_abs, diff.relative) == (4, 3, 1.0, 0.25)
    diff = only_tensor(tmp_path, a[:2], b[:2])
    assert (diff.differing, diff.not_finite, diff.max_abs, diff.relative) == (1, 1, None, None)


def test_signed_zeros_differ_by_zero(tmp_path: Path) -> None:
    diff = only_tensor(tmp_path, torch.zeros(3), -torch.zeros(3))
    assert (diff.differing, diff.max_abs, diff.relative) == (3, 0.0, 0.0)


def test_unknown_dtype_is_compared_by_bytes(tmp_path: Path) -> None:
    a = torch.ones(4).to(torch.float8_e8m0fnu)
    diff = only_tensor(tmp_path, a, (2 * torch.ones(4)).to(torch.float8_e8m0fnu))
    assert (diff.differing, diff.max_abs) == (4, None)


def test_missing_tensors_and_changed_forms(tmp_path: Path) -> None:
    a = {"w": torch.ones(2, 3), "v": torch.ones(2), "a": torch.ones(1), "same": torch.ones(0)}
    b = {"w": torch.ones(3, 2), "v": torch.ones(2).half(), "b": torch.ones(1), "same": torch.ones(0)}
    diff = save_and_compare(tmp_path, a, b)
    assert (diff.equal, diff.tensors, diff.only_a, diff.only_b) == (False, 1, ("a",), ("b",))
    assert [(f.name, f.a.dtype, f.a.shape, f.b.dtype, f.b.shape) for f in diff.forms] == [
        ("v", "float32", (2,), "float16", (2,)),
        ("w", "float32", (2, 3), "float32", (3, 2)),
    ]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": 1}, {"x": 1.0}, [("s/x", None, 1, 1.0)]),
        ({"x": True}, {"x": 1}, [("s/x", None, True, 1)]),
        ({"x": None}, {}, [("s/x", "a", None, None)]),
        ({}, {"x": {}}, [("s/x", "b", None, {})]),
        ({"x": [1, 2, 3]}, {"x": [1, 2]}, [("s/x", None, [1, 2, 3], [1, 2])]),
        ({"x": [{"y": 1}, {"y": 2}]}, {"x": [{"y": 1}, {"y": 3}]}, [("s/x/1/y", None, 2, 3)]),
        ({"x": (1, 2)}, {"x": (1, 3)}, [("s/x", None, [1, 2], [1, 3])]),
        ({"x": [1]}, {"x": (1,)}, [("s/x", "a", [1], None), ("s/x", "b", None, [1])]),
        ({"x": {0: {"y": 1}, 1: 5}}, {"x": {1: 5, 0: {"y": 2}}}, [("s/x/0/y", None, 1, 2)]),
        (
            {"x": {(0, "k"): 1, "1": 1, 1: 1, b"z": 1}},
            {"x": {(0, "k"): 2, "1": 2, 1: 2, b"z": 2}},
            [(f"s/x/{key}", None, 1, 2) for key in ("'1'", "(0, 'k')", "1", "b'z'")],
        ),
        ({"x": np.ones(2)}, {"x": np.ones(2, np.int64)}, [("s/x/dtype", None, "<f8", "<i8")]),
        ({"x": b"1"}, {"x": b"1"}, []),
        ({"x": "1"}, {"x": 1}, [("s/x", None, "1", 1)]),
    ],
    ids=[
        "int and float",
        "bool and int",
        "only in a",
        "only in b",
        "list lengths",
        "nested list",
        "tuples",
        "list and tuple",
        "maps",
        "keys that are not text",
        "arrays",
        "equal bytes",
        "string and int",
    ],
)
def test_values_are_listed_by_path(tmp_path: Path, a: Any, b: Any, expected: list[Any]) -> None:
    diff = save_and_compare(tmp_path, {"s": {"also": 0, **a}}, {"s": {"also": 0, **b}})
    assert [(v.name, v.only, v.a, v.b) for v in diff.values] == expected
    assert diff.equal is (not expected)


def test_changed_optimizer_group_is_listed(tmp_path: Path) -> None:
    states = [train_state(0), train_state(0)]
    states[1]["optimizer"].param_groups[0]["lr"] = 0.2
    diff = save_and_compare(tmp_path, *states)
    assert diff.values == (ValueDiff(name="optimizer/groups/0/lr", a=0.1, b=0.2),)


@pytest.mark.parametrize("side", [0, 1])
def test_damage_in_either_is_reported(tmp_path: Path, side: int) -> None:
    folders = [save(tmp_path / name, 1, train_state(1)) for name in "ab"]
    path = folders[side] / index.read_manifest(folders[side]).tensors[0].shards[0].file
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=str(path)):
        compare_checkpoints(*folders)
