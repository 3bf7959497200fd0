// Vectors of 8 consecutive elements, what a thread loads, computes with and stores at a time.
#pragma once
#include "common/step_tensor.h"
#include "core/scalar.h"
#include "cuda/device.cuh"

namespace memkern {

constexpr int kVector = 8;  // elements

// The elements of a vector. full: the vector has 8 elements, at an offset that is a multiple of 8, in arrays
// that are aligned to 16 bytes; then memory accesses are of 16 bytes (of codes, 8).
struct Span {
  int64_t offset;
  int n;  // 0 to 8; fewer at the end of a block or tensor
  bool full;
};

MEMKERN_DEVICE Span span_of(int64_t offset, int64_t left, bool aligned) {
  const int n = left >= kVector ? kVector : left > 0 ? static_cast<int>(left) : 0;
  return {offset, n, aligned && n == kVector && offset % kVector == 0};
}

// Calls move(span) with `full` as a constant: one branch for the accesses to several arrays.
template <class Move> MEMKERN_DEVICE void with_constant_span(const Span& at, Move&& move) {
  if (at.full)
    move(Span{at.offset, kVector, true});
  else
    move(Span{at.offset, at.n, false});
}

MEMKERN_FN bool on_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// A FloatType as a compile-time constant. Functions below with a parameter `type` take one of these or a
// FloatType.
template <FloatType T> struct ConstantType {
  MEMKERN_FN constexpr operator FloatType() const { return T; }
};

// A vector as it is in memory: fp32 in 8 words, 16-bit types in the first 4. Loaded first and converted
// later, so that the loads of several arrays are in flight together.
struct Raw {
  uint32_t word[kVector];
};

// A vector of fp32 in two parts of 4 elements, at `offset` and offset + distance, so that neighbouring lanes
// access neighbouring 16 bytes. With all 8 elements together each access would be to 16 of every 32 bytes,
// half a sector; with writes of half sectors a copy kernel on an H200 takes 1.23 times as long. distance =
// 0: the second part does not exist, and the first is loaded in its place.
struct Parts {
  int64_t offset;
  int32_t distance;
};

template <class Type> MEMKERN_DEVICE Raw load_raw(const void* array, Type type, const Span& at) {
  Raw raw;
  if (type == FloatType::kFp32) {
    const uint32_t* p = static_cast<const uint32_t*>(array) + at.offset;
    if (at.full) {
      const uint4 a = __ldcs(reinterpret_cast<const uint4*>(p)),
                  b = __ldcs(reinterpret_cast<const uint4*>(p) + 1);
      raw = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) raw.word[i] = i < at.n ? p[i] : 0;
    }
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(array) + at.offset;
    if (at.full) {
      const uint4 a = __ldcs(reinterpret_cast<const uint4*>(p));
      raw = {{a.x, a.y, a.z, a.w}};
    } else {
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        const uint32_t low = 2 * i < at.n ? p[2 * i] : 0, high = 2 * i + 1 < at.n ? p[2 * i + 1] : 0;
        raw.word[i] = low | high << 16;
      }
    }
  }
  return raw;
}

MEMKERN_DEVICE Raw load_raw(const void* array, ConstantType<FloatType::kFp32>, const Parts& at) {
  const float* p = static_cast<const float*>(array) + at.offset;
  const uint4 a = __ldcs(reinterpret_cast<const uint4*>(p)),
              b = __ldcs(reinterpret_cast<const uint4*>(p + at.distance));
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

template <class Type> MEMKERN_DEVICE void to_floats(const Raw& raw, Type type, float (&x)[kVector]) {
  if (type == FloatType::kFp32) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = float_of(raw.word[i]);
  } else if (type == FloatType::kBf16) {
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      x[i] = float_of(raw.word[i / 2] << 16);
      x[i + 1] = float_of(raw.word[i / 2] & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      x[i] = fp16_to_float(raw.word[i / 2] & 0xFFFFu);
      x[i + 1] = fp16_to_float(raw.word[i / 2] >> 16);
    }
  }
}

template <class Type> MEMKERN_DEVICE Raw to_raw(const float (&x)[kVector], Type type) {
  Raw raw;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (type == FloatType::kFp32)
      raw.word[i] = bits_of(x[i]);
    else if (i < kVector / 2)
      raw.word[i] =
          type == FloatType::kBf16 ? to_bf16x2(x[2 * i], x[2 * i + 1]) : to_fp16x2(x[2 * i], x[2 * i + 1]);
  }
  return raw;
}

template <class Type> MEMKERN_DEVICE void store_raw(void* array, Type type, const Span& at, const Raw& raw) {
  const uint32_t (&w)[kVector] = raw.word;
  if (type == FloatType::kFp32) {
    uint32_t* p = static_cast<uint32_t*>(array) + at.offset;
    if (at.full) {
      __stcs(reinterpret_cast<uint4*>(p), uint4{w[0], w[1], w[2], w[3]});
      __stcs(reinterpret_cast<uint4*>(p) + 1, uint4{w[4], w[5], w[6], w[7]});
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (i < at.n) p[i] = w[i];
    }
  } else {
    uint16_t* p = static_cast<uint16_t*>(array) + at.offset;
    if (at.full) {
      __stcs(reinterpret_cast<uint4*>(p), uint4{w[0], w[1], w[2], w[3]});
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (i < at.n) p[i] = static_cast<uint16_t>(w[i / 2] >> 16 * (i % 2));
    }
  }
}

MEMKERN_DEVICE void store_raw(void* array, ConstantType<FloatType::kFp32>, const Parts& at, const Raw& raw) {
  const uint32_t (&w)[kVector] = raw.word;
  float* p = static_cast<float*>(array) + at.offset;
  __stcs(reinterpret_cast<uint4*>(p), uint4{w[0], w[1], w[2], w[3]});
  if (at.distance != 0) __stcs(reinterpret_cast<uint4*>(p + at.distance), uint4{w[4], w[5], w[6], w[7]});
}

// At: Span or Parts.
template <class Type, class At>
MEMKERN_DEVICE void load_floats(const void* array, Type type, const At& at, float (&x)[kVector]) {
  to_floats(load_raw(array, type, at), type, x);
}

template <class Type, class At>
MEMKERN_DEVICE void store_floats(void* array, Type type, const At& at, const float (&x)[kVector]) {
  store_raw(array, type, at, to_raw(x, type));
}

// To how many bytes a gradient is aligned: 16, 4, or 2. Gradients may be views of DDP's buckets
// (gradient_as_bucket_view=True), which start at any element. All other arrays are aligned to 16 bytes, or
// are read one element at a time.
enum class Alignment { kVector, kWord, kHalfWord };

MEMKERN_DEVICE Alignment alignment_of(const void* gradient) {
  const auto address = reinterpret_cast<uintptr_t>(gradient);
  return address % 16 == 0 ? Alignment::kVector : address % 4 == 0 ? Alignment::kWord : Alignment::kHalfWord;
}
// The elements of a vector that is not full are loaded one by one, wherever they are.
MEMKERN_DEVICE Alignment alignment_of(const void* gradient, const Span& at) {
  return at.full ? alignment_of(gradient) : Alignment::kVector;
}

// Loads a vector of a gradient in aligned words: fp32 in 8 and 16-bit types in 4. With kHalfWord word 0 is
// element 0, words 1 to 3 are elements 1 and 2, 3 and 4, 5 and 6, and word 4 is element 7;
// gradient_to_floats() makes 4 of these.
template <class Type>
MEMKERN_DEVICE Raw load_gradient(const void* array, Type type, const Span& at, Alignment alignment) {
  if (alignment == Alignment::kVector) return load_raw(array, type, at);
  Raw raw;
  if (type == FloatType::kFp32) {
    const uint32_t* p = static_cast<const uint32_t*>(array) + at.offset;
#pragma unroll
    for (int i = 0; i < kVector; ++i) raw.word[i] = p[i];
    return raw;
  }
  const uint16_t* p = static_cast<const uint16_t*>(array) + at.offset;
  if (alignment == Alignment::kWord) {
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) raw.word[i] = reinterpret_cast<const uint32_t*>(p)[i];
  } else {
    raw.word[0] = p[0];
#pragma unroll
    for (int i = 0; i < kVector / 2 - 1; ++i) raw.word[i + 1] = reinterpret_cast<const uint32_t*>(p + 1)[i];
    raw.word[kVector / 2] = p[kVector - 1];
  }
  return raw;
}

MEMKERN_DEVICE Raw load_gradient(const void* array, ConstantType<FloatType::kFp32> type, const Parts& at,
                                 Alignment alignment) {
  if (alignment == Alignment::kVector) return load_raw(array, type, at);
  Raw raw;
  const uint32_t* p = static_cast<const uint32_t*>(array) + at.offset;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    raw.word[i] = p[i];
    raw.word[kVector / 2 + i] = p[at.distance + i];
  }
  return raw;
}

template <class Type>
MEMKERN_DEVICE void gradient_to_floats(const Raw& raw, Type type, Alignment alignment, float (&x)[kVector]) {
  Raw words = raw;
  if (type != FloatType::kFp32 && alignment == Alignment::kHalfWord)
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i)
      words.word[i] = __byte_perm(raw.word[i], raw.word[i + 1], i == 0 ? 0x5410 : 0x5432);
  to_floats(words, type, x);
}

template <class Type>
MEMKERN_DEVICE void load_gradient_floats(const void* array, Type type, const Span& at, float (&x)[kVector]) {
  const Alignment alignment = alignment_of(array, at);
  gradient_to_floats(load_gradient(array, type, at, alignment), type, alignment, x);
}

// A mask of two bf16 numbers in a word: all bits of the halves where a < b.
MEMKERN_DEVICE uint32_t less_bf16x2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t mask;
  asm("set.lt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  return mask;
#else
  const bool low = float_of(a << 16) < float_of(b << 16),
             high = float_of(a & 0xFFFF0000u) < float_of(b & 0xFFFF0000u);
  return (low ? 0xFFFFu : 0u) | (high ? 0xFFFF0000u : 0u);
#endif
}

// A vector of codes, four per word.
using Codes = uint2;

MEMKERN_DEVICE Codes load_codes(const void* array, const Span& at) {
  const uint8_t* p = static_cast<const uint8_t*>(array) + at.offset;
  if (at.full) return __ldcs(reinterpret_cast<const uint2*>(p));
  uint32_t word[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (i < at.n) word[i / 4] |= static_cast<uint32_t>(p[i]) << 8 * (i % 4);
  return {word[0], word[1]};
}

MEMKERN_DEVICE Codes load_codes(const void* array, const Parts& at) {
  const uint8_t* p = static_cast<const uint8_t*>(array) + at.offset;
  return {__ldcs(reinterpret_cast<const uint32_t*>(p)),
          __ldcs(reinterpret_cast<const uint32_t*>(p + at.distance))};
}

MEMKERN_DEVICE void store_codes(void* array, const Span& at, const Codes& codes) {
  uint8_t* p = static_cast<uint8_t*>(array) + at.offset;
  if (at.full) {
    __stcs(reinterpret_cast<uint2*>(p), codes);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i < at.n) p[i] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
  }
}

MEMKERN_DEVICE void store_codes(void* array, const Parts& at, const Codes& codes) {
  uint8_t* p = static_cast<uint8_t*>(array) + at.offset;
  __stcs(reinterpret_cast<uint32_t*>(p), codes.x);
  if (at.distance != 0) __stcs(reinterpret_cast<uint32_t*>(p + at.distance), codes.y);
}

}  // namespace memkern
