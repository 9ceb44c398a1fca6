"""Makes ``cuda`` an emulated device. Import it before torch; it imports torch itself.

Eight devices have the host's memory and the CPU's kernels. ``torch.cuda`` answers as for an H100, and the backend
``nccl`` is played by gloo. What the program does is reported to :mod:`tests.cuda_emulation.trace`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import types
from datetime import timedelta
from typing import Any

from tests.cuda_emulation import build

TOTAL_MEMORY = 80 << 30
NAME = "NVIDIA H100 80GB HBM3"


def _load_module() -> Any:
    """Load the emulation's functions. Its library has registered the device before torch looked for one."""
    path = build.load_libraries()
    import torch  # noqa: F401

    loader = importlib.machinery.ExtensionFileLoader(build.MODULE, str(path))
    spec = importlib.util.spec_from_file_location(build.MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


emulated = _load_module()

import torch  # noqa: E402

# These decide at import whether torch was built with CUDA. It was not, and there are no CUDA compilers.
import torch._dynamo  # noqa: E402
import torch._inductor.config  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device=f"cuda:{_index(device)}", priority=priority)


class Event(torch.Event):
    """``torch.cuda.Event``."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def elapsed_time(self, _end: torch.Event) -> float:
        return 1.0


def _index(device: Any = None) -> int:
    """Return the index of ``device``, as torch.cuda reads it; the current device's without one."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return emulated.current_device() if index is None or index < 0 else index


class StreamContext:
    """``torch.cuda.stream``: makes a stream the current one inside the block."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._previous = _current_stream(self.stream.device)
            torch._C._accelerator_setStream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch._C._accelerator_setStream(self._previous)


def _current_stream(device: Any = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_index(device))


def _default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.CUDA.value)


def _synchronize(device: Any = None) -> None:
    emulated.synchronize_device(_index(device))


def _count_visible() -> int:
    """Return the number of devices; those in CUDA_VISIBLE_DEVICES count from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count: int = emulated.DEVICE_COUNT
    return count if visible is None else min(count, sum(map(bool, visible.split(","))))


class _Runtime:
    """``torch.cuda.cudart()``: pinned memory of the host."""

    @staticmethod
    def cudaHostRegister(pointer: int, nbytes: int, _flags: int) -> int:
        emulated.register_pinned(pointer, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(pointer: int) -> int:
        emulated.unregister_pinned(pointer)
        return 0


def _replace_cuda_functions() -> None:
    properties = types.SimpleNamespace(
        name=NAME, total_memory=TOTAL_MEMORY, major=9, minor=0, multi_processor_count=132,
        uuid="00000000-0000-0000-0000-000000000000", L2_cache_size=50 << 20,
    )  # fmt: skip
    replacements: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _count_visible,
        "current_device": emulated.current_device,
        "set_device": lambda device: emulated.set_device(_index(device)),
        "_get_device_index": lambda device, optional=False, allow_cpu=False: _index(device),
        "default_generators": tuple(emulated.default_generator(i) for i in range(emulated.DEVICE_COUNT)),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "memory_allocated": lambda device=None: emulated.memory_stats(_index(device))[0],
        "max_memory_allocated": lambda device=None: emulated.memory_stats(_index(device))[1],
        "memory_reserved": lambda device=None: emulated.memory_stats(_index(device))[0],
        "max_memory_reserved": lambda device=None: emulated.memory_stats(_index(device))[1],
        "reset_peak_memory_stats": lambda device=None: emulated.reset_peak(_index(device)),
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - emulated.memory_stats(_index(device))[0], TOTAL_MEMORY),
        "empty_cache": emulated.empty_cache,
        "synchronize": _synchronize,
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": torch._C._accelerator_setStream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "cudart": _Runtime,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    for module, names in {
        "torch.cuda.random": ("_lazy_init", "current_device", "device_count"),
        "torch.cuda.memory": ("_lazy_init", "_get_device_index", *(n for n in replacements if "memory" in n)),
        "torch.cuda.streams": ("Stream", "Event"),
        "torch.cuda._utils": ("_get_device_index",),
    }.items():
        for name in names:
            setattr(importlib.import_module(module), name, replacements[name])
    torch.version.cuda = "13.0"
    torch.backends.cudnn.version = lambda: 92_000  # type: ignore[assignment]


def _replace_storage_functions() -> None:
    """Storages know no emulated device: torch's C++ asks the real library to resize and copy them."""
    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resize_(self: torch.UntypedStorage, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, nbytes)
        emulated.resize_storage(as_tensor(self), int(nbytes))
        return self

    def clone_(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return as_tensor(self).clone().untyped_storage() if self.device.type == "cuda" else clone(self)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage.clone = clone_  # type: ignore[method-assign]


_BACKEND = "emulated"  # torch refuses to have "nccl" registered, and was built without it


def _create_backend(options: Any, _backend_options: Any) -> Any:
    gloo = distributed_c10d.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    gloo.options.global_ranks_in_group, gloo.options.group_name = ranks, options.group_id
    gloo._set_sequence_number_for_group()
    return emulated.make_nccl(gloo, options.timeout.total_seconds(), options.group_id, ranks)


def _register_nccl() -> None:
    """Let ``nccl`` name the emulated backend, as far as programs can see."""
    # Where torch was built with CUDA, gloo copies tensors of the device through the host. We never want that.
    dist.Backend.backend_capability["gloo"] = ["cpu"]
    dist.Backend.register_backend(_BACKEND, _create_backend, extended_api=True, devices=["cuda"])

    def set_default_timeout(backend: Any, timeout: timedelta) -> None:
        emulated.set_timeout(backend, timeout)

    backend_class = torch._C._distributed_c10d.Backend
    backend_class.options = property(emulated.options)
    backend_class._set_default_timeout = set_default_timeout
    init, helper = dist.init_process_group, distributed_c10d._new_process_group_helper

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init(backend.replace("nccl", _BACKEND) if backend else None, *args, **kwargs)

    def new_process_group_helper(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        backend = str(backend).replace("nccl", _BACKEND)
        group, store = helper(size, rank, ranks, backend, *args, **kwargs)
        if _BACKEND in backend and isinstance(group, dist.ProcessGroup):
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # as torch does for NCCL
        return group, store

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
    distributed_c10d._new_process_group_helper = new_process_group_helper


def _replace_inductor() -> None:
    """Inductor's CUDA kernels need a GPU: torch.compile captures and differentiates graphs, which then run eagerly."""
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def wrapper_call(_: Any, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_options: Any) -> Any:
        return aot_eager(graph, inputs)

    torch._TorchCompileInductorWrapper.__call__ = wrapper_call  # type: ignore[method-assign]
    torch._dynamo.backends.registry._COMPILER_FNS["inductor"] = aot_eager


_replace_cuda_functions()
_replace_storage_functions()
_replace_inductor()
_register_nccl()
