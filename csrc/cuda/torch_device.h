// torch's current CUDA device, stream and memory. tests/support/simt/cuda/torch_device.h has the same
// functions for the CPU, where the tests run the kernels.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "common/tensors.h"

// Weak: a torch without CUDA has no such function, and the library loads there too. It binds because setup.py
// links libtorch, which depends on libtorch_cuda.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace memkern {

// Tensors of an op that torch dispatched to CUDA may be on the CPU as long as one is not.
inline int32_t device_of(const Tensor& t) {
  MEMKERN_CHECK(!t.is_cpu(), "all tensors must be on one device, got one on the CPU beside others");
  return t.get_device();
}

// Makes a tensor's device the current one, and holds torch's current stream there.
struct DeviceScope {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;

  explicit DeviceScope(const Tensor& t) : guard(device_of(t)) {
    MEMKERN_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "no aoti_torch_get_current_cuda_stream in this process: torch was built without CUDA, or "
                  "memkern was linked without libtorch");
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

inline bool is_host(const Tensor& t) { return t.is_cpu(); }
inline bool same_device(const Tensor& a, const Tensor& b) {
  return !a.is_cpu() && !b.is_cpu() && a.get_device() == b.get_device();
}

// Memory of torch's allocator. While a stream is captured, the graph keeps it.
inline Tensor new_bytes(const Tensor& like, size_t bytes) {
  return new_tensor(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

}  // namespace memkern
