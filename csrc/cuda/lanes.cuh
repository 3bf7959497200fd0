// Eight consecutive elements: what one lane of a warp holds of a tensor, on their way in and out of memory.
#pragma once
#include "common/step_tensor.h"
#include "core/scalar.h"
#include "runtime.h"

namespace memkern {

constexpr int kEight = 8;

// Where a lane's elements lie. Whole: all eight of them, and on a boundary of eight in arrays that start on
// one of 16 bytes, so that they move in 16-byte pieces (codes in one of 8).
struct Span {
  int64_t offset;
  int n;  // elements that are there, 0 to 8
  bool whole;
};

MEMKERN_DEVICE Span span_of(int64_t offset, int64_t left, bool aligned) {
  const int n = left >= kEight ? kEight : left > 0 ? static_cast<int>(left) : 0;
  return {offset, n, aligned && n == kEight && offset % kEight == 0};
}

// Calls move(span) once, where the compiler knows whether the span is whole: one branch for several arrays.
template <class Move> MEMKERN_DEVICE void either_way(const Span& at, Move&& move) {
  if (at.whole)
    move(Span{at.offset, kEight, true});
  else
    move(Span{at.offset, at.n, false});
}

MEMKERN_FN bool on_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// A FloatType that the compiler knows: what takes a type below takes one of these or a FloatType.
template <FloatType T> struct Known {
  MEMKERN_FN constexpr operator FloatType() const { return T; }
};

// Eight floats as they are stored: fp32 in eight words, 16-bit types in the first four. Loaded raw and
// converted later, so that the loads of several arrays are under way together.
struct Raw {
  uint32_t word[kEight];
};

template <class Type> MEMKERN_DEVICE Raw load_raw(const void* array, Type type, const Span& at) {
  Raw raw;
  if (type == FloatType::kFp32) {
    const uint32_t* p = static_cast<const uint32_t*>(array) + at.offset;
    if (at.whole) {
      const uint4 a = __ldcs(reinterpret_cast<const uint4*>(p)),
                  b = __ldcs(reinterpret_cast<const uint4*>(p) + 1);
      raw = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) raw.word[i] = i < at.n ? p[i] : 0;
    }
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(array) + at.offset;
    if (at.whole) {
      const uint4 a = __ldcs(reinterpret_cast<const uint4*>(p));
      raw = {{a.x, a.y, a.z, a.w}};
    } else {
#pragma unroll
      for (int i = 0; i < kEight / 2; ++i) {
        const uint32_t low = 2 * i < at.n ? p[2 * i] : 0, high = 2 * i + 1 < at.n ? p[2 * i + 1] : 0;
        raw.word[i] = low | high << 16;
      }
    }
  }
  return raw;
}

template <class Type> MEMKERN_DEVICE void to_floats(const Raw& raw, Type type, float (&x)[kEight]) {
  if (type == FloatType::kFp32) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = float_of(raw.word[i]);
  } else if (type == FloatType::kBf16) {
#pragma unroll
    for (int i = 0; i < kEight; i += 2) {
      x[i] = float_of(raw.word[i / 2] << 16);
      x[i + 1] = float_of(raw.word[i / 2] & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEight; i += 2) {
      x[i] = fp16_to_float(raw.word[i / 2] & 0xFFFFu);
      x[i + 1] = fp16_to_float(raw.word[i / 2] >> 16);
    }
  }
}

template <class Type> MEMKERN_DEVICE Raw to_raw(const float (&x)[kEight], Type type) {
  Raw raw;
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (type == FloatType::kFp32)
      raw.word[i] = bits_of(x[i]);
    else if (i < kEight / 2)
      raw.word[i] =
          type == FloatType::kBf16 ? to_bf16x2(x[2 * i], x[2 * i + 1]) : to_fp16x2(x[2 * i], x[2 * i + 1]);
  }
  return raw;
}

template <class Type> MEMKERN_DEVICE void store_raw(void* array, Type type, const Span& at, const Raw& raw) {
  const uint32_t (&w)[kEight] = raw.word;
  if (type == FloatType::kFp32) {
    uint32_t* p = static_cast<uint32_t*>(array) + at.offset;
    if (at.whole) {
      __stcs(reinterpret_cast<uint4*>(p), uint4{w[0], w[1], w[2], w[3]});
      __stcs(reinterpret_cast<uint4*>(p) + 1, uint4{w[4], w[5], w[6], w[7]});
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i)
        if (i < at.n) p[i] = w[i];
    }
  } else {
    uint16_t* p = static_cast<uint16_t*>(array) + at.offset;
    if (at.whole) {
      __stcs(reinterpret_cast<uint4*>(p), uint4{w[0], w[1], w[2], w[3]});
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i)
        if (i < at.n) p[i] = static_cast<uint16_t>(w[i / 2] >> 16 * (i % 2));
    }
  }
}

template <class Type>
MEMKERN_DEVICE void load_floats(const void* array, Type type, const Span& at, float (&x)[kEight]) {
  to_floats(load_raw(array, type, at), type, x);
}

template <class Type>
MEMKERN_DEVICE void store_floats(void* array, Type type, const Span& at, const float (&x)[kEight]) {
  store_raw(array, type, at, to_raw(x, type));
}

// Eight codes, four to a word.
using Codes = uint2;

MEMKERN_DEVICE Codes load_codes(const void* array, const Span& at) {
  const uint8_t* p = static_cast<const uint8_t*>(array) + at.offset;
  if (at.whole) return __ldcs(reinterpret_cast<const uint2*>(p));
  uint32_t word[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kEight; ++i)
    if (i < at.n) word[i / 4] |= static_cast<uint32_t>(p[i]) << 8 * (i % 4);
  return {word[0], word[1]};
}

MEMKERN_DEVICE void store_codes(void* array, const Span& at, const Codes& codes) {
  uint8_t* p = static_cast<uint8_t*>(array) + at.offset;
  if (at.whole) {
    __stcs(reinterpret_cast<uint2*>(p), codes);
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i)
      if (i < at.n) p[i] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
  }
}

}  // namespace memkern
