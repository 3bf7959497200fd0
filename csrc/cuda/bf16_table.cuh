// GELU of bf16 tensors by a table.
//
// bf16 has few values. The result is x / 2 for |x| below kLow, x from kIdentity on, and -0 below -kHigh. Each
// thread block has results and codes of the about 3,000 values in between in a table in shared memory. A
// lookup takes 13 instructions per element, the formula 65 (sm_90), more than fit into the time of the memory
// traffic. The results are torch's own: its op is called for these values once on each device.
#pragma once
#include <array>
#include <mutex>
#include <set>

#include "activation.cuh"
#include "launch.h"

namespace memkern {

struct Bf16Range {
  static constexpr uint32_t kLow = 0x3B00;       // 2^-9: from here on the second factor can change a bit
  static constexpr uint32_t kIdentity = 0x4040;  // 3
  static constexpr uint32_t kHigh = 0x40C0;      // 6: there erf and tanh are 1 in fp32
  // kFirst is the entry for all values below kLow, kHigh that for all values above.
  static constexpr uint32_t kFirst = kLow - 1;
  static constexpr int kEntries = 2 * static_cast<int>(kHigh - kFirst + 1);  // of both signs
};

constexpr int kTableThreads = 1024, kTableBlocks = kResidentThreads / kTableThreads;
// Smaller tensors do not repay filling the table.
constexpr int64_t kTableNumel = 1 << 19;

// The 16 bits in both halves of a word.
MEMKERN_DEVICE constexpr uint32_t both(uint32_t half) { return half | half << 16; }

// The bf16 value of table entry i: each magnitude has an entry and, after it, one of the negative value.
MEMKERN_DEVICE uint32_t table_value(int i) { return Bf16Range::kFirst + i / 2 + (i % 2 << 15); }

// torch's results for the table's values: GELU, then its tanh form.
static __device__ uint16_t torch_results[2][Bf16Range::kEntries];

static __global__ void __launch_bounds__(kThreads) list_values(uint16_t* values) {
  for (int i = threadIdx.x; i < Bf16Range::kEntries; i += kThreads)
    values[i] = static_cast<uint16_t>(table_value(i));
}

static __global__ void __launch_bounds__(kThreads) keep_results(const uint16_t* results, bool tanh_form) {
  for (int i = threadIdx.x; i < Bf16Range::kEntries; i += kThreads) torch_results[tanh_form][i] = results[i];
}

// A table entry: the result in the upper half, and bit p of the code at bit 4 p. The codes of four elements,
// each shifted by one bit more, add up to nibbles of the planes. Without torch's results, and in the last
// pair, which is for all values beyond it, the formula gives the result.
template <int Fn> MEMKERN_DEVICE uint32_t table_entry(int i, bool from_torch, const EncodeTable& thresholds) {
  const float x[1] = {float_of(table_value(i) << 16)};
  const Planes planes = encode(x, thresholds);
  const uint32_t code = (planes & 1) | (planes >> 4 & 0x10) | (planes >> 8 & 0x100) | (planes >> 12 & 0x1000);
  if (from_torch && i < Bf16Range::kEntries - 2)
    return static_cast<uint32_t>(torch_results[Fn == kGeluTanh][i]) << 16 | code;
  return to_bf16x2(0.0f, activate<Fn>(x[0], 0.0f, 0.0f)) | code;
}

// Replaces a vector of x by GELU's results; returns the planes of its codes.
MEMKERN_DEVICE Planes look_up(Raw& raw, const uint32_t* table) {
  uint32_t nibbles[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const uint32_t pair = raw.word[i], magnitude = pair & both(0x7FFF);
    const uint32_t clamped =
        min_bf16x2(max_bf16x2(magnitude, both(Bf16Range::kFirst)), both(Bf16Range::kHigh));  // NaN: kFirst
    // The offsets of both entries in the table, in bytes.
    const uint32_t place = ((clamped - both(Bf16Range::kFirst)) << 3) | (less_bf16x2(pair, 0) & both(4));
    const char* bytes = reinterpret_cast<const char*>(table);
    const uint32_t low = *reinterpret_cast<const uint32_t*>(bytes + (place & 0xFFFF)),
                   high = *reinterpret_cast<const uint32_t*>(bytes + (place >> 16));
    nibbles[i / 2] += (low + (high << 1)) << 2 * (i % 2);
    // Makes NaN and -inf NaN, and adds -0 to all others.
    uint32_t y = fma_bf16x2(magnitude, both(0x8000), __byte_perm(low, high, 0x7632));
    const uint32_t half = fma_bf16x2(pair, both(0x3F00), both(0x8000));
    const uint32_t small = less_bf16x2(magnitude, both(Bf16Range::kLow)),
                   not_large = less_bf16x2(pair, both(Bf16Range::kIdentity));
    y = (half & small) | (y & ~small);
    raw.word[i] = (y & not_large) | (pair & ~not_large);
  }
  // Gathers nibbles 0 to 3 of both words into bytes, then swaps the inner nibbles of each half.
  const Planes planes = __byte_perm(nibbles[0], nibbles[1], 0x5140);
  const uint32_t change = (planes ^ planes >> 4) & both(0x00F0);
  return planes ^ change ^ change << 4;
}

template <int Fn, int Bits> __global__ void __launch_bounds__(kTableThreads, kTableBlocks)
    forward_by_table(Elementwise t, bool from_torch, const __grid_constant__ EncodeTable thresholds) {
  constexpr ConstantType<FloatType::kBf16> type;
  __shared__ uint32_t table[Bf16Range::kEntries];
  for (int i = threadIdx.x; i < Bf16Range::kEntries; i += kTableThreads)
    table[i] = table_entry<Fn>(i, from_torch, thresholds);
  __syncthreads();

  for_each_vector<kTableThreads>(t, t.plane, [&](const Span& at, int64_t vector) {
    Raw raw = load_raw(t.input, type, at);
    const Planes planes = look_up(raw, table);
    store_raw(t.result, type, at, raw);
    store_planes(t, Bits, vector, planes & first_elements(at.n));
  });
}

// Whether x's device, the current one, has torch's results. The first call outside a CUDA graph capture
// computes them; a captured call would run nothing yet. They are in the module's memory: torch's allocator
// could place them in a graph's pool.
template <int Fn> bool has_torch_results(const Tensor& x, cudaStream_t stream) {
  static std::mutex mutex;
  static std::set<int> devices;
  const std::lock_guard lock(mutex);
  if (devices.contains(x.get_device())) return true;
  if (is_capturing(stream)) return false;
  const Tensor values = new_tensor(x, {Bf16Range::kEntries}, ScalarType::BFloat16);
  launch_checked("list_values", list_values, 1, stream, static_cast<uint16_t*>(values.data_ptr()));
  std::array<StableIValue, 2> stack{
      torch::stable::detail::from(values),
      torch::stable::detail::from(std::string(Fn == kGeluTanh ? "tanh" : "none"))};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::gelu", "", stack.data(), TORCH_ABI_VERSION));
  const Tensor results = torch::stable::detail::to<Tensor>(stack[0]);
  launch_checked("keep_results", keep_results, 1, stream, static_cast<const uint16_t*>(results.data_ptr()),
                 Fn == kGeluTanh);
  synchronize(stream);  // other streams will read them
  devices.insert(x.get_device());
  return true;
}

}  // namespace memkern
