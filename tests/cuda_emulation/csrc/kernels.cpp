// Operators on CUDA tensors: the CPU's kernel on the same memory, refused where CUDA would refuse, with what it reads
// and writes reported.
#include "emulation.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>

namespace emulation {

using namespace c10;

namespace {

// Operators that take CPU indices with CUDA tensors, and copy them to the device.
const std::set<std::string> kTakeHostIndices = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put",
                                                "aten::index_put_", "aten::_index_put_impl_",
                                                "aten::_unsafe_index.Tensor"};
// Operators whose CUDA kernels wait for the device: the size of their result depends on values, or they read one.
const std::set<std::string> kSynchronize = {
    "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::nanmedian", "aten::repeat_interleave.Tensor",
    "aten::_linalg_eigh", "aten::_linalg_svd"};

DeviceIndex index_or_current(std::optional<Device> device) {
  return device && device->index() >= 0 ? device->index() : current_device();
}

class DeviceScope {
 public:
  explicit DeviceScope(DeviceIndex index) : previous_(current_device()) { set_current_device(index); }
  ~DeviceScope() { set_current_device(previous_); }

 private:
  DeviceIndex previous_;
};

at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<MemoryFormat> format) {
  DeviceScope scope(index_or_current(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, dtype.value_or(ScalarType::Float), format);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  DeviceScope scope(index_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           dtype.value_or(ScalarType::Float));
}

// What a copy between host and device does to the host: it waits for blocking ones and for those of pageable memory. Any
// other from the device arrives later.
void finish_transfer(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto nbytes = static_cast<int64_t>(from.numel() * from.element_size());
  const bool pinned = is_pinned((is_cuda(to) ? from : to).const_data_ptr());
  const std::string direction = is_cuda(to) ? "host to device" : "device to host";
  if (!non_blocking) {
    synchronize_stream(current_stream_id());
    observe(kSync, "blocking copy, " + direction, 0, {}, {}, nbytes);
  } else if (!pinned) {
    if (is_cuda(from)) synchronize_stream(current_stream_id());
    observe(kSync, "copy of pageable memory, " + direction, 0, {}, {}, nbytes);
  } else if (is_cuda(from)) {
    const Range range = range_of(to);
    defer_arrival(reinterpret_cast<void*>(range.begin), range.nbytes, current_stream_id());
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  count_launch();
  if (is_observed(kKernel)) {
    observe(kKernel, "aten::copy_", current_stream_id(), {range_of(source)}, {range_of(self)});
  }
  if (!is_cuda(source)) settle(source.const_data_ptr(), range_of(source).nbytes);
  at::Tensor to = is_cuda(self) ? host_alias(self) : self;
  at::Tensor from = is_cuda(source) ? host_alias(source) : source;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  }
  if (is_cuda(self) != is_cuda(source)) finish_transfer(self, source, non_blocking);
  return self;
}

Scalar local_scalar_dense(const at::Tensor& self) {
  if (is_observed(kKernel)) observe(kKernel, "aten::_local_scalar_dense", current_stream_id(), {range_of(self)});
  synchronize_stream(current_stream_id());
  observe(kSync, "item");
  return host_alias(self).item();
}

void record_stream(at::Tensor& self, Stream stream) {
  const auto base = reinterpret_cast<uintptr_t>(self.storage().data());
  observe(kStream, "record_stream", stream.id(), {}, {{base, static_cast<int64_t>(self.storage().nbytes())}});
}

void grow(const Storage& storage, size_t nbytes) {
  DataPtr data = device_allocator()->allocate(nbytes);
  if (storage.nbytes() > 0) memcpy(data.get(), storage.data(), std::min(storage.nbytes(), nbytes));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  const auto numel = multiply_integers(size);
  const auto nbytes = static_cast<size_t>((numel + self.storage_offset()) * self.element_size());
  if (nbytes > self.storage().nbytes()) grow(self.storage(), nbytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(),
                                      source.strides());
}

// One call of an operator on CUDA tensors.
class Call {
 public:
  Call(const OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {
    const auto name = op.operator_name();
    name_ = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    first_ = stack->size() - op.schema().arguments().size();
  }

  void run() {
    for (size_t i = first_; i < stack_->size(); i++) replace_argument(i);
    TORCH_CHECK(aliases_.empty() || !has_host_tensor_,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                static_cast<int>(index()), " and cpu! (emulated ", name_, ")");
    TORCH_CHECK(device_ < 0 || device_ == current_device(), "emulated ", name_, " runs on cuda:",
                static_cast<int>(device_), " while cuda:", static_cast<int>(current_device()), " is current");
    // A structured operator has copied them already, to find its output's size, before it arrives as its out= overload.
    if (host_index_bytes_ > 0 && !aliases_.empty() && name_ != "aten::index.Tensor_out") {
      observe(kSync, "blocking copy, host to device", 0, {}, {}, host_index_bytes_);
    }
    // Structured operators arrive as their out= overload.
    const bool waits = kSynchronize.count(name_) + kSynchronize.count(op_.operator_name().name) > 0;
    call_kernel();
    if (!is_view()) count_launch();
    if (is_observed(kKernel) && !is_view()) report_kernel();
    if (waits) {
      synchronize_stream(current_stream_id());
      observe(kSync, name_);
    }
    adopt_resized();
    const size_t returns = op_.schema().returns().size();
    for (size_t i = stack_->size() - returns; i < stack_->size(); i++) {
      map_tensors((*stack_)[i], [this](const at::Tensor& t) { return to_device(t); });
    }
  }

 private:
  DeviceIndex index() const { return device_ >= 0 ? device_ : current_device(); }

  template <class Function>
  static void map_tensors(IValue& value, Function function) {
    if (value.isTensor()) {
      value = function(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& t : tensors) t = function(t);
      value = IValue(List<at::Tensor>(ArrayRef<at::Tensor>(tensors)));
    } else if (value.isOptionalTensorList()) {
      List<std::optional<at::Tensor>> result;
      for (const std::optional<at::Tensor> t : value.toOptionalTensorList()) {
        result.push_back(t ? std::optional<at::Tensor>(function(*t)) : t);
      }
      value = IValue(result);
    }
  }

  void replace_argument(size_t i) {
    auto& value = (*stack_)[i];
    const auto* alias = op_.schema().arguments()[i - first_].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (device_ < 0) device_ = value.toDevice().index();
      value = IValue(Device(DeviceType::CPU));
    } else if (value.isGenerator()) {
      generator_ = value.toGenerator();
      value = IValue();
    } else {
      const bool are_indices = value.isOptionalTensorList() && kTakeHostIndices.count(name_) > 0;
      map_tensors(value, [&](const at::Tensor& t) {
        if (!are_indices || is_cuda(t)) return to_host(t, is_written);
        if (t.defined()) host_index_bytes_ += static_cast<int64_t>(t.nbytes());
        return t;
      });
    }
  }

  at::Tensor to_host(const at::Tensor& t, bool is_written) {
    if (!t.defined()) return t;
    if (!is_cuda(t)) {
      has_host_tensor_ |= t.device().is_cpu() && t.dim() > 0;
      return t;
    }
    TORCH_CHECK(device_ < 0 || device_ == t.device().index(), "Expected all tensors to be on the same device, but ",
                name_, " got tensors on cuda:", static_cast<int>(device_), " and cuda:",
                static_cast<int>(t.device().index()));
    device_ = t.device().index();
    if (is_observed(kKernel)) (is_written ? writes_ : reads_).push_back(range_of(t));
    for (auto& [device, host] : aliases_) {
      if (device.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return host;
    }
    aliases_.emplace_back(t, host_alias(t));
    return aliases_.back().second;
  }

  void call_kernel() {
    std::optional<DeviceRandomState> random;
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) random.emplace(generator_, index());
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
  }

  bool is_view() const {
    for (const auto& result : op_.schema().returns()) {
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
    }
    return false;
  }

  // The ranges of new memory that it writes are reported with that memory.
  void report_kernel() { observe(kKernel, name_, current_stream_id(), reads_, writes_); }

  // Kernels of out= variants may have resized their outputs, which are then in memory of the host.
  void adopt_resized() {
    for (auto& [device, host] : aliases_) {
      const bool moved = host.storage().data() != device.storage().data();
      if (!moved && host.sizes() == device.sizes()) continue;
      auto* impl = device.unsafeGetTensorImpl();
      if (moved) impl->set_storage_keep_dtype(copy_to_device(host.storage()));
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      if (moved) report_output(device);
    }
  }

  // In memory of the device, so that it is counted and can be freed too early.
  Storage copy_to_device(const Storage& storage) {
    DeviceScope scope(index());
    const size_t nbytes = storage.nbytes();
    DataPtr data = device_allocator()->allocate(nbytes);
    if (nbytes > 0) memcpy(data.get(), storage.data(), nbytes);
    return Storage(Storage::use_byte_size_t(), nbytes, std::move(data), device_allocator(), true);
  }

  void report_output(const at::Tensor& t) {
    if (is_observed(kKernel) && t.numel() > 0) observe(kKernel, name_, current_stream_id(), {}, {range_of(t)});
  }

  at::Tensor to_device(const at::Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [device, host] : aliases_) {
      if (host.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return device;
    }
    for (auto& [device, host] : aliases_) {
      if (host.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) {
        return at::native::as_strided_tensorimpl(device, t.sizes(), t.strides(), t.storage_offset());
      }
    }
    DeviceScope scope(index());
    const at::Tensor result =
        at::detail::empty_strided_generic(t.sizes(), t.strides(), device_allocator(), kKeys, t.scalar_type());
    if (t.numel() > 0) memcpy(result.mutable_data_ptr(), t.const_data_ptr(), static_cast<size_t>(range_of(t).nbytes));
    if (t.is_conj()) result._set_conj(true);
    if (t.is_neg()) result._set_neg(true);
    report_output(result);
    return result;
  }

  const OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::string name_;
  size_t first_ = 0;
  DeviceIndex device_ = -1;
  bool has_host_tensor_ = false;
  int64_t host_index_bytes_ = 0;
  std::optional<at::Generator> generator_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // of the device, of the host
  Ranges reads_, writes_;
};

void call_on_host(const OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
}

}  // namespace emulation
