"""GPU types and their memory, for the plan. Names are those that sites give their Slurm gres types."""

from __future__ import annotations

import re

import msgspec


class GpuType(msgspec.Struct, frozen=True, kw_only=True):
    """``memory_gib`` is what the vendor sells; ``usable_gib`` what CUDA reports as total, where it was seen. ``fp8``
    and ``bf16``: whether its matrix units multiply such numbers; those with bf16 have tf32 or its like."""

    name: str
    memory_gib: float
    source: str
    fp8: bool
    bf16: bool = True
    usable_gib: float | None = None

    @property
    def capacity_gib(self) -> float:
        return self.usable_gib if self.usable_gib is not None else self.memory_gib


# Transformer Engine's support matrix: fp8 from compute capability 8.9 (Ada) on. AMD: from CDNA 3 (MI300) on.
_FIRST_FP8 = 8.9
_FIRST_BF16 = 8.0  # NVIDIA Ampere; and tf32


def _nvidia(name: str, capability: float, memory_gib: float, sheet: str, usable_gib: float | None = None) -> GpuType:
    """``capability``: from NVIDIA's table "CUDA GPU Compute Capability"."""
    return GpuType(
        name=name,
        memory_gib=memory_gib,
        source=f"NVIDIA {sheet} data sheet",
        fp8=capability >= _FIRST_FP8,
        bf16=capability >= _FIRST_BF16,
        usable_gib=usable_gib,
    )


# Vendors' "GB" of HBM and GDDR are binary: an "80 GB" A100 reports 81920 MiB in nvidia-smi. Data-centre cards reserve a
# little of it; 0.8 of the capacity, which the plan stays below, covers that.
CATALOGUE: tuple[GpuType, ...] = (
    _nvidia("p100", 6.0, 16, "Tesla P100"),
    _nvidia("v100", 7.0, 16, "Tesla V100"),
    _nvidia("v100-32gb", 7.0, 32, "Tesla V100"),
    _nvidia("t4", 7.5, 16, "T4", 15.0),
    _nvidia("rtx-2080-ti", 7.5, 11, "GeForce RTX 2080 Ti"),
    _nvidia("rtx-3090", 8.6, 24, "GeForce RTX 3090"),
    _nvidia("rtx-4090", 8.9, 24, "GeForce RTX 4090"),
    _nvidia("rtx-5090", 12.0, 32, "GeForce RTX 5090"),
    _nvidia("rtx-6000", 7.5, 24, "Quadro RTX 6000"),
    _nvidia("rtx-8000", 7.5, 48, "Quadro RTX 8000"),
    _nvidia("a10", 8.6, 24, "A10", 22.5),
    _nvidia("a16", 8.6, 16, "A16"),
    _nvidia("a30", 8.0, 24, "A30"),
    _nvidia("a40", 8.6, 48, "A40", 45.0),
    _nvidia("a6000", 8.6, 48, "RTX A6000"),
    _nvidia("a100", 8.0, 40, "A100"),
    _nvidia("a100-80gb", 8.0, 80, "A100"),
    _nvidia("l4", 8.9, 24, "L4", 22.5),
    _nvidia("l40", 8.9, 48, "L40", 45.0),
    _nvidia("l40s", 8.9, 48, "L40S", 45.0),
    _nvidia("h100", 9.0, 80, "H100"),
    _nvidia("h100-94gb", 9.0, 94, "H100 NVL"),
    _nvidia("h200", 9.0, 141, "H200", 139.8),
    _nvidia("gh200", 9.0, 96, "GH200"),
    _nvidia("b200", 10.0, 180, "DGX B200"),
    _nvidia("gb200", 10.0, 186, "GB200 NVL72"),
    _nvidia("b300", 10.3, 270, "DGX B300"),
    GpuType(name="mi250", memory_gib=64, fp8=False, source="AMD Instinct MI250 data sheet: 128 GB in two devices"),
    GpuType(name="mi250x", memory_gib=64, fp8=False, source="AMD Instinct MI250X data sheet: 128 GB in two devices"),
    GpuType(name="mi300a", memory_gib=128, fp8=True, source="AMD Instinct MI300A data sheet"),
    GpuType(name="mi300x", memory_gib=192, fp8=True, source="AMD Instinct MI300X data sheet"),
    GpuType(name="mi325x", memory_gib=256, fp8=True, source="AMD Instinct MI325X data sheet"),
)

_BY_NAME = {gpu.name: gpu for gpu in CATALOGUE}
# Form factors and vendors' words that say nothing about the memory.
_NOISE = frozenset({"nvidia", "amd", "tesla", "quadro", "geforce", "instinct", "sxm", "sxm2", "sxm3", "sxm4", "sxm5",
                    "pcie", "nvl", "hbm2", "hbm2e", "hbm3", "hbm3e", "oam", "rtx", "gpu"})  # fmt: skip


def _words(name: str) -> list[str]:
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w not in _NOISE]
    return [re.sub(r"^(\d+)g$", r"\1gb", w) for w in words]


_BY_WORDS = {tuple(sorted(_words(gpu.name))): gpu for gpu in CATALOGUE}


def find(name: str) -> GpuType | None:
    """The catalogue's entry for a site's or the driver's name (``a100``, ``nvidia_h100_80gb_hbm3``), or None.

    A memory size in the name decides between variants; one that contradicts the catalogue makes the type unknown, since
    a guess would end in an out-of-memory error hours later. A MIG slice (``1g.10gb``) is unknown for the same reason.
    """
    if not name or re.search(r"\d+g\.\d+gb", name.lower()):
        return None
    words = _words(name)
    exact = _BY_WORDS.get(tuple(sorted(words)))
    if exact is not None:
        return exact
    sizes = [int(w[:-2]) for w in words if re.fullmatch(r"\d+gb", w)]
    models = [w for w in words if not re.fullmatch(r"\d+gb", w)]
    gpu = _BY_WORDS.get(tuple(sorted(models)))
    if gpu is None or len(sizes) != 1 or gpu.memory_gib != sizes[0]:
        return None
    return gpu
