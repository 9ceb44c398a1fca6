"""``clustertrain checkpoint export``, as it is called."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from clustertrain import proc
from tests.unit.checkpoint.saved import change_index, decoder, recipe_of
from tests.unit.cli.checkpoint.conftest import SIZES, Command, folder_of


def test_export_says_what_it_wrote(run: Path, command: Command, tmp_path: Path) -> None:
    said = command("export", "net", "--output", tmp_path / "out")
    size = sum(p.nbytes for p in decoder(recipe_of(**SIZES)).parameters())
    assert said.out.splitlines() == [
        f"step 6: 12 tensors, {size / 2**20:.1f} MiB, huggingface names, in {tmp_path}/out",
        "  model.safetensors",
        "  config.json",
    ]
    said = command("export", "net@3", "-o", tmp_path / "x.pt", "--format", "torch", "--dtype", "bfloat16", "--json")
    assert said.json == {
        "run": "net-abcdef",
        "step": 3,
        "path": str(tmp_path / "x.pt"),
        "format": "torch",
        "names": "own",
        "files": [],
        "tensors": 12,
        "bytes": size // 2,
    }
    assert {t.dtype for t in torch.load(tmp_path / "x.pt", weights_only=True).values()} == {torch.bfloat16}


def judge(run: Path, step: int, value: float | None, mode: str = "min") -> None:
    change_index(folder_of(run, step), metric={"name": "validation_loss", "value": value, "mode": mode})


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 6)])
def test_the_best_is_marked_and_exported(run: Path, command: Command, tmp_path: Path, mode: str, best: int) -> None:
    judge(run, 3, 0.25, mode)
    judge(run, 6, 0.5, mode)
    rows = command("list", "net", "--json").json["checkpoints"]
    assert {r["step"]: (r["metric"]["value"], r["best"]) for r in rows} == {3: (0.25, best == 3), 6: (0.5, best == 6)}
    lines = [line.split() for line in command("list", "net").out.splitlines()]
    assert lines[0][-1] == "validation_loss"
    assert [line[0] for line in lines if "best" in line] == [str(best)]
    done = command("export", "net", "--best", "-o", tmp_path / "out", "--json").json
    assert (done["step"], done["tensors"]) == (best, 12)


def test_best_of_none_and_of_one(run: Path, command: Command, tmp_path: Path) -> None:
    judge(run, 6, None)
    said = command("export", "net", "--best", "-o", tmp_path / "out")
    assert said.code == 1 and "no checkpoint records a value of the deciding metric" in said.err
    for words in (("net", "--step", "3"), ("net@3",)):
        said = command("export", *words, "--best", "-o", tmp_path / "out")
        assert said.code == 2 and "leave one of them out" in said.err


@pytest.mark.long
def test_neither_an_export_nor_a_comparison_imports_torch(run: Path) -> None:
    program = "import sys; from clustertrain.cli.main import main; code = main(); print(code, 'torch' in sys.modules)"
    for words, code in (["diff", "net@3", "net@6"], 1), (["export", "net", "-o", "out", "--dtype", "bfloat16"], 0):
        done = proc.run([sys.executable, "-c", program, "checkpoint", *words], cwd=run, timeout_s=60.0)
        assert done.stdout.splitlines()[-1] == f"{code} False", done.stderr


def test_a_checkpoint_knows_its_model_wherever_it_lies(run: Path, command: Command, tmp_path: Path) -> None:
    shutil.copytree(folder_of(run, 3), tmp_path / "elsewhere" / "step-00000003")
    said = command("export", tmp_path / "elsewhere", "-o", tmp_path / "out", "--step", "3", "--json")
    assert (said.json["names"], said.json["run"]) == ("huggingface", str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("size", "files"), [("256kB", 6), ("0.25MiB", 5), ("256K", 6), ("256000", 6), ("0", None), ("5 big", None)]
)
def test_sizes_of_shards(run: Path, command: Command, tmp_path: Path, size: str, files: int | None) -> None:
    said = command("export", "net", "-o", tmp_path / "out", "--max-shard-size", size, "--names", "own", "--json")
    if files is None:
        assert (said.code, "write 5GB, 500MB or 2GiB" in said.err) == (2, True)
    else:
        assert len(said.json["files"]) == files + 1
