// Schemas of the operators on batches, which both back ends implement: torch's dispatcher chooses
// by the device of the batch. Each operator's last two results are a status code and its detail,
// for `raise_status` in oper/shmem/batch.py.
#pragma once

namespace oper {

// Returns the embeddings and the bounds of the bags (int64 [number of bags + 1]). `key_of`: int64
// [F], the key of the batch from which each feature takes its ids. `offsets`, `addresses`: results
// of `lookup_resolve`, if it was called ahead. `bags`, `samples`: only for pooled batches in host
// memory whose samples share bags. `bags`, int64 [num_keys], is each key's number of bags (its
// later ones are empty), `samples`, int64 [F, B], the bag of each sample by feature; the output
// then has one row per sample.
constexpr char kLookupForward[] =
    "lookup_forward(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
    "int batch_size, bool pooled, bool collective, Tensor? offsets, Tensor? addresses, "
    "Tensor? bags, Tensor? samples) -> (Tensor, Tensor, int, int)";
// Does the work on a batch that depends on its ids only. Returns the bounds of the bags, then two
// tensors whose contents only the back end can interpret: the addresses of the rows and, if
// `with_order`, their order for the backward pass.
constexpr char kLookupResolve[] =
    "lookup_resolve(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
    "int batch_size, bool pooled, bool with_order) -> (Tensor, Tensor, Tensor, int, int)";
// Returns the gradient of the per-sample weights.
constexpr char kLookupWeightGradient[] =
    "lookup_weight_gradient(int handle, Tensor grad, Tensor ids, Tensor offsets, Tensor weights, "
    "Tensor key_of, int batch_size) -> (Tensor, int, int)";
// Reduces, exchanges and applies gradients. `grads`: the gradient of the output or, for an unpooled
// batch in host memory, of each feature's rows; with `bags` and `samples` (as above) it has one row
// per sample. `optimizers`: float64 [T, kOptimizerWidth] in host memory. `updates`: bit 0: apply
// the optimizer; otherwise the owners keep the sums until the next call that does (host memory
// only). Bit 1: gradients were accumulated since the last update; all ranks must agree (checked in
// host memory).
constexpr char kLookupBackward[] =
    "lookup_backward(int handle, Tensor[] grads, Tensor ids, Tensor offsets, Tensor? weights, "
    "Tensor key_of, int batch_size, bool pooled, Tensor optimizers, float gradient_scale, "
    "Tensor? addresses, Tensor? order, int updates, Tensor? bags, Tensor? samples) -> (int, int)";

}  // namespace oper
