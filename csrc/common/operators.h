// How bindings name their operators for torch.
#pragma once

#include <torch/csrc/stable/library.h>

namespace oper {

// Registers functions as kernels for all device types: these operators do not depend on the device
// of their arguments. A registration lasts as long as its StableLibrary, which is therefore static.
inline torch::stable::detail::StableLibrary& kernels_for_all_devices() {
  using Library = torch::stable::detail::StableLibrary;
  static Library library(Library::Kind::IMPL, "oper", "CompositeExplicitAutograd", __FILE__,
                         __LINE__);
  return library;
}

}  // namespace oper

// Registers a function under its own name, in a block of STABLE_TORCH_LIBRARY with library `m`.
#define OPER_OPERATOR(function, signature) \
  m.def(#function signature);              \
  oper::kernels_for_all_devices().impl(#function, TORCH_BOX(&function))
