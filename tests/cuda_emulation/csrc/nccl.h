// NCCL played by gloo.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulation {

struct NCCLOptions final : c10d::Backend::Options {
  explicit NCCLOptions(std::chrono::milliseconds limit) : c10d::Backend::Options("nccl", limit) {}
};

// An NCCL backend for the ranks of the group `gloo`.
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Backend>& gloo,
                                            const c10::intrusive_ptr<NCCLOptions>& options);

}  // namespace emulation
