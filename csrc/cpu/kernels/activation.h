// Few-bit activations' kernels: x to bit planes, and gradients times the derivative that bit planes stand
// for. Compiled once per instruction set (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/block.h"

namespace memkern::MEMKERN_ISA {
namespace {

// Elements whose bits of one plane fill one word.
constexpr int kWord = 64;
constexpr int kVectors = kWord / kLanes;

// A word with a bit for each of kWord elements. where(v): the mask of vector v.
template <class Where> MEMKERN_FN uint64_t bits_where(Where where) {
  uint64_t word = 0;
  for (int v = 0; v < kVectors; ++v) word |= static_cast<uint64_t>(bits_of(where(v))) << (v * kLanes);
  return word;
}

// The bits of kWord elements: words[p] for plane p.
template <int Bits>
MEMKERN_FN void encode_word(F (&u)[kVectors], const ThresholdsOfPlanes& table, uint64_t* words) {
  uint64_t sign = 0;
  if (table.symmetry == kOdd) sign = bits_where([&](int v) MEMKERN_LAMBDA { return greater(F(0.0f), u[v]); });
  if (table.symmetry != kPlain)
    for (F& x : u) x = abs(x);
  for (int p = 0; p < Bits; ++p) {
    uint64_t word = p == Bits - 1 ? sign : 0;
    for (int i = table.first[p]; i < table.first[p + 1]; ++i) {
      const F threshold(table.threshold[i]);
      word ^= bits_where([&](int v) MEMKERN_LAMBDA { return greater(u[v], threshold); });
    }
    words[p] = word;
  }
}

template <class T, int Bits> void encode_planes(const ActivationJob& job, int64_t begin, int64_t end) {
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t) MEMKERN_LAMBDA {
    const T* x = static_cast<const T*>(job.input) + offset;
    // All of a group's bytes are written, those past the last element with zeros.
    for (int start = 0; start < kGroup; start += kWord) {
      F u[kVectors];
      uint64_t words[Bits], used_bits = ~uint64_t{0};
      if (const int left = n - start; left >= kWord) {
        for (int v = 0; v < kVectors; ++v) u[v] = load(x + start + v * kLanes);
      } else {
        used_bits = left > 0 ? (uint64_t{1} << left) - 1 : 0;
        T padded[kWord] = {};
        if (left > 0) std::memcpy(padded, x + start, left * sizeof(T));
        for (int v = 0; v < kVectors; ++v) u[v] = load(padded + v * kLanes);
      }
      encode_word<Bits>(u, *job.thresholds, words);
      for (int p = 0; p < Bits; ++p) {
        words[p] &= used_bits;
        std::memcpy(job.codes + p * job.plane + (offset + start) / 8, &words[p], 8);
      }
    }
  });
}

// Calls body(i, bits, load, store) for the vectors of all groups from begin to end; bits[p] holds plane p's.
template <int Bits, class Body>
MEMKERN_FN void for_planes(const ActivationJob& job, int64_t begin, int64_t end, Body&& body) {
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t) MEMKERN_LAMBDA {
    uint64_t words[Bits][kGroup / kWord];
    for (int p = 0; p < Bits; ++p)
      std::memcpy(words[p], job.codes + p * job.plane + offset / 8, kPlaneAlignment);
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      uint32_t bits[Bits];
      for (int p = 0; p < Bits; ++p)
        bits[p] = static_cast<uint32_t>(words[p][i / kWord] >> (i % kWord)) & ((1u << kLanes) - 1);
      body(offset + i, bits, load_from, store_to);
    });
  });
}

template <class T, int Bits> void multiply_by_levels(const ActivationJob& job, int64_t begin, int64_t end) {
  const LevelTable<Bits> table(job.levels);
  const T* grad = static_cast<const T*>(job.input);
  T* result = static_cast<T*>(job.result);
  for_planes<Bits>(job, begin, end,
                   [&](int64_t i, const uint32_t* bits, auto load_from, auto store_to)
                       MEMKERN_LAMBDA { store_to(result + i, load_from(grad + i) * table.at(bits)); });
}

template <class T, class Y>
void multiply_by_two_branch(const ActivationJob& job, int64_t begin, int64_t end) {
  const TwoBranch two_branch = *job.two_branch;
  const T* grad = static_cast<const T*>(job.input);
  const Y* output = static_cast<const Y*>(job.output);
  T* result = static_cast<T*>(job.result);
  for_planes<1>(job, begin, end,
                [&](int64_t i, const uint32_t* bits, auto load_from, auto store_to) MEMKERN_LAMBDA {
                  const F d = two_branch_derivative(load_from(output + i), mask_of(bits[0]), two_branch);
                  store_to(result + i, load_from(grad + i) * d);
                });
}

// Calls f with the number of bits as a constant.
template <class Call> auto with_bits(int bits, Call f) {
  return bits == 1   ? f(std::integral_constant<int, 1>())
         : bits == 2 ? f(std::integral_constant<int, 2>())
         : bits == 3 ? f(std::integral_constant<int, 3>())
                     : f(std::integral_constant<int, 4>());
}

}  // namespace

decltype(ActivationJob::run) pick_encode_kernel(FloatType x, int bits) {
  return with_type(x, [&](auto t) {
    return with_bits(bits, [](auto b) -> decltype(ActivationJob::run) {
      return encode_planes<decltype(t), decltype(b)::value>;
    });
  });
}

decltype(ActivationJob::run) pick_levels_kernel(FloatType grad, int bits) {
  return with_type(grad, [&](auto t) {
    return with_bits(bits, [](auto b) -> decltype(ActivationJob::run) {
      return multiply_by_levels<decltype(t), decltype(b)::value>;
    });
  });
}

decltype(ActivationJob::run) pick_two_branch_kernel(FloatType grad, FloatType output) {
  return with_type(grad, [&](auto t) {
    return with_type(output, [](auto y) -> decltype(ActivationJob::run) {
      return multiply_by_two_branch<decltype(t), decltype(y)>;
    });
  });
}

}  // namespace memkern::MEMKERN_ISA
