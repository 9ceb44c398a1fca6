from tests.fake_slurm.fixture import fake_slurm

__all__ = ["fake_slurm"]
