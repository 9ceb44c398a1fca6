"""The page of the GPU types and networks that the planner knows, from ``clustertrain/config/hardware.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clustertrain.config.hardware import CATALOG, FABRICS

_HEADER = """<!-- Written by python -m docs.generate from clustertrain/config/hardware.py. -->

# GPU types and networks

`plan` predicts speed and memory for these types. Rates are the vendor's dense ones, without sparsity.

## GPU types

`--gpu-type` takes these names, and names with parts that a site or the driver adds: `nvidia_h100_80gb_hbm3` is
`h100`. A type that is missing goes into the profile, as [`[gpu]`](cluster-profile.md#gpu). *Link* is the bandwidth
of a GPU's NVLink, or equivalent, in one direction, *network* the share of one GPU in the network of the system in
which the type usually ships.

"""
_FABRICS = """
## Networks

`fabric` in a [profile](cluster-profile.md) takes these names, or several ports per node: `"8 x ndr"`.

"""


def render() -> str:
    """Return the page."""
    gpus = [
        (
            f"`{gpu.name}`",
            f"{gpu.memory_gib:g}",
            _number(gpu.tflops),
            _number(gpu.fp8_tflops),
            f"{gpu.memory_gb_s:,.0f}",
            _number(gpu.link_gb_s),
            f"{gpu.fabric_gb_s:g}",
            gpu.source,
        )
        for gpu in CATALOG
    ]
    gpu_titles = ("type", "GiB", "16-bit TFLOP/s", "fp8 TFLOP/s", "memory GB/s", "link GB/s", "network GB/s", "source")
    fabrics = [(f"`{f.name}`", f"{f.gb_s:g}", "node" if f.per_node else "port", f.source) for f in FABRICS]
    fabric_titles = ("network", "GB/s", "per", "source")
    return _HEADER + _table(gpu_titles, gpus) + _FABRICS + _table(fabric_titles, fabrics)


def _number(value: float) -> str:
    return f"{value:,g}" if value else "–"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["-"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
