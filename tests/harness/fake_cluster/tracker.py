"""Peak memory of a rank by category: torch's MemTracker over fake CUDA tensors, without its statistics per module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torchao.optim.adam
from torch import nn
from torch._guards import active_fake_mode
from torch.distributed._tools.mem_tracker import MemTracker, _RefType, _UpdateType
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
# In the backward pass, what these compute in the shape of a weight is its gradient, or a part of it.
_WEIGHT_GRADIENTS = (
    aten.mm.default, aten.embedding_dense_backward.default, aten._to_copy.default, aten.add.Tensor
)  # fmt: skip
_FUSED_SGD = (aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)


class Category(_RefType):
    """What memory is for."""

    PARAMETERS = "parameters"
    GATHERED = "gathered"  # copies of parameters: what fully_shard gathers and autocast casts
    GRADIENTS = "gradients"
    REDUCED = "reduced"  # buffers in which gradients are reduced, DDP's buckets among them
    OPTIMIZER = "optimizer"
    UPDATE = "update"  # temporary, in the optimizer step
    FORWARD = "forward"  # what the forward pass creates: activations
    BACKWARD = "backward"  # what the backward pass creates
    LOGITS = "logits"
    BATCH = "batch"


class PeakTracker(MemTracker):
    """MemTracker whose categories are those of :class:`Category`.

    Storages, their lifetimes and the rounding to 512 bytes are MemTracker's; see its class for what it does not see. It
    allows several passes per step, which MemTracker does not.
    """

    def __init__(self, device: torch.device, vocab_sizes: set[int], weight_shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._ref_class = Category
        self._device = device
        self._vocab_sizes = vocab_sizes  # last dimensions of logits
        self._weight_shapes = weight_shapes
        self._categories = [Category.FORWARD]
        self._pauses = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}

    @contextmanager
    def category(self, category: Category) -> Iterator[None]:
        """Assign what is allocated inside the block to ``category``."""
        self._categories.append(category)
        try:
            yield
        finally:
            self._categories.pop()

    @contextmanager
    def categories_of_training(self) -> Iterator[None]:
        """Recognize what FSDP, its collectives and optimizers allocate inside the block."""
        unshard, wait, post_backward = (
            FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard, FSDPParamGroup.post_backward
        )  # fmt: skip

        ddp = DistributedDataParallel
        propagate_meta = ShardingPropagator._propagate_tensor_meta_non_cached
        update_8bit = torchao.optim.adam.single_param_adam

        def reduce(group: Any, *args: Any) -> None:
            unsharded = [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
            self.assign([p.grad for p in unsharded], Category.GRADIENTS)
            with self.category(Category.REDUCED):
                post_backward(group, *args)
            sharded = [p.sharded_param.grad for p in group.fsdp_params]
            self.assign([sharded, [p.unsharded_accumulated_grad for p in group.fsdp_params]], Category.GRADIENTS)

        def begin_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._categories.append(Category.UPDATE)

        def end_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._categories.pop()
            self.assign(list(optimizer.state.values()), Category.OPTIMIZER)

        hooks = register_optimizer_step_pre_hook(begin_update), register_optimizer_step_post_hook(end_update)
        with (
            mock.patch.object(FSDPParamGroup, "unshard", self._inside(Category.GATHERED, unshard)),
            mock.patch.object(FSDPParamGroup, "wait_for_unshard", self._inside(Category.GATHERED, wait)),
            mock.patch.object(FSDPParamGroup, "post_backward", reduce),
            # They allocate the buckets, of which the second call makes new ones.
            mock.patch.object(ddp, "__init__", self._inside(Category.REDUCED, ddp.__init__)),
            mock.patch.object(ddp, "_pre_forward", self._inside(Category.REDUCED, ddp._pre_forward)),
            # It computes the result's whole shape with fake tensors, also outside FakeTensorMode.
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._untracked(propagate_meta)),
            # It is compiled, and Inductor fuses what it would allocate: 36 bytes for each element of a parameter.
            mock.patch.object(torchao.optim.adam, "single_param_adam", self._untracked(update_8bit)),
        ):
            yield
        for hook in hooks:
            hook.remove()

    def _inside(self, category: Category, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.category(category):
                return function(*args, **kwargs)

        return call

    def _untracked(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pauses += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._pauses -= 1

        return call

    def track_parameters(self, model: nn.Module) -> None:
        """Recognize the parameters of ``model`` and the gradients that autograd accumulates in them."""
        for p in model.parameters():
            self.assign(p, Category.PARAMETERS)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: self.assign(p.grad, Category.GRADIENTS))

    def assign(self, tensors: Any, category: Category) -> None:
        """Assign the storages of ``tensors``, which may exist already, to ``category``."""
        tree_map_only(torch.Tensor, lambda t: self._update_and_maybe_create_winfos(t, category), tensors)

    def current(self) -> dict[str, int]:
        """Return the bytes on the device now, by category."""
        snapshot = self._curr_mem_snap.get(self._device, {})
        return {key.value: n for key, n in snapshot.items() if isinstance(key, Category) and n}

    def __enter__(self) -> PeakTracker:
        self._fake_mode_on_entry = active_fake_mode()
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *args: Any) -> None:
        self._restore_resize()
        TorchDispatchMode.__exit__(self, *args)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = 0, {}

    def record_peak(self) -> None:
        """Record the memory in use now if it is the most so far."""
        total = self._curr_mem_snap.get(self._device, {}).get("Total", 0)
        if total > self.peak:
            self.peak, self.at_peak = total, self.current()

    def _update_snap(self, u_type: _UpdateType, *args: Any, **kwargs: Any) -> None:
        if u_type is not _UpdateType.ADD:  # memory grows until something is freed
            self.record_peak()
        super()._update_snap(u_type, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func is aten._local_scalar_dense.default and self._categories[-1] is Category.UPDATE:
            # The host reads a value, for example whether a decomposition succeeded.
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func in _FUSED_SGD:
            return None  # it changes tensors in place, and has no implementation for fake ones
        if func is aten._pin_memory.default:
            return torch.empty_like(args[0])
        is_wait = func is torch.ops._c10d_functional.wait_tensor.default  # a new tensor for fake ones only
        result = args[0] if is_wait else func(*args, **kwargs or {})
        if not self._pauses and active_fake_mode() is self._fake_mode_on_entry:
            category = self._categories[-1]
            if category is Category.FORWARD:
                category = self._category_in_pass(func, args)
            tree_map_only(torch.Tensor, lambda t: self._track(self._refine(category, func, t), t), result)
        return result

    def _category_in_pass(self, func: Any, args: Any) -> Category:
        if func is aten._to_copy.default and self._category_of(args[0]) is Category.PARAMETERS:
            return Category.GATHERED
        return Category.FORWARD if torch._C._current_autograd_node() is None else Category.BACKWARD

    def _category_of(self, t: torch.Tensor) -> Category | None:
        known = self._WINFO.get(t.untyped_storage())
        return None if known is None else known[0].reftype  # type: ignore[return-value]

    def _refine(self, category: Category, func: Any, t: torch.Tensor) -> Category:
        """Return the category of a result from its shape."""
        if category is Category.BACKWARD and func in _WEIGHT_GRADIENTS and tuple(t.shape) in self._weight_shapes:
            return Category.GRADIENTS
        if category in (Category.FORWARD, Category.BACKWARD) and t.dim() > 1 and t.shape[-1] in self._vocab_sizes:
            return Category.LOGITS
        return category
