// What tests ask the emulation.
#include <torch/csrc/stable/library.h>

#include "emulation.h"

namespace {

// Kernels that this thread has launched since it last asked; those of CUB as CUDA's 13.0 has them.
int64_t take_launches() {
  const int64_t count = oper::emulation::num_launches;
  oper::emulation::num_launches = 0;
  return count;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper_emulated, m) { m.def("take_launches() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(oper_emulated, CompositeExplicitAutograd, m) {
  m.impl("take_launches", TORCH_BOX(&take_launches));
}
