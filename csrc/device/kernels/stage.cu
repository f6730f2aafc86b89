// De-duplicated pull: every row of a peer that a batch reads crosses the link once.
//
// Each run of equal keys in the batch plan is a distinct row. Rows of other ranks are copied to
// this rank's staging memory, from which the forward pass then reads them: table by table and, in a
// table, beginning with the rank after this one, so that not all ranks read from one peer at a
// time. Where a row is copied depends on the order of the blocks; results do not.
#include "device/batch.cuh"
#include "device/group.cuh"

namespace oper::device {
namespace {

struct StageArgs {
  View view;
  Batch batch;
  BatchPlan plan;
  Staging staging;
  int32_t table_begin, table_end;
  bool skip_pushed;
};

// Address of the row of a run if it is to be staged, else 0.
OPER_DEVICE int64_t peer_row(const StageArgs& a, const Table& table, int64_t run) {
  const int64_t pair = a.plan.payloads[a.plan.run_begin[run]];
  const int64_t f = last_at_most(a.plan.feature_begin, a.view.num_features, pair);
  const int64_t key = a.batch.key_of[a.view.features[f].logical];
  const int64_t at = pair - a.plan.feature_begin[f] + a.batch.bounds[key * a.batch.batch_size];
  const int64_t position = position_of(table.read.head, id_at(a.batch, at));
  const int32_t tier = tier_of(table.read, position);
  if (a.skip_pushed && table.pushes[tier]) return 0;
  const int64_t address = locate_in_tier(table.read.tiers[tier], position);
  if (address < 0) return 0;  // in another memory domain
  const char* row = reinterpret_cast<const char*>(address);
  return row >= a.view.arena_begin && row < a.view.arena_end ? 0 : address;
}

// The number of rows that a group fetches together: at most one per lane, since each lane locates
// one.
template <class Shape>
constexpr int kStaged = Shape::V >= 8 ? 1 : 8 / Shape::V < Shape::G ? 8 / Shape::V : Shape::G;

template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) stage_rows(const StageArgs a) {
  using T = typename Shape::T;
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  const uint32_t* segments = a.plan.segments;
  const int64_t begin = segments[a.table_begin * W], end = segments[a.table_end * W];
  const int64_t limit = a.staging.bytes / kStagingUnit;
  for (int64_t w = begin + group.index() * kStaged<Shape>; w < end;
       w += group.count() * kStaged<Shape>) {
    int64_t own_from = 0, own_run = 0;
    uint32_t own_place = kNotStaged;
    int32_t own_dim = 0;
    if (group.lane < kStaged<Shape> && w + group.lane < end) {
      const int64_t at = w + group.lane;
      // The order of a table's runs begins with the first one of the next rank.
      const int64_t t = last_that(a.table_begin, a.table_end,
                                  [&](int64_t k) { return segments[k * W] <= at; });
      const Table& table = a.view.tables[t];
      const int64_t first = segments[t * W], count = segments[(t + 1) * W] - first;
      const int64_t shift = segments[t * W + a.view.rank + 1] - first;
      own_run = first + (at - first + shift) % count;
      own_dim = table.dim;
      own_from = peer_row(a, table, own_run);
      if (own_from != 0) {
        const uint32_t units =
            static_cast<uint32_t>((table.dim * sizeof(T) + kStagingUnit - 1) / kStagingUnit);
        const int64_t before = static_cast<int64_t>(
            atomicAdd(a.plan.staged, static_cast<unsigned long long>(units)));
        if (before + units <= limit) own_place = static_cast<uint32_t>(before);
      }
    }
    RawRow<Shape, T> rows[kStaged<Shape>];
#pragma unroll
    for (int u = 0; u < kStaged<Shape>; ++u) {
      const int64_t from = group.shuffle(own_from, u);
      const int32_t dim = group.shuffle(own_dim, u);
      if (group.shuffle(own_place, u) != kNotStaged)
        rows[u].load(reinterpret_cast<const T*>(from), dim, group.lane, Shape::E > 1);
    }
#pragma unroll
    for (int u = 0; u < kStaged<Shape>; ++u) {
      const uint32_t place = group.shuffle(own_place, u);
      const int64_t run = group.shuffle(own_run, u);
      const int32_t dim = group.shuffle(own_dim, u);
      if (place == kNotStaged) continue;
      rows[u].store(reinterpret_cast<T*>(a.staging.data + place * kStagingUnit), dim, group.lane);
      const int64_t last = a.plan.run_begin[run + 1];
      for (int64_t p = a.plan.run_begin[run] + group.lane; p < last; p += Shape::G)
        a.plan.places[a.plan.payloads[p]] = place;
    }
  }
}

}  // namespace

void clear_staging(const Batch& batch, const BatchPlan& plan, cudaStream_t stream) {
  clear(plan.places, 0xff, 4 * batch.max_pairs, stream);
  clear(plan.staged, 0, 8, stream);
}

void stage(const Launch& on, const Batch& batch, const BatchPlan& plan, const Staging& staging,
           bool skip_pushed) {
  for (const RowClass& row_class : on.classes) {
    const StageArgs args{
        on.view, batch, plan, staging, row_class.table_begin, row_class.table_end, skip_pushed};
    with_shape(row_class, [&](auto shape) {
      using S = decltype(shape);
      OPER_LAUNCH(stage_rows<S>,
                  blocks_for(batch.max_pairs / kStaged<S> + 1, 256 / S::G), 256, on.stream,
                  args);
    });
  }
}

}  // namespace oper::device
