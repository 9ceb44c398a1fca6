"""Networks between nodes, as data with a source a line: what a profile's ``fabric`` may name."""

from __future__ import annotations

import re
from typing import NamedTuple

from clustertrain.config.parsing import did_you_mean
from clustertrain.errors import ConfigError


class Fabric(NamedTuple):
    """``gb_s``: 1e9 bytes/s in one direction, of one port or, where that is how it is sold, of a whole node."""

    name: str
    gb_s: float
    per_node: bool
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
    Fabric("slingshot-11", 25.0, False, "HPE Slingshot 11: 200 Gbit/s a port"),
    Fabric("efa-p3dn", 12.5, True, "AWS EC2 p3dn.24xlarge: 100 Gbit/s"),
    Fabric("efa-p4d", 50.0, True, "AWS EC2 p4d.24xlarge: 4 x 100 Gbit/s"),
    Fabric("efa-p5", 400.0, True, "AWS EC2 p5.48xlarge: 3200 Gbit/s"),
    Fabric("gcp-a3", 200.0, True, "Google Cloud a3-highgpu-8g: 8 x 200 Gbit/s"),
    Fabric("gcp-a3-mega", 400.0, True, "Google Cloud a3-megagpu-8g: 8 x 400 Gbit/s"),
)
_BY_NAME = {fabric.name: fabric for fabric in FABRICS}


def parse_node_gb_s(text: str) -> float:
    """GB/s of a node whose fabric is ``text``: a name, or ports of one as in ``8 x ndr``.

    Raises:
        ConfigError: no such fabric; names the known ones.
    """
    match = re.fullmatch(r"\s*(?:([0-9]{1,4})\s*x\s*)?([\w.-]+)\s*", text.lower())
    fabric = _BY_NAME.get(match[2]) if match else None
    if match is None or fabric is None or (fabric.per_node and match[1]):
        raise ConfigError(
            f"fabric = {text!r} is not known: {did_you_mean(match[2] if match else text, list(_BY_NAME))}",
                          fix="a name, or ports of one a node, as '8 x ndr'")  # fmt: skip
    return fabric.gb_s * int(match[1] or 1)
