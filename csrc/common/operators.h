// How bindings name their operators for torch.
#pragma once

#include <torch/csrc/stable/library.h>

namespace oper {

// Kernels of operators that are the same for every device type, since the kind of memory behind the
// tensors decides what they do. Registered as long as the library is loaded.
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
