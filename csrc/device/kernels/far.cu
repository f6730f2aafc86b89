// Rows that cross between memory domains: packed for those who asked, put in place by who did. A
// collective of torch carries them, see oper/shmem/exchange/device.py.
#include "device/batch.cuh"
#include "device/group.cuh"

namespace oper::device {
namespace {

// The stretch that row number k is in; the first column of each says how many rows come before it.
template <int kWidth>
OPER_DEVICE const int64_t* stretch_of(const int64_t* stretches, int64_t count, int64_t k) {
  return stretches +
         kWidth * last_that(0, count, [&](int64_t s) { return stretches[s * kWidth] <= k; });
}

__global__ void __launch_bounds__(256) place_kernel(View view, BatchPlan plan, FarRows far,
                                                    Staging staging) {
  const Group<32> group;
  for (int64_t k = group.index(); k < far.num_rows; k += group.count()) {
    const int64_t* x = stretch_of<FarRows::kWidth>(far.stretches, far.num_stretches, k);
    const int64_t i = k - x[FarRows::kBegin];
    const Table& table = view.tables[x[FarRows::kTableIndex]];
    const int64_t row_bytes = bytes_of_row(table.type, table.dim);
    const int64_t unit = x[FarRows::kUnit] + i * ((row_bytes + kStagingUnit - 1) / kStagingUnit);
    copy_row(group, staging.data + unit * kStagingUnit, far.rows + x[FarRows::kBytes] + i * row_bytes,
             row_bytes);
    const int64_t run = x[FarRows::kRun] + i, last = plan.run_begin[run + 1];
    for (int64_t p = plan.run_begin[run] + group.lane; p < last; p += 32)
      plan.places[plan.payloads[p]] = static_cast<uint32_t>(unit);
  }
}

__global__ void __launch_bounds__(256) pack_kernel(View view, AskedRows asked) {
  const Group<32> group;
  for (int64_t k = group.index(); k < asked.num_rows; k += group.count()) {
    const int64_t* x = stretch_of<AskedRows::kWidth>(asked.stretches, asked.num_stretches, k);
    const Table& table = view.tables[x[AskedRows::kTableIndex]];
    const int64_t row_bytes = bytes_of_row(table.type, table.dim), slot = asked.slots[k];
    if (slot >= table.owner_begin[view.rank + 1] - table.owner_begin[view.rank]) {
      if (group.lane == 0) report(view.error, 8, view.rank, slot);
      continue;
    }
    copy_row(group, asked.out + x[AskedRows::kBytes] + (k - x[AskedRows::kBegin]) * row_bytes,
             table.rows + slot * row_bytes, row_bytes);
  }
}

}  // namespace

void place_far_rows(const View& view, const BatchPlan& plan, const FarRows& far,
                           const Staging& staging, cudaStream_t stream) {
  if (far.num_rows == 0) return;
  OPER_LAUNCH(place_kernel, blocks_for(far.num_rows, 8), 256, stream, view, plan, far, staging);
}

void pack_rows(const View& view, const AskedRows& asked, cudaStream_t stream) {
  if (asked.num_rows == 0) return;
  OPER_LAUNCH(pack_kernel, blocks_for(asked.num_rows, 8), 256, stream, view, asked);
}

}  // namespace oper::device
