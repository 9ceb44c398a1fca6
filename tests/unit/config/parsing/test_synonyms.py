"""Suggestions for unknown keys and values, including the names that other trainers use."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.parsing import synonyms
from clustertrain.config.parsing.documents import build, format_value, list_keys, set_value_at
from clustertrain.errors import ConfigError
from clustertrain.submit.recipe import RecipeFile


def error_message(key: str, value: Any = 1) -> str:
    document: dict[str, Any] = {}
    set_value_at(document, key, value)
    with pytest.raises(ConfigError) as caught:
        build(document, RecipeFile, "recipe.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "intended"),
    [
        ("evaluation.early_stopping", "evaluation.patience"),
        ("optim.learning_rate", "optim.lr"),
        ("optim.max_grad_norm", "optim.clip_norm"),
        ("optimizer", "optim"),
        ("train.lr", "optim.lr"),
        ("train.betas", "optim.betas"),
        ("train.max_steps", "train.steps"),
        ("train.stpes", "train.steps"),
        ("lr", "optim.lr"),
        ("model.num_hidden_layers", "model.layers"),
        ("model.seq_len", "model.max_seq_len or data.seq_len"),
        ("optim.patience", "schedule.patience or evaluation.patience"),
        ("schedule.steps", "train.steps"),
        ("parallel.tensor_parallel_degree", "job.tp"),
    ],
)
def test_alias_suggests_key_of_any_table(key: str, intended: str) -> None:
    assert error_message(key) == f"recipe.toml: unknown key {key!r}\n  fix: did you mean {intended}?"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rehearsal", "preemption_test"),
        ("stability.then", "stability.on_divergence"),
        ("stability.vanishing", "stability.grad_norm_min"),
        ("stability.layers_every", "stability.layer_stats_every"),
        ("evaluation.rising", "evaluation.warn_when_rising"),
        ("contract.when_spent", "contract.on_budget_spent"),
        ("checkpoint.background", "checkpoint.async_save"),
        ("tracking.to", "tracking.trackers"),
        ("parallel.context", "parallel.context_parallel_method"),
        ("optim.lr_batch", "optim.lr_reference_batch"),
    ],
)
def test_former_key_suggests_its_new_name(old: str, new: str) -> None:
    assert error_message(old) == f"recipe.toml: unknown key {old!r}\n  fix: did you mean {new}?"


def test_different_unit_is_noted() -> None:
    assert error_message("schedule.eta_min").endswith("did you mean schedule.floor? It is a fraction of optim.lr.")


def test_unknown_key_lists_its_table() -> None:
    assert error_message("train.foo").endswith(
        "fix: known: attention_backend, deterministic, epochs, global_batch, log_every, micro_batch, precision, "
        "profile, seed, steps"
    )


@pytest.mark.parametrize(
    ("key", "value", "intended"),
    [
        ("objective.kind", "bce", "binary-cross-entropy"),
        ("objective.kind", "clip", "nt-xent"),
        ("model.kind", "clip", "two-tower"),
        ("schedule.kind", "OneCycleLR", "one-cycle"),
        ("train.precision", "bfloat16", "bf16"),
        ("optim.name", "AdamW", "adamw"),
        ("job.layout", "zero3", "fsdp"),
        ("data.kind", "own", "custom"),
    ],
)
def test_intended_choice_comes_first(key: str, value: str, intended: str) -> None:
    assert f"fix: use one of {intended}, " in error_message(key, value)


def test_aliases_lead_to_existing_keys() -> None:
    keys = list_keys(RecipeFile)
    assert {intended for keys_of_alias in synonyms.KEYS_BY_ALIAS.values() for intended in keys_of_alias} <= set(keys)
    assert not synonyms.KEYS_BY_ALIAS.keys() & {name for name in keys if "." not in name}


def test_values_are_formatted_as_toml() -> None:
    assert error_message("optim.lr", "x").endswith(
        'optim.lr: expected `float`, got `str`\n  fix: change optim.lr = "x"'
    )
    assert format_value({"a": (1, 2.5, "x"), "b": True}) == '{ a = [1, 2.5, "x"], b = true }'


def test_cross_table_error_has_no_key_prefix() -> None:
    assert error_message("schedule.warmup_steps", 200).startswith(
        "recipe.toml: schedule.warmup_steps = 200 is not less"
    )


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("optim.nope", "known: betas, clip, "),
        ("optim.clip_at", "did you mean optim.clip"),
        ("optim.weight", "did you mean optim.weight_decay or optim.weight_decay_scale?"),  # the beginning of a name
    ],
)
def test_only_near_keys_are_suggested(key: str, fix: str) -> None:
    assert error_message(key).partition("fix: ")[2].startswith(fix)
