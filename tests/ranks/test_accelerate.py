"""``accelerate launch``: the ranks get the environment that accelerate's own launcher gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.errors import UsageError
from clustertrain.submit.launchers.replace import replace_launcher
from clustertrain.submit.request import SubmitRequest

pytestmark = pytest.mark.ranks
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
PRINT = "import json, os, sys; open(f'out-{os.environ.get(\"RANK\", 0)}', 'w').write(json.dumps(dict(os.environ)))\n"
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true}
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


def translate(folder: Path, *arguments: str, **job: object) -> SubmitRequest:
    return replace_launcher(SubmitRequest(command=(*LAUNCH, *arguments), cwd=folder, job=job)).request


def select(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.mark.parametrize("options", [("--config_file", "fsdp.yaml"), ("--cpu", "--mixed_precision", "bf16")])
def test_environment_is_that_of_accelerates_own_launcher(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    (tmp_path / "program.py").write_text(PRINT)
    subprocess.run([*LAUNCH, *options, "program.py"], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    real = json.loads((tmp_path / "out-0").read_text())
    request = translate(tmp_path, *options, "program.py", "--lr", "1")
    # What this process has itself is not repeated: the ranks inherit it.
    assert select({**os.environ, **request.env}) == select(real)
    assert request.command == (sys.executable, "program.py", "--lr", "1")
    assert request.job == ({"nodes": 1, "gpus": 2} if "fsdp.yaml" in options else {})


def test_environment_of_the_user_wins(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP.replace("num_machines: 1", "num_machines: 2"))
    request = SubmitRequest(
        command=(*LAUNCH, "--config_file", "fsdp.yaml", "-m", "package.train"), cwd=tmp_path, env={"FSDP_VERSION": "1"}
    )
    translated = replace_launcher(request).request
    assert translated.env["FSDP_VERSION"] == "1"
    assert translated.command == (sys.executable, "-m", "package.train")
    assert translated.job == {"nodes": 2, "gpus": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bogus",), "unrecognized arguments: --bogus"),
        (("--config_file", "missing.yaml"), "missing.yaml"),
        (("--tpu",), "start other launchers"),
    ],
)
def test_what_accelerate_refuses_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        translate(tmp_path, *options, "program.py")


def test_python_without_accelerate_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"accelerate launch: .*python has no accelerate"):
        launcher = tmp_path / "accelerate"
        launcher.touch()
        (tmp_path / "python").symlink_to("/usr/bin/python3")
        replace_launcher(SubmitRequest(command=(str(launcher), "launch", "x.py"), cwd=tmp_path))


TRL = {
    "__init__.py": "",
    "scripts/__init__.py": "",
    "scripts/sft.py": "",
    "scripts/utils.py": """
import argparse


class TrlParser(argparse.ArgumentParser):
    def __init__(self, dataclass_types):
        super().__init__()
        self.dataclass_types = dataclass_types
        self.add_argument("--model")

    def parse_args_into_dataclasses(self, args=None, return_remaining_strings=False):
        raise ValueError("bf16 needs a GPU")
""",
    "cli.py": """
import sys
from accelerate.commands.launch import launch_command, launch_command_parser
from trl.scripts.utils import TrlParser


def main():
    rest = TrlParser([dict]).parse_args_into_dataclasses(sys.argv[2:], return_remaining_strings=True)[-1]
    script = [word for word in sys.argv[2:] if word not in rest]
    launch_command(launch_command_parser().parse_args([*rest, "/trl/scripts/sft.py", *script]))
""",
}


def test_trl_separates_the_options_of_accelerate(tmp_path: Path) -> None:
    """As trl does on a machine with GPUs: the classes of its arguments, which check them, are not needed."""
    for name, text in TRL.items():
        (tmp_path / "trl" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "trl" / name).write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def translate_trl(*arguments: str) -> SubmitRequest:
        command = (sys.executable, "-m", "trl.cli", *arguments)
        return replace_launcher(SubmitRequest(command=command, cwd=tmp_path, environ=environ)).request

    request = translate_trl("sft", "--num_processes", "4", "--model", "m", "--mixed_precision", "bf16")
    assert request.command == (sys.executable, "/trl/scripts/sft.py", "--model", "m")
    assert request.job == {"gpus": 4} and request.env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    with pytest.raises(UsageError, match="trl stf: stf is not a training command of this trl"):
        translate_trl("stf", "--model", "m")
