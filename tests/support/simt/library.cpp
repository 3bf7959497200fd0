// The ops of csrc/cuda/ for CPU tensors, in the namespace memkern_simt, which tests/support/simt/build.py defines.
#include <dlfcn.h>
#include <simt.h>

#include "common/ops.h"

STABLE_TORCH_LIBRARY_IMPL(memkern_simt, CPU, m) {
  MEMKERN_REGISTER_OPS(m, cuda);
  m.impl("few_bit_forward", TORCH_BOX(&memkern::few_bit_forward_cuda));
}

extern "C" void memkern_simt_launch_with(decltype(simt::Machine::launcher) launcher) {
  simt::machine.launcher = launcher;
}

// Where this library lies in memory: what nm prints is relative to it.
extern "C" const void* memkern_simt_base() {
  Dl_info info;
  return dladdr(reinterpret_cast<const void*>(&memkern_simt_base), &info) ? info.dli_fbase : nullptr;
}

extern "C" void memkern_simt_replay() { simt::replay(); }

extern "C" void memkern_simt_forget() {
  simt::machine.recorded.clear();
  simt::machine.kept.clear();
}

// How many launches the graph holds.
extern "C" int memkern_simt_launches() { return static_cast<int>(simt::machine.recorded.size()); }
