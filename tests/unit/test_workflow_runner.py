"""The runner of workflows: what steps hand to each other, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests import workflow_runner
from tests.workflow_runner import CannotRun, run_job


def write_job(folder: Path, *steps: dict[str, object]) -> Path:
    file = folder / "workflow.yml"
    file.write_text(yaml.safe_dump({"defaults": {"run": {"shell": "bash"}}, "jobs": {"job": {"steps": list(steps)}}}))
    return file


def write_action(folder: Path, run: str) -> None:
    action = {
        "inputs": {"count": {"default": "4"}},
        "outputs": {"twice": {"value": "${{ steps.compute.outputs.twice }}"}},
        "runs": {
            "using": "composite",
            "steps": [{"id": "compute", "shell": "bash", "env": {"COUNT": "${{ inputs.count }}"}, "run": run}],
        },
    }
    (folder / "action.yml").write_text(yaml.safe_dump(action))


def test_steps_share_environment_path_and_outputs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = (
        'echo NAME=value=1 >>"$GITHUB_ENV"; mkdir bin; printf "#!/bin/sh\\necho found" >bin/tool; chmod +x bin/tool\n'
        'echo "$PWD/bin" >>"$GITHUB_PATH"; echo key=from-output >>"$GITHUB_OUTPUT"'
    )
    second = {"run": 'tool; echo "$NAME $KEY"', "env": {"KEY": "${{ steps.one.outputs.key }}"}}
    assert run_job(write_job(tmp_path, {"id": "one", "run": first}, second), "job")
    assert "found\nvalue=1 from-output\n" in capfd.readouterr().out


def test_failed_step_skips_others_but_not_those_that_ask(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = [{"run": "echo before | false | cat; echo not reached"}, {"run": "echo skipped"}]
    steps += [{"run": f"echo on-{when}", "if": f"{when}()"} for when in ("failure", "always", "success")]
    assert not run_job(write_job(tmp_path, *steps), "job")
    output = capfd.readouterr().out
    assert "on-failure\n" in output and "on-always\n" in output
    assert not any(word in output for word in ("not reached", "skipped", "on-success"))


@pytest.mark.parametrize(("count", "expected"), [(None, "8"), ("21", "42")])
def test_action_has_inputs_and_outputs(
    count: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workflow_runner, "ROOT", tmp_path)
    write_action(tmp_path, 'test -e "$GITHUB_ACTION_PATH/action.yml"; echo "twice=$((COUNT * 2))" >>"$GITHUB_OUTPUT"')
    step = {"id": "action", "uses": "./", "with": {"count": count} if count else {}}
    show = {"run": 'echo "result $RESULT"', "env": {"RESULT": "${{ steps.action.outputs.twice }}"}}
    assert run_job(write_job(tmp_path, step, show), "job")
    assert f"result {expected}\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"uses": "actions/cache@v5"}, "unknown action: actions/cache@v5"),
        ({"run": "true", "if": "github.ref == 'x'"}, "unknown condition"),
        ({"run": "echo ${{ github.ref }}"}, "unknown expression: github.ref"),
        ({"run": "true", "working-directory": "x"}, "unknown keys of a step: working-directory"),
        ({"run": 'echo "no assignment" >>"$GITHUB_ENV"'}, "no assignment: no assignment"),
        ({"uses": "./", "with": {"size": "3"}}, "unknown inputs: size"),
    ],
)
def test_what_it_does_not_know_is_an_error(
    step: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow_runner, "ROOT", tmp_path)
    write_action(tmp_path, "true")
    with pytest.raises(CannotRun, match=message):
        run_job(write_job(tmp_path, step), "job")
