// The batch plan: the keys of all ids (see Table), sorted, and the runs of equal keys.
//
// There is a pair (key, payload) for each id of each feature, column pieces counted separately. The
// payload tells where the id's gradient is:
//   pooled:         feature << bag_bits | bag
//   unpooled:       row of the output
//   Batch::by_pair: number of the pair; pair_bags and pair_weights then have the above, and the weight
#include "device/batch.cuh"

namespace oper::device {
namespace {

// One block.
__global__ void __launch_bounds__(256) lay_out_kernel(View view, Batch batch, BatchPlan plan) {
  const int64_t B = batch.batch_size;
  const auto count = [&](int64_t f) {
    const int64_t key = batch.key_of[view.features[f].logical];
    return batch.bounds[(key + 1) * B] - batch.bounds[key * B];
  };
  // Column pieces of one feature of the collection share their output rows.
  const auto is_first = [&](int64_t f) {
    return f == 0 || view.features[f].logical != view.features[f - 1].logical;
  };
  const int32_t F = view.num_features;
  if (threadIdx.x == 0) *plan.refused = batch.bounds[0] == kRefusedBound;
  block_sums(F, count, [&](int64_t f, int64_t before) { plan.feature_begin[f] = before; });
  block_sums(
      F, [&](int64_t f) { return ((batch.pooled ? B : count(f)) + kTile - 1) / kTile; },
      [&](int64_t f, int64_t before) { plan.tile_begin[f] = static_cast<int32_t>(before); });
  if (batch.pooled) return;
  block_sums(
      F, [&](int64_t f) { return is_first(f) ? count(f) : 0; },
      [&](int64_t f, int64_t before) {
        if (f < F) plan.output_begin[f] = is_first(f) ? before : before - count(f);
      });
}

__global__ void __launch_bounds__(256, 4) resolve_kernel(View view, Batch batch, BatchPlan plan) {
  const int64_t num_keys = view.table_keys[view.num_tables];
  const int64_t num_pairs = plan.feature_begin[view.num_features];
  for (int64_t p = num_pairs + thread_index(); p < batch.max_pairs; p += num_threads()) {
    plan.keys.set(p, num_keys);
    plan.payloads[p] = 0;
  }
  for_pairs(view, batch, plan, [&](int32_t f, int64_t at, int64_t bag, int64_t p) {
    const Table& table = view.tables[view.features[f].table];
    const int64_t id = id_at(batch, at);
    const bool good = static_cast<uint64_t>(id) < static_cast<uint64_t>(table.home.num_rows);
    if (!good) {
      report(view.error, 4, view.features[f].logical, id);
      *plan.refused = 1;
    }
    plan.keys.set(p, good ? table.key_begin + locate(table.home, id) : num_keys);
    const uint32_t where =
        batch.pooled ? static_cast<uint32_t>(f) << plan.bag_bits | static_cast<uint32_t>(bag)
                     : static_cast<uint32_t>(plan.output_begin[f] + p - plan.feature_begin[f]);
    if (batch.by_pair) {
      plan.pair_bags[p] = where;
      if (batch.weights) plan.pair_weights[p] = batch.weights[at];
      plan.payloads[p] = static_cast<uint32_t>(p);
    } else {
      plan.payloads[p] = where;
    }
  });
}

// One warp for each number: the first run of every table and owner, and their end; and the end of
// the last run, which is the number of valid pairs.
__global__ void __launch_bounds__(256) segments_kernel(View view, Batch batch, BatchPlan plan) {
  const int64_t W = view.world_size;
  const int64_t count = view.num_tables * W;
  const Group<32> warp;
  const int64_t k = warp.index();
  const int64_t num_keys = view.table_keys[view.num_tables];
  if (k == count + 1) {
    const int64_t pairs =
        lower_bound(warp, batch.max_pairs, num_keys, [&](int64_t p) { return plan.keys.at(p); });
    if (warp.lane != 0) return;
    plan.run_begin[*plan.num_runs] = static_cast<uint32_t>(pairs);
    view.duplication[0] = pairs;
    view.duplication[1] = *plan.num_runs;
  }
  if (k > count) return;
  int64_t key = num_keys;
  if (k < count) {
    const Table& table = view.tables[k / W];
    key = table.key_begin + table.owner_begin[k % W];
  }
  const int64_t run = lower_bound(warp, *plan.num_runs, key,
                                  [&](int64_t r) { return plan.keys.at(plan.run_begin[r]); });
  if (warp.lane == 0) plan.segments[k] = static_cast<uint32_t>(run);
}

}  // namespace

void lay_out_features(const Launch& on, const Batch& batch, const BatchPlan& plan) {
  OPER_LAUNCH(lay_out_kernel, 1, 256, on.stream, on.view, batch, plan);
}

void make_plan(const Launch& on, int64_t num_keys, const Batch& batch, BatchPlan& plan) {
  const View& view = on.view;
  lay_out_features(on, batch, plan);
  const int64_t tiles = batch.pooled
                            ? (batch.batch_size + kTile - 1) / kTile * view.num_features
                            : batch.max_pairs / kTile + view.num_features;
  OPER_LAUNCH(resolve_kernel, blocks_for(tiles, 8), 256, on.stream, view, batch, plan);
  sort_into_runs(plan, batch.max_pairs, 0, bits_for(static_cast<uint64_t>(num_keys) + 1),
                 on.stream);
  const int64_t segments = static_cast<int64_t>(view.num_tables) * view.world_size + 2;
  OPER_LAUNCH(segments_kernel, static_cast<int>((segments + 7) / 8), 256, on.stream, view, batch,
              plan);
}

}  // namespace oper::device
