// A CUDA device for a torch built without CUDA: memory of the host, kernels of the CPU, NCCL played by gloo.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <mutex>
#include <string>
#include <vector>

namespace emulation {

constexpr int kDeviceCount = 8;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// ---- observation

enum Kind : int { kSync = 1, kKernel = 2, kMemory = 4, kStream = 8, kCollective = 16 };

struct Range {
  uintptr_t begin;
  int64_t nbytes;
};
using Ranges = std::vector<Range>;

// Whether a Python observer wants events of `kind`.
bool is_observed(Kind kind);

// Calls the Python observer as observer(kind, name, stream, reads, writes, value). If it raises, so does this.
void observe(Kind kind, const std::string& name, int64_t stream = 0, const Ranges& reads = {},
             const Ranges& writes = {}, int64_t value = 0);

void set_observer(PyObject* observer, int kinds);

// The bytes between the first and the last element of `t`.
Range range_of(const at::Tensor& t);

// ---- device and memory

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
int64_t current_stream_id();
int64_t new_stream_id();
// The host waits for the stream.
void synchronize_stream(int64_t stream);
// Gives unused memory back, for which the host waits for the device.
void empty_cache();

c10::Allocator* device_allocator();
bool is_pinned(const void* pointer);
void register_pinned(uintptr_t pointer, int64_t nbytes);
void unregister_pinned(uintptr_t pointer);

struct MemoryStats {
  int64_t allocated = 0, peak = 0;
};
MemoryStats memory_stats(c10::DeviceIndex index);
void reset_peak(c10::DeviceIndex index);
void set_capacity(int64_t nbytes);

// ---- copies from the device to pinned memory, which arrive when the host has waited for them

// The memory at `to` has other contents until a wait of the host that covers `stream` as it is now.
void defer_arrival(void* to, int64_t nbytes, int64_t stream);
// Lets what is still on its way to the memory arrive, because the device reads it.
void settle(const void* pointer, int64_t nbytes);

// Lets the device be `kernels` behind the host: the first query of an event that was recorded less than that ago answers
// "not complete". 0: it is idle.
void set_lag(int64_t kernels);
// Counts a kernel.
void count_launch();

// ---- tensors

inline bool is_cuda(const at::Tensor& t) {
  return t.defined() && t.device().type() == c10::DeviceType::CUDA;
}
// A CPU tensor with the memory of `t`, which it keeps alive.
at::Tensor host_alias(const at::Tensor& t);

// ---- random numbers: (seed, offset) like the Philox generator of a CUDA device

const at::Generator& default_generator(c10::DeviceIndex index);
// With this, the device draws the CPU generator's numbers, so that a run on it equals one on the CPU.
void set_host_random(bool host);

// Gives torch's default CPU generator a state that follows from the CUDA generator, for as long as this lives.
class DeviceRandomState {
 public:
  // `generator` undefined: the device's default one.
  DeviceRandomState(const std::optional<at::Generator>& generator, c10::DeviceIndex index);
  ~DeviceRandomState();

 private:
  at::Tensor saved_;
};



}  // namespace emulation
