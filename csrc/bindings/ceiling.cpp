// torch operators for the ceilings that benchmarks set beside lookups and updates; see host/ceiling.h.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/operators.h"
#include "host/ceiling.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace oper::host {
namespace {

constexpr int64_t kGrain = 256;  // bags that a thread takes at least

const int64_t* checked(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(),
                  "gather_ceiling: ", name, " is not a contiguous int64 tensor");
  return static_cast<const int64_t*>(tensor.data_ptr());
}

void gather_ceiling(Tensor addresses, Tensor offsets, Tensor destinations, int64_t dim,
                    int64_t prefetch, bool stream, Tensor out) {
  const int64_t num_bags = destinations.numel();
  GatherJob job{checked(addresses, "addresses"), checked(offsets, "offsets"),
                checked(destinations, "destinations"), static_cast<float*>(out.data_ptr()),
                dim, prefetch, stream};
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.is_contiguous() &&
                      out.numel() >= num_bags * dim && offsets.numel() == num_bags + 1 &&
                      prefetch >= 0 && addresses.numel() >= job.offsets[num_bags] + prefetch,
                  "gather_ceiling: shapes of addresses, offsets, destinations and out disagree");
  torch::stable::parallel_for(0, num_bags, kGrain,
                              [&job](int64_t begin, int64_t end) { gather(job, begin, end); });
}

void rewrite_ceiling(Tensor addresses, int64_t bytes, int64_t prefetch) {
  const RewriteJob job{checked(addresses, "addresses"), bytes, prefetch};
  STD_TORCH_CHECK(bytes > 0 && bytes % 4 == 0 && prefetch >= 0 && addresses.numel() >= prefetch,
                  "rewrite_ceiling: bytes and prefetch do not fit the addresses");
  torch::stable::parallel_for(0, addresses.numel() - prefetch, kGrain,
                              [&job](int64_t begin, int64_t end) { rewrite(job, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(gather_ceiling,
                "(Tensor addresses, Tensor offsets, Tensor destinations, int dim, int prefetch, "
                "bool stream, Tensor(a!) out) -> ()");
  OPER_OPERATOR(rewrite_ceiling, "(Tensor addresses, int bytes, int prefetch) -> ()");
}

}  // namespace oper::host
