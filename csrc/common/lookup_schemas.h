// Schemas of the operators on batches, which both back ends implement: the dispatcher chooses by
// the device of the batch. Codes are those of `raise_status` in oper/shmem/batch.py.
#pragma once

namespace oper {

// Embeddings, bounds of the bags, code, detail. `offsets` and `addresses`: what `lookup_resolve` gave.
// Of pooled batches in host memory whose samples share bags, else none: `bags` int64 [num_keys], how many
// bags each key has, with empty ones behind them; `samples` int64 [F, B], the bag of each sample by feature.
// The output then has the samples' rows.
constexpr char kLookupForward[] =
    "lookup_forward(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
    "int batch_size, bool pooled, bool collective, Tensor? offsets, Tensor? addresses, "
    "Tensor? bags, Tensor? samples) -> (Tensor, Tensor, int, int)";
// Bounds of the bags, then tensors that only the back end can read: the addresses of the rows, and
// their order for the backward pass.
constexpr char kLookupResolve[] =
    "lookup_resolve(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
    "int batch_size, bool pooled, bool with_order) -> (Tensor, Tensor, Tensor, int, int)";
constexpr char kLookupWeightGradient[] =
    "lookup_weight_gradient(int handle, Tensor grad, Tensor ids, Tensor offsets, Tensor weights, "
    "Tensor key_of, int batch_size) -> (Tensor, int, int)";
// `grads`: of the output or, for an unpooled batch in host memory, one per feature, of its rows. `bags` and
// `samples` as above: the gradient is then that of the samples. `optimizers`: float64
// [T, kOptimizerWidth] in host memory. Not `updates`: owners keep the sums of a part of a batch until the
// next call that does; in host memory only.
constexpr char kLookupBackward[] =
    "lookup_backward(int handle, Tensor[] grads, Tensor ids, Tensor offsets, Tensor? weights, "
    "Tensor key_of, int batch_size, bool pooled, Tensor optimizers, float gradient_scale, "
    "Tensor? addresses, Tensor? order, bool updates, Tensor? bags, Tensor? samples) -> (int, int)";

}  // namespace oper
