// Activations of one element in fp32, by the formulas of torch's CUDA kernels, so that a result rounded to 16
// bits is theirs but for rare ties, and no less exact.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"
#include "runtime.h"

namespace memkern {

MEMKERN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// a, b: softplus' beta and threshold, leaky ReLU's slope, hardtanh's bounds.
template <int Fn> MEMKERN_DEVICE float activate(float x, float a, float b) {
  if constexpr (Fn == kGelu) return x * 0.5f * (1.0f + erff(x * 0x1.6a09e6p-1f));  // sqrt(1/2)
  if constexpr (Fn == kGeluTanh) {
    const float inner = 0x1.988454p-1f * fmaf(0x1.6e4e26p-5f, x * x * x, x);  // sqrt(2/pi), 0.044715
    return 0.5f * x * (1.0f + tanhf(inner));
  }
  if constexpr (Fn == kSilu) return x / (1.0f + expf(-x));
  if constexpr (Fn == kTanh) return tanhf(x);
  if constexpr (Fn == kSigmoid) return sigmoid(x);
  if constexpr (Fn == kSoftplus) return x * a > b ? x : log1pf(expf(x * a)) / a;
  if constexpr (Fn == kMish) return x * tanhf(log1pf(expf(x)));
  if constexpr (Fn == kHardswish) return x * fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * 0x1.555556p-3f;  // 1/6
  if constexpr (Fn == kQuickGelu) return x * sigmoid(1.702f * x);
  if constexpr (Fn == kRelu) return x < 0.0f ? 0.0f : x;
  if constexpr (Fn == kLeakyRelu) return x > 0.0f ? x : x * a;
  if constexpr (Fn == kHardtanh) return x < a ? a : x > b ? b : x;
}

}  // namespace memkern
