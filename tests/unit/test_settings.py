"""The environment variables that a submission passes on."""

from __future__ import annotations

import getpass
import os

import pytest

from clustertrain import settings

USER_ENV = {
    "PATH": "/bin",
    "SLURM_CONF": "/etc/slurm.conf",
    settings.HOME: "/data/runs",
    settings.CLUSTER: "big",
    settings.CLUSTER_PATH: "/clusters",
}


def test_variables_of_an_outer_rank_are_removed() -> None:
    own_names = [
        "RUN_DIR",
        "ATTEMPT",
        "NONCE",
        "NODE",
        "NODE_RANK",
        "NODE_LIST",
        "RANK_DIR",
        "DEVICE",
        "LOCAL_JOB",
    ]
    torchrun = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    torchrun += ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"]
    rank_env = dict.fromkeys([*(f"CLUSTERTRAIN_{name}" for name in own_names), *torchrun], "1")
    assert settings.strip_allocation_env({**USER_ENV, **rank_env}) == USER_ENV


def test_options_of_an_outer_allocation_are_removed() -> None:
    allocation_env = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_NODE": "100",
        "SLURMD_NODENAME": "a",
        "SBATCH_ACCOUNT": "theirs",
    }
    assert settings.strip_allocation_env({**USER_ENV, **allocation_env}) == USER_ENV


def test_sbatch_defaults_stay_outside_an_allocation() -> None:
    defaults = {"SBATCH_ACCOUNT": "physics", "SBATCH_PARTITION": "gpu"}
    options = {"SLURM_ACCOUNT": "x", "SBATCH_SIGNAL": "TERM@5", "SBATCH_NO_REQUEUE": "1", "SBATCH_TIMELIMIT": "1"}
    assert settings.strip_allocation_env({**USER_ENV, **defaults, **options}) == {**USER_ENV, **defaults}


def test_a_user_without_a_name_is_its_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", fail)
    assert settings.user_name() == str(os.getuid())
