// What ops share on the host side of a CUDA device: errors, captures, the size of a grid, launches.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "common/tensors.h"
#include "cuda/torch_device.h"
#include "tile.cuh"

namespace memkern {

// Whether kernels take their fast paths. With MEMKERN_CUDA_FAST=0 in the environment, read once, the general
// kernels run, which give the same bits: to find a fault, or to measure what a fast path gains.
inline bool fast_paths() {
  static const bool fast = [] {
    const char* const setting = std::getenv("MEMKERN_CUDA_FAST");
    return setting == nullptr || std::string_view(setting) != "0";
  }();
  return fast;
}

inline void check_cuda(cudaError_t status, const char* what) {
  MEMKERN_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

inline bool is_capturing(cudaStream_t stream) {
  // The default stream cannot be captured. To ask CUDA about the default stream is an error while a stream
  // that waits for the default stream is captured.
  if (stream == nullptr) return false;
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// A number that no other stream of the process ever has. A handle is not enough: CUDA reuses the handle of a
// destroyed stream, whose kernels may still run. The default stream is never destroyed and has no number.
using StreamId = std::optional<unsigned long long>;
inline StreamId id_of(cudaStream_t stream) {
  if (stream == nullptr) return std::nullopt;
  unsigned long long id;
  check_cuda(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return id;
}

// In its scope this thread may wait and allocate although another thread captures a stream, which CUDA's
// default mode forbids.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Waits for a stream that is not captured.
inline void synchronize(cudaStream_t stream) {
  const RelaxedCapture relaxed;
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// The kernels count a state's blocks in a segment (a row, or all rows where these are short) in 32 bits.
inline void check_blocks(const BlockLayout& layout) {
  MEMKERN_CHECK(layout.blocks_per_segment < int64_t{1} << 31, "a row of ", layout.blocks_per_segment,
                " blocks is too long; a larger block_size makes fewer");
}

// An attribute of the current device.
inline int64_t device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}
inline int64_t multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Thread blocks of `threads` threads, with few registers, that the current device runs at once.
inline int64_t resident_blocks(int threads) {
  const int64_t max_threads = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  return std::min<int64_t>(max_threads, kResidentThreads) / threads * multiprocessors();
}

// How a codec's kernel divides a tensor, alone on the current device, whose multiprocessors run kCodecBlocks
// thread blocks each at once.
inline Blocks codec_blocks(const BlockLayout& layout) {
  return blocks_of(layout, tile_elements(layout.numel, kCodecBlocks * multiprocessors()));
}

// Launches a kernel on a grid of thread blocks. Errors of the launch itself are raised here; errors in the
// kernel by torch at the next synchronization.
template <int Threads = kThreads, class... Params, class... Args>
void launch_checked(const char* name, void (*kernel)(Params...), int64_t blocks, cudaStream_t stream,
                    const Args&... args) {
  if (blocks == 0) return;
  MEMKERN_CHECK(blocks < int64_t{1} << 31, name, ": too many elements for one launch");
  launch<Threads>(kernel, blocks, stream, args...);
  check_cuda(cudaGetLastError(), name);
}

}  // namespace memkern
