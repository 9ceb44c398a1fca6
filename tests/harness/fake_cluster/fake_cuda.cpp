// What autograd, FSDP and DDP ask of a CUDA build besides tensors: one device, and streams and events that do nothing.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace at {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

std::atomic<int64_t> next_id{1}; // of streams and events
thread_local c10::StreamId current_stream = 0;

Stream make_stream(c10::StreamId id) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), id);
}

struct FakeCudaGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return make_stream(current_stream); }
  Stream getDefaultStream(Device) const override { return make_stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return make_stream(next_id++); }
  Stream getNewStream(Device, int) const override { return make_stream(next_id++); }
  Stream exchangeStream(Stream stream) const override {
    return make_stream(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(static_cast<intptr_t>(next_id++));
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard);

struct FakeCudaHooks final : CUDAHooksInterface {
  explicit FakeCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

C10_REGISTER_CREATOR(CUDAHooksRegistry, CUDAHooks, [](CUDAHooksArgs args) -> std::unique_ptr<CUDAHooksInterface> {
  return std::make_unique<FakeCudaHooks>(args);
});

} // namespace
} // namespace at

namespace c10d {
namespace {

struct FakeCudaTimer final : Timer {
  explicit FakeCudaTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeCudaTimer);

} // namespace
} // namespace c10d
