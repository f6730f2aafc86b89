// torch operators of the ceilings, the bare memory accesses with which benchmarks compare lookups
// and updates.
#include "common/handles.h"
#include "common/operators.h"
#include "host/kernels/kernels.h"

namespace oper::host {
namespace {

constexpr int64_t kGrain = 256;  // bags or rows that a thread takes at least

// See GatherJob in host/kernels/kernels.h.
void gather_ceiling(Tensor addresses, Tensor offsets, Tensor destinations, int64_t dim,
                    int64_t prefetch, bool stream, Tensor out) {
  const int64_t num_bags = destinations.numel();
  const GatherJob job{int64_data(addresses), int64_data(offsets), int64_data(destinations),
                      float_data(out), dim, prefetch, stream};
  STD_TORCH_CHECK(out.is_contiguous() &&
                      out.numel() >= num_bags * dim && offsets.numel() == num_bags + 1 &&
                      prefetch >= 0 && dim <= 1024 &&
                      addresses.numel() >= job.offsets[num_bags] + prefetch,
                  "gather_ceiling: shapes of addresses, offsets, destinations and out disagree");
  torch::stable::parallel_for(0, num_bags, kGrain, [&job](int64_t begin, int64_t end) {
    kernels().gather(job, begin, end);
  });
}

// Reads and writes back one word of every cache line of N rows of `bytes` each. No other thread may
// write there. `addresses` [N + prefetch]: of the rows; the last `prefetch` are only prefetched.
void rewrite_ceiling(Tensor addresses, int64_t bytes, int64_t prefetch) {
  constexpr int64_t kLine = 64;
  const int64_t* const places = int64_data(addresses);
  STD_TORCH_CHECK(bytes > 0 && bytes % 4 == 0 && prefetch >= 0 && addresses.numel() >= prefetch,
                  "rewrite_ceiling: bytes and prefetch do not fit the addresses");
  const auto rewrite = [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t line = 0; line < bytes; line += kLine)
        __builtin_prefetch(reinterpret_cast<const char*>(places[i + prefetch]) + line, 1, 3);
      for (int64_t line = 0; line < bytes; line += kLine) {
        volatile int32_t* word = reinterpret_cast<volatile int32_t*>(places[i] + line);
        *word = *word;
      }
    }
  };
  torch::stable::parallel_for(0, addresses.numel() - prefetch, kGrain, rewrite);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(gather_ceiling,
                "(Tensor addresses, Tensor offsets, Tensor destinations, int dim, int prefetch, "
                "bool stream, Tensor(a!) out) -> ()");
  OPER_OPERATOR(rewrite_ceiling, "(Tensor addresses, int bytes, int prefetch) -> ()");
}

}  // namespace oper::host
