"""What of the environment a submission passes on."""

from __future__ import annotations

from clustertrain import settings

USERS = {
    "PATH": "/bin",
    "SLURM_CONF": "/etc/slurm.conf",
    settings.HOME: "/data/runs",
    settings.CLUSTER: "big",
    settings.CLUSTER_PATH: "/clusters",
}


def test_nothing_of_an_enclosing_rank_reaches_the_new_job() -> None:
    ours = [
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
    inside = dict.fromkeys([*(f"CLUSTERTRAIN_{name}" for name in ours), *torchrun], "1")
    assert settings.strip_allocation_env({**USERS, **inside}) == USERS


def test_inside_an_allocation_its_options_are_dropped() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "100", "SLURMD_NODENAME": "a", "SBATCH_ACCOUNT": "theirs"}
    assert settings.strip_allocation_env({**USERS, **inside}) == USERS


def test_outside_of_an_allocation_the_users_defaults_for_sbatch_stay() -> None:
    defaults = {"SBATCH_ACCOUNT": "physics", "SBATCH_PARTITION": "gpu"}
    options = {"SLURM_ACCOUNT": "x", "SBATCH_SIGNAL": "TERM@5", "SBATCH_NO_REQUEUE": "1", "SBATCH_TIMELIMIT": "1"}
    assert settings.strip_allocation_env({**USERS, **defaults, **options}) == {**USERS, **defaults}
