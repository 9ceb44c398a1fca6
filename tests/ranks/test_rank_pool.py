"""The fork server of the ranks does not keep them from using a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.ranks.rank_pool import preloaded_modules

# What asks CUDA's runtime for devices. Afterwards, torch refuses to initialize CUDA in a fork.
_QUERIES = (
    "cuda.is_available", "cuda.device_count", "cuda.current_device", "cuda.get_device_capability",
    "cuda.get_device_properties", "cuda.get_device_name", "cuda.mem_get_info", "cuda._lazy_init",
    "accelerator.is_available", "accelerator.device_count", "accelerator.current_device_index",
)  # fmt: skip
# Imports modules, and prints which of them call one of the queries.
_PROGRAM = """
import contextlib, functools, importlib, json, sys
import torch

calls = []

def report(query):
    owner, _, name = query.partition(".")
    original = getattr(getattr(torch, owner), name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        calls.append(module)
        return original(*args, **kwargs)

    setattr(getattr(torch, owner), name, wrapper)

modules, queries = map(json.loads, sys.argv[1:])
for query in queries:
    report(query)
for module in modules:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(module)
print(json.dumps(sorted(set(calls))))
"""


def _modules_that_use_cuda(modules: list[str]) -> list[str]:
    command = [sys.executable, "-c", _PROGRAM, json.dumps(modules), json.dumps(_QUERIES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
def test_preloaded_modules_do_not_initialize_cuda() -> None:
    assert _modules_that_use_cuda(preloaded_modules(has_cuda=True)) == []


@pytest.mark.long
def test_modules_that_initialize_cuda_are_found() -> None:
    assert _modules_that_use_cuda(preloaded_modules(has_cuda=False)) == ["torchao.optim"]
