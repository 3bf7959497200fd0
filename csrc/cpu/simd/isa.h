// The instruction set whose kernels run: this processor's best, or the one that MEMKERN_CPU_ISA names.
#pragma once
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define MEMKERN_X86 1
#elif defined(__aarch64__)
#define MEMKERN_ARM64 1
#endif

namespace memkern {

enum class Isa { kGeneric, kAvx2, kAvx512, kNeon };

inline const char* isa_name(Isa isa) {
  constexpr const char* kNames[] = {"generic", "avx2", "avx512", "neon"};
  return kNames[static_cast<int>(isa)];
}

inline Isa best_isa() {
#ifdef MEMKERN_ARM64
  return Isa::kNeon;
#elif defined(MEMKERN_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma")) {
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has_avx512 ? Isa::kAvx512 : Isa::kAvx2;
  }
#endif
  return Isa::kGeneric;
}

// The best one, or a lesser one that MEMKERN_CPU_ISA names (generic, avx2, avx512). Read at every call, so
// that one process can compare them; this costs nothing beside a step.
inline Isa cpu_isa() {
  static const Isa best = best_isa();
  const char* requested = std::getenv("MEMKERN_CPU_ISA");
  if (!requested) return best;
  if (!std::strcmp(requested, "generic")) return Isa::kGeneric;
  if (!std::strcmp(requested, "avx2") && best == Isa::kAvx512) return Isa::kAvx2;
  return best;
}

}  // namespace memkern
