"""GPU types (memory, compute rates, bandwidths) and networks between nodes, with a source per line.

GPU names follow the sites' Slurm gres types. To add a type, add a line to ``CATALOG``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from clustertrain.config.parsing.documents import did_you_mean
from clustertrain.errors import ConfigError


class GpuType(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU type: memory, compute rates and bandwidths; the ``[gpu]`` table of a cluster profile.

    Rates are the vendor's dense ones, without sparsity, in TFLOP/s (1e12); 0: no such unit. GB are 1e9 bytes.
    """

    name: str
    """Name in lower case, as ``--gpu-type`` takes it."""
    memory_gib: float
    """Nominal memory in GiB, as the vendor sells it."""
    source: str = "the cluster profile"
    """Source of the figures."""
    fp32_tflops: float = 0.0
    """Rate in fp32 without reduced-precision matrix units."""
    tflops: float = 0.0
    """Rate of the 16-bit format used for training: bf16 where it exists, otherwise fp16."""
    fp8_tflops: float = 0.0
    """Rate in fp8. 0: not supported."""
    fp4_tflops: float = 0.0
    """Rate in fp4. 0: not supported."""
    memory_gb_s: float = 0.0
    """Memory bandwidth in GB/s."""
    link_gb_s: float = 0.0
    """Bandwidth of one GPU's NVLink (or equivalent) in one direction, in GB/s. 0: the GPUs of a node communicate over
    PCIe."""
    domain: int = 0
    """GPUs joined by such links. 0: those of a node."""
    fabric_gb_s: float = 12.5
    """One GPU's share of the network, in GB/s, in the system in which the type usually ships."""
    power_limit_factor: float = 1.0
    """Fraction of the rates that a card sustains if its power limit is below that of its type."""
    bf16: bool = True
    """The type supports bf16."""
    usable_gib: float | None = None
    """Total memory that CUDA reports, in GiB. Unset: not observed, ``memory_gib`` is used."""

    @property
    def capacity_gib(self) -> float:
        return self.usable_gib if self.usable_gib is not None else self.memory_gib

    @property
    def fp8(self) -> bool:
        return self.fp8_tflops > 0


_MIN_BF16_CAPABILITY = 8.0  # NVIDIA Ampere, which also added tf32


def _nvidia(
    name: str,
    capability: float,
    memory_gib: float,
    rates: tuple[float, float, float, float],
    memory_gb_s: float,
    link_gb_s: float,
    datasheet: str,
    *,
    fabric_gb_s: float = 12.5,
    domain: int = 0,
    usable_gib: float | None = None,
    power_limit_factor: float = 1.0,
) -> GpuType:
    """Return the entry of an NVIDIA GPU.

    Args:
        capability: from NVIDIA's table "CUDA GPU Compute Capability".
        rates: TFLOP/s of fp32 without tensor cores, and of 16, 8 and 4 bits with them.
    """
    return GpuType(
        name=name,
        memory_gib=memory_gib,
        source=f"NVIDIA {datasheet} data sheet",
        fp32_tflops=rates[0],
        tflops=rates[1],
        fp8_tflops=rates[2],
        fp4_tflops=rates[3],
        memory_gb_s=memory_gb_s,
        link_gb_s=link_gb_s,
        domain=domain,
        fabric_gb_s=fabric_gb_s,
        bf16=capability >= _MIN_BF16_CAPABILITY,
        usable_gib=usable_gib,
        power_limit_factor=power_limit_factor,
    )


# Vendors' "GB" of HBM and GDDR are binary: an "80 GB" A100 reports 81920 MiB in nvidia-smi. Data-center cards reserve a
# little of it; the safety margin of the search covers that.
# Networks: 12.5 GB/s per GPU is one 100 Gbit/s port per GPU. DGX A100: 8 x 200 Gbit/s (HDR); DGX H100, H200 and B200:
# 8 x 400 (NDR); GB200 NVL72: 400 per GPU; DGX B300 and GB300: 800 (ConnectX-8): NVIDIA's guides of these systems.
# Data sheets that state rates with sparsity are halved here.
CATALOG: tuple[GpuType, ...] = (
    _nvidia("p100", 6.0, 16, (10.6, 21.2, 0, 0), 732, 80, "Tesla P100"),
    _nvidia("v100", 7.0, 16, (15.7, 125, 0, 0), 900, 150, "Tesla V100"),
    _nvidia("v100-32gb", 7.0, 32, (15.7, 125, 0, 0), 900, 150, "Tesla V100"),
    _nvidia("v100-pcie", 7.0, 16, (14, 112, 0, 0), 900, 0, "Tesla V100 PCIe"),
    _nvidia("v100-pcie-32gb", 7.0, 32, (14, 112, 0, 0), 900, 0, "Tesla V100 PCIe"),
    _nvidia("t4", 7.5, 16, (8.1, 65, 0, 0), 320, 0, "T4", usable_gib=15.0),
    _nvidia("rtx-2080-ti", 7.5, 11, (13.4, 53.8, 0, 0), 616, 0, "GeForce RTX 2080 Ti"),
    _nvidia("rtx-3090", 8.6, 24, (35.6, 71, 0, 0), 936, 0, "GeForce RTX 3090"),
    _nvidia("rtx-4090", 8.9, 24, (82.6, 165, 330, 0), 1008, 0, "GeForce RTX 4090"),
    _nvidia("rtx-5090", 12.0, 32, (104.8, 210, 419, 1676), 1792, 0, "GeForce RTX 5090"),
    _nvidia("rtx-6000", 7.5, 24, (16.3, 130.5, 0, 0), 672, 0, "Quadro RTX 6000"),
    _nvidia("rtx-8000", 7.5, 48, (16.3, 130.5, 0, 0), 672, 0, "Quadro RTX 8000"),
    _nvidia("a10", 8.6, 24, (31.2, 125, 0, 0), 600, 0, "A10", usable_gib=22.5),
    _nvidia("a16", 8.6, 16, (4.5, 18, 0, 0), 200, 0, "A16"),
    _nvidia("a30", 8.0, 24, (10.3, 165, 0, 0), 933, 0, "A30"),
    _nvidia("a40", 8.6, 48, (37.4, 149.7, 0, 0), 696, 0, "A40", usable_gib=45.0),
    _nvidia("a6000", 8.6, 48, (38.7, 154.8, 0, 0), 768, 0, "RTX A6000"),
    _nvidia("a100", 8.0, 40, (19.5, 312, 0, 0), 1555, 300, "A100", fabric_gb_s=25),
    _nvidia("a100-80gb", 8.0, 80, (19.5, 312, 0, 0), 2039, 300, "A100", fabric_gb_s=25),
    _nvidia("a100-pcie", 8.0, 40, (19.5, 312, 0, 0), 1555, 0, "A100 PCIe"),
    _nvidia("a100-pcie-80gb", 8.0, 80, (19.5, 312, 0, 0), 1935, 0, "A100 PCIe"),
    _nvidia("a800", 8.0, 80, (19.5, 312, 0, 0), 2039, 200, "A800", fabric_gb_s=25),
    _nvidia("l4", 8.9, 24, (30.3, 121, 242, 0), 300, 0, "L4", usable_gib=22.5),
    _nvidia("l40", 8.9, 48, (90.5, 181, 362, 0), 864, 0, "L40", usable_gib=45.0),
    _nvidia("l40s", 8.9, 48, (91.6, 362, 733, 0), 864, 0, "L40S", usable_gib=45.0),
    _nvidia("h100", 9.0, 80, (67, 989, 1979, 0), 3350, 450, "H100", fabric_gb_s=50),
    _nvidia("h100-pcie", 9.0, 80, (51, 756, 1513, 0), 2000, 0, "H100 PCIe"),
    # NVL bridges join pairs.
    _nvidia("h100-nvl", 9.0, 94, (60, 835, 1671, 0), 3900, 300, "H100 NVL", fabric_gb_s=25, domain=2),
    _nvidia("h100-94gb", 9.0, 94, (67, 989, 1979, 0), 2400, 450, "H100", fabric_gb_s=50),
    # HBM2e and 500 W, as in torchtitan's benchmarks; its factor is fitted with plan/cost/compute.py's constants.
    _nvidia("h100-96gb", 9.0, 96, (67, 989, 1979, 0), 2400, 450, "H100", fabric_gb_s=50, usable_gib=95.0,
            power_limit_factor=0.92),
    _nvidia("h800", 9.0, 80, (67, 989, 1979, 0), 3350, 200, "H800", fabric_gb_s=50),
    _nvidia("h200", 9.0, 141, (67, 989, 1979, 0), 4800, 450, "H200", fabric_gb_s=50, usable_gib=139.8),
    _nvidia("gh200", 9.0, 96, (67, 989, 1979, 0), 4000, 450, "GH200", fabric_gb_s=50),
    _nvidia("b200", 10.0, 180, (75, 2250, 4500, 9000), 7700, 900, "DGX B200", fabric_gb_s=50),
    _nvidia("gb200", 10.0, 186, (80, 2500, 5000, 10000), 8000, 900, "GB200 NVL72", fabric_gb_s=50, domain=72),
    _nvidia("b300", 10.3, 270, (75, 2250, 4500, 13500), 7700, 900, "DGX B300", fabric_gb_s=100),
    _nvidia("gb300", 10.3, 288, (80, 2500, 5000, 15000), 8000, 900, "GB300 NVL72", fabric_gb_s=100, domain=72),
    GpuType(name="mi250", memory_gib=64, fp32_tflops=22.6,
            tflops=181, memory_gb_s=1638, link_gb_s=100,
            source="AMD Instinct MI250 data sheet: 128 GB in two devices"),
    GpuType(name="mi250x", memory_gib=64, fp32_tflops=23.9,
            tflops=191.5, memory_gb_s=1638, link_gb_s=100, fabric_gb_s=12.5,
            source="AMD Instinct MI250X data sheet: 128 GB in two devices"),
    GpuType(name="mi300a", memory_gib=128, fp32_tflops=122.6,
            tflops=981, fp8_tflops=1961, memory_gb_s=5300, link_gb_s=192,
            fabric_gb_s=25, source="AMD Instinct MI300A data sheet"),
    GpuType(name="mi300x", memory_gib=192, fp32_tflops=163.4,
            tflops=1307, fp8_tflops=2615, memory_gb_s=5300, link_gb_s=448,
            fabric_gb_s=50, source="AMD Instinct MI300X data sheet"),
    GpuType(name="mi325x", memory_gib=256, fp32_tflops=163.4,
            tflops=1307, fp8_tflops=2615, memory_gb_s=6000, link_gb_s=448,
            fabric_gb_s=50, source="AMD Instinct MI325X data sheet"),
)  # fmt: skip

_BY_NAME = {gpu.name: gpu for gpu in CATALOG}
# Form factors and vendor terms that do not distinguish types.
_IGNORED_TOKENS = frozenset({
    "nvidia", "amd", "tesla", "quadro", "geforce", "instinct", "sxm", "sxm2", "sxm3", "sxm4", "sxm5",
                    "hbm2", "hbm2e", "hbm3", "hbm3e", "oam", "rtx", "gpu"})  # fmt: skip


def _name_tokens(name: str) -> list[str]:
    tokens = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w not in _IGNORED_TOKENS]
    return [re.sub(r"^(\d+)g$", r"\1gb", w) for w in tokens]


_BY_TOKENS = {tuple(sorted(_name_tokens(gpu.name))): gpu for gpu in CATALOG}


def _find_pcie_only(tokens: list[str]) -> GpuType | None:
    """Return the type of a name without its "pcie" if that type exists only as a PCIe card."""
    gpu = _BY_TOKENS.get(tuple(sorted(w for w in tokens if w != "pcie"))) if "pcie" in tokens else None
    return gpu if gpu is not None and not gpu.link_gb_s else None


def find_gpu_type(name: str) -> GpuType | None:
    """Return the type for a site's or the driver's name (``a100``, ``nvidia_h100_80gb_hbm3``), or None if unknown.

    A memory size in the name decides between variants; a size that contradicts the catalog makes the type unknown,
    since a guess could end in an out-of-memory error hours later. A MIG slice (``1g.10gb``) is unknown for the same
    reason.
    """
    if not name or re.search(r"\d+g\.\d+gb", name.lower()):
        return None
    tokens = _name_tokens(name)
    exact = _BY_TOKENS.get(tuple(sorted(tokens))) or _find_pcie_only(tokens)
    if exact is not None:
        return exact
    sizes = [int(w[:-2]) for w in tokens if re.fullmatch(r"\d+gb", w)]
    models = [w for w in tokens if not re.fullmatch(r"\d+gb", w)]
    gpu = _BY_TOKENS.get(tuple(sorted(models))) or _find_pcie_only(models)
    if gpu is None or len(sizes) != 1 or gpu.memory_gib != sizes[0]:
        return None
    return gpu


class Fabric(NamedTuple):
    """A network between nodes, which a profile's ``fabric`` may name."""

    name: str
    gb_s: float
    """1e9 bytes/s in one direction, per port, or per node if ``per_node``."""
    per_node: bool
    """``gb_s`` is the bandwidth of a whole node."""
    source: str


FABRICS: tuple[Fabric, ...] = (
    Fabric("edr", 12.5, False, "InfiniBand Trade Association roadmap: 4x EDR 100 Gbit/s"),
    Fabric("hdr", 25.0, False, "InfiniBand Trade Association roadmap: 4x HDR 200 Gbit/s"),
    Fabric("ndr", 50.0, False, "InfiniBand Trade Association roadmap: 4x NDR 400 Gbit/s"),
    Fabric("xdr", 100.0, False, "InfiniBand Trade Association roadmap: 4x XDR 800 Gbit/s"),
    Fabric("opa", 12.5, False, "Omni-Path 100 series: 100 Gbit/s"),
    Fabric("roce-100", 12.5, False, "100 Gbit/s Ethernet"),
    Fabric("roce-200", 25.0, False, "200 Gbit/s Ethernet"),
    Fabric("roce-400", 50.0, False, "400 Gbit/s Ethernet"),
    Fabric("ethernet-10", 1.25, False, "10 Gbit/s Ethernet"),
    Fabric("ethernet-25", 3.125, False, "25 Gbit/s Ethernet"),
    Fabric("ethernet-100", 12.5, False, "100 Gbit/s Ethernet"),
    Fabric("slingshot-11", 25.0, False, "HPE Slingshot 11: 200 Gbit/s per port"),
    Fabric("efa-p3dn", 12.5, True, "AWS EC2 p3dn.24xlarge: 100 Gbit/s"),
    Fabric("efa-p4d", 50.0, True, "AWS EC2 p4d.24xlarge: 4 x 100 Gbit/s"),
    Fabric("efa-p5", 400.0, True, "AWS EC2 p5.48xlarge: 3200 Gbit/s"),
    Fabric("gcp-a3", 200.0, True, "Google Cloud a3-highgpu-8g: 8 x 200 Gbit/s"),
    Fabric("gcp-a3-mega", 400.0, True, "Google Cloud a3-megagpu-8g: 8 x 400 Gbit/s"),
)
_FABRICS_BY_NAME = {fabric.name: fabric for fabric in FABRICS}


def parse_node_gb_s(text: str) -> float:
    """Return the GB/s of a node with the fabric ``text``: a name, or several ports, as in ``8 x ndr``.

    Raises:
        ConfigError: the fabric is unknown; the message suggests known ones.
    """
    match = re.fullmatch(r"\s*(?:([0-9]{1,4})\s*x\s*)?([\w.-]+)\s*", text.lower())
    fabric = _FABRICS_BY_NAME.get(match[2]) if match else None
    if match is None or fabric is None or (fabric.per_node and match[1]):
        raise ConfigError(
            f"fabric = {text!r} is not known: {did_you_mean(match[2] if match else text, list(_FABRICS_BY_NAME))}",
                          fix="give a name, or the ports per node, as in '8 x ndr'")  # fmt: skip
    return fabric.gb_s * int(match[1] or 1)
