// Lets autograd run on fake CUDA tensors in a torch without CUDA: a device guard and hooks that do nothing.
// Without them autograd fails as soon as it meets a tensor whose device is cuda. Written for torch 2.13.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

struct FakeCudaGuard final : DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  FakeCudaGuard() = default;
  explicit FakeCudaGuard(DeviceType) {}

  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int = 0) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    static int any;
    *event = &any;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard);

}  // namespace c10::impl

namespace at::detail {

struct FakeCudaHooks : CUDAHooksInterface {
  explicit FakeCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCudaHooks)

}  // namespace at::detail
