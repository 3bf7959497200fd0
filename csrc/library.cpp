// Every op: its schema and its registration. Built against LibTorch's stable ABI: no Python.h, one binary for
// any Python and torch >= 2.10.
#include "common/ops.h"

STABLE_TORCH_LIBRARY(memkern, m) {
  for (const char* schema : memkern::kSchemas) m.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(memkern, CPU, m) { MEMKERN_REGISTER_OPS(m, cpu); }

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(memkern, CUDA, m) {
  MEMKERN_REGISTER_OPS(m, cuda);
  m.impl("few_bit_forward", TORCH_BOX(&memkern::few_bit_forward_cuda));
}
#endif
