// What the CPU kernels take, and which kernels each instruction set has. Nothing of torch is included: an
// inline function of torch compiled here for AVX-512 could become the one copy that the linker keeps for the
// whole library.
#pragma once
#include "common/step_tensor.h"
#include "core/activation.h"
#include "core/adam.h"
#include "core/lamb.h"
#include "core/lars.h"
#include "core/lion.h"
#include "core/sgd.h"

namespace memkern {

// What codes are rounded with at each place in a block: u, and signed_rest(u). None: to the nearest code.
struct Dither {
  const float* u = nullptr;
  const float* rest = nullptr;
};

// `run` updates the blocks [begin, end).
template <class Scalars> struct Job : StepTensor {
  const Scalars* scalars;
  Dither dither;
  const uint32_t* weight_random = nullptr;  // for each place in a block, where weights are rounded with it
  void (*run)(const Job&, int64_t begin, int64_t end);
};
using AdamJob = Job<AdamScalars>;
using LionJob = Job<LionScalars>;
using SgdJob = Job<SgdScalars>;
using LambJob = Job<LambScalars>;
using LarsJob = Job<LarsScalars>;

// The sums of squares over the blocks [begin, end), in an order that depends on nothing else.
template <class J> using Norms = Squares (*)(const J&, int64_t begin, int64_t end);

// A tensor whose squares are summed: a partial sum for each chunk (a "block" of the layout).
struct SquaresJob {
  const void* values;
  double* partial;
  BlockLayout layout;
  void (*run)(const SquaresJob&, int64_t begin, int64_t end);
};

struct CodecJob {
  void* values;
  void* codes;
  float* scale;
  Dither dither;
  BlockLayout layout;
  void (*run)(const CodecJob&, int64_t begin, int64_t end);
};

// The thresholds of plane p are those from first[p] to first[p + 1].
struct PlaneThresholds {
  int symmetry, bits;
  int first[kMaxBits + 1];
  float threshold[kMaxBits * kMaxThresholds];
};

// One pass of a few-bit activation; a "block" of the layout is kGroup elements.
struct ActivationJob {
  const void* input;   // x where codes are written, else the gradient
  const void* output;  // the activation's, where the derivative comes from it
  void* result;
  uint8_t* codes;
  int64_t plane;  // bytes from one plane to the next
  const PlaneThresholds* thresholds;
  const float* levels;
  const Valley* valley;
  BlockLayout layout;
  void (*run)(const ActivationJob&, int64_t begin, int64_t end);
};

#define MEMKERN_DECLARE_KERNELS(ISA)                                                                \
  namespace ISA {                                                                                   \
  decltype(AdamJob::run) adam_kernel(const StepTensor&);                                            \
  decltype(LionJob::run) lion_kernel(const StepTensor&);                                            \
  decltype(SgdJob::run) sgd_kernel(const StepTensor&);                                              \
  decltype(LambJob::run) lamb_kernel(const StepTensor&);                                            \
  Norms<LambJob> lamb_norms(const StepTensor&);                                                     \
  decltype(LarsJob::run) lars_kernel(const StepTensor&);                                            \
  Norms<LarsJob> lars_norms(const StepTensor&);                                                     \
  decltype(CodecJob::run) codec_kernel(StateKind, FloatType values, bool is_signed, bool quantize); \
  decltype(SquaresJob::run) squares_kernel(FloatType values);                                       \
  decltype(ActivationJob::run) encode_kernel(FloatType x, int bits);                                \
  decltype(ActivationJob::run) levels_kernel(FloatType grad, int bits);                             \
  decltype(ActivationJob::run) valley_kernel(FloatType grad, FloatType output);                     \
  }
MEMKERN_DECLARE_KERNELS(generic)
MEMKERN_DECLARE_KERNELS(avx2)
MEMKERN_DECLARE_KERNELS(avx512)

}  // namespace memkern
