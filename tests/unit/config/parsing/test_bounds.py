"""Every number of recipes, profiles and options has an upper bound, and an error with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec
from clustertrain.config.node_facts import parse_cpu_list
from clustertrain.config.parsing import bounds
from clustertrain.config.parsing.documents import build, load_toml, parse_toml, parse_value
from clustertrain.config.parsing.dotted_keys import element_types, field_types, find_struct
from clustertrain.config.parsing.durations import parse_duration_s
from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.config.parsing.toml_parser import MAX_DEPTH
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, UsageError

# Bounded by the checks of their tables; those in the second set only by the 64 bits of TOML.
BOUNDED_BY_TABLE = {
    "model.dropout", "adapter.dropout", "data.validation", "data.augment.color", "data.augment.mixup", "optim.betas",
    "optim.momentum", "optim.layer_decay", "optim.clip_quantile", "objective.label_smoothing", "objective.temperature",
    "objective.beta",
    "model.two_tower.temperature", "schedule.floor", "schedule.gamma", "schedule.rise", "schedule.initial",
    "schedule.final", "schedule.max_momentum", "schedule.min_momentum", "schedule.warmup_ratio", "schedule.factor",
    "schedule.threshold", "stability.clipped_share", "stability.slowdown", "telemetry.interval_s", "telemetry.flush_s",
    "telemetry.alerts.utilization", "telemetry.alerts.slowdown", "telemetry.alerts.memory",
    "telemetry.alerts.straggler", "telemetry.prometheus.port",
}  # fmt: skip
ANY_64_BITS = {"train.seed", "objective.ignore_index"}


def numbers(struct_type: type[msgspec.Struct], parent: str = "") -> Iterator[tuple[str, bool, list[bool]]]:
    """Iterate over (key, whether it accepts only integers, whether each enclosing table is in a list)."""
    for name, field_type in field_types(struct_type).items():
        items = element_types(field_type)
        struct = find_struct(items[0]) if items else find_struct(field_type)
        if struct is not None:
            for key, is_integer, lists in numbers(struct, f"{parent}{name}."):
                yield key, is_integer, [bool(items), *lists]
            continue
        leaves = {field_type, *get_args(field_type), *items}
        if leaves & {int, float}:
            yield f"{parent}{name}", float not in leaves, []


def document(key: str, value: Any, lists: list[bool]) -> dict[str, Any]:
    *tables, last = key.split(".")
    table_value: Any = {last: value}
    for table, listed in zip(reversed(tables), reversed(lists), strict=True):
        table_value = {table: [table_value] if listed else table_value}
    return dict(table_value)


CASES = [
    *((Recipe, "", key, is_integer, lists) for key, is_integer, lists in numbers(Recipe)),
    *((ClusterProfile, "", key, is_integer, lists) for key, is_integer, lists in numbers(ClusterProfile)),
    *((JobSpec, "job.", key, is_integer, lists) for key, is_integer, lists in numbers(JobSpec)),
]


@pytest.mark.parametrize(
    ("struct_type", "at", "key", "is_integer", "lists"), CASES, ids=[at + key for _, at, key, _, _ in CASES]
)
def test_every_number_has_a_bound(
    struct_type: type[msgspec.Struct], at: str, key: str, is_integer: bool, lists: list[bool]
) -> None:
    values: list[Any] = [2**62, 10**400, int("f" * 6000, 16), *([] if is_integer else [1e308])]
    for value in values[1:] if key in ANY_64_BITS else values:
        try:
            build(document(key, value, lists), struct_type, "x.toml", prefix=at)
        except ConfigError as e:
            error = e
        else:
            hint = "give it a bound in bounds.py, or a range and a place in BOUNDED_BY_TABLE"
            pytest.fail(f"{at}{key} accepts {value}: {hint}")
        assert key.rpartition(".")[2] in error.message and len(error.message) < 1000
        if key not in BOUNDED_BY_TABLE | ANY_64_BITS:
            assert f"x.toml: {key} = " in error.message and ": at most " in error.message


def test_every_bound_belongs_to_a_key() -> None:
    known = {at + key for _, at, key, _, _ in CASES} | {"optim.lr_scale", "optim.weight_decay_scale"}
    assert set(bounds.BOUNDS) - known == set()


def test_bound_error_has_reason() -> None:
    with pytest.raises(ConfigError, match=r"model.layers = 1000000000: at most 10000; the deepest") as caught:
        build({"model": {"layers": 10**9}}, Recipe, "x.toml")
    assert caught.value.fix == "change model.layers"


def test_values_of_named_tables_have_a_bound() -> None:
    with pytest.raises(ConfigError, match=r"optim.lr_scale = 1e"):
        build({"optim": {"lr_scale": {"head": 1e30}}}, Recipe, "x.toml")


def test_entry_args_are_unbounded_but_64_bit() -> None:
    recipe = build({"model": {"entry": "a:b", "args": {"n": 2**63 - 1}}}, Recipe, "x.toml")
    assert recipe.model.args == {"n": 2**63 - 1}
    with pytest.raises(ConfigError, match=r"model.args.n = a number of about"):
        build({"model": {"entry": "a:b", "args": {"n": 2**64}}}, Recipe, "x.toml")


@pytest.mark.parametrize("text", ["9" * 5000, "1-" + "9" * 5000, "٣", "1:" + "9" * 400])
def test_time_limit_with_many_digits_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_time_limit_s(text)


def test_duration_with_many_digits_is_refused() -> None:
    assert parse_duration_s("9" * 400 + "h") is None and parse_duration_s("999h") == 999 * 3600


@pytest.mark.parametrize("cpus", ["0-99999999999", "0-" + "9" * 5000, "a", "5-2-1"])
def test_cpu_numbers_above_linux_limit_are_refused(cpus: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_cpu_list(cpus)
    with pytest.raises(ConfigError, match=r"node.cpus"):
        build({"node": {"cpus": {"numa_nodes": [{"index": 0, "cpus": cpus}]}}}, ClusterProfile, "x.toml")


def test_convnet_with_many_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks: 1000 stages, at most 14"):
        build({"model": {"kind": "convnet", "convnet": {"blocks": [1] * 1000}}}, Recipe, "x.toml")


DEEP = ("[" * 3000 + "]" * 3000, "[" * 400 + "]" * 400, "{a=" * 200 + "1" + "}" * 200)


@pytest.mark.parametrize("value", DEEP, ids=len)
def test_deep_nesting_is_refused(value: str) -> None:
    for read in (lambda: parse_toml(f"x = {value}", "x.toml"), lambda: parse_value(value, "model.args.x")):
        with pytest.raises(ConfigError, match=f"nested more than {MAX_DEPTH} levels deep"):
            read()
    with pytest.raises(ConfigError, match="nested more than"):
        parse_toml("[" + "a." * 2000 + "b]", "x.toml")


def test_number_with_too_many_digits_is_refused() -> None:
    for read in (lambda: parse_toml("x = " + "9" * 5000, "x"), lambda: parse_value("9" * 5000, "train.steps")):
        with pytest.raises(ConfigError, match="more than 4300 digits"):
            read()
    with pytest.raises(ConfigError, match=r"train.steps: expected `int`, got `str`"):
        build({"train": {"steps": "9" * 5000}}, Recipe, "x.toml")


def test_utf8_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_toml(path) == {"train": {"steps": 3}}
    path.write_bytes("[train]\nsteps = 3\n".encode("utf-16"))
    with pytest.raises(ConfigError, match="is UTF-16") as caught:
        load_toml(path)
    assert "UTF-8" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("document", "message", "fix"),
    [
        ({"telemetry": {"alerts": {"command": {}}}}, "telemetry.alerts.command: expected a list, got a table", '["…"]'),
        ({"model": 3}, "model: expected a table, got `int`", "model.kind"),
        ({"optim": {"lr_scale": {"a.b": "x"}}}, 'optim.lr_scale."a.b": expected `float`, got `str`', ""),
    ],
)
def test_type_error_uses_toml_terms(document: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(document, Recipe, "x.toml")
    assert message in caught.value.message and fix in str(caught.value.fix)
