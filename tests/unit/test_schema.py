"""Decoding into typed structs, also when several threads use a type for the first time at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import tomli_w

from clustertrain import schema

# Threads that use the recipe's types for the first time at once. msgspec itself crashed in each of a dozen tries.
FIRST_USE = """
import sys, threading
from pathlib import Path
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
sys.setswitchinterval(1e-5)
run, found, start = RunDir(Path(sys.argv[1])), [], threading.Barrier(4)
def load():
    start.wait()
    for _ in range(3):
        found.append(load_spec(run).recipe.train.steps)
threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found)
"""


@pytest.mark.parametrize("_", range(3))
def test_threads_may_load_their_first_spec_at_once(tmp_path: Path, _: int) -> None:
    (tmp_path / "spec.toml").write_text(tomli_w.dumps({"recipe": {"train": {"steps": 7}}}))
    argv = [sys.executable, "-X", "faulthandler", "-c", FIRST_USE, str(tmp_path)]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([7] * 12)


class Point(msgspec.Struct):
    x: int


def test_decode_json_and_convert_builtins() -> None:
    assert schema.decode(b'{"x": 3}', Point) == schema.convert({"x": 3}, Point) == Point(3)
    assert schema.decode(b"[[1]]", list[list[int]]) == [[1]]


@pytest.mark.parametrize("text", [b'{"x": "3"}', b"{}", b"", b"[" * 100_000, b'{"x": "\xff"}'], ids=repr)
def test_any_invalid_input_is_a_decode_error(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        schema.decode(text, Point)
