// memkern._host (pybind11): facts about this build and this machine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "cpu/simd/isa.h"

namespace py = pybind11;

#ifndef MEMKERN_CUDA_ARCHS
#define MEMKERN_CUDA_ARCHS ""
#endif
#ifndef MEMKERN_TORCH_VERSION
#define MEMKERN_TORCH_VERSION "unknown"
#endif

PYBIND11_MODULE(_host, m) {
  m.doc() = "Build facts and CPU features.";

  m.def(
      "build_info",
      [] {
        return std::map<std::string, std::string>{
            {"compiler", __VERSION__},
            {"c++", std::to_string(__cplusplus)},
            {"torch", MEMKERN_TORCH_VERSION},
            {"cuda_archs", MEMKERN_CUDA_ARCHS},
        };
      },
      "What this module was compiled with.");

  m.def(
      "cpu_isa", [] { return memkern::isa_name(memkern::cpu_isa()); },
      "The instruction set that kernels use.");

  m.def(
      "cpu_features",
      [] {
        std::vector<std::string> features;
#ifdef MEMKERN_X86
        __builtin_cpu_init();
#define MEMKERN_FEATURE(NAME) \
  if (__builtin_cpu_supports(NAME)) features.push_back(NAME);
        MEMKERN_FEATURE("avx2")
        MEMKERN_FEATURE("f16c")
        MEMKERN_FEATURE("fma")
        MEMKERN_FEATURE("avx512f")
        MEMKERN_FEATURE("avx512bw")
        MEMKERN_FEATURE("avx512dq")
        MEMKERN_FEATURE("avx512vl")
#undef MEMKERN_FEATURE
#endif
        return features;
      },
      "Those of this processor's features that the kernels can use.");
}
