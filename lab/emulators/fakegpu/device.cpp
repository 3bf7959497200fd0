// Registers the made-up CUDA devices with a torch without CUDA: a device guard, memory, the current stream.
// Device memory is memory of this process that no CPU tensor of torch shares, so that a kernel that gets a
// host's pointer fails. Written for torch 2.13.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/gelu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <cstring>

extern "C" void* fakegpu_allocate(size_t bytes, int of_torch);
extern "C" void fakegpu_release(void* memory);
extern "C" void fakegpu_written(void* memory);

namespace {

constexpr int kDevices = 2;

void* current_streams[kDevices];
int stream_lookups[kDevices];

int device_now() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device_now()));
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    void* memory = fakegpu_allocate(bytes, true);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (void* stream = current_streams[device.index()])
      cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
    // Memory that is allocated during a capture belongs to the graph and outlives its tensor, as in torch.
    return {memory, memory, status == cudaStreamCaptureStatusNone ? &release : &keep, device};
  }
  static void keep(void*) {}
  static void release(void* memory) { fakegpu_release(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceMemory device_memory;

struct OnDevice {  // makes a device current in a scope
  int before = device_now();
  explicit OnDevice(int device) { cudaSetDevice(device); }
  ~OnDevice() { cudaSetDevice(before); }
};

int index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : device_now();
}

at::Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const OnDevice on(index_of(device));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(c10::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const OnDevice on(index_of(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(c10::kFloat));
}

// A copy with the storage's size, the strides and the offset of the original.
at::Tensor moved(const at::Tensor& x, c10::Allocator* allocator, c10::DispatchKey key) {
  const size_t bytes = x.storage().nbytes();
  c10::DataPtr memory = allocator->allocate(bytes);
  if (bytes) std::memcpy(memory.get(), x.storage().data(), bytes);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), allocator, false);
  at::Tensor y =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), x.dtype());
  y.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return y;
}
at::Tensor to_device(const at::Tensor& x, int64_t device) {
  const OnDevice on(static_cast<int>(device));
  const at::Tensor y = moved(x, &device_memory, c10::DispatchKey::CUDA);
  if (y.storage().nbytes()) fakegpu_written(y.storage().mutable_data());
  return y;
}
at::Tensor to_host(const at::Tensor& x) {
  return moved(x, c10::GetAllocator(c10::DeviceType::CPU), c10::DispatchKey::CPU);
}
at::Tensor gelu(const at::Tensor& x, c10::string_view approximate) {
  return to_device(at::gelu(to_host(x), approximate), x.device().index());
}

}  // namespace

namespace c10::impl {

struct FakeGuard final : DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  FakeGuard() = default;
  explicit FakeGuard(DeviceType) {}

  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override {
    return Device(DeviceType::CUDA, static_cast<DeviceIndex>(device_now()));
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override { cudaSetDevice(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { cudaSetDevice(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

}  // namespace c10::impl

namespace at::detail {

struct FakeHooks : CUDAHooksInterface {
  explicit FakeHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(device_now()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { cudaSetDevice(device); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)

}  // namespace at::detail

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("gelu", &gelu);
}

TORCH_LIBRARY(fakegpu, m) {
  m.def("to_device(Tensor x, int device) -> Tensor", &to_device);
  m.def("to_host(Tensor x) -> Tensor", &to_host);
}

// ---- in place of libtorch_cuda's function

extern "C" __attribute__((visibility("default"))) int32_t aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                             void** stream) {
  ++stream_lookups[device];
  *stream = current_streams[device];
  return 0;
}

// ---- for the tests

extern "C" __attribute__((visibility("default"))) void fakegpu_use_stream(int device, void* stream) {
  current_streams[device] = stream;
}
extern "C" __attribute__((visibility("default"))) int fakegpu_stream_lookups(int device) {
  return stream_lookups[device];
}
