"""Errors about job keys name the option if the user typed it."""

from __future__ import annotations

import pytest

from clustertrain.errors import UnsuitableEnvironment
from clustertrain.submit.option_names import named, option_name


@pytest.mark.parametrize(
    ("message", "fix", "expected"),
    [
        ("job: qos = 'a b': bad", "write qos = 'a'", ("--qos 'a b': bad", "--qos a")),
        ("""time = "it's": bad""", "change time", ("""--time "it's": bad""", "change --time")),
        ("container_mounts: /a is missing", "check it", ("--container-mount: /a is missing", "check it")),
        ("nodes = 3 x gpus = 2: odd", None, ("--nodes 3 x gpus = 2: odd", None)),  # --gpus was not given
        ("job: mem = '1': bad", "change mem", ("job: mem = '1': bad", "change mem")),
        ("train.time = 'x': bad", "change train.time", ("train.time = 'x': bad", "change train.time")),
    ],
)
def test_options_of_the_command_line_are_named(message: str, fix: str | None, expected: tuple[str, str | None]) -> None:
    with pytest.raises(UnsuitableEnvironment) as caught, named({"qos", "time", "container_mounts", "nodes"}):
        raise UnsuitableEnvironment(message, fix=fix)
    assert (caught.value.message, caught.value.fix) == expected


def test_options_that_differ_from_their_keys() -> None:
    keys = ("container_mounts", "hooks", "environment", "stop_signal")
    assert [option_name(key) for key in keys] == ["--container-mount", "--no-hooks", "--ship-env", "--stop-signal"]
