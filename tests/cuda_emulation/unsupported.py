"""The ranks' tests that do not run on the emulated device, and why.

A key is the beginning of test ids: a file, a function of it or one of its cases. All else must pass.
"""

from __future__ import annotations

from collections.abc import Mapping

OWN_PROCESSES = "starts its own CPU-only processes"
NO_RANKS = "starts no rank: it computes in the test's process, on the CPU"
HOST_MEMORY = "limits the memory of a CPU rank"
ON_CPU = "its programs train on the CPU"
HAS_GPU = "expects a machine without a GPU, and the emulated device is one"

UNSUPPORTED: Mapping[str, str] = {
    "tests/ranks/test_accelerate.py": NO_RANKS,
    "tests/ranks/test_coming_from.py": NO_RANKS,
    "tests/ranks/test_current_folder.py": OWN_PROCESSES,
    "tests/ranks/test_custom_model_count.py": NO_RANKS,
    "tests/ranks/test_faults.py::test_cuda_without_gpu_is_refused": HAS_GPU,
    "tests/ranks/test_frameworks.py": ON_CPU,
    "tests/ranks/test_job_python.py": OWN_PROCESSES,
    "tests/ranks/test_measured_rates.py": OWN_PROCESSES,
    "tests/ranks/test_find_micro_batch.py::test_search_grows_to_memory_limit_and_recommends_fit": HOST_MEMORY,
    "tests/ranks/test_find_micro_batch.py::test_nothing_fits_is_reported_as_failure": HOST_MEMORY,
    "tests/ranks/test_plan_memory_counted.py": NO_RANKS,
}


def reason(test_id: str) -> str | None:
    """Return why the test cannot run on the emulated device, or None."""
    return next((reason for start, reason in UNSUPPORTED.items() if test_id.startswith(start)), None)
