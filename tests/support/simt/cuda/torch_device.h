// csrc/cuda/torch_device.h for the CPU: one device, whose tensors are torch's CPU tensors.
#pragma once
#include <simt.h>

#include "common/tensors.h"

namespace memkern {

struct DeviceScope {
  cudaStream_t stream = simt::stream();
  explicit DeviceScope(const Tensor&) {}
};

inline bool is_host(const Tensor&) { return simt::scalars_on_host(); }
inline bool same_device(const Tensor&, const Tensor&) { return true; }

inline Tensor new_bytes(const Tensor& like, size_t bytes) {
  Tensor memory = new_tensor(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  if (simt::capturing()) simt::machine.kept.push_back([memory] {});
  return memory;
}

}  // namespace memkern
