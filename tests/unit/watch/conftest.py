import pytest

from tests.fakes.nvml.build import Stub
from tests.fakes.slurm.fixture import FakeSlurm
from tests.unit.watch.cluster import FakeCluster


@pytest.fixture
def fake_cluster(fake_slurm: FakeSlurm, nvml_stub: Stub, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A running job on two nodes with the GPUs of the NVML stub."""
    for name, value in nvml_stub.environ(NVML_STUB_DEVICES="2").items():
        monkeypatch.setenv(name, value)
    cluster = FakeCluster(fake_slurm)
    cluster.set_job("RUNNING")
    cluster.set_accounting("RUNNING")
    cluster.set_srun()
    return cluster
