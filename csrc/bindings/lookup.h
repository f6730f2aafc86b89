// What the operators of the host back end share.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "common/handles.h"
#include "host/context.h"
#include "host/exchange/exchange.h"

namespace oper::host {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Owned {
  Context context;
  std::vector<Tensor> keep_alive;  // head maps, referenced and not copied
};

Handles<Owned>& contexts();
inline Context& context_of(int64_t handle) { return contexts().at(handle).context; }

// A tensor from the pool of `host/memory.h`, `item` bytes an element; not cleared.
Tensor pooled_tensor(ScalarType type, size_t item, std::vector<int64_t> sizes);

// A `ParallelFor` of torch's threads.
void parallel_over_tasks(int64_t count, void (*body)(int64_t, int64_t, void*), void* argument);

}  // namespace oper::host
