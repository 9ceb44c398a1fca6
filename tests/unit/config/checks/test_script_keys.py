"""The recipe keys that a script uses, and a model of your own."""

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
# What reads the recipe where a script runs; all else in train/ that does is for the built-in trainer.
OF_SESSION = (
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


def keys(table: dict[str, Any], above: str = "") -> list[str]:
    return [
        key
        for name, value in table.items()
        for key in (keys(value, f"{above}{name}.") if isinstance(value, dict) and value else [f"{above}{name}"])
    ]


def used(script: ScriptSpec | None = None, **tables: Any) -> set[str]:
    spec = RunSpec(recipe=build(tables, Recipe, "recipe"), script=script)
    return {key for key in keys(msgspec.to_builtins(spec.recipe)) if is_key_used(spec, key)}


# Tables that the session passes on as a whole.
PASSED_ON = ("contract", "parallel", "stability", "telemetry")
# The supervisor, the trackers' process, the plan, and two properties of the recipe read these.
READ_ELSEWHERE = ("preemption_test", "tracking", "train.precision", "train.profile", "checkpoint.best_mode")


def session_keys() -> set[str]:
    """Return the keys, tables and properties of the recipe that the session's source reads."""
    folder = Path(str(clustertrain.train.__file__)).parent
    read = set()
    for name in OF_SESSION:
        text = (folder / name).read_text()
        read |= set(re.findall(r"\brecipe\.([a-z_]+(?:\.[a-z_]+)?)", text))
        if "checkpointing" in name:
            read |= {f"checkpoint.{key}" for key in re.findall(r"\bspec\.([a-z_]+)", text)}
    return read


def test_session_keys_are_not_trainer_keys() -> None:
    read = session_keys()
    # Of the table itself, handed on as a whole, every key is read but those of the trainer.
    assert {"parallel", "stability", "train.seed", "train.deterministic", "train.log_every"} <= read
    assert {"checkpoint.keep", "checkpoint.best", "contract.metric", "contract.resume"} <= read
    assert [key for key in sorted(read) if is_trainer_key(key)] == []


def test_every_key_is_for_the_trainer_or_is_read_without_it() -> None:
    # A script that sets a key which nothing reads must be refused. A new key of the trainer belongs in TRAINER_KEYS.
    read = session_keys() | set(PASSED_ON) | set(READ_ELSEWHERE)
    unread = [
        key
        for key in keys(msgspec.to_builtins(Recipe()))
        if not is_trainer_key(key) and key not in read and key.partition(".")[0] not in {*PASSED_ON, *READ_ELSEWHERE}
    ]
    assert unread == []


def test_trainer_keys_exist_in_recipe() -> None:
    known = keys(msgspec.to_builtins(Recipe()))
    assert [name for name in TRAINER_KEYS if not any(f"{key}.".startswith(f"{name}.") for key in known)] == []


def test_script_uses_session_keys() -> None:
    found = used(SCRIPT)
    assert {"train.seed", "train.precision", "checkpoint.keep", "contract.metric", "parallel.split"} <= found
    assert not {"optim.lr", "train.steps", "checkpoint.every", "model.dim", "evaluation.every"} & found


def test_model_entry_uses_its_args() -> None:
    found = used(model={"entry": "mine:Net", "args": {"dim": 3}})
    assert {"model.entry", "model.args.dim", "optim.lr"} <= found
    assert not {"model.dim", "model.kind", "model.convnet.width", "model.two_tower.group"} & found
    assert {"model.dim", "model.kind"} <= used()


def test_recipe_uses_keys_of_its_kinds() -> None:
    found = used(schedule={"kind": "step"}, optim={"name": "sgd"}, data={"validation": 0.1})
    assert {"schedule.gamma", "schedule.warmup_steps", "optim.momentum", "evaluation.every"} <= found
    assert (
        not {"schedule.floor", "optim.betas", "model.convnet.width", "data.image_size", "contract.on_budget_spent"}
        & found
    )
