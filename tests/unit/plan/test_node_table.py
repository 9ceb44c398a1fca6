"""The table [node] of a cluster profile round-trips through TOML and reaches the plan."""

from __future__ import annotations

import tomllib

import msgspec
import pytest
import tomli_w

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec, RunSpec
from clustertrain.config.node_facts import NodeFacts, parse_cpu_list
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError
from clustertrain.plan.planner import plan
from tests.fixtures.nodes.expand import KINDS, facts_of


def profile(node_facts: NodeFacts) -> ClusterProfile:
    text = tomli_w.dumps({"node": msgspec.to_builtins(node_facts)})
    return build(tomllib.loads(text), ClusterProfile, "profile")


@pytest.mark.parametrize("kind", KINDS)
def test_node_facts_survive_profile(kind: str) -> None:
    node_facts = facts_of(kind)
    assert profile(node_facts).node == node_facts


def test_plan_selects_ports_for_several_nodes() -> None:
    cluster = profile(facts_of("dgx-h100"))

    def network_settings(**job: object) -> set[str]:
        result = plan(RunSpec(job=JobSpec(**{"nodes": 2, "gpus": 8, "backend": "slurm", **job})), cluster, "cuda")  # type: ignore[arg-type]
        return {name for name in result.nccl if name.startswith(("NCCL_", "GLOO_"))}

    assert network_settings() == {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert network_settings(nodes=1) == network_settings(backend="local") == set()


def test_typo_in_node_table_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"node\.hcas\[0\].*rate_gbits"):
        build({"node": {"hcas": [{"name": "mlx5_0", "rate_gbits": 400}]}}, ClusterProfile, "profile")


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,8") == {0, 1, 2, 8} and parse_cpu_list("") == set()
    with pytest.raises(ValueError, match="x"):
        parse_cpu_list("0-x")
