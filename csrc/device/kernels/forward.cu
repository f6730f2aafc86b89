// Forward: pools rows, which are read from the memory of all ranks of the memory domain, or from
// copies in the staging memory.
#include "device/batch.cuh"
#include "device/group.cuh"
#include "device/ring.cuh"

namespace oper::device {
namespace {

struct PoolArgs {
  View view;
  Batch batch;
  const int32_t* features;  // [num_features], those of this launch
  int32_t num_features;
  int32_t row_class, dim;        // as in RowClass
  int32_t bags_per_group;        // pooled: bags that a group takes at a time
  // Pooled: warps take the same bags of all features, then the next bags.
  bool by_bag;
  const int32_t* tile_begin;     // unpooled: [F + 1]
  const int64_t* output_begin;   // unpooled: [F]
  const int64_t* feature_begin;  // with staged rows: [F + 1]
  const uint32_t* places;        // in `staging`, of each pair's row; or null
  const char* staging;
  Output out;
  bool wide_out;     // outputs at multiples of four columns are aligned to 16 bytes
  bool skip_pushed;  // see `pool`
};

// Pools bags of one feature with a group.
template <class Shape>
struct Pool {
  using T = typename Shape::T;
  // Number of rows in flight, at most as many as the group has lanes.
  static constexpr int kMost = Shape::V >= 8 ? 1 : 8 / Shape::V;
  static constexpr int kSlots = kMost < Shape::G ? kMost : Shape::G;
  using Ring = RowRing<Shape, T, kSlots>;

  const PoolArgs& a;
  const Group<Shape::G>& group;
  const Table& table;
  const uint32_t* places;  // by index of the id
  int32_t feature;
  int dim;
  mutable Ring ring;

  // `f`: the feature; `first`: index of its first id; `shared`: Ring::kBytes of the block.
  OPER_DEVICE Pool(const PoolArgs& args, const Group<Shape::G>& lanes, const Table& t, int64_t f,
                   int64_t first, char* shared)
      : a(args),
        group(lanes),
        table(t),
        places(nullptr),
        feature(args.view.features[f].logical),
        dim(args.dim > 0 ? args.dim : t.dim),
        ring(shared) {
    if (args.places != nullptr) places = args.places + (args.feature_begin[f] - first);
  }

  // Pools the bags [bag, last), which have the ids [i, stop), and calls finish(bag, sum, length)
  // for each. end_of(bag) is the end of a bag's ids. All lanes of the warp call `end_of` together,
  // all lanes of the group `finish`.
  template <class Bound, class Finish>
  OPER_DEVICE void bags(int32_t bag, int32_t last, int32_t i, int32_t stop, Bound end_of,
                        Finish finish) const {
    constexpr int32_t kNever = INT32_MAX;  // the end of the bag after the last one
    Row<Shape> sum;
    sum.begin();
    bool is_empty = true;
    int32_t begin = i;
    int32_t end = end_of(bag);
    if (bag >= last) end = kNever;
    const auto close_bags = [&](int32_t at) {
      for (bool closes; group.any(closes = at >= end);) {
        const int32_t next = end_of(bag + 1 < last ? bag + 1 : bag);
        if (!closes) continue;
        if (is_empty) sum.zero();
        finish(bag, sum, end - begin);
        sum.begin();
        is_empty = true;
        begin = end;
        ++bag;
        end = bag < last ? next : kNever;
      }
    };
    // Address of this lane's row among those that are fetched next, kSlots rows before they are
    // added.
    int64_t address = address_of(i + group.lane, stop, id_of(i + group.lane, stop));
    unsigned coming = group.ballot(address != 0);
#pragma unroll
    for (int t = 0; t < kSlots; ++t) start(group.shuffle(address, t), is_set(coming, t));
    const bool is_weighted = a.batch.weights != nullptr;
    // In lockstep other groups may have more ids: then `i` stays at `stop`, so that indices do not
    // pass 2^31.
    for (int left = group.most(stop - i); left > 0;
         left -= Shape::G, i = stop - i > Shape::G ? i + Shape::G : stop) {
      const int n = left < Shape::G ? left : Shape::G;
      const unsigned there = coming;
      const float weight =
          is_weighted && i + group.lane < stop ? a.batch.weights[i + group.lane] : 1.0f;
      const int32_t next_i = i + Shape::G + group.lane;
      const int64_t next_id = id_of(next_i, stop);
      for (int t = 0; t < n; ++t) {
        wait_for_copies<kSlots - 1>();
        close_bags(i + t);
        const float scale = is_weighted ? group.shuffle(weight, t) : 1.0f;
        if (is_set(there, t)) {
          Row<Shape> row;
          ring.read(row);
          if (is_weighted) row.scale(scale);
          sum.add(row);
          is_empty = false;
        }
        if (t + kSlots == Shape::G) {
          address = address_of(next_i, stop, next_id);
          coming = group.ballot(address != 0);
        }
        const int ahead = (t + kSlots) % Shape::G;
        start(group.shuffle(address, ahead), is_set(coming, ahead));
      }
    }
    close_bags(stop);
  }

  // Begins to fetch a row into the current slot if `is_there`; then advances to the next slot.
  OPER_DEVICE void start(int64_t from, bool is_there) const {
    if (is_there) ring.start(reinterpret_cast<const T*>(from), dim, group.lane, Shape::E > 1);
    ring.advance();
    commit_copies();
  }

  OPER_DEVICE int64_t id_of(int32_t i, int32_t stop) const {
    return i < stop ? id_at(a.batch, i) : 0;
  }

  // Address of the row of id number `i`; 0 if i >= stop, or if no row is to be added.
  OPER_DEVICE int64_t address_of(int32_t i, int32_t stop, int64_t id) const {
    if (i >= stop) return 0;
    if (places != nullptr && places[i] != kNotStaged)
      return reinterpret_cast<int64_t>(a.staging + places[i] * kStagingUnit);
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(table.read.num_rows)) {
      report(a.view.error, 4, feature, id);
      return 0;
    }
    const int64_t position = position_of(table.read.head, id);
    const int32_t tier = tier_of(table.read, position);
    if (a.skip_pushed && table.pushes[tier]) return 0;
    const int64_t address = locate_in_tier(table.read.tiers[tier], position);
    if (address >= 0) return address;
    report(a.view.error, 8, a.view.rank, i);  // the row is in another memory domain, and not staged
    return 0;
  }
};

// Blocks that a multiprocessor must hold (__launch_bounds__): more if rows take few registers, to
// hide the latency of reading ids and maps, which precedes that of the rows.
template <class Shape>
constexpr int kPoolBlocks = Shape::V * Shape::E <= 4 && Shape::G == 32 ? 4
                            : Shape::V * Shape::E <= 8                 ? 3
                            : Shape::V * Shape::E <= 16                ? 2
                                                                       : 1;

// Number of items that warps take: bags_per_group bags of one feature for each of the warp's
// groups.
OPER_HD int64_t num_warps(const PoolArgs& a, int32_t groups) {
  const int64_t bags = static_cast<int64_t>(a.bags_per_group) * groups;
  return (a.batch.batch_size + bags - 1) / bags * a.num_features;
}

template <class Shape>
__global__ void __launch_bounds__(256, kPoolBlocks<Shape>) pool_bags(const PoolArgs a) {
  alignas(16) __shared__ char shared[kArrayBytes<Pool<Shape>::Ring::kBytes>];
  const Group<Shape::G> group(true);
  wait_for_earlier_kernel();
  const int64_t B = a.batch.batch_size;
  constexpr int32_t kGroups = 32 / Shape::G;
  const uint32_t num_items = static_cast<uint32_t>(num_warps(a, kGroups));
  const uint32_t num_features = static_cast<uint32_t>(a.num_features);
  const uint32_t per_feature = num_items / num_features;
  const Group<32> warp;
  for (int64_t w = warp.index(); w < num_items; w += warp.count()) {
    const uint32_t item = static_cast<uint32_t>(w),
                   turn = item / (a.by_bag ? num_features : per_feature);
    const uint32_t f = a.by_bag ? item - turn * num_features : turn;
    const int32_t tile = static_cast<int32_t>(a.by_bag ? turn : item - turn * per_feature);
    const int64_t own_bag =
        (static_cast<int64_t>(tile) * kGroups + warp.lane / Shape::G) * a.bags_per_group;
    const int32_t bag = static_cast<int32_t>(own_bag < B ? own_bag : B);
    const Feature& feature = a.view.features[a.features[f]];
    const Table& table = a.view.tables[feature.table];
    const int64_t* bounds = a.batch.bounds + a.batch.key_of[feature.logical] * B;
    const Pool<Shape> pool(a, group, table, a.features[f], bounds[0], shared);
    const int32_t last =
        static_cast<int32_t>(bag + a.bags_per_group < B ? bag + a.bags_per_group : B);
    const bool divide = table.mean && !(a.skip_pushed && table.has_push);
    float* out = a.out.data + feature.column;
    const bool wide = a.wide_out && feature.column % 4 == 0;
    const int32_t begin = static_cast<int32_t>(bounds[bag]);
    // End of each lane's bag: a group takes no more bags than it has lanes.
    const int32_t own_end =
        static_cast<int32_t>(bounds[bag + group.lane < last ? bag + group.lane + 1 : last]);
    const int32_t end_of_last = group.shuffle(own_end, bag < last ? last - bag - 1 : 0);
    const int32_t stop = bag < last ? end_of_last : begin;
    pool.bags(
        bag, last, begin, stop, [&](int32_t b) { return group.shuffle(own_end, b - bag); },
        [&](int32_t b, Row<Shape>& sum, int32_t length) {
          if (divide && length > 1) sum.divide(static_cast<float>(length));
          sum.store(out + b * a.out.stride, pool.dim, group.lane, wide);
        });
  }
}

template <class Shape>
__global__ void __launch_bounds__(256, kPoolBlocks<Shape>) pool_ids(const PoolArgs a) {
  alignas(16) __shared__ char shared[kArrayBytes<Pool<Shape>::Ring::kBytes>];
  // Not in lockstep, as the groups of a warp may have different features.
  const Group<Shape::G> group;
  if (a.batch.bounds[0] == kRefusedBound) {  // there are no tiles that would write the output
    for (int64_t k = thread_index(); k < a.out.rows * a.out.stride; k += num_threads())
      a.out.data[k] = 0.0f;
    return;
  }
  const int32_t num_tiles = a.tile_begin[a.view.num_features];
  for (int64_t w = group.index(); w < num_tiles; w += group.count()) {
    const int32_t f = static_cast<int32_t>(
        last_at_most(a.tile_begin, a.view.num_features, static_cast<int32_t>(w)));
    const Feature& feature = a.view.features[f];
    const Table& table = a.view.tables[feature.table];
    if (table.row_class != a.row_class) continue;
    const int64_t key = a.batch.key_of[feature.logical];
    const int32_t first = static_cast<int32_t>(a.batch.bounds[key * a.batch.batch_size]);
    const Pool<Shape> pool(a, group, table, f, first, shared);
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

// Each group of 16 lanes computes the gradient of one id's weight, the sum over the features that
// use the id (column pieces included), in their order.
__global__ void __launch_bounds__(256)
    weight_gradient_kernel(View view, Batch batch, BatchPlan plan, Gradient grad, float* out,
                           Staging staging) {
  const Group<16> group;
  const int64_t B = batch.batch_size;
  const bool is_refused = batch.bounds[0] == kRefusedBound;
  for (int64_t i = group.index(); i < batch.num_ids; i += group.count()) {
    if (is_refused) {
      if (group.lane == 0) out[i] = 0.0f;
      continue;
    }
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
void launch_bags(const PoolArgs& args, cudaStream_t stream) {
  const int64_t warps = num_warps(args, 32 / Shape::G);
  if (warps > 0) OPER_LAUNCH_EARLY(pool_bags<Shape>, blocks_for(warps, 8), 256, stream, args);
}

template <class Shape>
void launch_ids(const PoolArgs& args, cudaStream_t stream) {
  const int64_t groups = args.batch.max_pairs / kTile + args.view.num_features;
  OPER_LAUNCH(pool_ids<Shape>, blocks_for(groups, 256 / Shape::G), 256, stream, args);
}

}  // namespace

void pool(const Launch& on, const Batch& batch, const BatchPlan& plan, const Output& out,
          const Staging& staging, bool skip_pushed) {
  for (const RowClass& row_class : on.classes) {
    if (row_class.features.empty()) continue;
    PoolArgs args{on.view,
                  batch,
                  row_class.device_features,
                  static_cast<int32_t>(row_class.features.size()),
                  row_class.index,
                  row_class.dim,
                  1,
                  false,
                  plan.tile_begin,
                  plan.output_begin,
                  plan.feature_begin,
                  staging.data ? plan.places : nullptr,
                  staging.data,
                  out,
                  is_wide(out.data, out.stride),
                  skip_pushed};
    // If there are few bags, each gets its own group, so that all are in flight at the same time.
    // If there are many, a group takes bags of about kIdsPerGroup ids in total, enough to fetch
    // many rows together; but fewer if the groups would then fill the device less than kTurns
    // times, since with few turns most of the device would wait for the last groups.
    constexpr int64_t kIdsPerGroup = 64, kTurns = 6;
    const int64_t bags = batch.batch_size * args.num_features;
    const int64_t all_bags = std::max<int64_t>(1, batch.num_bounds - 1);
    const int64_t mean = std::max<int64_t>(1, batch.num_ids / all_bags);
    args.by_bag = mean < 2;
    with_shape(row_class, [&](auto shape) {
      using S = Halved<decltype(shape)>;
      const int64_t turns = bags / std::max<int64_t>(1, kTurns * resident_threads() / S::G);
      args.bags_per_group =
          static_cast<int32_t>(std::clamp<int64_t>(std::min(kIdsPerGroup / mean, turns), 1, S::G));
      if (batch.pooled) {
        launch_bags<S>(args, on.stream);
      } else {
        launch_ids<HalvedIf32<decltype(shape)>>(args, on.stream);
      }
    });
  }
}

void weight_gradient(const Launch& on, const Batch& batch, const BatchPlan& plan, const Gradient& grad,
                     float* out, const Staging& staging) {
  if (batch.num_ids == 0) return;
  OPER_LAUNCH(weight_gradient_kernel, blocks_for(batch.num_ids, 16), 256, on.stream, on.view, batch,
              plan, grad, out, staging);
}

}  // namespace oper::device
