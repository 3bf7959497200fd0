// Runs CUDA kernels on the CPU: csrc/cuda/ compiled by g++, one fiber per CUDA thread (x86-64, Linux).
//
// At barriers and warp operations fibers wait for each other: a thread that does not arrive, or arrives with another mask
// or operation, stops the program with a message. SIMT_ORDER=fwd|rev|rand sets the order in which threads run, so that
// what depends on it differs from run to run. Blocks run one after another; __shared__ is a static variable.
// SIMT_CAPTURE records launches instead of running them, like a CUDA graph; simt::replay() runs them.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __shared__ static

struct __attribute__((aligned(8))) float2 {
  float x, y;
};
struct uint2 {
  unsigned x, y;
} __attribute__((aligned(8)));
struct uint4 {
  unsigned x, y, z, w;
} __attribute__((aligned(16)));

namespace simt {

struct Index {
  unsigned x;
};

constexpr size_t kStack = 256 << 10;
constexpr int kWarp = 32;

enum class State { kReady, kAtBarrier, kAtWarp, kDone };

struct Fiber {
  void* stack_pointer;
  State state;
  unsigned mask;  // of the warp operation that it waits in
  int operation, argument;
  uint64_t in, out;
};

struct Machine {
  std::vector<Fiber> fibers;
  char* stacks = nullptr;
  void* main_stack = nullptr;
  std::function<void()> body;
  Index block{0}, grid{0};
  unsigned current = 0;
  uint32_t seed = 1;
  // Where set, launches go to it instead of to fibers: the kernel, its grid, the bytes of its parameters.
  void (*launcher)(const void* kernel, int64_t blocks, int threads, const char* params, size_t size) = nullptr;
  std::vector<std::function<void()>> recorded;  // launches of the graph that is being captured
  std::vector<std::function<void()>> kept;      // memory of that graph
};
inline Machine machine;

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "simt: block %u, thread %u: %s\n", machine.block.x, machine.current, what);
  std::abort();
}

// Saves the callee-saved registers and the stack pointer, and continues on another stack.
extern "C" void memkern_simt_switch(void** from, void* to);
asm(".text\n.weak memkern_simt_switch\n.type memkern_simt_switch,@function\nmemkern_simt_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size memkern_simt_switch,.-memkern_simt_switch\n");

inline Fiber& self() { return machine.fibers[machine.current]; }
inline void wait() { memkern_simt_switch(&self().stack_pointer, machine.main_stack); }

inline __attribute__((noinline)) void run_thread() {
  machine.body();
  self().state = State::kDone;
  wait();
  die("a finished thread was resumed");
}

// ---- warp operations

enum Operation { kShuffle, kShuffleXor, kBallot };

// Waits until the lanes of the mask have all come to this operation, and returns its result for this lane.
inline uint64_t meet(Operation operation, unsigned mask, uint64_t value, int argument) {
  Fiber& f = self();
  if (!(mask >> machine.current % kWarp & 1)) die("a lane is missing from its own mask");
  f.mask = mask;
  f.operation = operation;
  f.argument = argument;
  f.in = value;
  f.state = State::kAtWarp;
  wait();
  return self().out;
}

// Releases the lanes of a warp once all lanes of the mask have arrived at the same operation.
inline void resolve(unsigned first) {
  const unsigned lanes = std::min<unsigned>(kWarp, machine.fibers.size() - first);
  Fiber* warp = &machine.fibers[first];
  for (unsigned l = 0; l < lanes; ++l) {
    if (warp[l].state != State::kAtWarp) continue;
    const unsigned mask = warp[l].mask;
    bool complete = true;
    uint64_t ballot = 0;
    for (unsigned k = 0; k < lanes; ++k) {
      if (!(mask >> k & 1)) continue;
      machine.current = first + k;
      if (warp[k].state == State::kDone) die("a lane that a warp operation names has returned");
      if (warp[k].state != State::kAtWarp) complete = false;
      else if (warp[k].mask != mask || warp[k].operation != warp[l].operation)
        die("lanes of a warp have come to different operations");
      if (warp[k].in) ballot |= 1u << k;
    }
    if (!complete) continue;
    for (unsigned k = 0; k < lanes; ++k) {
      if (!(mask >> k & 1)) continue;
      unsigned source = k;
      if (warp[k].operation == kShuffle) source = warp[k].argument;
      if (warp[k].operation == kShuffleXor) source = k ^ warp[k].argument;
      if (source >= lanes || !(mask >> source & 1)) die("a shuffle reads a lane that does not take part");
      warp[k].out = warp[k].operation == kBallot ? ballot : warp[source].in;
    }
    for (unsigned k = 0; k < lanes; ++k)
      if (mask >> k & 1) warp[k].state = State::kReady;
  }
}

// ---- blocks

struct Order {
  bool reversed = false, random = false;
  Order() {
    const char* name = std::getenv("SIMT_ORDER");
    reversed = name && !std::strcmp(name, "rev");
    random = name && !std::strcmp(name, "rand");
  }
  unsigned next(unsigned i, unsigned n) const {
    if (!random) return reversed ? n - 1 - i : i;
    machine.seed = machine.seed * 1664525u + 1013904223u;
    return (i + (machine.seed >> 16)) % n;  // some run twice in a round, others not at all
  }
};

inline void run_block(const Order& order) {
  const unsigned n = machine.fibers.size(), warps = (n + kWarp - 1) / kWarp;
  for (unsigned i = 0; i < n; ++i) {
    void** top = reinterpret_cast<void**>(machine.stacks + (i + 1) * kStack) - 2;
    *top = reinterpret_cast<void*>(&run_thread);
    machine.fibers[i] = {top - 6, State::kReady, 0, 0, 0, 0, 0};
  }
  const auto count = [](State state) {
    return std::count_if(machine.fibers.begin(), machine.fibers.end(),
                         [=](const Fiber& f) { return f.state == state; });
  };
  while (count(State::kDone) != n) {
    for (unsigned i = 0; i < warps; ++i) {
      const unsigned first = order.next(i, warps) * kWarp, lanes = std::min<unsigned>(kWarp, n - first);
      for (unsigned k = 0; k < lanes; ++k) {
        machine.current = first + order.next(k, lanes);
        if (self().state == State::kReady) memkern_simt_switch(&machine.main_stack, self().stack_pointer);
      }
      resolve(first);
    }
    if (count(State::kReady)) continue;
    const auto waiting = count(State::kAtBarrier);
    if (waiting == 0 && count(State::kDone) == n) break;
    if (waiting != n) die("threads wait for others that will not come");
    for (Fiber& f : machine.fibers) f.state = State::kReady;
  }
}

// Runs `body` in each thread of each block.
inline void run(const std::function<void()>& body, int64_t blocks, int threads) {
  static int capacity = 0;
  if (threads > capacity) {
    capacity = threads;
    machine.stacks = static_cast<char*>(mmap(nullptr, capacity * kStack, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  const Order order;
  machine.body = body;
  machine.grid.x = static_cast<unsigned>(blocks);
  machine.fibers.resize(threads);
  for (int64_t i = 0; i < blocks; ++i) {
    machine.block.x = static_cast<unsigned>(order.random || !order.reversed ? i : blocks - 1 - i);
    run_block(order);
  }
}

// Whether one-element tensors are treated as on the host, where the op reads them, or as on the device.
inline bool scalars_on_host() { return std::getenv("SIMT_HOST_SCALARS") != nullptr; }

// Whether the emulated device has slow fp64.
inline bool slow_fp64() { return std::getenv("SIMT_SLOW_FP64") != nullptr; }

inline bool capturing() { return std::getenv("SIMT_CAPTURE") != nullptr; }
inline void replay() {
  for (const auto& launch : machine.recorded) launch();
}

template <class T> uint64_t to_bits(T x) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  return bits;
}
template <class T> T from_bits(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}

}  // namespace simt

#define threadIdx (simt::Index{simt::machine.current})
#define blockIdx (simt::machine.block)
#define gridDim (simt::machine.grid)

inline void __syncthreads() {
  simt::self().state = simt::State::kAtBarrier;
  simt::wait();
}
template <class T> T __shfl_sync(unsigned mask, T x, int lane) {
  return simt::from_bits<T>(simt::meet(simt::kShuffle, mask, simt::to_bits(x), lane));
}
// Among aligned groups of `width` lanes.
template <class T> T __shfl_sync(unsigned mask, T x, int lane, int width) {
  const int first = static_cast<int>(threadIdx.x) % 32 & -width;
  return __shfl_sync(mask, x, first | (lane & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int distance) {
  return simt::from_bits<T>(simt::meet(simt::kShuffleXor, mask, simt::to_bits(x), distance));
}
inline unsigned __ballot_sync(unsigned mask, bool yes) {
  return static_cast<unsigned>(simt::meet(simt::kBallot, mask, yes, 0));
}
inline bool __any_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) != 0; }

inline int __reduce_max_sync(unsigned mask, int x) {  // of equal numbers only
  if (__shfl_sync(mask, x, 0) != x) simt::die("lanes disagree on a loop's count");
  return x;
}

template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T x) { *p = x; }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned selected = 0;
  for (int i = 0; i < 4; ++i)
    selected |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return selected;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
// Rounded down. For 0 <= a and a + b < 2^52.
inline float __fadd_rd(float a, float b) {
  const double sum = static_cast<double>(a) + b;
  const float nearest = static_cast<float>(sum);
  return nearest > sum ? std::nextafterf(nearest, -INFINITY) : nearest;
}

// ---- the CUDA runtime's host side

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxThreadsPerMultiProcessor };
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 2 : 1536;
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = simt::capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* id) {
  *id = 1;
  return cudaSuccess;
}

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

namespace simt {

// The current stream: one that can be captured, unlike the default stream, which is null.
inline cudaStream_t stream() { return &machine; }

// Parameters as a kernel gets them: each where its alignment allows.
template <class... Params> std::vector<char> packed(const Params&... params) {
  std::vector<char> bytes;
  const auto add = [&](const void* from, size_t size, size_t alignment) {
    const size_t place = (bytes.size() + alignment - 1) / alignment * alignment;
    bytes.resize(place + size);
    std::memcpy(bytes.data() + place, from, size);
  };
  (add(&params, sizeof(Params), alignof(Params)), ...);
  return bytes;
}

}  // namespace simt
