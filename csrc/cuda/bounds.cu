// Bag lengths to bounds. Whatever the lengths are, the bounds ascend within [0, num_ids], so that no
// later kernel reads outside of the batch.
#include "cuda/batch.cuh"

namespace oper::device {
namespace {

__global__ void __launch_bounds__(256) widen_kernel(const void* lengths, bool are_32_bit,
                                                    int64_t count, int64_t* out,
                                                    ErrorSink error) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t length = are_32_bit ? static_cast<const int32_t*>(lengths)[i]
                                      : static_cast<const int64_t*>(lengths)[i];
    if (length < 0) report(error, 5, -1, length);
    out[i] = length < 0 ? 0 : length;
  }
}

__global__ void __launch_bounds__(256) clamp_kernel(int64_t* bounds, int64_t count,
                                                    int64_t num_ids, ErrorSink error) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i == 0) {
    bounds[0] = 0;
    if (count > 0 && bounds[count] != num_ids) report(error, 5, -1, bounds[count]);
    if (count == 0 && num_ids != 0) report(error, 5, -1, 0);
  }
  for (int64_t k = i + 1; k <= count; k += static_cast<int64_t>(gridDim.x) * blockDim.x)
    if (bounds[k] > num_ids) bounds[k] = num_ids;
}

}  // namespace

int64_t bounds_scratch_bytes(int64_t count) {
  return (count * 8 + 255) / 256 * 256 + sort_scratch_bytes(count > 0 ? count : 1);
}

cudaError_t make_bounds(const void* lengths, bool are_32_bit, int64_t count, int64_t num_ids,
                        int64_t* bounds, void* scratch, int64_t scratch_bytes, const ErrorSink& error,
                        cudaStream_t stream) {
  if (count > 0) {
    int64_t* wide = static_cast<int64_t*>(scratch);
    const int64_t used = (count * 8 + 255) / 256 * 256;
    OPER_LAUNCH(widen_kernel, blocks_for(count, 256), 256, stream, lengths, are_32_bit, count, wide,
                error);
    cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
    status = inclusive_sums(wide, bounds + 1, count, static_cast<char*>(scratch) + used,
                            scratch_bytes - used, stream);
    if (status != cudaSuccess) return status;
  }
  OPER_LAUNCH(clamp_kernel, blocks_for(count + 1, 256), 256, stream, bounds, count, num_ids, error);
  return cudaGetLastError();
}

}  // namespace oper::device
