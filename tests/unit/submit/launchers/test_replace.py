"""What a launcher's replacement tells: sizes that accelerate gives, options without effect, the Python it uses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clustertrain.errors import UsageError
from clustertrain.submit.launchers import replace as launchers
from clustertrain.submit.launchers.replace import Translation, replace_launcher
from clustertrain.submit.request import SubmitRequest


def translate(folder: Path, command: str, **job: Any) -> Translation:
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "CLUSTERTRAIN_CLUSTER_PATH": str(folder)}
    return replace_launcher(SubmitRequest(command=tuple(command.split()), cwd=folder, environ=environ, job=job))


def answer(folder: Path, **values: Any) -> None:
    """Make the accelerate of ``folder`` one that has read these values."""
    fields = {
        "env": {"ACCELERATE_MIXED_PRECISION": "no"}, "nodes": 1, "processes": None, "has_config": False,
        "is_cpu": False, "gpu_ids": None, "is_module": False, "is_program": False, "program": ["train.py", "--x"],
    }  # fmt: skip
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("python", "accelerate", "trl"):
        (folder / "bin" / name).write_text(f"#!/bin/sh\ncat <<'EOF'\n{json.dumps(fields | values)}\nEOF\n")
        (folder / "bin" / name).chmod(0o755)


def test_accelerate_without_a_size_means_all_gpus_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text("gpus_per_node = 8\n")
    answer(tmp_path)
    command = "accelerate launch train.py --x"
    translation = translate(tmp_path, command, cluster="site")
    assert translation.request.job == {"cluster": "site", "nodes": 1, "gpus": 8}
    assert translation.request.command == (f"{tmp_path}/bin/python", "train.py", "--x")
    note = "accelerate launch without --num_processes: 8, the GPUs per node of the cluster profile"
    assert note in translation.notes
    assert translate(tmp_path, command, cluster="site", gpus=2).request.job["gpus"] == 2
    assert translate(tmp_path, command, cluster="site", device="cpu").request.job["gpus"] == 1
    with pytest.raises(UsageError, match="accelerate launch without --num_processes: the number of GPUs per node is"):
        translate(tmp_path, command, backend="slurm")
    for count in (0, 4):  # on this machine
        monkeypatch.setattr(launchers, "count_gpus", lambda count=count: count)
        assert translate(tmp_path, command, backend="local").request.job["gpus"] == max(1, count)
    answer(tmp_path, is_cpu=True)  # accelerate launch --cpu
    assert "gpus" not in translate(tmp_path, command, cluster="site").request.job


def test_sizes_of_accelerate_have_to_fit(tmp_path: Path) -> None:
    answer(tmp_path, nodes=2, processes=4, has_config=True)
    command = "accelerate launch train.py --x"
    assert translate(tmp_path, command).request.job == {"nodes": 2, "gpus": 2}
    with pytest.raises(UsageError) as e:
        translate(tmp_path, command, gpus=8)
    text = "--gpus 8 contradicts the accelerate configuration: 4 processes on 2 nodes, 2 per node"
    assert e.value.message == text and "--num_processes" in str(e.value.fix)
    answer(tmp_path, nodes=2, processes=3, has_config=True)
    with pytest.raises(UsageError, match="configuration: 3 processes cannot be divided among 2 nodes"):
        translate(tmp_path, command)


def test_options_without_effect_are_noted(tmp_path: Path) -> None:
    answer(tmp_path, processes=2, gpu_ids="0")
    notes = translate(
        tmp_path, "accelerate launch --gpu_ids 0 --max_restarts 3 --main_process_port=1 train.py --x"
    ).notes
    assert "accelerate launch --gpu-ids: no effect; Slurm chooses the GPUs" in notes
    restarts = "no effect; clustertrain's requeues replace it, up to --max-requeues"
    assert f"accelerate launch --max-restarts: {restarts}" in notes
    assert "accelerate launch --main-process-port: no effect; clustertrain sets addresses and ports" in notes
    notes = translate(
        tmp_path, "torchrun --max-restarts 3 --role=r --log-dir d --tee 3 --rdzv-id 1 --standalone train.py"
    ).notes
    assert notes == (
        "torchrun is replaced by clustertrain's own launch",
        f"torchrun --max-restarts: {restarts}",
        "torchrun --role: no effect",
        "torchrun --log-dir, --tee: no effect; each rank has a log (clustertrain logs)",
        "torchrun --rdzv-id, --standalone: no effect; clustertrain sets addresses and ports",
    )
    notes = translate(tmp_path, "deepspeed --master_port 1 --quiet train.py", gpus=2).notes
    assert "deepspeed --master-port: no effect; clustertrain sets addresses and ports" in notes
    notes = translate(tmp_path, "python -O -W error -u -m torch.distributed.run train.py").notes
    assert notes[1:] == ("python -O -W error: for torchrun alone; the ranks do not get it",)


def test_trl_is_the_accelerate_launch_that_it_calls(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("gpus_per_node = 8\n")
    answer(tmp_path, program=["/env/trl/scripts/sft.py", "--x"])
    translation = translate(tmp_path, "trl sft --x", cluster="site")
    assert translation.request.command == (f"{tmp_path}/bin/python", "/env/trl/scripts/sft.py", "--x")
    assert translation.request.job["gpus"] == 8
    assert translation.notes[0] == "trl is replaced by clustertrain's own launch"
    answer(tmp_path, processes=4)
    with pytest.raises(UsageError, match="--gpus 8 contradicts trl sft: 4 processes on 1 node"):
        translate(tmp_path, "trl sft --x", gpus=8)


@pytest.mark.parametrize(
    ("line", "python"),
    [("#!/usr/bin/env python3", "python3"), ("#!{folder}/env/bin/python3.12 -E", "{folder}/env/bin/python3.12")],
)
def test_python_of_a_launcher_is_the_one_in_its_first_line(line: str, python: str, tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python3.12").touch()
    (tmp_path / "local").mkdir()
    launcher = tmp_path / "local" / "torchrun"
    launcher.write_text(line.format(folder=tmp_path) + "\nimport torch\n")
    launcher.chmod(0o755)
    translated = translate(tmp_path, f"{launcher} train.py").request
    assert translated.command == (python.format(folder=tmp_path), "train.py")
    (tmp_path / "bin").symlink_to("local")  # found in PATH
    assert translate(tmp_path, "torchrun train.py").request.command == translated.command
    (tmp_path / "local" / "python").touch()  # of another environment
    is_named = "/" in python
    beside = str(tmp_path / "local" / "python")
    assert translate(tmp_path, f"{launcher} train.py").request.command[0] == (
        translated.command[0] if is_named else beside
    )


def test_launcher_without_a_python_is_named_as_typed(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    for name, module in {"torchrun": "torch.distributed.run", "accelerate": "accelerate_cli"}.items():
        (tmp_path / "local" / name).write_text("#!/gone/python3\n")
        with pytest.raises(UsageError, match=f"^local/{name}: there is no python beside it") as e:
            translate(tmp_path, f"local/{name} launch train.py")
        assert module in str(e.value.fix)
    with pytest.raises(UsageError, match=r"^missing/torchrun: no such file"):
        translate(tmp_path, "missing/torchrun train.py")


def test_python_that_cannot_answer_is_named(tmp_path: Path) -> None:
    answer(tmp_path)
    (tmp_path / "bin" / "python").write_text("not a program\n")
    (tmp_path / "bin" / "python").chmod(0o644)
    with pytest.raises(UsageError, match=r"accelerate launch: .*/bin/python does not run here") as e:
        translate(tmp_path, "bin/accelerate launch train.py")
    assert "import json" not in str(e.value)
