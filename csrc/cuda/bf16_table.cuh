// GELU of bf16 tensors by a table.
//
// bf16 has few values. GELU(x) in bf16 is
//   -0       for x < -kHigh
//   x / 2    for |x| < kLow
//   x        for x >= kIdentity
// and each thread block has the results and codes of the other values, about 3,000, in a table in shared
// memory. A lookup takes 13 instructions per element, the formula 65 (sm_90), more than fit into the time of
// the memory traffic. The results are torch's own: its op is called for these values once on each device.
#pragma once
#include <array>
#include <mutex>
#include <set>

#include "activation.cuh"
#include "launch.h"

namespace memkern {

struct Bf16Range {
  static constexpr uint32_t kLow = 0x3B00;       // 2^-9: from here on the factor of x / 2 can change a bit
  static constexpr uint32_t kIdentity = 0x4040;  // 3
  static constexpr uint32_t kHigh = 0x40C0;      // 6: there erf and tanh are 1 in fp32
  // The table's magnitudes: from kFirst, for all below kLow, to kHigh, for all above kHigh.
  static constexpr uint32_t kFirst = kLow - 1;
  static constexpr int kEntries = 2 * static_cast<int>(kHigh - kFirst + 1);  // of both signs
};

constexpr int kTableThreads = 1024, kTableBlocks = kResidentThreads / kTableThreads;
// Smaller tensors do not repay filling the table.
constexpr int64_t kTableNumel = 1 << 19;

// A word with `half`, of 16 bits, in both of its halves.
MEMKERN_DEVICE constexpr uint32_t both(uint32_t half) { return half | half << 16; }

// The bf16 value of table entry i. Entry 2 k is of magnitude kFirst + k, entry 2 k + 1 of its negative.
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

// A table entry, in which bit p of the code is bit 4 p:
//   bits 16 to 31    the result in bf16
//   bits 0 to 15     0 0 0 c3  0 0 0 c2  0 0 0 c1  0 0 0 c0
// So the entries of elements k = 0 to 3, each shifted left by k, add up to a word whose nibble p has these
// four elements' bits of plane p. The formula gives the results if torch's are missing, and always those of
// the last pair, which stands for all larger magnitudes too.
template <int Fn> MEMKERN_DEVICE uint32_t table_entry(int i, bool from_torch, const EncodeTable& thresholds) {
  const float x[1] = {float_of(table_value(i) << 16)};
  const Planes planes = encode(x, thresholds);
  // Bit p of this one element's code is bit 8 p of `planes` (activation.cuh).
  const uint32_t code = (planes & 1) | (planes >> 4 & 0x10) | (planes >> 8 & 0x100) | (planes >> 12 & 0x1000);
  if (from_torch && i < Bf16Range::kEntries - 2)
    return static_cast<uint32_t>(torch_results[Fn == kGeluTanh][i]) << 16 | code;
  return to_bf16x2(0.0f, activate<Fn>(x[0], 0.0f, 0.0f)) | code;
}

// Replaces a vector of x by GELU's results; returns the planes of its codes.
MEMKERN_DEVICE Planes look_up(Raw& raw, const uint32_t* table) {
  uint32_t nibbles[2] = {0, 0};  // nibble p of word w: plane p of elements 4 w to 4 w + 3
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const uint32_t pair = raw.word[i], magnitude = pair & both(0x7FFF);
    const uint32_t clamped =
        min_bf16x2(max_bf16x2(magnitude, both(Bf16Range::kFirst)), both(Bf16Range::kHigh));  // NaN: kFirst
    // The offsets of both entries in the table, in bytes: 8 per pair of entries, and 4 where x < 0.
    const uint32_t place = ((clamped - both(Bf16Range::kFirst)) << 3) | (less_bf16x2(pair, 0) & both(4));
    const char* bytes = reinterpret_cast<const char*>(table);
    const uint32_t low = *reinterpret_cast<const uint32_t*>(bytes + (place & 0xFFFF)),
                   high = *reinterpret_cast<const uint32_t*>(bytes + (place >> 16));
    nibbles[i / 2] += (low + (high << 1)) << 2 * (i % 2);
    // The results from both entries (the __byte_perm), plus |x| * -0. Of a finite x that product is -0,
    // which changes no result. Of an infinity and of NaN it is NaN: GELU(-inf) is NaN.
    uint32_t y = fma_bf16x2(magnitude, both(0x8000), __byte_perm(low, high, 0x7632));
    // x / 2: 0x3F00 is 0.5, and adding -0 (0x8000) keeps the sign of a zero.
    const uint32_t half = fma_bf16x2(pair, both(0x3F00), both(0x8000));
    const uint32_t small = less_bf16x2(magnitude, both(Bf16Range::kLow)),
                   not_large = less_bf16x2(pair, both(Bf16Range::kIdentity));
    y = (half & small) | (y & ~small);
    raw.word[i] = (y & not_large) | (pair & ~not_large);
  }
  // ap: the bits of plane p of elements 0 to 3 (nibble p of nibbles[0]); bp: those of elements 4 to 7.
  //   __byte_perm     a0 a1 b0 b1  a2 a3 b2 b3    from the lowest nibble
  //   Planes          a0 b0 a1 b1  a2 b2 a3 b3
  // The second and third nibble of each half change places: `change` has their XOR.
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
