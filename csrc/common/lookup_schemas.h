// Schemas of the operators on batches, which both back ends implement: the dispatcher chooses by where
// the batch is. Codes are those of `raise_status` in oper/shmem/batch.py.
#pragma once

namespace oper {

// Embeddings, bounds of the bags, code, detail. `offsets` and `addresses`: what `lookup_resolve` gave.
// `bags` int64 [num_keys] in host memory, of pooled batches: how many bags each key has; those behind them
// are empty, and their rows of the output may be left as they are.
constexpr char kLookupForward[] =
    "lookup_forward(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
    "int batch_size, bool pooled, bool collective, Tensor? offsets, Tensor? addresses, "
    "Tensor? bags) -> (Tensor, Tensor, int, int)";
// Bounds of the bags, then what only the back end can read: where the rows are, and their order for
// the backward pass.
constexpr char kLookupResolve[] =
    "lookup_resolve(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
    "int batch_size, bool pooled, bool with_order) -> (Tensor, Tensor, Tensor, int, int)";
constexpr char kLookupWeightGradient[] =
    "lookup_weight_gradient(int handle, Tensor grad, Tensor ids, Tensor offsets, Tensor weights, "
    "Tensor key_of, int batch_size) -> (Tensor, int, int)";
// `optimizers`: float64 [T, kOptimizerWidth] in host memory. Not `updates`: owners keep the sums of a part
// of a batch until the next call that does; in host memory only.
constexpr char kLookupBackward[] =
    "lookup_backward(int handle, Tensor grad, Tensor ids, Tensor offsets, Tensor? weights, "
    "Tensor key_of, int batch_size, bool pooled, Tensor optimizers, float gradient_scale, "
    "Tensor? addresses, Tensor? order, bool updates) -> (int, int)";

}  // namespace oper
