"""Suggested fixes for values of the wrong type and for invalid TOML."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.config.parsing.documents import build, did_you_mean, parse_toml, parse_value, set_value_at
from clustertrain.errors import ConfigError
from clustertrain.submit.recipe import RecipeFile


def find_fix(text: str) -> str | None:
    with pytest.raises(ConfigError) as caught:
        build(parse_toml(text, "recipe.toml"), RecipeFile, "recipe.toml")
    return caught.value.fix


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('optim.lr = "1e-3"', "write optim.lr = 1e-3, without the quotes"),
        ('train.steps = "1e-3"', 'change train.steps = "1e-3"'),
        ("train.steps = 1e4", "write train.steps = 10000"),
        (
            "schedule.warmup_steps = 0.05",
            "write an integer, or schedule.warmup_ratio for a fraction of the steps",
        ),
        ("schedule.milestones = [0.5, 0.75]", "write an integer, or schedule.milestone_epochs for epochs"),
        ("checkpoint.keep = 0.5", "write an integer: it is a count, not a fraction"),
        ("train.steps = 10.5", "write an integer, or train.epochs for passes over the data"),
        ("job.time = 30", 'write job.time = "30", with the quotes'),
        ('data.pack = "yes"', "write data.pack = true"),
        ("optim.betas = 0.9", "write optim.betas = [0.9, …], a list of 2"),
        ("optim.betas = [0.9]", "write optim.betas = [0.9, …], a list of 2"),
        ("preemption_test.preempt_at_steps = 3", "write preemption_test.preempt_at_steps = [3]"),
        ("[optim.unfreeze]\nstep = 1", "write [[optim.unfreeze]] with two brackets, because it is a list of tables"),
        ('[[optim.unfreeze]]\nstep = 1\nmodules = "stem"', 'write modules = ["stem"]'),
        ("optim.lr = 0", "change optim.lr, or remove it to use the default, 0.0003"),
        ("train.steps = 0", "change train.steps, or remove it to use the default, 200"),
        ("model.dropout = 2", "change model.dropout"),
        ("schedule.warmup_steps = 500", "decrease schedule.warmup_steps or increase train.steps"),
    ],
)
def test_suggested_fix(text: str, fix: str) -> None:
    assert find_fix(text) == fix


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("name = adamw", 'strings need quotes: "adamw"'),
        ("path = /data/a b  # here", 'strings need quotes: "/data/a b"'),
        ("pack = yes # packed", "write true"),
        ("pack = False", "write false"),
        ("betas = None", "remove the key: TOML has no null"),
        ("steps = 1,000", None),
    ],
)
def test_invalid_toml_line_is_shown(line: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_toml(f"[table]\n{line}\n", "recipe.toml")
    assert caught.value.message.startswith("recipe.toml: not valid TOML: ")
    assert caught.value.message.endswith(f"): {line}") and caught.value.fix == fix


def test_of_a_long_invalid_toml_line_the_beginning_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_toml("[" * 100_000, "recipe.toml")
    assert "[[[[" in caught.value.message and len(caught.value.message) < 400


def test_toml_error_without_line() -> None:
    with pytest.raises(ConfigError, match=r"at end of document\)$"):
        parse_toml("[table", "recipe.toml")


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ('optim.lr_scale."layers.0"', {"optim": {"lr_scale": {"layers.0": 0.1}}}),
        ("optim.'lr_scale'.'a.*'", {"optim": {"lr_scale": {"a.*": 0.1}}}),
        ("optim.lr_scale.head*", {"optim": {"lr_scale": {"head*": 0.1}}}),
    ],
)
def test_quoted_key_part(path: str, document: dict[str, Any]) -> None:
    assigned: dict[str, Any] = {}
    set_value_at(assigned, path, parse_value("0.1"))
    assert assigned == document


def test_unclosed_quote_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a TOML key"):
        set_value_at({}, 'optim.lr_scale."layers.0', 0.1)


def test_name_with_dots_suggests_quotes() -> None:
    fix = """quote the name: optim.lr_scale."blocks.0.a" = 0.1, or in a shell --set 'optim.lr_scale."blocks.0.a"=0.1'"""
    assert find_fix("optim.lr_scale.blocks.0.a = 0.1") == fix


DOCUMENTS = ["checkpoint-diff", "checkpoint-list", "compare", "diagnose", "telemetry", "top"]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("nope", f"known: {', '.join(DOCUMENTS)}"),  # shares single letters with top, compare and diagnose
        ("", f"known: {', '.join(DOCUMENTS)}"),
        ("chekpoint-list", "did you mean checkpoint-list or checkpoint-diff?"),
        ("tel", "did you mean telemetry?"),  # the beginning of a name
        ("checkpoint", "did you mean checkpoint-list or checkpoint-diff?"),
    ],
)
def test_only_near_names_are_suggested(name: str, suggestion: str) -> None:
    assert did_you_mean(name, DOCUMENTS) == suggestion
