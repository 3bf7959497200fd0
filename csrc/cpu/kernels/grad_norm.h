// Sums of squares in fp64, for gradients' norms and Muon's updates. Compiled once per instruction set
// (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/block.h"

namespace memkern::MEMKERN_ISA {
namespace {

template <class T> void sum_squares(const SquaresJob& job, int64_t begin, int64_t end) {
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t chunk) MEMKERN_LAMBDA {
    const T* x = static_cast<const T*>(job.values) + offset;
    // Two sums, so that an addition does not wait for the one before it.
    SquareSum even, odd;
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      even.add(load(x + i));
      odd.add(load(x + i + kLanes));
    }
    for_vectors(n - i, [&](int k, auto load_from, auto) MEMKERN_LAMBDA { even.add(load_from(x + i + k)); });
    job.partial[chunk] = even.total() + odd.total();
  });
}

}  // namespace

decltype(SquaresJob::run) pick_squares_kernel(FloatType values) {
  return with_type(values, [](auto x) -> decltype(SquaresJob::run) { return sum_squares<decltype(x)>; });
}

}  // namespace memkern::MEMKERN_ISA
