"""Environment settings: few, with reasons, and never in place of the user's."""

from __future__ import annotations

from clustertrain.plan.env import nccl


def test_every_setting_has_value_and_reason() -> None:
    for settings in (nccl.communication_env("cuda", "ib0", ()), nccl.process_env("cuda", 8, 8, ())):
        assert settings
        assert all(s.value and s.reason for s in settings.values())


def test_user_names_are_kept() -> None:
    user = {"NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"}
    assert "NCCL_SOCKET_IFNAME" not in nccl.communication_env("cuda", "ib0", user)
    assert "GLOO_SOCKET_IFNAME" in nccl.communication_env("cuda", "ib0", user)
    assert "OMP_NUM_THREADS" not in nccl.process_env("cpu", 4, 4, user)


def test_former_name_counts_as_user_choice() -> None:
    assert "PYTORCH_ALLOC_CONF" in nccl.process_env("cuda", 0, 8, ())
    assert "PYTORCH_ALLOC_CONF" not in nccl.process_env("cuda", 0, 8, {"PYTORCH_CUDA_ALLOC_CONF"})
    assert "TORCH_FR_BUFFER_SIZE" not in nccl.communication_env("cuda", "", {"TORCH_NCCL_TRACE_BUFFER_SIZE"})


def test_cpu_gets_no_cuda_settings() -> None:
    assert nccl.communication_env("cpu", "", ()) == {}
    assert set(nccl.communication_env("cpu", "eth0", ())) == {"GLOO_SOCKET_IFNAME"}
    assert nccl.process_env("cpu", 0, 1, ()) == {}


def test_omp_threads_equal_cores_per_rank() -> None:
    assert nccl.process_env("cpu", 6, 4, ())["OMP_NUM_THREADS"].value == "6"
    assert nccl.process_env("cpu", 0, 4, ())["OMP_NUM_THREADS"].value == "1"
