// Every op: its schema and its registration. adam_step_ is adam_step_cpu of cpu/steps.cpp and adam_step_cuda
// of cuda/adam.cu, and so on. Built against LibTorch's stable ABI: no Python.h, one binary for any Python and
// torch >= 2.10.
#include "common/ops.h"

#ifndef MEMKERN_NAMESPACE  // of torch.ops; tools/hub_kernel.py gives each build one of its own
#define MEMKERN_NAMESPACE memkern
#endif
// Expand MEMKERN_NAMESPACE before torch's macros, which would take its name for the namespace's.
#define MEMKERN_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define MEMKERN_LIBRARY_IMPL(name, device, m) STABLE_TORCH_LIBRARY_IMPL(name, device, m)

MEMKERN_LIBRARY(MEMKERN_NAMESPACE, m) {
  for (const char* schema : memkern::kSchemas) m.def(schema);
}

MEMKERN_LIBRARY_IMPL(MEMKERN_NAMESPACE, CPU, m) { MEMKERN_REGISTER_OPS(m, cpu); }

#ifdef USE_CUDA
MEMKERN_LIBRARY_IMPL(MEMKERN_NAMESPACE, CUDA, m) {
  MEMKERN_REGISTER_OPS(m, cuda);
  m.impl("few_bit_forward", TORCH_BOX(&memkern::few_bit_forward_cuda));
}
#endif
