// Devices, streams, events, memory and random generators, and what ATen asks of the CUDA library.
#include "emulation.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <bit>
#include <list>
#include <map>
#include <utility>

namespace emulation {

using namespace c10;

// ---- observation

namespace {
// Memory of the device.
struct Block {
  void* pointer;
  int64_t nbytes;
  int64_t stream;
  DeviceIndex device;
};
void release(Block* block);

PyObject* g_observer = nullptr;
std::atomic<int> g_kinds{0};
thread_local bool t_in_observer = false;
// Memory that Python's collector frees while it runs the observer. It is reported, and given back, afterwards.
thread_local std::vector<Block*> t_deferred;

const char* name_of(Kind kind) {
  switch (kind) {
    case kSync: return "sync";
    case kKernel: return "kernel";
    case kMemory: return "memory";
    case kStream: return "stream";
    default: return "collective";
  }
}

PyObject* to_python(const Ranges& ranges) {
  PyObject* list = PyTuple_New(static_cast<Py_ssize_t>(ranges.size()));
  for (size_t i = 0; i < ranges.size(); i++) {
    PyTuple_SET_ITEM(list, static_cast<Py_ssize_t>(i),
                     Py_BuildValue("(KL)", static_cast<unsigned long long>(ranges[i].begin),
                                   static_cast<long long>(ranges[i].nbytes)));
  }
  return list;
}

std::string take_error() {
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyObject* text = PyObject_Str(error != nullptr ? error : type);
  const char* message = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
  std::string result = message != nullptr ? message : "the observer failed";
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
  return result;
}
}  // namespace

bool is_observed(Kind kind) { return (g_kinds.load(std::memory_order_relaxed) & kind) != 0 && !t_in_observer; }

void set_observer(PyObject* observer, int kinds) {
  Py_XDECREF(g_observer);
  g_observer = observer == Py_None ? nullptr : Py_NewRef(observer);
  g_kinds = g_observer == nullptr ? 0 : kinds;
}

void observe(Kind kind, const std::string& name, int64_t stream, const Ranges& reads, const Ranges& writes,
             int64_t value) {
  if (!is_observed(kind) || !Py_IsInitialized() || _Py_IsFinalizing()) return;
  t_in_observer = true;
  std::string refusal;
  {
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject* observer = g_observer;  // another thread may just have removed it
    Py_XINCREF(observer);
    // A tensor may be freed while an exception propagates.
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (observer != nullptr) {
      PyObject* result = PyObject_CallFunction(observer, "ssLNNL", name_of(kind), name.c_str(),
                                               static_cast<long long>(stream), to_python(reads), to_python(writes),
                                               static_cast<long long>(value));
      if (result == nullptr) refusal = take_error();
      Py_XDECREF(result);
      Py_DECREF(observer);
    }
    PyErr_Restore(type, error, traceback);
    PyGILState_Release(gil);
  }
  t_in_observer = false;
  for (auto* block : std::exchange(t_deferred, {})) release(block);
  TORCH_CHECK(refusal.empty(), refusal);
}

Range range_of(const at::Tensor& t) {
  if (!t.defined() || t.numel() == 0 || !t.has_storage()) return {0, 0};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  const auto base = reinterpret_cast<uintptr_t>(t.storage().data());
  return {base + static_cast<uintptr_t>(t.storage_offset() * t.element_size()), (last + 1) * t.element_size()};
}

// ---- copies from the device to pinned memory

namespace {
constexpr int kUninitialized = 0xFF;  // NaN in each floating-point dtype

using Clock = std::map<int64_t, int64_t>;  // how many arrivals of each stream are over

struct Arrival {
  char* to;
  std::vector<char> contents;
  int64_t stream, time;
};

std::mutex g_arrival_mutex;
std::list<Arrival> g_arrivals;
std::map<int64_t, Clock> g_stream_clocks, g_event_clocks;

void merge(Clock& clock, const Clock& other) {
  for (const auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
}

template <class Predicate>
void arrive_if(Predicate predicate) {
  for (auto arrival = g_arrivals.begin(); arrival != g_arrivals.end();) {
    if (predicate(*arrival)) {
      memcpy(arrival->to, arrival->contents.data(), arrival->contents.size());
      arrival = g_arrivals.erase(arrival);
    } else {
      ++arrival;
    }
  }
}

void arrive_until(const Clock& clock) {
  arrive_if([&](const Arrival& a) {
    const auto time = clock.find(a.stream);
    return time != clock.end() && time->second >= a.time;
  });
}

bool overlaps(const Arrival& arrival, const char* begin, int64_t nbytes) {
  return arrival.to < begin + nbytes && begin < arrival.to + arrival.contents.size();
}

// Nothing arrives in memory that is gone.
void forget_arrivals(const void* pointer, int64_t nbytes) {
  std::lock_guard<std::mutex> lock(g_arrival_mutex);
  g_arrivals.remove_if([&](const Arrival& a) { return overlaps(a, static_cast<const char*>(pointer), nbytes); });
}
}  // namespace

void defer_arrival(void* to, int64_t nbytes, int64_t stream) {
  std::lock_guard<std::mutex> lock(g_arrival_mutex);
  auto* begin = static_cast<char*>(to);
  const auto time = ++g_stream_clocks[stream][stream];
  g_arrivals.push_back({begin, std::vector<char>(begin, begin + nbytes), stream, time});
  memset(to, kUninitialized, static_cast<size_t>(nbytes));
}

void settle(const void* pointer, int64_t nbytes) {
  std::lock_guard<std::mutex> lock(g_arrival_mutex);
  arrive_if([&](const Arrival& a) { return overlaps(a, static_cast<const char*>(pointer), nbytes); });
}

// ---- devices, streams, events

namespace {
// Each reports what orders streams, and the host's waits, and lets the copies arrive that a wait covers.

void record_event(int64_t event, int64_t stream) {
  {
    std::lock_guard<std::mutex> lock(g_arrival_mutex);
    g_event_clocks[event] = g_stream_clocks[stream];
  }
  observe(kStream, "record_event", stream, {}, {}, event);
}

void wait_event(int64_t event, int64_t stream) {
  {
    std::lock_guard<std::mutex> lock(g_arrival_mutex);
    merge(g_stream_clocks[stream], g_event_clocks[event]);
  }
  observe(kStream, "wait_event", stream, {}, {}, event);
}

void synchronize_event(int64_t event) {
  {
    std::lock_guard<std::mutex> lock(g_arrival_mutex);
    arrive_until(g_event_clocks[event]);
  }
  observe(kStream, "synchronize_event", 0, {}, {}, event);
}

void synchronize_all() {
  {
    std::lock_guard<std::mutex> lock(g_arrival_mutex);
    arrive_if([](const Arrival&) { return true; });
  }
  observe(kStream, "synchronize_device");
}
}  // namespace

void synchronize_stream(int64_t stream) {
  {
    std::lock_guard<std::mutex> lock(g_arrival_mutex);
    arrive_until(g_stream_clocks[stream]);
  }
  observe(kStream, "synchronize_stream", stream);
}

namespace {
thread_local DeviceIndex t_device = 0;
thread_local StreamId t_stream[kDeviceCount] = {0};
std::atomic<int64_t> g_next_stream{1}, g_next_event{1};
std::atomic<int64_t> g_launched{0}, g_lag{0};  // kernels, and how many of them the device is behind the host
std::mutex g_mutex;
std::map<int64_t, int64_t> g_unqueried_events;  // kernels launched before each

int64_t event_id(void* event) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(event)); }

struct EmulatedGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device previous(DeviceType::CUDA, t_device);
    setDevice(d);
    return previous;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, t_device); }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  Stream getStream(Device d) const override { return stream(d, t_stream[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override { return stream(d, g_next_stream++); }
  Stream exchangeStream(Stream s) const override {
    Stream previous = getStream(s.device());
    t_stream[s.device_index()] = s.id();
    return previous;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(static_cast<intptr_t>(g_next_event++));
    if (g_lag > 0) {
      std::lock_guard<std::mutex> lock(g_mutex);
      g_unqueried_events[event_id(*event)] = g_launched;
    }
    record_event(event_id(*event), s.id());
  }
  void block(void* event, const Stream& s) const override {
    if (event != nullptr) wait_event(event_id(event), s.id());
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    if (g_lag > 0) {
      std::lock_guard<std::mutex> lock(g_mutex);
      const auto recorded = g_unqueried_events.find(event_id(event));
      if (recorded != g_unqueried_events.end()) {
        const bool is_recent = g_launched - recorded->second < g_lag;
        g_unqueried_events.erase(recorded);  // a host that asks again has waited
        if (is_recent) return false;
      }
    }
    synchronize_event(event_id(event));
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }
  bool queryStream(const Stream& s) const override {
    synchronize_stream(s.id());
    return true;
  }
  void synchronizeStream(const Stream& s) const override {
    synchronize_stream(s.id());
    observe(kSync, "stream.synchronize");
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    synchronize_event(event_id(event));
    observe(kSync, "event.synchronize", 0, {}, {}, event_id(event));
  }
  void synchronizeDevice(const DeviceIndex) const override {
    synchronize_all();
    observe(kSync, "device.synchronize");
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }

 private:
  static DeviceIndex index_of(Device d) { return d.index() < 0 ? t_device : d.index(); }
  static Stream stream(Device d, StreamId id) {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_of(d)), id);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, EmulatedGuard);
}  // namespace

DeviceIndex current_device() { return t_device; }
void set_current_device(DeviceIndex index) { t_device = index; }
void empty_cache() {
  synchronize_all();  // cudaFree waits for the device
  observe(kSync, "empty_cache");
}
int64_t current_stream_id() { return t_stream[t_device]; }
int64_t new_stream_id() { return g_next_stream++; }
void set_lag(int64_t kernels) { g_lag = kernels; }
void count_launch() { g_launched++; }

// ---- memory

namespace {
constexpr size_t kBlockBytes = 512;  // what CUDACachingAllocator rounds to
MemoryStats g_stats[kDeviceCount];
int64_t g_capacity = 0;  // 0: as much as the host has
std::map<uintptr_t, int64_t> g_pinned;

void release(Block* block) {
  if (t_in_observer) {
    t_deferred.push_back(block);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_stats[block->device].allocated -= block->nbytes;
  }
  if (block->nbytes > 0) {
    try {
      observe(kMemory, "free", block->stream, {}, {{reinterpret_cast<uintptr_t>(block->pointer), block->nbytes}});
    } catch (const c10::Error&) {  // a destructor cannot raise, and the observer has noted it
    }
  }
  free(block->pointer);
  delete block;
}

void free_block(void* context) { release(static_cast<Block*>(context)); }

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t requested) override {
    const auto nbytes = static_cast<int64_t>((requested + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
    {
      std::lock_guard<std::mutex> lock(g_mutex);
      auto& stats = g_stats[t_device];
      TORCH_CHECK_WITH(OutOfMemoryError, g_capacity == 0 || stats.allocated + nbytes <= g_capacity,
                       "CUDA out of memory. Tried to allocate ", nbytes, " bytes. GPU ", static_cast<int>(t_device),
                       " has a total capacity of ", g_capacity, " bytes of which ", g_capacity - stats.allocated,
                       " bytes is free.");
      stats.allocated += nbytes;
      stats.peak = std::max(stats.peak, stats.allocated);
    }
    void* pointer = nullptr;
    if (nbytes > 0) {
      TORCH_CHECK(posix_memalign(&pointer, kBlockBytes, static_cast<size_t>(nbytes)) == 0, "no host memory left");
      memset(pointer, kUninitialized, static_cast<size_t>(nbytes));
      observe(kMemory, "allocate", current_stream_id(), {}, {{reinterpret_cast<uintptr_t>(pointer), nbytes}});
    }
    auto* block = new Block{pointer, nbytes, current_stream_id(), t_device};
    return {pointer, block, &free_block, Device(DeviceType::CUDA, t_device)};
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
DeviceAllocator g_device_allocator;

// Blocks of pinned memory by size, for the next tensor.
std::multimap<size_t, void*> g_free_pinned;

void free_pinned(void* context) {
  auto* block = static_cast<std::pair<size_t, void*>*>(context);
  if (block == nullptr) return;
  forget_arrivals(block->second, static_cast<int64_t>(block->first));
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_pinned.erase(reinterpret_cast<uintptr_t>(block->second));
    g_free_pinned.emplace(block->first, block->second);
  }
  delete block;
}

// Like CachingHostAllocator, it rounds sizes to powers of two and reuses memory, so only new blocks cost a call of CUDA.
// CachingHostAllocator holds a freed block back until the copies that use it are over. Here it is given out at once, and
// these copies count as over.
struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t requested) override {
    if (requested == 0) return {nullptr, nullptr, &free_pinned, Device(DeviceType::CPU)};
    const size_t nbytes = std::max(kBlockBytes, std::bit_ceil(requested));
    void* pointer = nullptr;
    {
      std::lock_guard<std::mutex> lock(g_mutex);
      const auto block = g_free_pinned.find(nbytes);
      if (block != g_free_pinned.end()) {
        pointer = block->second;
        g_free_pinned.erase(block);
      }
    }
    if (pointer != nullptr) {
      observe(kMemory, "reuse", 0, {}, {{reinterpret_cast<uintptr_t>(pointer), static_cast<int64_t>(nbytes)}});
    } else {
      TORCH_CHECK(posix_memalign(&pointer, kBlockBytes, nbytes) == 0, "no host memory left");
      observe(kSync, "allocation of pinned memory", 0, {}, {}, static_cast<int64_t>(nbytes));
    }
    register_pinned(reinterpret_cast<uintptr_t>(pointer), static_cast<int64_t>(nbytes));
    return {pointer, new std::pair<size_t, void*>(nbytes, pointer), &free_pinned, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
PinnedAllocator g_pinned_allocator;
}  // namespace

Allocator* device_allocator() { return &g_device_allocator; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = g_pinned.upper_bound(address);
  if (next == g_pinned.begin()) return false;
  --next;
  return address < next->first + static_cast<uintptr_t>(next->second);
}

void register_pinned(uintptr_t pointer, int64_t nbytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_pinned[pointer] = nbytes;
}

void unregister_pinned(uintptr_t pointer) {
  int64_t nbytes = 0;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    nbytes = g_pinned[pointer];
    g_pinned.erase(pointer);
  }
  forget_arrivals(reinterpret_cast<const void*>(pointer), nbytes);
  observe(kMemory, "unregister", 0, {}, {{pointer, nbytes}});
}

MemoryStats memory_stats(DeviceIndex index) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_stats[index];
}

void reset_peak(DeviceIndex index) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_stats[index].peak = g_stats[index].allocated;
}

void set_capacity(int64_t nbytes) { g_capacity = nbytes; }

// ---- tensors

namespace {
void release_storage(void* context) { delete static_cast<Storage*>(context); }

Storage alias_storage(const Storage& storage, Device device, Allocator* allocator) {
  DataPtr data(storage.mutable_data(), new Storage(storage), &release_storage, device);
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}

at::Tensor alias(const at::Tensor& t, Storage storage, DispatchKeySet keys) {
  auto result = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, t.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  return result;
}
}  // namespace

at::Tensor host_alias(const at::Tensor& t) {
  return alias(t, alias_storage(t.storage(), Device(DeviceType::CPU), GetCPUAllocator()),
               DispatchKeySet(DispatchKey::CPU));
}

// ---- random numbers

namespace {
constexpr uint64_t kOffsetPerOperation = 4;
std::atomic<bool> g_host_random{false};

struct Generator final : GeneratorImpl {
  uint64_t seed_value = default_rng_seed_val;
  uint64_t offset_value = 0;

  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(DeviceType::CUDA, index), DispatchKeySet(DispatchKey::CUDA)) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  void set_current_seed(uint64_t seed) override {
    seed_value = seed;
    offset_value = 0;
  }
  void set_offset(uint64_t offset) override { offset_value = offset; }
  uint64_t get_offset() const override { return offset_value; }
  uint64_t current_seed() const override { return seed_value; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_value;
  }
  void set_state(const TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "the state of a CUDA generator has 16 bytes");
    const auto* values = static_cast<const uint64_t*>(state.data());
    seed_value = values[0];
    offset_value = values[1];
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    auto state = at::empty({2 * sizeof(uint64_t)}, at::TensorOptions().dtype(ScalarType::Byte).device(kCPU));
    auto* values = reinterpret_cast<uint64_t*>(state.data_ptr());
    values[0] = seed_value;
    values[1] = offset_value;
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_value = seed_value;
    copy->offset_value = offset_value;
    return copy;
  }
};

}  // namespace

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> result;
    for (DeviceIndex i = 0; i < kDeviceCount; i++) result.push_back(at::make_generator<Generator>(i));
    return result;
  }();
  return generators[static_cast<size_t>(index < 0 ? t_device : index)];
}
void set_host_random(bool host) { g_host_random = host; }

DeviceRandomState::DeviceRandomState(const std::optional<at::Generator>& generator, DeviceIndex index) {
  if (g_host_random && !generator) return;
  auto& device = (generator ? *generator : default_generator(index));
  auto* state = device.get<Generator>();
  auto cpu = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(cpu.mutex());
  saved_ = cpu.get_state();
  // The first numbers of a generator of the program's own are those of a CPU generator with its seed.
  const bool is_first = g_host_random && state->offset_value == 0;
  cpu.set_current_seed(is_first ? state->seed_value : state->seed_value * 0x9E3779B97F4A7C15ULL + state->offset_value);
  state->offset_value += kOffsetPerOperation;
}

DeviceRandomState::~DeviceRandomState() {
  if (!saved_.defined()) return;
  auto cpu = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(cpu.mutex());
  cpu.set_state(saved_);
}

}  // namespace emulation

namespace at {
struct EmulatedHooks final : CUDAHooksInterface {
  explicit EmulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return emulation::kDeviceCount; }
  int getNumGPUs() const override { return emulation::kDeviceCount; }
  DeviceIndex current_device() const override { return emulation::current_device(); }
  DeviceIndex getCurrentDevice() const override { return emulation::current_device(); }
  void setCurrentDevice(DeviceIndex index) const override { emulation::set_current_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto previous = emulation::current_device();
    emulation::set_current_device(index);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return emulation::is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &emulation::g_pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return emulation::device_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, emulation::current_device()); }
  void deviceSynchronize(DeviceIndex index) const override { emulation::EmulatedGuard().synchronizeDevice(index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return emulation::default_generator(index);
  }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<emulation::Generator>(index < 0 ? emulation::current_device() : index);
  }
};
C10_REGISTER_CREATOR(CUDAHooksRegistry, CUDAHooks, [](CUDAHooksArgs args) -> std::unique_ptr<CUDAHooksInterface> {
  return std::make_unique<EmulatedHooks>(args);
});
}  // namespace at

namespace c10d {
// DDP's reducer times its passes with it.
struct EmulatedTimer final : Timer {
  explicit EmulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, EmulatedTimer);
}  // namespace c10d
