// The parameters of a block as a step reads and writes them. Compiled once per instruction set
// (simd/compile_*.cpp).
#pragma once
#include "core/weights.h"
#include "cpu/kernels/vector_loops.h"

namespace memkern::MEMKERN_ISA {
namespace {

// A bf16 parameter that is not just rounded to the nearest: in place of bf16 as a kernel's type.
struct master_bf16 {
  bf16 p;
};

template <class P> struct Weights {
  P* p;
  template <class J> MEMKERN_FN Weights(const J& job, int64_t offset)
      : p(static_cast<P*>(job.param) + offset) {}
  template <class Load> MEMKERN_FN F get(int i, Load load_from) const { return load_from(p + i); }
  template <class Store> MEMKERN_FN void put(int i, F x, Store store_to) const { store_to(p + i, x); }
};

// One type for all other ways, so that there are a third more kernels and not twice as many: a branch per
// vector, always the same, costs nothing that can be measured.
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
    if (storage == WeightStorage::kFp32) {
      const F copy = load_from(state_as<const float>() + i);
      return unless_nan(select(equal(round_to_bf16(to_bits(copy)), to_bits(x)), copy, x), x);
    }
    if (storage == WeightStorage::kError8)
      return unless_nan(from_bits(join_weight(to_bits(x), load_from(state_as<const error8>() + i))), x);
    if (storage == WeightStorage::kError16)
      return unless_nan(from_bits(join_weight(to_bits(x), load_from(state_as<const error16>() + i))), x);
    return x;
  }

  template <class Store> MEMKERN_FN void put(int i, F x, Store store_to) const {
    if (storage == WeightStorage::kFp32) {
      store_to(state_as<float>() + i, x);
      store_to(p + i, x);
      return;
    }
    const auto split = [&](I r, uint32_t dropped_mask) MEMKERN_LAMBDA {
      I weight, error;
      split_weight(to_bits(x), r, dropped_mask, weight, error);
      // What is not finite stays so, and has no error.
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

// Calls f(P(), G()) with the C++ types of a tensor's parameter and gradient.
template <class Call> auto with_types(const StepTensor& t, Call f) {
  return with_type(t.grad_type, [&](auto g) {
    if (t.weight_storage != WeightStorage::kNearest) return f(master_bf16(), g);
    return with_type(t.param_type, [&](auto p) { return f(p, g); });
  });
}

}  // namespace
}  // namespace memkern::MEMKERN_ISA
