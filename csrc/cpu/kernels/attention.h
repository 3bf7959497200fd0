// How sure a few queries of each head are of single keys. Compiled once per instruction set
// (simd/compile_*.cpp).
#pragma once
#include <cmath>

#include "cpu/kernels/block.h"

namespace memkern::MEMKERN_ISA {
namespace {

constexpr int kRowVectors = kAttentionRows / kLanes;
constexpr int kKeysAtOnce = 4;
constexpr int kPiece = 64;      // elements of a key that are converted at once
constexpr int kKeysChunk = 64;  // between two updates of the largest score

MEMKERN_FN float number(float x) { return x; }
template <class T> MEMKERN_FN float number(T x) { return to_float(x); }

// Sums of e = exp(score - largest), of its square and its cube, for one query.
struct Exponentials {
  float largest = -INFINITY;
  double sum = 0.0, squares = 0.0, cubes = 0.0;

  MEMKERN_FN void raise(float score) {
    if (!(score > largest)) return;
    const double factor = ::expf(largest - score);
    sum *= factor, squares *= factor * factor, cubes *= factor * factor * factor;
    largest = score;
  }
  MEMKERN_FN void add(float score) {
    if (largest == -INFINITY && !(score != score)) return;  // masked, as everything before it
    const double e = ::expf(score - largest);
    sum += e, squares += e * e, cubes += e * e * e;
  }
};

// The scores of kKeysAtOnce keys with kAttentionRows queries, whose elements lie one row after the other.
template <class T>
MEMKERN_FN void score_keys(const float* queries, const T* const* keys, int64_t width, float* scores) {
  F sums[kKeysAtOnce][kRowVectors];
  for (auto& key : sums)
    for (F& sum : key) sum = F(0.0f);
  float values[kKeysAtOnce][kPiece];
  for (int64_t begin = 0; begin < width; begin += kPiece) {
    const int n = static_cast<int>(width - begin < kPiece ? width - begin : kPiece);
    for (int k = 0; k < kKeysAtOnce; ++k)
      for_vectors(n, [&](int i, auto load_from, auto)
                         MEMKERN_LAMBDA { store(values[k] + i, load_from(keys[k] + begin + i)); });
    for (int i = 0; i < n; ++i)
      for (int v = 0; v < kRowVectors; ++v) {
        const F query = load(queries + (begin + i) * kAttentionRows + v * kLanes);
        for (int k = 0; k < kKeysAtOnce; ++k) sums[k][v] = sums[k][v] + F(values[k][i]) * query;
      }
  }
  for (int k = 0; k < kKeysAtOnce; ++k)
    for (int v = 0; v < kRowVectors; ++v) store(scores + k * kAttentionRows + v * kLanes, sums[k][v]);
}

template <class T>
MEMKERN_FN double squares_of_rows(const T* x, int64_t rows, int64_t stride, int64_t width) {
  SquareSum sum;
  for (int64_t r = 0; r < rows; ++r, x += stride)
    for (int64_t begin = 0; begin < width; begin += kPiece) {
      const int n = static_cast<int>(width - begin < kPiece ? width - begin : kPiece);
      for_vectors(n, [&](int i, auto load_from, auto) MEMKERN_LAMBDA { sum.add(load_from(x + begin + i)); });
    }
  return sum.total();
}

MEMKERN_FN float masked(const AttentionJob& job, int64_t offset, float score) {
  switch (job.mask_type) {
    case AttentionJob::kBool:
      return static_cast<const bool*>(job.mask)[offset] ? score : -INFINITY;
    case AttentionJob::kFp32:
      return score + static_cast<const float*>(job.mask)[offset];
    case AttentionJob::kBf16:
      return score + to_float(static_cast<const bf16*>(job.mask)[offset]);
    case AttentionJob::kFp16:
      return score + to_float(static_cast<const fp16*>(job.mask)[offset]);
    default:
      return score;
  }
}

// Adds up to kAttentionRows queries of a head, from the first on, to the last two sums.
template <class T> MEMKERN_FN void add_rows(const AttentionJob& job, const T* query, const T* key,
                                            int64_t mask, int64_t first, float* scratch, double* sums) {
  Exponentials rows[kAttentionRows];
  const int64_t left = (job.queries - first + job.step - 1) / job.step;
  const int count = static_cast<int>(left < kAttentionRows ? left : kAttentionRows);
  for (int64_t i = 0; i < job.width; ++i)
    for (int r = 0; r < kAttentionRows; ++r)
      scratch[i * kAttentionRows + r] =
          r < count ? number(query[(first + r * job.step) * job.query_stride[2] + i]) * job.scale : 0.0f;
  float scores[kKeysChunk * kAttentionRows];
  for (int64_t begin = 0; begin < job.keys; begin += kKeysChunk) {
    const int n = static_cast<int>(job.keys - begin < kKeysChunk ? job.keys - begin : kKeysChunk);
    for (int k = 0; k < n; k += kKeysAtOnce) {
      const T* keys[kKeysAtOnce];
      for (int c = 0; c < kKeysAtOnce; ++c)
        keys[c] = key + (begin + (k + c < n ? k + c : n - 1)) * job.key_stride[2];
      score_keys(scratch, keys, job.width, scores + k * kAttentionRows);
    }
    for (int r = 0; r < count; ++r) {
      const int64_t row = first + r * job.step;
      const int seen = job.is_causal ? static_cast<int>(row - begin < n ? row - begin + 1 : n) : n;
      float* score = scores + r;
      for (int k = 0; k < seen; ++k) {
        float& own = score[k * kAttentionRows];
        own = masked(job, mask + row * job.mask_stride[2] + (begin + k) * job.mask_stride[3], own);
        rows[r].raise(own);
      }
      for (int k = 0; k < seen; ++k) rows[r].add(score[k * kAttentionRows]);
    }
  }
  for (int r = 0; r < count; ++r) {
    const double sum = rows[r].sum;
    if (!(sum > 0.0 && sum < INFINITY)) continue;  // sees nothing, or a NaN
    const double squares = rows[r].squares / (sum * sum), cubes = rows[r].cubes / (sum * sum * sum);
    sums[2] += squares;
    sums[3] += squares - 2.0 * cubes + squares * squares;
  }
}

template <class T> void attention_run(const AttentionJob& job, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / job.heads, head = unit % job.heads, group = job.heads / job.key_heads;
    const T* query =
        static_cast<const T*>(job.query) + batch * job.query_stride[0] + head * job.query_stride[1];
    const T* key =
        static_cast<const T*>(job.key) + batch * job.key_stride[0] + head / group * job.key_stride[1];
    double* sums = job.partial + unit * 4;
    sums[0] = squares_of_rows(query, job.queries, job.query_stride[2], job.width);
    sums[1] = head % group == 0 ? squares_of_rows(key, job.keys, job.key_stride[2], job.width) : 0.0;
    sums[2] = sums[3] = 0.0;
    float* scratch = job.scratch + unit * job.width * kAttentionRows;
    const int64_t mask = batch * job.mask_stride[0] + head * job.mask_stride[1];
    // From the middle: the first row of a causal mask stands for itself alone.
    for (int64_t first = job.step / 2; first < job.queries; first += job.step * kAttentionRows)
      add_rows(job, query, key, mask, first, scratch, sums);
  }
}

}  // namespace

decltype(AttentionJob::run) attention_kernel(FloatType values) {
  return with_type(values, [](auto x) -> decltype(AttentionJob::run) { return attention_run<decltype(x)>; });
}

}  // namespace memkern::MEMKERN_ISA
