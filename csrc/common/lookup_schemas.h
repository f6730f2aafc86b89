// Schemas of the operators on batches, which both back ends implement: the dispatcher chooses by
// the device of the batch. Codes are those of `raise_status` in oper/shmem/batch.py.
#pragma once

namespace oper {

// Returns embeddings, bounds of the bags, code, detail. `offsets`, `addresses`: results of
// `lookup_resolve`. Only for pooled batches in host memory whose samples share bags: `bags` int64
// [num_keys], each key's number of bags, all later ones being empty; `samples` int64 [F, B], the bag
// of each sample by feature. The output then has one row per sample.
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
// `grads`: the gradient of the output or, for an unpooled batch in host memory, of each feature's
// rows; with `bags` and `samples` (as above) it has one row per sample. `optimizers`: float64 [T,
// kOptimizerWidth] in host memory. `updates`: 1, or 0 if owners are to keep the sums until the next
// call that updates (only in host memory); plus 2 if gradients were accumulated since the last
// update, which ranks in host memory compare.
constexpr char kLookupBackward[] =
    "lookup_backward(int handle, Tensor[] grads, Tensor ids, Tensor offsets, Tensor? weights, "
    "Tensor key_of, int batch_size, bool pooled, Tensor optimizers, float gradient_scale, "
    "Tensor? addresses, Tensor? order, int updates, Tensor? bags, Tensor? samples) -> (int, int)";

}  // namespace oper
