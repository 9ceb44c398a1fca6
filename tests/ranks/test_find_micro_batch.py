"""``plan --find-micro-batch`` with real ranks on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clustertrain import clock
from tests.documents import check_document
from tests.runs import INTERRUPTIBLE, LOCAL

pytestmark = pytest.mark.ranks
# The command line with a lower memory limit per rank than 4 GiB, which no small model would reach.
LIMITED = """
import sys
from clustertrain.agent import micro_batch_search
micro_batch_search.DEFAULT_CPU_GIB = float(sys.argv.pop(1))
from clustertrain.cli.main import main
sys.argv[0] = "clustertrain"
sys.exit(main())
"""
# Most of the memory is logits: 51 MiB per sequence, with all copies.
RECIPE = """
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 1
vocab_size = 8192
[data]
seq_len = 512
max_bytes = 262144
[train]
global_batch = 12
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def start_search(folder: Path, gib: float, *args: str) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    environ |= {"CLUSTERTRAIN_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    # Let glibc map each tensor of 1 MiB or more separately; otherwise some reuse gaps in the heap, which varies.
    environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    options = (*LOCAL, "--find-micro-batch")
    return subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-c", LIMITED, str(gib), "plan", *options, *args],
        cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=300)
    return child.returncode, out, err


def list_temporary_files(folder: Path) -> list[str]:
    """List temporary files, except the cache that torch keeps for the next process."""
    return [p.name for p in (folder / "tmp").iterdir() if not p.name.startswith("torchinductor_")]


def test_search_grows_to_memory_limit_and_recommends_fit(folder: Path) -> None:
    code, out, err = finish(
        start_search(folder, 0.185, "--gpus", "1", "--json", "--set", "train.global_batch=6", "recipe.toml")
    )
    assert code == 0, err
    report: dict[str, Any] = check_document("plan-find-micro-batch", out)
    rows = {row["micro_batch"]: row for row in report["trials"]}
    assert list(rows) == [1, 2, 4, 3]  # 3 is the only divisor of 6 between 2 and 4
    assert rows[4]["outcome"] == "out_of_memory" and rows[4]["peak_gib"] is None
    assert [rows[m]["fits"] for m in (1, 2)] == [True] * 2
    assert rows[1]["peak_gib"] < 0.08 < rows[2]["peak_gib"] < 0.13 < rows[3]["peak_gib"]
    assert not rows[4]["divides_batch"] and all(rows[m]["tokens_per_s_per_gpu"] > 0 for m in (1, 2, 3))
    assert (
        report["recommended"] in rows
        and rows[report["recommended"]]["fits"]
        and rows[report["recommended"]]["divides_batch"]
    )
    assert (
        report["assignment"] == f"train.micro_batch={report['recommended']}"
        and report["represents"] == "the plan's 1 rank"
    )
    assert list_temporary_files(folder) == [] and not (folder / "home").exists()


def test_table_names_the_recipe_line(folder: Path) -> None:
    code, out, err = finish(start_search(folder, 4, "--gpus", "1", "--set", "train.global_batch=2", "recipe.toml"))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split() == ["micro_batch", "peak_gib", "tokens_per_s_per_gpu", "fits"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"] and out.count("<- recommended") == 1
    assert lines[-2] == "  [train]" and lines[-1].startswith("  micro_batch = ")
    assert "micro_batch 2 ..." in err  # progress


def test_nothing_fits_is_reported_as_failure(folder: Path) -> None:
    code, out, err = finish(start_search(folder, 0.02, "--gpus", "2", "recipe.toml"))
    assert code == 1 and "no: out of memory" in out and "micro_batch 1 does not fit" in err


def test_error_other_than_memory_is_shown(folder: Path) -> None:
    (folder / "torn.py").write_text(
        "from torch import nn\n"
        "class Torn(nn.Embedding):\n"
        "    def forward(self, x):\n"
        "        if len(x) > 1:\n"
        "            raise ValueError('only one at a time')\n"
        "        return super().forward(x)\n"
    )
    (folder / "recipe.toml").write_text(
        '[model]\nentry = "torn:Torn"\nargs = { num_embeddings = 256, embedding_dim = 256 }\n'
    )
    code, out, err = finish(start_search(folder, 4, "--gpus", "1", "recipe.toml"))
    assert code == 1 and "ValueError: only one at a time" in err and "trial of micro_batch 2 failed" in err
    assert out.splitlines()[1].split()[0] == "1"  # the trials before the error


def rank_processes(child: subprocess.Popen[str]) -> list[psutil.Process]:
    ranks = []
    for p in psutil.Process(child.pid).children(recursive=True):
        try:
            if (
                "clustertrain.train.tools.micro_batch_probe" in p.cmdline()
                and "torch.distributed.run" not in p.cmdline()
            ):
                ranks.append(p)
        except psutil.Error:
            continue
    return ranks


@pytest.fixture
def running_search(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Yield a search that is probing with two ranks, and all its descendants."""
    child = start_search(folder, 4, "--gpus", "2", "recipe.toml")
    try:
        assert clock.wait_until(lambda: len(rank_processes(child)) == 2, 60.0)
        yield child, psutil.Process(child.pid).children(recursive=True)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_search_leaves_no_process_and_no_file(
    running_search: tuple[subprocess.Popen[str], list[psutil.Process]], folder: Path, number: signal.Signals
) -> None:
    child, descendants = running_search
    child.send_signal(number)
    code, _, err = finish(child)
    assert code == 130, err
    assert len(descendants) >= 3 and not any(p.is_running() for p in descendants)
    assert list_temporary_files(folder) == []
