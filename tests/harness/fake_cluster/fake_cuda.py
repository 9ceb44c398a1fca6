"""A CUDA device without memory or kernels, for fake tensors under a torch that was built without CUDA.

:func:`install` must run before the first ``import torch`` of the process, because torch looks for the CUDA build once.
The kernels' choices are those of torch 2.13 on an H100: ``sdp_utils.cpp`` for attention, ``_fused_rms_norm`` for norms.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TORCH_VERSION = "2.13."  # whose private interfaces this harness relies on
DEVICE_BYTES = 80 << 30
SOURCE = Path(__file__).with_suffix(".cpp")
_libraries: list[Any] = []  # a registration ends with its torch.library.Library


class Unavailable(Exception):
    """There is no C++ compiler, or this torch version has other private interfaces."""


def install() -> None:
    """Make torch believe in one CUDA device. Import torch only afterwards.

    Raises:
        Unavailable: the stand-in cannot be built.
    """
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH_VERSION):
        raise Unavailable(f"torch {version}: the stand-ins are for torch {TORCH_VERSION}x")
    torch_root = _find_torch()
    with tempfile.TemporaryDirectory(prefix="fake-cuda-") as folder:
        library = _compile(torch_root, Path(folder, "fake_cuda.so"))
        for path in (torch_root / "lib/libc10.so", torch_root / "lib/libtorch_cpu.so", library):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    _replace_torch_cuda()
    _register_kernels()


def _find_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _compile(torch_root: Path, library: Path) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise Unavailable("no C++ compiler: c++ and g++ are not on the PATH")
    argv = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_root}/include", "-o", str(library),
            str(SOURCE), f"-L{torch_root}/lib", "-lc10", "-ltorch_cpu"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{compiler} failed:\n{done.stderr[-2000:]}")
    return library


def _replace_torch_cuda() -> None:
    """Replace the functions of ``torch.cuda`` that FSDP, DDP, autocast and the trainer call."""
    import torch
    import torch._subclasses

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
            return super().__new__(cls, device="cuda:0", priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
            return super().__new__(cls, device="cuda:0", enable_timing=enable_timing)

    @contextlib.contextmanager
    def stream(new: torch.Stream | None) -> Iterator[None]:
        old = current_stream()
        torch._C._accelerator_setStream(new or old)
        try:
            yield
        finally:
            torch._C._accelerator_setStream(old)

    def current_stream(device: Any = None) -> torch.Stream:
        return torch._C._accelerator_getStream(0)

    class Generator(torch._C.Generator):
        def __new__(cls, device: Any = "cpu") -> Generator:
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    properties = SimpleNamespace(total_memory=DEVICE_BYTES, major=9, minor=0, name="NVIDIA H100 80GB HBM3")
    torch.Generator = Generator
    torch.version.cuda = "13.0"
    torch.backends.cudnn.version = lambda: 92_000  # type: ignore[assignment]
    replacements: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "synchronize": lambda device=None: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": current_stream,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    # Fake tensors must never be made on the device first, as they may be where CUDA is available.
    torch._subclasses.FakeTensorMode.avoid_device_init = property(lambda mode: True)


def _register_kernels() -> None:
    """Give fake CUDA tensors the fused kernels of a CUDA build.

    Attention: cuDNN's kernel on an H100 for 16 bit, otherwise the memory-efficient one, which wants as many heads of
    keys as of queries, otherwise plain matrix products. Norms: input, weight and 1 / rms of each row are kept.
    """
    import torch

    aten = torch.ops.aten

    class FusedRmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                y, rstd = aten._fused_rms_norm(x, shape, weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            ctx.shape = shape
            ctx.mark_non_differentiable(rstd)
            return y, rstd

        @staticmethod
        def backward(ctx: Any, grad: Any, _: Any) -> Any:
            x, weight, rstd = ctx.saved_tensors
            grad_x, grad_weight = aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, [True, True])
            return grad_x, None, grad_weight, None

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        return FusedRmsNorm.apply(x, shape, weight, eps)

    def attention(q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, *,
                  scale: Any = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        half = q.dtype in (torch.float16, torch.bfloat16)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask.logical_not(), -torch.inf, torch.zeros((), dtype=q.dtype, device=q.device))
        if half:
            return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, dropout, causal, False, scale=scale)[0]
        if q.shape[1] == k.shape[1]:
            if mask is not None:
                mask = mask.expand(*q.shape[:3], k.shape[2])
            return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout, causal, scale=scale)[0]
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout, causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", rms_norm, "AutogradCUDA")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    _libraries.append(library)
