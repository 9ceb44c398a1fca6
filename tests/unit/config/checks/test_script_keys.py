"""Recipe keys that scripts and custom models use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

import clustertrain.train
from clustertrain.config.checks.script_keys import TRAINER_KEYS, is_trainer_key
from clustertrain.config.checks.unused_keys import is_key_used
from clustertrain.config.job import RunSpec, ScriptSpec
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe

SCRIPT = ScriptSpec(path="train.py", cwd="/")
# The modules that read the recipe in runs of scripts; other modules of train/ read it for the built-in trainer.
SESSION_MODULES = (
    "core/context.py",
    *(
        f"session/{name}.py"
        for name in (
            "checkpointing",
            "checkpointing_config",
            "resume_check",
            "runtime",
            "recorder",
            "session",
            "budget",
        )
    ),
)


def keys(table: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        key
        for name, value in table.items()
        for key in (keys(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"])
    ]


def used_keys(script: ScriptSpec | None = None, **tables: Any) -> set[str]:
    spec = RunSpec(recipe=build(tables, Recipe, "recipe"), script=script)
    return {key for key in keys(msgspec.to_builtins(spec.recipe)) if is_key_used(spec, key)}


# Tables that the session passes on completely.
PASSED_TABLES = ("contract", "parallel", "stability", "telemetry")
# Read by the supervisor, the tracker process, the plan, and two properties of the recipe.
READ_ELSEWHERE = ("preemption_test", "tracking", "train.precision", "train.profile", "checkpoint.best_mode")


def session_keys() -> set[str]:
    """Return the keys, tables and properties of the recipe that the session's source reads."""
    folder = Path(str(clustertrain.train.__file__)).parent
    read = set()
    for name in SESSION_MODULES:
        text = (folder / name).read_text()
        read |= set(re.findall(r"\brecipe\.([a-z_]+(?:\.[a-z_]+)?)", text))
        if "checkpointing" in name:
            read |= {f"checkpoint.{key}" for key in re.findall(r"\bspec\.([a-z_]+)", text)}
    return read


def test_session_keys_are_not_trainer_keys() -> None:
    read = session_keys()
    # The session reads all keys of the tables that it passes on.
    assert {"parallel", "stability", "train.seed", "train.deterministic", "train.log_every"} <= read
    assert {"checkpoint.keep", "checkpoint.best", "contract.metric", "contract.resume"} <= read
    assert [key for key in sorted(read) if is_trainer_key(key)] == []


def test_every_key_is_for_the_trainer_or_is_read_without_it() -> None:
    # A key that nothing reads must be refused for scripts, so a new key of the trainer belongs in TRAINER_KEYS.
    read = session_keys() | set(PASSED_TABLES) | set(READ_ELSEWHERE)
    unread = [
        key
        for key in keys(msgspec.to_builtins(Recipe()))
        if not is_trainer_key(key)
        and key not in read
        and key.partition(".")[0] not in {*PASSED_TABLES, *READ_ELSEWHERE}
    ]
    assert unread == []


def test_trainer_keys_exist_in_recipe() -> None:
    known = keys(msgspec.to_builtins(Recipe()))
    assert [name for name in TRAINER_KEYS if not any(f"{key}.".startswith(f"{name}.") for key in known)] == []


def test_script_uses_session_keys() -> None:
    used = used_keys(SCRIPT)
    assert {"train.seed", "train.precision", "checkpoint.keep", "contract.metric", "parallel.split"} <= used
    assert not {"optim.lr", "train.steps", "checkpoint.every", "model.dim", "evaluation.every"} & used


def test_model_entry_uses_its_args() -> None:
    used = used_keys(model={"entry": "mine:Net", "args": {"dim": 3}})
    assert {"model.entry", "model.args.dim", "optim.lr"} <= used
    assert not {"model.dim", "model.kind", "model.convnet.width", "model.two_tower.embedding"} & used
    assert {"model.dim", "model.kind"} <= used_keys()


def test_recipe_uses_keys_of_its_kinds() -> None:
    used = used_keys(schedule={"kind": "step"}, optim={"name": "sgd"}, data={"validation": 0.1})
    assert {"schedule.gamma", "schedule.warmup_steps", "optim.momentum", "evaluation.every"} <= used
    assert (
        not {"schedule.floor", "optim.betas", "model.convnet.width", "data.image_size", "contract.on_budget_spent"}
        & used
    )
