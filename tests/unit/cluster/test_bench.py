"""Combination of measurements, with a shell script in place of the Python interpreter.

tests/ranks/test_measured_rates.py runs real measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cluster import bench
from clustertrain.cluster.bench import BenchResult, BenchTarget
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.node_facts import Cpus, Interface, NodeFacts

Measure = Callable[..., BenchResult]
DEVICE = '{"kind": "cuda", "device": "NVIDIA H100", "count": 8, "torch": "2.13.0", "port": 1}'
GEMM = '{"gemm_tflops": 612.345, "gemm_dtype": "bf16"}'
FACTS = '{"node": {"cpus": {"sockets": 2}, "interfaces": [{"name": "eth0"}]}}'
BUS = '{"bus_gb_s": 361.2, "ranks": 8}'


def print_lines(*lines: str) -> str:
    return "; ".join(f"echo \"$mark\"'{line}'" for line in lines)


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Return a function that measures with a shell script; each argument is the script of one measurement."""

    def call(
        *, gemm: str, inside: str = "", across: str = "", facts: str = print_lines(FACTS), nodes: tuple[str, ...] = ()
    ) -> BenchResult:
        python = tmp_path / "python"
        python.write_text(
            "#!/bin/sh\nmark='clustertrain-measured '\n"
            f'case "$*" in *facts*) {facts} ;; *across*) {across or "true"} ;; '
            f"*all-reduce*) {inside or 'true'} ;; *) {gemm} ;; esac\n"
        )
        python.chmod(0o755)
        srun = tmp_path / "srun"  # runs what follows its own options
        srun.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
        srun.chmod(0o755)
        path = f"{tmp_path}:/usr/bin:/bin"
        return bench.measure(BenchTarget(python=str(python), nodes=nodes, env={"PATH": path}), lambda _: None)

    return call


def test_all_measurements_succeed(measure: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = measure(
        gemm=print_lines(DEVICE, GEMM),
        inside=print_lines(BUS),
        across=print_lines('{"bus_gb_s": 45.0}'),
        nodes=("a", "b"),
    )
    assert result.failures == () and result.measured is not None
    rates = result.measured
    assert (rates.gemm_tflops, rates.gemm_dtype, rates.node_bus_gb_s, rates.fabric_bus_gb_s) == (
        612.3,
        "bf16",
        361.2,
        45.0,
    )
    assert (rates.device, rates.ranks, rates.nodes, rates.torch) == ("NVIDIA H100", 8, 2, "2.13.0")
    assert result.node == NodeFacts(cpus=Cpus(sockets=2), interfaces=(Interface(name="eth0"),))


def test_unknown_node_facts_are_a_separate_failure(measure: Measure) -> None:
    result = measure(
        gemm=print_lines(DEVICE, GEMM), inside=print_lines(BUS), facts=print_lines('{"node": {"moons": 2}}')
    )
    assert result.node is None and result.measured is not None
    assert result.failures[0].startswith("reading the node's hardware: the node: unknown key 'moons'")


def test_failed_measurement_keeps_the_others(measure: Measure) -> None:
    result = measure(gemm=print_lines(DEVICE, GEMM), inside="echo started; echo boom >&2; exit 3")
    assert result.measured is not None
    assert (result.measured.gemm_tflops, result.measured.node_bus_gb_s) == (612.3, None)
    assert result.failures == ("measuring an all-reduce over 8 ranks of one node: exit code 3: started / boom",)
    result = measure(gemm=print_lines(DEVICE, '{"error": "OutOfMemoryError: x"}') + "; exit 1", inside=print_lines(BUS))
    assert result.failures == ("measuring matrix products: OutOfMemoryError: x",)
    assert result.measured is not None and result.measured.node_bus_gb_s == 361.2


def test_first_failed_rank_is_quoted(measure: Measure) -> None:
    errors = print_lines('{"error": "OutOfMemoryError: x"}', '{"error": "RuntimeError: connection closed by peer"}')
    result = measure(gemm=print_lines(DEVICE, GEMM), inside=errors + "; exit 1")
    assert result.failures == ("measuring an all-reduce over 8 ranks of one node: OutOfMemoryError: x",)


def test_no_result_gives_no_rates(measure: Measure) -> None:
    result = measure(gemm="echo no torch; exit 1")
    assert result.measured is None and result.failures == ("measuring matrix products: exit code 1: no torch",)
    result = measure(gemm=print_lines(DEVICE) + "; exit 1", inside="exit 1")
    assert result.measured is None and len(result.failures) == 2
    result = bench.measure(BenchTarget(python="/no/such/python"), lambda _: None)
    assert result.measured is None and "cannot be started" in result.failures[0]


def test_one_gpu_skips_the_all_reduce(measure: Measure) -> None:
    result = measure(gemm=print_lines(DEVICE.replace("8,", "1,"), GEMM), inside="exit 1")
    assert result.failures == () and result.measured is not None and result.measured.ranks == 1
    assert any("one GPU" in note for note in result.notes)


def test_measurement_times_out(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TIMEOUT_S", 0.3)
    result = measure(gemm="exec sleep 600")
    assert result.failures[-1] == "measuring matrix products: took longer than 0.3 s"


def test_target_uses_the_environment_of_runs() -> None:
    profile = ClusterProfile(python="/env/bin/python", fabric_interface="ib0", env={"NCCL_DEBUG": "WARN"})
    target = BenchTarget.from_profile(profile, "/usr/bin/python", ("a", "b"), "cuda")
    assert target.python == "/env/bin/python" and target.nodes == ("a", "b")
    expected_env = {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert expected_env.items() <= target.env.items()
    assert {"--nodes=1", "--nodelist=a", "--ntasks=1", "--overlap"} <= set(target.srun_argv(("a",)))
    assert BenchTarget.from_profile(ClusterProfile(), "/usr/bin/python", (), "cpu").srun_argv(()) == []
