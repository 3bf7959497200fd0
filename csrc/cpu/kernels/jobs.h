// The interface of the CPU kernels: the jobs that they take, and the functions that pick a kernel, of each
// instruction set. This file includes nothing of torch: the linker could keep the AVX-512 copy of one of
// torch's inline functions for the whole library.
#pragma once
#include "common/step_tensor.h"
#include "core/activation.h"
#include "core/adam.h"
#include "core/lamb.h"
#include "core/lars.h"
#include "core/lion.h"
#include "core/muon.h"
#include "core/sgd.h"

namespace memkern {

// The dither of codes for each position in a block: u, and one_minus_dither(u). Null: round to the nearest
// code.
struct Dither {
  const float* u = nullptr;
  const float* one_minus_u = nullptr;
};

// A tensor of a step. `run` updates the blocks [begin, end).
template <class Scalars> struct Job : StepTensor {
  const Scalars* scalars;
  Dither dither;
  const uint32_t* weight_random = nullptr;  // random bits for each position in a block, if weights need them
  void (*run)(const Job&, int64_t begin, int64_t end);
};
using AdamJob = Job<AdamScalars>;
using LionJob = Job<LionScalars>;
using SgdJob = Job<SgdScalars>;
using LambJob = Job<LambScalars>;
using LarsJob = Job<LarsScalars>;

struct MuonJob : Job<MuonScalars> {
  void* update;  // bf16, laid out as the parameter
};

// A kernel for a trust ratio: the sums of squares over the blocks [begin, end), in a fixed order.
template <class J> using Norms = Squares (*)(const J&, int64_t begin, int64_t end);

// A tensor whose squares are summed: a partial sum for each chunk (a "block" of the layout).
struct SquaresJob {
  const void* values;
  double* partial;
  BlockLayout layout;
  void (*run)(const SquaresJob&, int64_t begin, int64_t end);
};

// A tensor that is quantized, or dequantized.
struct CodecJob {
  void* values;
  void* codes;
  float* scale;
  Dither dither;
  BlockLayout layout;
  bool mark_nonfinite;
  void (*run)(const CodecJob&, int64_t begin, int64_t end);
};

// The thresholds that flip a bit of plane p are threshold[first[p]] to threshold[first[p + 1] - 1].
struct ThresholdsOfPlanes {
  int symmetry, bits;
  int first[kMaxBits + 1];
  float threshold[kMaxBits * kMaxThresholds];
};

// One pass of a few-bit activation; a "block" of the layout is kGroup elements.
struct ActivationJob {
  const void* input;   // x where codes are written, else the gradient
  const void* output;  // the activation's, where the derivative comes from it
  void* result;        // the gradient times the derivative
  uint8_t* codes;
  int64_t plane;  // bytes from one plane to the next
  const ThresholdsOfPlanes* thresholds;
  const float* levels;  // of each code
  const TwoBranch* two_branch;
  BlockLayout layout;
  void (*run)(const ActivationJob&, int64_t begin, int64_t end);
};

// A function that picks a tensor's kernel, by its dtypes and codec.
template <class Scalars> using PickKernel = decltype(Job<Scalars>::run) (*)(const StepTensor&);
template <class Scalars> using PickNorms = Norms<Job<Scalars>> (*)(const StepTensor&);

// The kernels of an instruction set: for each family, the function that picks one by dtypes and codec.
struct Kernels {
  PickKernel<AdamScalars> adam;
  PickKernel<LionScalars> lion;
  PickKernel<SgdScalars> sgd;
  PickKernel<LambScalars> lamb;
  PickNorms<LambScalars> lamb_norms;
  PickKernel<LarsScalars> lars;
  PickNorms<LarsScalars> lars_norms;
  PickKernel<MuonScalars> muon_momentum;
  PickKernel<MuonScalars> muon_apply;
  decltype(CodecJob::run) (*codec)(StateKind, FloatType values, bool is_signed, bool quantize);
  decltype(SquaresJob::run) (*squares)(FloatType values);
  decltype(ActivationJob::run) (*encode)(FloatType x, int bits);     // x to bit planes
  decltype(ActivationJob::run) (*levels)(FloatType grad, int bits);  // grad times levels
  decltype(ActivationJob::run) (*two_branch)(FloatType grad, FloatType output);
};
// Defined in kernels/all.h, which simd/compile_*.cpp compile for an instruction set each.
namespace generic {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace neon {
extern const Kernels kKernels;
}

}  // namespace memkern
