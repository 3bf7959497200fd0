// Uploads the table of an op on many tensors (addresses, layouts, scalars) for its kernels to read.
//
// The host builds an image of the whole table at every step and compares it with the image of the last step.
// A small kernel has the bytes that differ as its arguments and writes them. This needs no pinned memory and
// no wait, and in a CUDA graph the bytes are part of the graph.
#pragma once
#include <mutex>

#include "launch.h"

namespace memkern {

// A table in host memory: sections of plain structs, each aligned to 16 bytes. Padding is 0.
class TableImage {
 public:
  // Adds a section of n entries; returns its offset.
  template <class T> size_t add(size_t n) {
    const size_t offset = bytes_.size();
    bytes_.resize(offset + (n * sizeof(T) + 15) / 16 * 16);
    return offset;
  }
  template <class T> T* at(size_t offset) { return reinterpret_cast<T*>(bytes_.data() + offset); }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

// A table's copy on the device.
struct DeviceTable {
  char* data;
  std::optional<Tensor> memory;       // keeps it alive, where it is torch's
  std::unique_lock<std::mutex> lock;  // held until the step is launched: no other thread changes a table

  template <class T> T* at(size_t offset) const { return reinterpret_cast<T*>(data + offset); }
};

// Brings the device's copy of an image up to date; after it there are `scratch` bytes for the kernels' use.
// The cached table is found by op, first (a tensor of the step), count and stream: most likely the table of
// the step before.
DeviceTable upload_table(const TableImage& image, size_t scratch, const char* op, const Tensor& first,
                         size_t count, cudaStream_t stream);

}  // namespace memkern
