// NCCL played by gloo over the same memory: its streams and events, and what NCCL would refuse.
#include "nccl.h"

#include "emulation.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <functional>
#include <list>
#include <sstream>

namespace emulation {

using namespace c10;
using Tensors = std::vector<at::Tensor>;
using InnerWork = c10::intrusive_ptr<c10d::Work>;

namespace {

Stream stream_of(int64_t id) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, current_device()), id);
}

// A collective in flight. Like ProcessGroupNCCL's, it keeps its tensors until somebody has waited for it.
class Work final : public c10d::Work {
 public:
  Work(Tensors inputs, Tensors outputs, int64_t stream, bool is_async)
      : inputs_(std::move(inputs)), outputs_(std::move(outputs)), stream_(stream), is_async_(is_async),
        end_(DeviceType::CUDA) {}

  // The kernel has been launched. `inner` is in flight if this is a transfer between two ranks.
  void launched(InnerWork inner) {
    inner_ = std::move(inner);
    if (is_async_) end_.record(stream_of(stream_));
  }

  bool isCompleted() override { return inner_ == nullptr || inner_->isCompleted(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (inner_ != nullptr) inner_->wait();
    if (is_async_) end_.block(stream_of(current_stream_id()));
    inputs_.clear();
  }
  Tensors result() override { return outputs_; }
  intrusive_ptr<ivalue::Future> getFuture() override {
    if (future_ == nullptr) {
      future_ = make_intrusive<ivalue::Future>(ListType::create(TensorType::get()),
                                               std::vector<Device>{Device(DeviceType::CUDA, current_device())});
      if (inner_ != nullptr) inner_->wait();
      StreamGuard guard(stream_of(stream_));  // whose end the future's users wait for
      future_->markCompleted(IValue(outputs_));
    }
    return future_;
  }

 private:
  Tensors inputs_, outputs_;
  int64_t stream_;
  bool is_async_;
  Event end_;
  InnerWork inner_;
  intrusive_ptr<ivalue::Future> future_;
};

// The works of one batch of transfers.
class WorkGroup final : public c10d::Work {
 public:
  explicit WorkGroup(std::vector<InnerWork> works) : works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds limit) override {
    for (auto& work : works_) work->wait(limit);
    return true;
  }
  void synchronize() override {
    for (auto& work : works_) work->synchronize();
  }

 private:
  std::vector<InnerWork> works_;
};

class EmulatedNCCL final : public c10d::Backend {
 public:
  EmulatedNCCL(intrusive_ptr<c10d::Backend> gloo, intrusive_ptr<NCCLOptions> options)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), options_(std::move(options)),
        stream_(new_stream_id()) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void eagerConnectSingleDevice(at::Device) override {}
  intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return static_cast<uint64_t>(sequence_); }
  void setTimeout(std::chrono::milliseconds limit) override {
    options_->timeout = limit;
    gloo_->setTimeout(limit);
  }

  intrusive_ptr<c10d::Backend> split(const intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                     const intrusive_ptr<c10d::Backend::Options>& options) override {
    auto prefixed = make_intrusive<c10d::PrefixStore>("emulated-nccl", store);
    auto inner = gloo_->split(prefixed, ranks, options);
    if (!inner) return nullptr;
    auto own = make_intrusive<NCCLOptions>(options->timeout);
    own->group_name = options->group_name;
    own->global_ranks_in_group = options->global_ranks_in_group;
    inner->setTimeout(own->timeout);
    return make_intrusive<EmulatedNCCL>(inner, own);
  }

  void startCoalescing() override { coalesced_.emplace(); }
  InnerWork endCoalescing() override {
    sign("end of batch", {}, -1);
    auto work = make_intrusive<WorkGroup>(std::move(*coalesced_));
    coalesced_.reset();
    return work;
  }

  InnerWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return run("broadcast", tensors, tensors, o.asyncOp, [&] { return gloo_->broadcast(host(tensors), o); });
  }
  InnerWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return run("all_reduce", tensors, tensors, o.asyncOp, [&] { return all_reduce(tensors, o); });
  }
  InnerWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return run("all_reduce_coalesced", tensors, tensors, o.asyncOp, [&] {
      for (auto& t : tensors) {
        Tensors one{t};
        all_reduce(one, o)->wait();
      }
      return InnerWork();
    });
  }
  InnerWork reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    check_operation(o.reduceOp);
    return run("reduce", tensors, tensors, o.asyncOp, [&] { return gloo_->reduce(host(tensors), o); });
  }
  InnerWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return run("all_gather", inputs, flatten(outputs), o.asyncOp, [&] {
      auto out = host(outputs);
      return gloo_->allgather(out, host(inputs), o);
    });
  }
  InnerWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    return run("all_gather_into_tensor", {input}, {output}, o.asyncOp, [&] {
      auto out = host_alias(output), in = host_alias(input);
      return gloo_->_allgather_base(out, in, o);
    });
  }
  InnerWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& o) override {
    return run("all_gather_into_tensor_coalesced", inputs, outputs, o.asyncOp, [&] {
      for (size_t i = 0; i < inputs.size(); i++) {
        auto out = host_alias(outputs[i]), in = host_alias(inputs[i]);
        gloo_->_allgather_base(out, in, o)->wait();
      }
      return InnerWork();
    });
  }
  InnerWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& o) override {
    return run("reduce_scatter_tensor", {input}, {output}, o.asyncOp, [&] { return reduce_scatter(output, input, o); });
  }
  InnerWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& o) override {
    return run("reduce_scatter_tensor_coalesced", inputs, outputs, o.asyncOp, [&] {
      for (size_t i = 0; i < inputs.size(); i++) {
        auto work = reduce_scatter(outputs[i], inputs[i], o);
        if (work != nullptr) work->wait();
      }
      return InnerWork();
    });
  }
  InnerWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& o) override {
    return run("all_to_all_single", {input}, {output}, o.asyncOp, [&] {
      auto out = host_alias(output), in = host_alias(input);
      return gloo_->alltoall_base(out, in, output_sizes, input_sizes, o);
    });
  }
  InnerWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    return run("gather", inputs, flatten(outputs), o.asyncOp, [&] {
      auto out = host(outputs);
      return gloo_->gather(out, host(inputs), o);
    });
  }
  InnerWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    return run("scatter", flatten(inputs), outputs, o.asyncOp, [&] {
      auto in = host(inputs);
      return gloo_->scatter(host(outputs), in, o);
    });
  }
  InnerWork send(Tensors& tensors, int peer, int tag) override {
    return transfer("send", tensors, {}, peer, [&] { return gloo_->send(host(tensors), peer, tag); });
  }
  InnerWork recv(Tensors& tensors, int peer, int tag) override {
    return transfer("recv", {}, tensors, peer, [&] { return gloo_->recv(host(tensors), peer, tag); });
  }
  InnerWork barrier(const c10d::BarrierOptions& o) override {
    sign("barrier", {}, -1);
    gloo_->barrier(o)->wait();
    synchronize_stream(current_stream_id());  // NCCL's barrier blocks the host
    observe(kSync, "barrier");
    auto work = make_intrusive<Work>(Tensors{}, Tensors{}, current_stream_id(), false);
    work->launched(nullptr);
    return work;
  }

 private:
  // gloo's interface takes lists by reference.
  Tensors& host(const Tensors& tensors) {
    host_.emplace_back();
    for (const auto& t : tensors) host_.back().push_back(host_alias(t));
    return host_.back();
  }
  std::vector<Tensors> host(const std::vector<Tensors>& lists) {
    std::vector<Tensors> result;
    for (const auto& tensors : lists) result.push_back(host(tensors));
    return result;
  }
  static Tensors flatten(const std::vector<Tensors>& lists) {
    Tensors result;
    for (const auto& tensors : lists) result.insert(result.end(), tensors.begin(), tensors.end());
    return result;
  }

  static void check(const std::string& name, const Tensors& tensors) {
    for (const auto& t : tensors) {
      TORCH_CHECK(is_cuda(t), "No backend type associated with device type ", t.device().type(), " (emulated NCCL, ",
                  name, ")");
      TORCH_CHECK(t.device().index() == current_device(), "Tensor found on device ", t.device(),
                  " but backend constrained to cuda:", static_cast<int>(current_device()), " (emulated NCCL, ", name,
                  ")");
      TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous (emulated NCCL, ", name, ")");
      const auto dtype = t.scalar_type();
      TORCH_CHECK(dtype != ScalarType::Short && !isComplexType(dtype),
                  "Input tensor data type is not supported for NCCL process group: ", dtype);
    }
  }

  static void check_operation(const c10d::ReduceOp& operation) {
    TORCH_CHECK_VALUE(operation != c10d::ReduceOp::BAND && operation != c10d::ReduceOp::BOR &&
                          operation != c10d::ReduceOp::BXOR,
                      "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL (emulated)");
  }

  // Reports the order of collectives, which must be the same on all ranks of a group, and of transfers, with the peer's
  // rank in the group.
  void sign(const std::string& name, const Tensors& tensors, int peer) {
    if (!is_observed(kCollective)) return;
    std::ostringstream text;
    text << options_->group_name << '|' << name << '|';
    for (const auto& t : tensors) text << t.scalar_type() << 'x' << t.numel() << ' ';
    observe(kCollective, text.str(), stream_, {}, {}, peer);
  }

  void report_kernel(const std::string& name, int64_t stream, const Tensors& inputs, const Tensors& outputs) {
    if (!is_observed(kKernel)) return;
    Ranges reads, writes;
    for (const auto& t : inputs) reads.push_back(range_of(t));
    for (const auto& t : outputs) writes.push_back(range_of(t));
    observe(kKernel, "nccl::" + name, stream, reads, writes);
  }

  // Starts a kernel on NCCL's own stream after the current one, or on the current one, as ProcessGroupNCCL does.
  intrusive_ptr<Work> launch(const std::string& name, const Tensors& inputs, const Tensors& outputs, bool is_async,
                             int peer, const std::function<InnerWork()>& call, bool wait) {
    check(name, inputs);
    check(name, outputs);
    sequence_++;
    sign(name, inputs.empty() ? outputs : inputs, peer);
    const int64_t stream = is_async ? stream_ : current_stream_id();
    if (is_async) {
      Event start(DeviceType::CUDA);
      start.record(stream_of(current_stream_id()));
      start.block(stream_of(stream));
    }
    auto work = make_intrusive<Work>(inputs, outputs, stream, is_async);
    InnerWork inner = call();
    if (wait && inner != nullptr) {
      inner->wait();
      inner = nullptr;
    }
    host_.clear();
    report_kernel(name, stream, inputs, outputs);
    work->launched(inner);
    if (coalesced_) coalesced_->push_back(work);
    return work;
  }
  InnerWork run(const std::string& name, const Tensors& inputs, const Tensors& outputs, bool is_async,
                const std::function<InnerWork()>& call) {
    return launch(name, inputs, outputs, is_async, -1, call, true);
  }
  InnerWork transfer(const std::string& name, const Tensors& inputs, const Tensors& outputs, int peer,
                     const std::function<InnerWork()>& call) {
    return launch(coalesced_ ? "batched " + name : name, inputs, outputs, true, peer, call, false);
  }

  // gloo has no AVG.
  template <class CollectiveOptions>
  static CollectiveOptions as_sum(const CollectiveOptions& options, bool& is_average) {
    check_operation(options.reduceOp);
    CollectiveOptions result = options;
    is_average = options.reduceOp == c10d::ReduceOp::AVG;
    if (is_average) result.reduceOp = c10d::ReduceOp::SUM;
    return result;
  }
  InnerWork all_reduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
    bool is_average = false;
    const auto sum = as_sum(options, is_average);
    auto& on_host = host(tensors);
    gloo_->allreduce(on_host, sum)->wait();
    if (is_average) {
      for (auto& t : on_host) t.div_(size_);
    }
    return InnerWork();
  }
  InnerWork reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                           const c10d::ReduceScatterOptions& options) {
    bool is_average = false;
    const auto sum = as_sum(options, is_average);
    auto out = host_alias(output), in = host_alias(input);
    gloo_->_reduce_scatter_base(out, in, sum)->wait();
    if (is_average) out.div_(size_);
    return InnerWork();
  }

  intrusive_ptr<c10d::Backend> gloo_;
  intrusive_ptr<NCCLOptions> options_;
  int64_t stream_;
  int64_t sequence_ = 0;
  std::list<Tensors> host_;
  std::optional<std::vector<InnerWork>> coalesced_;
};

}  // namespace

intrusive_ptr<c10d::Backend> make_nccl(const intrusive_ptr<c10d::Backend>& gloo,
                                       const intrusive_ptr<NCCLOptions>& options) {
  return make_intrusive<EmulatedNCCL>(gloo, options);
}

}  // namespace emulation
