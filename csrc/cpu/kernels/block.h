// What kernels share: loops over a block's vectors, the last of which may be short; loads and stores of
// parameters in any storage; moments in codes; batches of blocks whose codes are computed together. The file
// is compiled once per instruction set (simd/compile_*.cpp).
#pragma once
#include <cstring>
#include <type_traits>

#include "core/dynamic.h"
#include "core/power.h"
#include "core/weights.h"
#include "cpu/kernels/jobs.h"
#include "cpu/simd/half.h"

namespace memkern::MEMKERN_ISA {
namespace {

// ---- vectors

// Calls f(T()) with the C++ type of a float dtype.
template <class Call> auto with_type(FloatType t, Call f) {
  return t == FloatType::kBf16 ? f(bf16()) : t == FloatType::kFp16 ? f(fp16()) : f(float());
}

// Loads or stores the first `count` lanes of a vector. The other lanes are loaded as zeros and not stored.
template <class T> MEMKERN_FN auto load_part(const T* p, int count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <class T, class X> MEMKERN_FN void store_part(T* p, X x, int count) {
  T padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, count * sizeof(T));
}

// Calls body(i, load, store) for each vector of [0, n). In a short last vector, lanes past n load 0 and
// store nothing.
template <class Body> MEMKERN_FN void for_vectors(int n, Body&& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    body(
        i, [](const auto* p) MEMKERN_LAMBDA { return load(p); },
        [](auto* p, auto x) MEMKERN_LAMBDA { store(p, x); });
  if (const int left = n - i; left > 0)
    body(
        i, [left](const auto* p) MEMKERN_LAMBDA { return load_part(p, left); },
        [left](auto* p, auto x) MEMKERN_LAMBDA { store_part(p, x, left); });
}

// Whether this step reads the prefetched memory again. Only then the prefetch leaves that memory in the
// last-level cache, which so has room for what LAMB's second pass reads again. With this distinction LAMB's
// step takes 0.95 of the time for GPT-2's shapes, Adam's and Lion's 0.97 to 0.98.
enum Reuse { kOnce = 0, kAgain = 3 };  // __builtin_prefetch's locality

// The address of an element of an array or a Gradient.
template <class T> MEMKERN_FN const void* address(const T* array, int i) { return array + i; }

// In a body of for_vectors: prefetches the elements 1024 after i. With two threads on Zen 5 and tensors in
// memory, Adam's step takes 0.8 of the time on cores with a last-level cache each, and 0.93 on cores that
// share one; Lion's takes 0.86 and 0.94.
template <Reuse R, class... T> MEMKERN_FN void prefetch(int i, const T&... arrays) {
  if constexpr (kLanes > 1) (__builtin_prefetch(address(arrays, i + 1024), 0, R), ...);
}

// In a body of for_vectors: a function that sets the lanes past n of a computed vector to 0.
template <class Store> MEMKERN_FN auto masked_by(Store store_to) {
  return [store_to](F x) MEMKERN_LAMBDA {
    if constexpr (std::is_empty_v<Store>) {  // a whole vector
      return x;
    } else {
      float lane[kLanes] = {};
      store_to(lane, x);
      return load(lane);
    }
  };
}

// ---- gradients and parameters

// A tensor's gradient from an offset on, of any float dtype. The branch per vector is always the same and has
// no measurable cost; a kernel for each dtype would be three times as many, and as long to compile.
struct Gradient {
  const char* data;
  FloatType type;
  int size;  // bytes of an element

  template <class J> MEMKERN_FN Gradient(const J& job, int64_t offset)
      : type(job.grad_type), size(type == FloatType::kFp32 ? 4 : 2) {
    data = static_cast<const char*>(job.grad) + offset * size;
  }

  template <class Load> MEMKERN_FN F get(int i, Load load_from) const {
    if (type == FloatType::kBf16) return load_from(reinterpret_cast<const bf16*>(data) + i);
    if (type == FloatType::kFp16) return load_from(reinterpret_cast<const fp16*>(data) + i);
    return load_from(reinterpret_cast<const float*>(data) + i);
  }
};
MEMKERN_FN const void* address(const Gradient& grad, int i) { return grad.data + i * grad.size; }

// A kernel's type, in place of bf16, for bf16 parameters in any WeightStorage but kNearest: with a weight
// state (their rounding errors), or rounded stochastically, without a state.
struct master_bf16 {
  bf16 p;
};

// A tensor's parameters from an offset on: get() loads them in fp32, put() rounds and stores them.
template <class P> struct Weights {
  P* p;
  template <class J> MEMKERN_FN Weights(const J& job, int64_t offset)
      : p(static_cast<P*>(job.param) + offset) {}
  template <class Load> MEMKERN_FN F get(int i, Load load_from) const { return load_from(p + i); }
  template <class Store> MEMKERN_FN void put(int i, F x, Store store_to) const { store_to(p + i, x); }
};

// One type for the three storages, with a branch per vector as in Gradient.
template <> struct Weights<master_bf16> {
  bf16* p;
  WeightStorage storage;
  char* state;
  const uint32_t* random;

  template <class J> MEMKERN_FN Weights(const J& job, int64_t offset)
      : p(static_cast<bf16*>(job.param) + offset),
        storage(job.weight_storage),
        state(static_cast<char*>(job.weight_state) + offset * weight_state_bytes(job.weight_storage)),
        random(job.weight_random) {}

  template <class T> MEMKERN_FN T* state_as() const { return reinterpret_cast<T*>(state); }

  template <class Load> MEMKERN_FN F get(int i, Load load_from) const {
    const F x = load_from(p + i);
    if (storage == WeightStorage::kError8)
      return unless_nan(from_bits(join_weight(to_bits(x), load_from(state_as<const error8>() + i))), x);
    if (storage == WeightStorage::kError16)
      return unless_nan(from_bits(join_weight(to_bits(x), load_from(state_as<const error16>() + i))), x);
    return x;
  }

  template <class Store> MEMKERN_FN void put(int i, F x, Store store_to) const {
    // Stores x in bf16, rounded with the random bits r; returns its error.
    const auto split = [&](I r, uint32_t dropped_mask) MEMKERN_LAMBDA {
      I weight, error;
      split_weight(to_bits(x), r, dropped_mask, weight, error);
      // Infinity and NaN stay and have no error.
      store_to(p + i, select(is_finite(x), from_bits(weight), x));
      return to_bits(select(is_finite(x), from_bits(error), F(0.0f)));
    };
    if (storage == WeightStorage::kError8)
      store_to(state_as<error8>() + i, split(load(random + i), (1u << kWeightDroppedError8) - 1));
    else if (storage == WeightStorage::kError16)
      store_to(state_as<error16>() + i, split(I(0u), 0));
    else
      split(load(random + i), (1u << kWeightDroppedStochastic) - 1);
  }
};

// Calls f(P()) with the type of a tensor's parameters, for Weights<P>.
template <class Call> auto with_param_type(const StepTensor& t, Call f) {
  if (t.weight_storage != WeightStorage::kNearest) return f(master_bf16());
  return with_type(t.param_type, f);
}

// ---- moments

constexpr int kBuffer = kMaxBlockSize + kLanes;  // floats of the blocks that are not quantized yet

// The first address from x on whose offset within its 4 KiB page is p's plus `floats`. Processors compare
// only the low 12 bits of a load's address with those of stores under way: a load at the same offset as a
// store, in another page, waits for that store (4K aliasing). All arrays of a step advance together, so that
// equal offsets stay equal.
constexpr int kPage = 4096 / sizeof(float);  // floats of a page
MEMKERN_FN float* at_page_offset(float* x, const void* p, int floats) {
  const auto place = [](const void* q) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(q) / 64 * 16 % kPage);  // in floats, down to 64 bytes
  };
  return x + (place(p) + floats - place(x) + kPage) % kPage;
}

template <class Code> constexpr bool kIsSigned = std::is_same_v<Code, int8_t>;
template <class Code> constexpr int kLevels = kIsSigned<Code> ? kPowerLevelsSigned : kPowerLevelsUnsigned;

// A moment's absmax over its finite values. An unsigned moment's absmax is its maximum.
__attribute__((noinline)) float largest_finite(const float* values, int n, bool is_signed) {
  float largest = 0.0f;
  for (int i = 0; i < n; ++i)
    if (memkern::is_finite(values[i]))
      largest = memkern::max(is_signed ? fabsf(values[i]) : values[i], largest);
  return largest;
}

// A block that is updated but not quantized yet. Its values are in a buffer, from `place` on. Blocks are
// quantized two at a time: the codes of one block are computed while the maximum and the reciprocal of the
// other are pending. (Eight at a time are no faster in cache, and 15 % slower from memory, as reads come in
// bursts.)
struct PendingBlock {
  int64_t offset;
  int place, n;
  float m_factor, w_factor;  // what the encoders of its two moments multiply by
};
constexpr int kBatch = 2;

// Calls update(pending, block), which sets the factors, for each of the blocks [begin, end), and later
// encode(pending).
template <class Update, class Encode> MEMKERN_FN void for_batches(const BlockLayout& layout, int64_t begin,
                                                                  int64_t end, Update&& update,
                                                                  Encode&& encode) {
  PendingBlock pending[kBatch];
  int count = 0, place = 0;
  const auto encode_all = [&]() MEMKERN_LAMBDA {
    for (int k = 0; k < count; ++k) encode(pending[k]);
    count = place = 0;
  };
  for_blocks(layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    if (count == kBatch || place + n > kMaxBlockSize) encode_all();
    PendingBlock& next = pending[count++];
    next = {offset, place, n, 0.0f, 0.0f};
    update(next, block);
    place += (n + kLanes - 1) / kLanes * kLanes;
  });
  encode_all();
}

// One moment of one block, in codes, during its update. It is a small local object, which the compiler keeps
// in registers. A store through int8_t* may alias anything in memory; reloading after each store doubled the
// time of a step.
template <class Code, StateKind Kind> struct Moment {
  static constexpr bool kSigned = kIsSigned<Code>;

  Code* codes;
  float* scale;
  float* values;  // the new values, until the block's scale is known
  // unit: what q * |q|, or the dynamic map's entry, is multiplied by. largest: each lane's new absmax.
  F unit, largest;

  MEMKERN_FN Moment(void* all_codes, float* scales, float decay, int64_t offset, int64_t block,
                    float* values_)
      : codes(static_cast<Code*>(all_codes) + offset),
        scale(scales + block),
        values(values_),
        unit(Kind == StateKind::kPower ? power_unit(*scale, decay, kLevels<Code>) : decay * *scale),
        largest(0.0f) {}

  // The value of element i, times decay.
  template <class Load> MEMKERN_FN F get(int i, Load load_from) const {
    const F q = load_from(codes + i);
    if constexpr (Kind == StateKind::kPower) {
      return power_decode<kSigned>(q, unit);
    } else {
      float lane[kLanes];
      store(lane, q);
      for (int k = 0; k < kLanes; ++k)
        lane[k] = dynamic_decode<kSigned>(static_cast<uint8_t>(static_cast<int>(lane[k])), {});
      return load(lane) * unit;
    }
  }

  // Sets element i: the moment, or w = sqrt(v) for unsigned power codes.
  MEMKERN_FN void put(int i, F x) {
    store(values + i, x);
    largest = max(kSigned ? abs(x) : x, largest);  // skips NaN; set_scale() handles infinity
  }

  // Stores the scale of the n new values. Returns the factor that the encoder multiplies by: 0 for a block
  // that is to be stored as zeros.
  MEMKERN_FN float set_scale(int n) const {
    float s = max_of(largest);
    if (!memkern::is_finite(s)) s = largest_finite(values, n, kSigned);
    *scale = s;
    return Kind == StateKind::kPower ? power_factor(s, kLevels<Code>) : dynamic_factor(s);
  }
};

// SignedWriter and UnsignedWriter encode a block's values into power codes with a dither, vector by vector.
template <class Encoder> struct SignedWriter {
  int8_t* codes;
  const float* values;
  const float* one_minus_u;  // of the dither, for each place of the block
  Encoder encoder;
  MEMKERN_FN SignedWriter(int8_t* codes_, const float* values_, float factor, const float* one_minus_u_)
      : codes(codes_), values(values_), one_minus_u(one_minus_u_), encoder(factor) {}
  template <class Store> MEMKERN_FN void write(int i, Store store_to) {
    store_to(codes + i, encoder.encode(load(values + i), load(one_minus_u + i)));
  }
};

struct UnsignedWriter {
  uint8_t* codes;
  const float* values;
  const float* u;
  UnsignedEncoder<kPowerLevelsUnsigned> encoder;
  MEMKERN_FN UnsignedWriter(uint8_t* codes_, const float* values_, float factor, const float* u_)
      : codes(codes_), values(values_), u(u_), encoder(factor) {}
  template <class Store> MEMKERN_FN void write(int i, Store store_to) {
    store_to(codes + i, encoder.encode(load(values + i), load(u + i)));
  }
};

// Encodes a whole block, in codes of any kind. With a dither, a positive v takes no code of zero. Not
// inlined: the kernels of all dtypes share it.
template <StateKind Kind, class Code> __attribute__((noinline)) void encode(Code* codes, const float* values,
                                                                            int n, float factor,
                                                                            const Dither& dither) {
  constexpr bool kSigned = kIsSigned<Code>;
  const auto write_with = [&](auto& writer) MEMKERN_LAMBDA {
    for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA { writer.write(i, store_to); });
  };
  if (factor == 0.0f) {
    std::memset(codes, 0, n);
  } else if constexpr (Kind == StateKind::kDynamic) {
    for (int i = 0; i < n; ++i) {
      const uint8_t code = dynamic_encode<kSigned>(values[i], factor, {});
      const bool too_small = !kSigned && dither.u && code == 0 && values[i] > 0.0f;
      codes[i] = static_cast<Code>(too_small ? 1 : code);
    }
  } else if (!dither.u) {
    for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA {
      if constexpr (kSigned)
        store_to(codes + i, nearest_signed(load(values + i), F(factor)));
      else
        store_to(codes + i, UnsignedEncoder<kLevels<Code>>(factor).encode(load(values + i), F(0.5f)));
    });
  } else if constexpr (kSigned) {
    SignedWriter<SignedEncoder> writer(codes, values, factor, dither.one_minus_u);
    write_with(writer);
  } else {
    UnsignedWriter writer(codes, values, factor, dither.u);
    write_with(writer);
  }
}

}  // namespace
}  // namespace memkern::MEMKERN_ISA
