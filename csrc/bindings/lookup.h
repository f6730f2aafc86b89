// Types and functions that several operators of the host back end use.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "common/handles.h"
#include "host/context.h"
#include "host/exchange/exchange.h"

namespace oper::host {

struct Owned {
  Context context;
  std::vector<Tensor> keep_alive;  // head maps, referenced and not copied
};

inline Handles<Owned>& contexts() { return all_handles<Owned>(); }
inline Context& context_of(int64_t handle) { return contexts().at(handle).context; }

// A tensor of float32, int32, int64 or bytes from the pool of `host/memory.h`; not cleared.
Tensor pooled_tensor(ScalarType type, const std::vector<int64_t>& sizes);

// Samples that share bags; `samples` int64 [F, B] and `bags` int64 [num_keys] as in common/lookup_schemas.h.
Samples samples_of(const Tensor& samples, const Tensor& key_of);
SampleGradients gradients_of(const Tensor& grad, const Tensor& samples, const Tensor& key_of);

// Allocates sums by bag for the features whose samples share bags, from which the backward pass of the batch
// reads their gradients. Returns a feature with a sample whose bag is out of range, or -1.
int64_t place_sums(const Context& context, const Tensor& bags, const Tensor& key_of,
                   SampleGradients& shared, Batch& batch, Tensor* memory);

}  // namespace oper::host
