"""Launchers in shell scripts, which each rank would start again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clustertrain.errors import UsageError
from clustertrain.submit.adopt.adoption import Adoption, adopt
from clustertrain.submit.adopt.script_file import check_script
from clustertrain.submit.launchers.hidden_launchers import find_hidden_launcher
from clustertrain.submit.launchers.replace import replace_launcher
from clustertrain.submit.request import SubmitRequest


def write(folder: Path, text: str, name: str = "run.sh") -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def find(folder: Path, *command: str) -> str:
    found = find_hidden_launcher(command or ("bash", "run.sh"), folder)
    return "" if found is None else f"{found.place}{' (if)' if found.is_conditional else ''}"


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("torchrun --nproc-per-node 2 train.py", 2, "torchrun --nproc-per-node 2 train.py"),
        ("cd /a && torchrun \\\n  train.py", 2, "torchrun train.py"),
        ("# torchrun\nexec nohup accelerate launch train.py > log 2>&1 &", 3, "exec nohup accelerate launch train.py"),
        ("N=8\nLAUNCHER='torchrun --nproc-per-node 8'\n$LAUNCHER train.py", 4, "$LAUNCHER train.py"),
        ("python -O -m torch.distributed.run train.py", 2, "python -O -m torch.distributed.run train.py"),
        ('"$CONDA_PREFIX/bin/torchrun" train.py', 2, '"$CONDA_PREFIX/bin/torchrun" train.py'),
        ("A=1 uv run deepspeed train.py", 2, "A=1 uv run deepspeed train.py"),
        ("for i in 1 2; do\n  mpirun -n 8 ./a.out\ndone", 3, "mpirun -n 8 ./a.out"),
        ("train() {\n  srun python train.py\n}\ntrain", 3, "srun python train.py"),
        ("bash <<EOF\ntorchrun train.py\nEOF", 2, "bash <<EOF torchrun train.py EOF"),
        ("eval \"torchrun train.py\"", 2, "eval \"torchrun train.py\""),
        ("trl sft --model x", 2, "trl sft --model x"),
    ],
)  # fmt: skip
def test_launcher_in_a_script_is_refused_with_its_line(text: str, line: int, shown: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    found = find_hidden_launcher(("bash", "-e", "run.sh", "x"), tmp_path)
    assert found is not None and not found.is_conditional
    assert (found.script, found.line) == ("run.sh", line) and found.text.startswith(shown)


@pytest.mark.parametrize(
    "text",
    [
        "# torchrun train.py",
        "echo torchrun train.py; printf 'torchrun x'",
        "cat > other.sh <<EOF\ntorchrun train.py\nEOF",
        "which torchrun; command -v torchrun; type deepspeed",
        "pip install deepspeed",
        "torchrun --help",
        "$1 train.py",
        "X=torchrun\nunset X",
        "python train.py --launcher torchrun",
        "echo 'not closed",
        "if true; then",
    ],
)
def test_harmless_script_passes(text: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    assert find(tmp_path) == ""


@pytest.mark.parametrize(
    "text",
    [
        'if [ -z "$RANK" ]; then torchrun train.py; else python train.py; fi',
        'case "$1" in\n many) torchrun train.py;;\nesac',
        '[ -n "$RANK" ] || torchrun train.py',
        '[[ -z $RANK ]] && torchrun train.py',
    ],
)  # fmt: skip
def test_launcher_under_a_condition_is_noted(text: str, tmp_path: Path) -> None:
    write(tmp_path, text)
    assert find(tmp_path).endswith("(if)")
    notes = replace_launcher(SubmitRequest(command=("./run.sh",), cwd=tmp_path)).notes
    assert len(notes) == 1 and "torchrun train.py: if a rank gets here, it starts torchrun again" in notes[0]


def test_script_that_a_script_starts_is_read(tmp_path: Path) -> None:
    write(tmp_path, "source env.sh\n./inner.sh\n./run.sh")
    write(tmp_path, "torchrun train.py", "inner.sh")
    assert find(tmp_path) == "./inner.sh, line 2: torchrun train.py"
    write(tmp_path, "deepspeed train.py", "env.sh")
    assert find(tmp_path) == "env.sh, line 2: deepspeed train.py"
    assert find(tmp_path, "nice", "sh", "run.sh") == "env.sh, line 2: deepspeed train.py"


def test_other_files_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, "torchrun train.py")
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\ntorchrun = 1\n")
    (tmp_path / "program").write_bytes(b"\x7fELF\0torchrun train.py\n")
    (tmp_path / "large.sh").write_text("#!/bin/sh\n" + "#\n" * 1_000_000 + "torchrun x.py\n")
    for command in ("./tool", "./program", "bash program", "./large.sh", "./missing.sh", "cat run.sh", "bash"):
        assert find(tmp_path, *command.split()) == "", command
    assert find_hidden_launcher(("bash", "run.sh")) is None
    assert find(tmp_path, "env", "-C", "/", "bash", "run.sh") == ""  # in another folder


def test_fix_says_what_to_write(tmp_path: Path) -> None:
    write(tmp_path, "module load x\ntorchrun --nproc-per-node 2 train.py")
    request = SubmitRequest(command=("./run.sh",), cwd=tmp_path)
    with pytest.raises(UsageError, match=r"^./run.sh, line 3: torchrun .* train.py: each rank would start") as e:
        replace_launcher(request)
    assert "submit the command of this line itself after --" in str(e.value.fix)
    assert "`clustertrain wrap --` before torchrun" in str(e.value.fix)
    with pytest.raises(UsageError) as e:
        replace_launcher(replace(request, wrapped=True))
    assert str(e.value.fix).startswith("start ./run.sh without wrap, and put `clustertrain wrap --` before torchrun")


def read(folder: Path, command: str) -> Adoption:
    text = f"#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4\n{command}\n"
    return adopt(check_script(text.encode(), "job.sbatch"), "job.sbatch", "job", folder)


def test_adopt_reads_the_script_too(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "torchrun train.py")
    with pytest.raises(UsageError, match=r"job.sbatch, line 4: it runs run.sh, whose line 2 starts torchrun") as e:
        read(tmp_path, "cd sub\nsrun bash run.sh")
    assert "clustertrain wrap --" in str(e.value.fix)
    with pytest.raises(UsageError, match=r"line 3: torchrun inside env -S"):
        read(tmp_path, "srun env -S 'torchrun train.py'")
    write(tmp_path, "[ -n \"$RANK\" ] || torchrun train.py")  # fmt: skip
    details = [question.detail for question in read(tmp_path, "srun ./run.sh").questions]
    assert any("each rank that gets here starts torchrun again" in detail for detail in details)
