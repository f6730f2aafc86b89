// Types and functions that several operators of the host back end use.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <vector>

#include "common/handles.h"
#include "host/context.h"
#include "host/exchange/exchange.h"

namespace oper::host {

struct Owned {
  Context context;
  std::vector<Tensor> keep_alive;  // head maps, to which the context points
};

inline Handles<Owned>& contexts() { return all_handles<Owned>(); }
// The context of open tables, which `context_close` keeps as long as the caller holds it.
inline std::shared_ptr<Context> context_of(int64_t handle) {
  const auto owned = contexts().share(handle);
  return {owned, &owned->context};
}

// An uninitialised tensor of float32, int32, int64 or bytes in memory of `pool_take`, see
// host/memory.h.
Tensor pooled_tensor(ScalarType type, const std::vector<int64_t>& sizes);

// For batches whose samples share bags; `samples`, `bags`, `key_of`: see common/lookup_schemas.h.
Samples samples_of(const Tensor& samples, const Tensor& key_of);
SampleGradients gradients_of(const Tensor& grad, const Tensor& samples, const Tensor& key_of);

// Allocates `memory` for the sums by bag of `shared`, for features whose samples share bags, and
// makes the batch's backward pass read the gradients from there. Returns -1, or a feature with a
// sample whose bag is out of range.
int64_t place_sums(const Context& context, const Tensor& bags, const Tensor& key_of,
                   SampleGradients& shared, Batch& batch, Tensor* memory);

}  // namespace oper::host
