// What Python sees of the emulation.
#include "emulation.h"

#include "nccl.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

namespace {

using emulation::NCCLOptions;
using Backend = c10::intrusive_ptr<c10d::Backend>;

void bind_nccl(pybind11::module_& m) {
  pybind11::class_<NCCLOptions, c10::intrusive_ptr<NCCLOptions>, c10d::Backend::Options> options(m, "Options");
  options.def("__deepcopy__", [](const NCCLOptions& self, const pybind11::dict&) {
    return c10::make_intrusive<NCCLOptions>(self);
  });
  m.def("options", [](const Backend& backend) {
    return c10::dynamic_intrusive_pointer_cast<NCCLOptions>(backend->getBackendOptions());
  });
  m.def("set_timeout", [](const Backend& backend, std::chrono::milliseconds timeout) { backend->setTimeout(timeout); });
  m.def("make_nccl", [](const Backend& gloo, double timeout_s, const std::string& name,
                        const std::vector<uint64_t>& ranks) {
    const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
    auto own = c10::make_intrusive<NCCLOptions>(timeout);
    own->group_name = name;
    own->global_ranks_in_group = ranks;
    return emulation::make_nccl(gloo, own);
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulation;
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator());
  m.attr("DEVICE_COUNT") = kDeviceCount;
  m.attr("SYNC") = static_cast<int>(kSync);
  m.attr("KERNEL") = static_cast<int>(kKernel);
  m.attr("MEMORY") = static_cast<int>(kMemory);
  m.attr("STREAM") = static_cast<int>(kStream);
  m.attr("COLLECTIVE") = static_cast<int>(kCollective);
  m.def("set_observer", [](const pybind11::object& observer, int kinds) { set_observer(observer.ptr(), kinds); });
  m.def("set_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("memory_stats", [](int index) {
    const auto stats = memory_stats(static_cast<c10::DeviceIndex>(index));
    return std::pair<int64_t, int64_t>(stats.allocated, stats.peak);
  });
  m.def("reset_peak", [](int index) { reset_peak(static_cast<c10::DeviceIndex>(index)); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("synchronize_device", [](int index) {
    c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->synchronizeDevice(static_cast<c10::DeviceIndex>(index));
  });
  m.def("empty_cache", &empty_cache);
  m.def("set_capacity", &set_capacity);
  m.def("set_host_random", &set_host_random);
  m.def("set_lag", &set_lag);
  m.def("register_pinned", &register_pinned);
  m.def("unregister_pinned", &unregister_pinned);
  m.def("resize_storage", [](const at::Tensor& view, int64_t nbytes) {
    auto* storage = view.storage().unsafeGetStorageImpl();
    c10::DataPtr data = device_allocator()->allocate(static_cast<size_t>(nbytes));
    const auto kept = std::min<size_t>(storage->nbytes(), static_cast<size_t>(nbytes));
    if (kept > 0) memcpy(data.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(static_cast<size_t>(nbytes));
  });
  bind_nccl(m);
}
