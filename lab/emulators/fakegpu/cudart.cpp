// A CUDA runtime without a GPU: what nvcc-compiled host code calls, on made-up devices. A launch goes to a
// function that is set from outside (lab/emulators/fakegpu/__init__.py), which runs the kernel's PTX on the
// CPU.
//
// As on a GPU: a launch in a stream of another device than the current one fails. While a stream is captured
// its launches are recorded. The default stream cannot be captured. While a blocking stream (one that waits
// for the default stream) is captured, a query of the default stream is an error, and so is a launch in it,
// which also ends the capture. Synchronizing and allocating end captures too, except in the relaxed mode.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr size_t kMostShared = 227 << 10;  // bytes of a thread block, as on sm_90

struct Stream {
  int device;
  bool blocking;
  bool capturing;
  unsigned long long id;
};

using Launcher = int (*)(const char* kernel, unsigned blocks, unsigned threads, void** arguments,
                         size_t shared, void* stream, int capturing);

Launcher launcher = nullptr;
std::vector<Stream*> streams;
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

// Memory of the devices, between guard zones that belong to nothing.
struct Memory {
  size_t bytes;
  uint64_t serial;
  bool written;   // by the host: kernels may read it without writing it first
  bool of_torch;  // from torch's allocator, not from cudaMalloc
  bool in_pool;   // in the memory pool of a CUDA graph
};
constexpr size_t kGuard = 4096;
constexpr int kFill = 0xA5;  // of fresh memory: not 0, so that a kernel that relies on zeros fails
std::map<char*, Memory> memories;
uint64_t next_serial = 0;
unsigned long long next_stream = 0;
bool allocating_to_pool = false, out_of_memory = false;

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream* stream_of(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }

// A captured blocking stream of the current device: the default stream would wait for it.
Stream* captured_blocking() {
  for (Stream* each : streams)
    if (each->capturing && each->blocking && each->device == current_device) return each;
  return nullptr;
}

// Ends all captures, unless the mode is relaxed. Returns whether there was one.
bool end_captures_unless_relaxed() {
  bool ended = false;
  for (Stream* each : streams)
    if (each->capturing && capture_mode != cudaStreamCaptureModeRelaxed) {
      each->capturing = false;
      ended = true;
    }
  return ended;
}

cudaError_t run(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                cudaStream_t handle) {
  if (!kernels().count(kernel)) return fail(cudaErrorInvalidDeviceFunction);
  const bool one_dimension = grid.y == 1 && grid.z == 1 && block.y == 1 && block.z == 1;
  if (!one_dimension || grid.x == 0 || grid.x >= 1u << 31 || block.x == 0 || block.x > 1024 ||
      shared > kMostShared)
    return fail(cudaErrorInvalidConfiguration);
  Stream* stream = stream_of(handle);
  if (stream && stream->device != current_device) return fail(cudaErrorInvalidResourceHandle);
  if (!stream) {
    if (Stream* captured = captured_blocking()) {
      captured->capturing = false;
      return fail(cudaErrorStreamCaptureImplicit);
    }
  }
  const bool capturing = stream && stream->capturing;
  const char* name = kernels()[kernel].c_str();
  if (!launcher || launcher(name, grid.x, block.x, arguments, shared, stream, capturing))
    return fail(cudaErrorLaunchFailure);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- for the tests

void fakegpu_set_launcher(Launcher function) { launcher = function; }
void* fakegpu_new_stream(int device, int blocking) {
  streams.push_back(new Stream{device, blocking != 0, false, ++next_stream});
  return streams.back();
}
// Destroys a stream and makes another one of its device, which gets its handle.
void fakegpu_replace_stream(void* stream) { static_cast<Stream*>(stream)->id = ++next_stream; }
void fakegpu_capture(void* stream, int on) { static_cast<Stream*>(stream)->capturing = on != 0; }
int fakegpu_is_capturing(void* stream) { return static_cast<Stream*>(stream)->capturing; }

// ---- memory: of torch's allocator (device.cpp) and of cudaMalloc

void* fakegpu_allocate(size_t bytes, int of_torch) {
  const size_t room = (bytes + 511) / 512 * 512 + 2 * kGuard;
  char* start = static_cast<char*>(std::aligned_alloc(512, room));
  std::memset(start, kFill, room);
  memories[start + kGuard] = {bytes, ++next_serial, false, of_torch != 0, of_torch && allocating_to_pool};
  return start + kGuard;
}
void fakegpu_release(void* memory) {
  if (memory && memories.erase(static_cast<char*>(memory))) std::free(static_cast<char*>(memory) - kGuard);
}
void fakegpu_written(void* memory) { memories.at(static_cast<char*>(memory)).written = true; }
// From now on torch's allocator uses a CUDA graph's pool, as when torch.compile warms up for the graph.
void fakegpu_allocate_to_pool(int on) { allocating_to_pool = on != 0; }
void fakegpu_out_of_memory(int on) { out_of_memory = on != 0; }
// Five numbers for each piece of memory: address, bytes, serial number, whether the host wrote it, whether it
// is torch's (1) or in a pool (2). Returns how many there are.
size_t fakegpu_memory(uint64_t* rows, size_t room) {
  size_t i = 0;
  for (const auto& [address, m] : memories) {
    if (i < room) {
      const uint64_t row[] = {reinterpret_cast<uint64_t>(address), m.bytes, m.serial, m.written,
                              m.in_pool ? 2ull : m.of_torch};
      std::memcpy(rows + 5 * i, row, sizeof(row));
    }
    ++i;
  }
  return i;
}

// ---- what nvcc's host code calls

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  kernels()[host] = device;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return fail(cudaErrorInvalidConfiguration);
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return run(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
  return run(kernel, grid, block, arguments, shared, stream);
}

// ---- the runtime

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    default:
      return "a fake CUDA error";
  }
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount)
    *value = 2;
  else if (attribute == cudaDevAttrMaxThreadsPerMultiProcessor)
    *value = 1536;
  else
    return fail(cudaErrorInvalidValue);
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Stream* stream = stream_of(handle);
  if (!stream && captured_blocking()) return fail(cudaErrorStreamCaptureImplicit);
  *status = stream && stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = stream_of(stream)->id;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  if (!stream && captured_blocking()) return fail(cudaErrorStreamCaptureImplicit);
  if (stream && stream->capturing) return fail(cudaErrorStreamCaptureUnsupported);
  return end_captures_unless_relaxed() ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (end_captures_unless_relaxed()) return fail(cudaErrorStreamCaptureUnsupported);
  if (out_of_memory) return fail(cudaErrorMemoryAllocation);
  *memory = fakegpu_allocate(bytes, false);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (end_captures_unless_relaxed()) return fail(cudaErrorStreamCaptureUnsupported);
  if (!memories.count(static_cast<char*>(memory))) return fail(cudaErrorInvalidValue);
  fakegpu_release(memory);
  return cudaSuccess;
}

}  // extern "C"
