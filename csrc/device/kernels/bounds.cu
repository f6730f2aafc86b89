// Bag lengths to bounds. Whatever the lengths are, the bounds ascend within [0, num_ids], so that no
// later kernel reads outside of the batch.
#include "device/batch.cuh"

namespace oper::device {
namespace {

__global__ void no_bags_kernel(int64_t* bounds, int64_t num_ids, ErrorSink error) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  bounds[0] = 0;
  if (num_ids != 0) report(error, 5, -1, 0);
}

}  // namespace

int64_t bounds_scratch_bytes(int64_t count) { return sort_scratch_bytes(count > 0 ? count : 1); }

void make_bounds(const void* lengths, bool are_32_bit, int64_t count, int64_t num_ids,
                        int64_t* bounds, void* scratch, int64_t scratch_bytes, const ErrorSink& error,
                        cudaStream_t stream) {
  if (count > 0)
    return sum_lengths({lengths, are_32_bit, count, num_ids}, bounds, scratch, scratch_bytes, error,
                       stream);
  OPER_LAUNCH(no_bags_kernel, 1, 32, stream, bounds, num_ids, error);
}

}  // namespace oper::device
