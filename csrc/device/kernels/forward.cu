// Forward: from ids to pooled rows, through the addresses of all ranks' memory.
#include "device/batch.cuh"
#include "device/group.cuh"

namespace oper::device {
namespace {

struct PoolArgs {
  View view;
  Batch batch;
  const int32_t* features;  // [num_features] of this launch
  int32_t num_features;
  int32_t row_class;
  int32_t bags_per_group;        // pooled
  const int32_t* tile_begin;     // unpooled: [F + 1]
  const int64_t* output_begin;   // unpooled: [F]
  const int64_t* feature_begin;  // with staged rows: [F + 1]
  const uint32_t* places;        // of each pair's row in `staging`, or null
  const char* staging;
  Output out;
  bool wide_out;  // of columns that are multiples of four
  bool skip_pushed;
};

template <class Shape>
struct Pool {
  using T = typename Shape::T;
  static constexpr int kInFlight = Shape::V >= 8 ? 1 : 8 / Shape::V;

  const PoolArgs& a;
  const Group<Shape::G>& group;
  const Table& table;
  const uint32_t* places;  // by index of the id
  int32_t feature;
  int dim;
  bool wide_rows;

  // `f`: the feature; `first`: index of its first id.
  OPER_DEVICE Pool(const PoolArgs& args, const Group<Shape::G>& lanes, const Table& t, int64_t f,
                   int64_t first)
      : a(args),
        group(lanes),
        table(t),
        places(nullptr),
        feature(args.view.features[f].logical),
        dim(t.dim),
        wide_rows(Shape::E > 1) {
    if (args.places != nullptr) places = args.places + (args.feature_begin[f] - first);
  }

  // One run of bags: calls `finish(bag, sum, length)` for every bag in [bag, last), which hold the
  // ids [i, stop).
  template <class Bound, class Finish>
  OPER_DEVICE void bags(int32_t bag, int32_t last, int32_t i, int32_t stop, Bound end_of,
                        Finish finish) const {
    Row<Shape> sum;
    sum.zero();
    bool first = true;
    int32_t begin = i;
    int32_t end = bag < last ? end_of(bag) : stop;
    auto close_bags = [&](int32_t at) {
      while (bag < last && at >= end) {
        finish(bag, sum, end - begin);
        sum.zero();
        first = true;
        begin = end;
        if (++bag < last) end = end_of(bag);
      }
    };
    for (; i < stop; i += Shape::G) {
      const int n = stop - i < Shape::G ? stop - i : Shape::G;
      int64_t address = 0;
      float weight = 1.0f;
      if (group.lane < n) {
        address = address_of(i + group.lane);
        if (a.batch.weights) weight = a.batch.weights[i + group.lane];
      }
      for (int j = 0; j < n; j += kInFlight) {
        RawRow<Shape, T> rows[kInFlight];
        bool there[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const int64_t from = group.shuffle(address, (j + u) % Shape::G);
          there[u] = j + u < n && from != 0;
          if (there[u]) rows[u].load(reinterpret_cast<const T*>(from), dim, group.lane, wide_rows);
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const float w = a.batch.weights ? group.shuffle(weight, (j + u) % Shape::G) : 1.0f;
          if (j + u >= n) continue;
          close_bags(i + j + u);
          if (!there[u]) continue;
          Row<Shape> row;
          rows[u].unpack(row);
          if (a.batch.weights) row.scale(w);
          if (first) {
            sum = row;
          } else {
            sum.add(row);
          }
          first = false;
        }
      }
    }
    close_bags(stop);
  }

  OPER_DEVICE int64_t address_of(int32_t i) const {
    if (places != nullptr && places[i] != kNotStaged)
      return reinterpret_cast<int64_t>(a.staging + places[i] * kStagingUnit);
    const int64_t id = id_at(a.batch, i);
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(table.read.num_rows)) {
      report(a.view.error, 4, feature, id);
      return 0;
    }
    const int64_t position = position_of(table.read.head, id);
    const int32_t tier = tier_of(table.read, position);
    if (a.skip_pushed && table.pushes[tier]) return 0;
    const int64_t address = locate_in_tier(table.read.tiers[tier], position);
    if (address >= 0) return address;
    report(a.view.error, 8, a.view.rank, i);  // in another memory domain, and was not fetched
    return 0;
  }
};

template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) pool_bags(const PoolArgs a) {
  const Group<Shape::G> group;
  const int64_t B = a.batch.batch_size;
  const int64_t tiles = (B + a.bags_per_group - 1) / a.bags_per_group;
  for (int64_t w = group.index(); w < tiles * a.num_features; w += group.count()) {
    const int64_t f = w / tiles;
    const Feature& feature = a.view.features[a.features[f]];
    const Table& table = a.view.tables[feature.table];
    const int64_t* bounds = a.batch.bounds + a.batch.key_of[feature.logical] * B;
    const Pool<Shape> pool(a, group, table, a.features[f], bounds[0]);
    const int32_t bag = static_cast<int32_t>(w - f * tiles) * a.bags_per_group;
    const int32_t last =
        static_cast<int32_t>(bag + a.bags_per_group < B ? bag + a.bags_per_group : B);
    const bool divide = table.mean && !(a.skip_pushed && table.has_push);
    float* out = a.out.data + feature.column;
    const bool wide = a.wide_out && feature.column % 4 == 0;
    pool.bags(
        bag, last, static_cast<int32_t>(bounds[bag]), static_cast<int32_t>(bounds[last]),
        [&](int32_t b) { return static_cast<int32_t>(bounds[b + 1]); },
        [&](int32_t b, Row<Shape>& sum, int32_t length) {
          if (divide && length > 1) sum.divide(static_cast<float>(length));
          sum.store(out + b * a.out.stride, pool.dim, group.lane, wide);
        });
  }
}

template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) pool_ids(const PoolArgs a) {
  const Group<Shape::G> group;
  const int32_t num_tiles = a.tile_begin[a.view.num_features];
  for (int64_t w = group.index(); w < num_tiles; w += group.count()) {
    const int32_t f = static_cast<int32_t>(
        last_at_most(a.tile_begin, a.view.num_features, static_cast<int32_t>(w)));
    const Feature& feature = a.view.features[f];
    const Table& table = a.view.tables[feature.table];
    if (table.row_class != a.row_class) continue;
    const int64_t key = a.batch.key_of[feature.logical];
    const int32_t first = static_cast<int32_t>(a.batch.bounds[key * a.batch.batch_size]);
    const Pool<Shape> pool(a, group, table, f, first);
    const int32_t stop = static_cast<int32_t>(a.batch.bounds[(key + 1) * a.batch.batch_size]);
    const int32_t i = first + (static_cast<int32_t>(w) - a.tile_begin[f]) * kTile;
    const int32_t end = i + kTile < stop ? i + kTile : stop;
    float* out = a.out.data + table.piece_start;
    const bool wide = a.wide_out && table.piece_start % 4 == 0;
    const int64_t shift = a.output_begin[f] - first;
    pool.bags(
        i, end, i, end, [&](int32_t b) { return b + 1; },
        [&](int32_t b, Row<Shape>& sum, int32_t) {
          sum.store(out + (b + shift) * a.out.stride, pool.dim, group.lane, wide);
        });
  }
}

// One group of 16 lanes per id; sums over features and column pieces in their order.
__global__ void __launch_bounds__(256)
    weight_gradient_kernel(View view, Batch batch, BatchPlan plan, Gradient grad, float* out,
                           Staging staging) {
  const Group<16> group;
  const int64_t B = batch.batch_size;
  for (int64_t i = group.index(); i < batch.num_ids; i += group.count()) {
    const int64_t bound = last_at_most(batch.bounds, batch.num_bounds - 1, i);
    const int64_t key = bound / B, bag = bound - key * B;
    float total = 0.0f;
    const bool is_used = key < batch.num_used_keys;
    const int32_t end = is_used ? batch.users_begin[key + 1] : 0;
    for (int32_t k = is_used ? batch.users_begin[key] : 0; k < end; ++k) {
      const int32_t f = batch.users[k];
      const Feature& feature = view.features[f];
      const Table& table = view.tables[feature.table];
      const int64_t id = id_at(batch, i);
      if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(table.read.num_rows)) continue;
      const char* row;
      const uint32_t place =
          staging.data == nullptr
              ? kNotStaged
              : plan.places[plan.feature_begin[f] + i - batch.bounds[key * B]];
      if (place != kNotStaged) {
        row = staging.data + place * kStagingUnit;
      } else {
        const int64_t address = locate(table.read, id);
        if (address < 0) continue;
        row = reinterpret_cast<const char*>(address);
      }
      const int64_t length = batch.bounds[bound + 1] - batch.bounds[bound];
      const float divisor = table.mean && length > 1 ? static_cast<float>(length) : 1.0f;
      const int64_t at = bag * grad.stride + feature.column;
      float sum = 0.0f;
      for (int column = group.lane; column < table.dim; column += 16) {
        const float g = grad.data[at + column] / divisor;
        const float product = g * element(row, table.type, column);
        sum = column == group.lane ? product : sum + product;
      }
      for (int width = 8; width > 0; width /= 2) sum += group.shuffle_xor(sum, width);
      total += sum;
    }
    if (group.lane == 0) out[i] = total;
  }
}

template <class Shape>
void launch_pool(const PoolArgs& args, cudaStream_t stream) {
  const int64_t groups_per_block = 256 / Shape::G;
  if (args.batch.pooled) {
    const int64_t tiles = (args.batch.batch_size + args.bags_per_group - 1) / args.bags_per_group;
    const int64_t groups = tiles * args.num_features;
    if (groups > 0)
      OPER_LAUNCH(pool_bags<Shape>, blocks_for(groups, groups_per_block), 256, stream, args);
  } else {
    const int64_t groups = args.batch.max_pairs / kTile + args.view.num_features;
    OPER_LAUNCH(pool_ids<Shape>, blocks_for(groups, groups_per_block), 256, stream, args);
  }
}

}  // namespace

void pool(const Launch& on, const Batch& batch, const BatchPlan& plan, const Output& out,
          const Staging& staging, bool skip_pushed) {
  for (const RowClass& row_class : on.classes) {
    if (row_class.features.empty()) continue;
    PoolArgs args{
        on.view,
        batch,
        row_class.device_features,
        static_cast<int32_t>(row_class.features.size()),
        row_class.index,
        1,
        plan.tile_begin,
        plan.output_begin,
        plan.feature_begin,
        staging.data ? plan.places : nullptr,
        staging.data,
        out,
        is_wide(out.data, out.stride),
        skip_pushed};
    // Few bags: one group each, so that all are in flight at once. Many: bags of about kIdsPerGroup
    // ids, enough to fetch rows together, and few enough that the last groups end soon after the
    // others: all groups come in six turns or more.
    constexpr int64_t kIdsPerGroup = 64;
    const int64_t bags = batch.batch_size * args.num_features;
    const int64_t resident = resident_threads() / row_class.group_lanes();
    const int64_t all_bags = std::max<int64_t>(1, batch.batch_size * on.view.num_features);
    const int64_t mean = std::max<int64_t>(1, batch.max_pairs / all_bags);
    args.bags_per_group = static_cast<int32_t>(std::clamp<int64_t>(
        std::min(kIdsPerGroup / mean, bags / std::max<int64_t>(1, 6 * resident)), 1, 32));
    with_shape(row_class, [&](auto shape) { launch_pool<decltype(shape)>(args, on.stream); });
  }
}

void weight_gradient(const Launch& on, const Batch& batch, const BatchPlan& plan, const Gradient& grad,
                     float* out, const Staging& staging) {
  if (batch.num_ids == 0) return;
  OPER_LAUNCH(weight_gradient_kernel, blocks_for(batch.num_ids, 16), 256, on.stream, on.view, batch,
              plan, grad, out, staging);
}

}  // namespace oper::device
