// One moment of a block: dequantized, updated, quantized again. Compiled once per instruction set
// (simd/compile_*.cpp).
#pragma once
#include <type_traits>

#include "core/dynamic.h"
#include "core/power.h"
#include "cpu/kernels/weights.h"

namespace memkern::MEMKERN_ISA {
namespace {

constexpr int kBuffer = kMaxBlockSize + kLanes;  // floats of the blocks that are not quantized yet

// The first address from x on whose offset within its 4 KiB page is p's plus `floats`. Processors compare
// only the low 12 bits of an address with those of stores under way, so that a load at the same offset of
// another page as a store waits for it (4K aliasing); and all arrays of a step advance together.
constexpr int kPage = 4096 / sizeof(float);
MEMKERN_FN float* at_page_offset(float* x, const void* p, int floats) {
  const auto place = [](const void* q) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(q) / 64 * 16 % kPage);
  };
  return x + (place(p) + floats - place(x) + kPage) % kPage;
}

template <class Code> constexpr bool kIsSigned = std::is_same_v<Code, int8_t>;
template <class Code> constexpr bool kIsPacked = std::is_same_v<Code, code4x2>;
template <class Code> constexpr int kLevels = kIsSigned<Code>   ? kPowerLevelsSigned
                                              : kIsPacked<Code> ? kPower4Levels
                                                                : kPowerLevelsUnsigned;

// Where the codes of a block that begins at element `offset` begin, and their bytes.
template <class Code> MEMKERN_FN int64_t codes_offset(const BlockLayout& l, int64_t offset, int64_t block) {
  return kIsPacked<Code> ? packed_offset(l.segment, l.block, l.blocks_per_segment, offset, block) : offset;
}
template <class Code> MEMKERN_FN int codes_bytes(int n) { return kIsPacked<Code> ? (n + 1) / 2 : n; }

__attribute__((noinline)) float largest_finite(const float* values, int n, bool is_signed) {
  float found = 0.0f;
  for (int i = 0; i < n; ++i)
    if (memkern::is_finite(values[i])) found = memkern::max(is_signed ? fabsf(values[i]) : values[i], found);
  return found;
}

// A block that is updated but not quantized yet: its values are in a buffer, from `place` on. Blocks are
// quantized two at a time, so that the codes of one are computed while the maximum and the reciprocal of the
// other are not there yet. (Eight at a time gain nothing more in cache, and cost 15 % in memory: reads then
// come in bursts.)
struct PendingBlock {
  int64_t offset, w_offset;  // of its elements and first moment, and of the second moment's codes
  int place, n;
  float m_factor, w_factor;  // what the encoders of its two moments multiply by
};
constexpr int kBatch = 2;

// For each of the blocks [begin, end): update(pending, block), which sets the factors, and later
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
    next = {offset, offset, place, n, 0.0f, 0.0f};
    update(next, block);
    place += (n + kLanes - 1) / kLanes * kLanes;
  });
  encode_all();
}

// One moment of one block, in codes, while it is updated. Small and local, so that the compiler keeps it in
// registers: a store through int8_t* may change anything in memory, and reloading after each doubled the time
// of a step.
template <class Code, StateKind Kind> struct Moment {
  static constexpr bool kSigned = kIsSigned<Code>;

  Code* codes;
  float* scale;
  float* values;  // the new values, until the block's scale is known
  F unit, largest;

  // offset: codes_offset() of the block.
  MEMKERN_FN Moment(void* all_codes, float* scales, float decay, int64_t offset, int64_t block,
                    float* values_)
      : codes(static_cast<Code*>(all_codes) + offset),
        scale(scales + block),
        values(values_),
        unit(Kind == StateKind::kPower ? power_unit(*scale, decay, kLevels<Code>) : decay * *scale),
        largest(0.0f) {}

  // The value of element i, times decay.
  template <class Load> MEMKERN_FN F get(int i, Load load_from) const {
    const F q = load_code(codes, i, load_from);
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
    largest = max(kSigned ? abs(x) : x, largest);  // skips NaN; set_scale() sees to infinity
  }

  // Stores the scale of the n new values. Returns what the encoder multiplies by, 0 for a block to be stored
  // as zeros.
  MEMKERN_FN float set_scale(int n) const {
    float s = max_of(largest);
    if (!memkern::is_finite(s)) s = largest_finite(values, n, kSigned);
    *scale = s;
    return Kind == StateKind::kPower ? power_factor(s, kLevels<Code>) : dynamic_factor(s);
  }
};

// Encodes the values of a block into power codes with a dither, vector by vector.
template <class Encoder> struct SignedWriter {
  int8_t* codes;
  const float* values;
  const float* rest;  // of the dither, for each place of the block
  Encoder encoder;
  MEMKERN_FN SignedWriter(int8_t* codes_, const float* values_, float factor, const float* rest_)
      : codes(codes_), values(values_), rest(rest_), encoder(factor) {}
  template <class Store> MEMKERN_FN void write(int i, Store store_to) {
    store_to(codes + i, encoder.encode(load(values + i), load(rest + i)));
  }
};

template <class Code> struct UnsignedWriter {
  Code* codes;
  const float* values;
  const float* u;
  UnsignedEncoder<kLevels<Code>> encoder;
  MEMKERN_FN UnsignedWriter(Code* codes_, const float* values_, float factor, const float* u_)
      : codes(codes_), values(values_), u(u_), encoder(factor) {}
  template <class Store> MEMKERN_FN void write(int i, Store store_to) {
    store_code(codes, i, encoder.encode(load(values + i), load(u + i)), store_to);
  }
};

// Encodes a whole block of any kind. With a dither, a positive v takes no code of zero.
template <StateKind Kind, class Code>
MEMKERN_FN void encode(Code* codes, const float* values, int n, float factor, const Dither& dither) {
  constexpr bool kSigned = kIsSigned<Code>;
  const auto write_with = [&](auto& writer) MEMKERN_LAMBDA {
    for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA { writer.write(i, store_to); });
  };
  if (factor == 0.0f) {
    std::memset(codes, 0, codes_bytes<Code>(n));
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
        store_code(codes, i, UnsignedEncoder<kLevels<Code>>(factor).encode(load(values + i), F(0.5f)),
                   store_to);
    });
  } else if constexpr (kSigned) {
    SignedWriter<SignedEncoder> writer(codes, values, factor, dither.rest);
    write_with(writer);
  } else {
    UnsignedWriter<Code> writer(codes, values, factor, dither.u);
    write_with(writer);
  }
}

}  // namespace
}  // namespace memkern::MEMKERN_ISA
