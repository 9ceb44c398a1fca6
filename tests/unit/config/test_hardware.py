"""GPU names of sites and drivers, and the catalog of GPUs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from clustertrain.config import hardware


@pytest.mark.parametrize(
    ("name", "gpu_type"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL 94GB", "h100-nvl"),
        ("a100", "a100"),
        ("a100_80gb", "a100-80gb"),
        ("a100-sxm4-80gb", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("a100_80g", "a100-80gb"),
        ("Tesla-V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx_a6000", "a6000"),
        ("quadro_rtx_6000", "rtx-6000"),
        ("nvidia_h200", "h200"),
        ("mi300x", "mi300x"),
    ],
)
def test_known_gpu_names(name: str, gpu_type: str) -> None:
    gpu = hardware.find_gpu_type(name)
    assert gpu is not None and gpu.name == gpu_type


@pytest.mark.parametrize("name", ["", "gpu", "h100-20gb", "x9000", "a100_1g.10gb", "nvidia_a100_3g.20gb", "a100 h100"])
def test_ambiguous_gpu_name_is_unknown(name: str) -> None:
    assert hardware.find_gpu_type(name) is None


def test_every_gpu_has_source_and_plausible_memory() -> None:
    for gpu in hardware.CATALOG:
        assert gpu.source
        assert 8 <= gpu.capacity_gib <= gpu.memory_gib <= 512
        assert hardware.find_gpu_type(gpu.name) is gpu


@pytest.mark.parametrize(
    ("name", "fp8"),
    [("v100", False), ("a100", False), ("a10", False), ("l40s", True), ("h100", True), ("b200", True),
     ("mi250x", False), ("mi300x", True)],
)  # fmt: skip
def test_fp8_support(name: str, fp8: bool) -> None:
    gpu = hardware.find_gpu_type(name)
    assert gpu is not None and gpu.fp8 is fp8


def test_bf16_starts_with_ampere() -> None:
    without = {gpu.name for gpu in hardware.CATALOG if not gpu.bf16}
    assert without == {
        "p100",
        "v100",
        "v100-32gb",
        "v100-pcie",
        "v100-pcie-32gb",
        "t4",
        "rtx-2080-ti",
        "rtx-6000",
        "rtx-8000",
    }


def test_every_gpu_has_positive_rates() -> None:
    for gpu in hardware.CATALOG:
        assert min(gpu.tflops, gpu.memory_gb_s, gpu.fabric_gb_s, gpu.power_limit_factor) > 0, gpu.name
        assert gpu.link_gb_s >= 0 and gpu.power_limit_factor <= 1, gpu.name
        # Fewer bits are faster, and the links of a node faster than a GPU's share of the network.
        assert not gpu.fp8_tflops or gpu.fp8_tflops > gpu.tflops, gpu.name
        assert not gpu.fp4_tflops or gpu.fp4_tflops > gpu.fp8_tflops, gpu.name
        assert not gpu.link_gb_s or gpu.link_gb_s > gpu.fabric_gb_s, gpu.name


def test_gpu_generations_get_faster() -> None:
    generations = [hardware.find_gpu_type(name) for name in ("v100", "a100-80gb", "h100", "b200")]
    for older, newer in pairwise(generations):
        assert older is not None and newer is not None
        assert newer.tflops > older.tflops and newer.memory_gb_s > older.memory_gb_s
        assert newer.link_gb_s > older.link_gb_s and newer.memory_gib >= older.memory_gib
