"""How measurements are put together, with a stand-in for the interpreter that would do them; the real ones:
tests/ranks/test_measured_rates.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cluster import bench
from clustertrain.cluster.bench import BenchResult, BenchTarget
from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.node_facts import Cpus, Interface, NodeFacts

Measure = Callable[..., BenchResult]
SEEN = '{"kind": "cuda", "device": "NVIDIA H100", "count": 8, "torch": "2.13.0", "port": 1}'
GEMM = '{"gemm_tflops": 612.345, "gemm_dtype": "bf16"}'
FACTS = '{"node": {"cpus": {"sockets": 2}, "interfaces": [{"name": "eth0"}]}}'
BUS = '{"bus_gb_s": 361.2, "ranks": 8}'


def say(*lines: str) -> str:
    return "; ".join(f"echo \"$mark\"'{line}'" for line in lines)


@pytest.fixture
def measured(tmp_path: Path) -> Measure:
    """Measures with a shell script; each argument is what it does for one measurement."""

    def call(
        *, gemm: str, inside: str = "", across: str = "", facts: str = say(FACTS), nodes: tuple[str, ...] = ()
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


def test_all_of_them(measured: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = measured(gemm=say(SEEN, GEMM), inside=say(BUS), across=say('{"bus_gb_s": 45.0}'), nodes=("a", "b"))
    assert found.failures == () and found.measured is not None
    m = found.measured
    assert (m.gemm_tflops, m.gemm_dtype, m.node_bus_gb_s, m.fabric_bus_gb_s) == (612.3, "bf16", 361.2, 45.0)
    assert (m.device, m.ranks, m.nodes, m.torch) == ("NVIDIA H100", 8, 2, "2.13.0")
    assert found.node == NodeFacts(cpus=Cpus(sockets=2), interfaces=(Interface(name="eth0"),))


def test_a_node_that_is_described_in_other_words_is_a_failure_of_that_alone(measured: Measure) -> None:
    found = measured(gemm=say(SEEN, GEMM), inside=say(BUS), facts=say('{"node": {"moons": 2}}'))
    assert found.node is None and found.measured is not None
    assert found.failures[0].startswith("reading what the node is made of: the node: unknown key 'moons'")


def test_one_that_fails_is_told_and_the_rest_is_kept(measured: Measure) -> None:
    found = measured(gemm=say(SEEN, GEMM), inside="echo started; echo boom >&2; exit 3")
    assert found.measured is not None
    assert (found.measured.gemm_tflops, found.measured.node_bus_gb_s) == (612.3, None)
    assert found.failures == ("measuring an all-reduce over 8 ranks of one node: exit code 3: started / boom",)
    found = measured(gemm=say(SEEN, '{"error": "OutOfMemoryError: x"}') + "; exit 1", inside=say(BUS))
    assert found.failures == ("measuring matrix products: OutOfMemoryError: x",)
    assert found.measured is not None and found.measured.node_bus_gb_s == 361.2


def test_the_first_rank_that_failed_is_quoted(measured: Measure) -> None:
    words = say('{"error": "OutOfMemoryError: x"}', '{"error": "RuntimeError: connection closed by peer"}')
    found = measured(gemm=say(SEEN, GEMM), inside=words + "; exit 1")
    assert found.failures == ("measuring an all-reduce over 8 ranks of one node: OutOfMemoryError: x",)


def test_nothing_measured_is_no_measurement(measured: Measure) -> None:
    found = measured(gemm="echo no torch; exit 1")
    assert found.measured is None and found.failures == ("measuring matrix products: exit code 1: no torch",)
    found = measured(gemm=say(SEEN) + "; exit 1", inside="exit 1")
    assert found.measured is None and len(found.failures) == 2
    found = bench.measure(BenchTarget(python="/no/such/python"), lambda _: None)
    assert found.measured is None and "cannot be started" in found.failures[0]


def test_one_gpu_has_nothing_to_reduce_with(measured: Measure) -> None:
    found = measured(gemm=say(SEEN.replace("8,", "1,"), GEMM), inside="exit 1")
    assert found.failures == () and found.measured is not None and found.measured.ranks == 1
    assert any("one GPU" in note for note in found.notes)


def test_one_that_takes_too_long_is_ended(measured: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TIMEOUT_S", 0.3)
    found = measured(gemm="exec sleep 600")
    assert found.failures[-1] == "measuring matrix products: it took longer than 0.3 s"


def test_measured_as_the_runs_will_go() -> None:
    profile = ClusterProfile(python="/env/bin/python", fabric_interface="ib0", env={"NCCL_DEBUG": "WARN"})
    where = BenchTarget.from_profile(profile, "/usr/bin/python", ("a", "b"), "cuda")
    assert where.python == "/env/bin/python" and where.nodes == ("a", "b")
    assert {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}.items() <= where.env.items()
    assert {"--nodes=1", "--nodelist=a", "--ntasks=1", "--overlap"} <= set(where.srun_argv(("a",)))
    assert BenchTarget.from_profile(ClusterProfile(), "/usr/bin/python", (), "cpu").srun_argv(()) == []
