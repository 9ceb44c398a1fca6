"""Cluster profiles: keys that both `cluster detect` and the plan use."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.config import cluster
from clustertrain.errors import ConfigError


def load(folder: Path, text: str) -> cluster.ClusterProfile:
    (folder / "p.toml").write_text(text)
    return cluster.load_profile("p", {"CLUSTERTRAIN_CLUSTER_PATH": str(folder)})


def test_measured_rates_are_read(tmp_path: Path) -> None:
    profile = load(tmp_path, 'gpus_per_node = 8\n[measured]\ngemm_tflops = 600\ndevice = "NVIDIA H100 80GB HBM3"\n')
    assert profile.gpus_per_node == 8 and profile.measured is not None
    assert profile.measured.gemm_tflops == 600.0 and profile.measured.fabric_bus_gb_s is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus_per_node = -1", "gpus_per_node = -1"),
        ("[measured]\nnode_bus_gb_s = 0", "greater than 0"),
        ("[measured]\ngemm_tflop = 1", r"did you mean measured\.gemm_tflops"),
        ('[measured]\ngemm_dtype = "tf32"', "use one of"),
    ],
)
def test_invalid_profile_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_profile_selection() -> None:
    assert cluster.default_profile_name({"CLUSTERTRAIN_CLUSTER": "big"}) == "big"
    assert cluster.default_profile_name({}) == ""
