from tests.fakes.nvml.fixture import nvml_library, nvml_stub
from tests.fakes.slurm.fixture import fake_slurm

__all__ = ["fake_slurm", "nvml_library", "nvml_stub"]
