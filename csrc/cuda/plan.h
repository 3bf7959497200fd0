// Tables on the device: what the kernels of a step read about its tensors.
//
// The host writes the whole table into an image at every step and compares it with the image of the step
// before; only what differs goes to the device, as arguments of a kernel: nothing is staged, nothing is
// waited for, and in a CUDA graph the bytes are part of the graph.
#pragma once
#include <mutex>

#include "host.h"

namespace memkern {

// A table in host memory: sections of plain structs, each on 16 bytes. Bytes that nobody writes are 0.
class Image {
 public:
  // Room for n entries; returns their place.
  template <class T> size_t add(size_t n) {
    const size_t place = bytes_.size();
    bytes_.resize(place + (n * sizeof(T) + 15) / 16 * 16);
    return place;
  }
  template <class T> T* at(size_t place) { return reinterpret_cast<T*>(bytes_.data() + place); }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

// A table's twin on the device.
struct Twin {
  Tensor memory;
  std::unique_lock<std::mutex> lock;  // until the step is launched, nobody else changes a table

  template <class T> T* at(size_t place) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory.data_ptr()) + place);
  }
};

// Brings the device's twin of an image up to date, with `scratch` bytes after it for the kernels' own use.
// `first`: a tensor of the step, which tells with op and count the table that is likely to differ least.
Twin upload(const Image& image, size_t scratch, const char* op, const Tensor& first, size_t count,
            cudaStream_t stream);

}  // namespace memkern
