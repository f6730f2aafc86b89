// Exchange mode push, forward: owners pool their rows of each bag.
//
// A reader sorts its ids in pushed tiers by (table, owner), in input order otherwise, and writes a
// request with their slots, divided into runs: the ids of one bag that one owner has. An owner
// pools every run into a partial sum, at a place that the request determines. The reader adds the
// partial sums owner by owner, in rank order. The backward pass needs none of this: the reader sums
// its gradients by row itself.
#include "device/batch.cuh"
#include "device/group.cuh"

namespace oper::device {
namespace {

// A request: its header; segments (uint32 [T * W + 1]), the first run of each table and owner;
// offsets (int64 [T * W]) of their partial sums, floats from the start of this reader's part of the
// owner's sums.
OPER_DEVICE const uint32_t* request_segments(const char* request) {
  return reinterpret_cast<const uint32_t*>(request + sizeof(RequestHeader));
}
OPER_DEVICE int64_t* request_offsets(char* request, const View& view) {
  return reinterpret_cast<int64_t*>(request + sizeof(RequestHeader) +
                                    send_buffer_segment_bytes(view));
}
OPER_DEVICE int64_t request_header_bytes(const View& view) {
  return static_cast<int64_t>(sizeof(RequestHeader)) + send_buffer_segment_bytes(view) +
         8 * static_cast<int64_t>(view.num_tables) * view.world_size;
}

// A key is table * W + owner, by which keys are sorted, in the upper 32 bits, and feature and bag
// in the lower ones, so that the ids of one bag that one owner has are a run of equal keys.
__global__ void __launch_bounds__(256)
    request_keys_kernel(View view, Batch batch, BatchPlan plan, PushPlan push) {
  const int64_t W = view.world_size;
  const int64_t none = view.num_tables * W;
  const int64_t num_pairs = plan.feature_begin[view.num_features];
  for (int64_t p = num_pairs + thread_index(); p < batch.max_pairs; p += num_threads()) {
    push.keys.set(p, none << 32);
    push.payloads[p] = 0;
  }
  for_pairs(view, batch, plan, [&](int32_t f, int64_t at, int64_t bag, int64_t p) {
    const Feature& feature = view.features[f];
    const Table& table = view.tables[feature.table];
    const int64_t id = id_at(batch, at);
    int64_t segment = none, where = 0;
    uint32_t slot = 0;
    if (static_cast<uint64_t>(id) < static_cast<uint64_t>(table.home.num_rows)) {
      const int64_t position = position_of(table.home.head, id);
      const int32_t tier = tier_of(table.home, position);
      if (table.pushes[tier]) {
        const int64_t key = locate_in_tier(table.home.tiers[tier], position);
        const int64_t owner = last_at_most(table.owner_begin, W + 1, key);
        segment = feature.table * W + owner;
        slot = static_cast<uint32_t>(key - table.owner_begin[owner]);
        where = static_cast<int64_t>(static_cast<uint32_t>(f) << plan.bag_bits |
                                     static_cast<uint32_t>(bag));
      }
    }
    push.keys.set(p, segment << 32 | where);
    push.payloads[p] = static_cast<uint32_t>(p);
    push.slots[p] = slot;
    if (batch.weights) plan.pair_weights[p] = batch.weights[at];
  });
}

// One block writes the request's header, segments and offsets. `refused`: see publish_requests.
__global__ void __launch_bounds__(256)
    open_request_kernel(View view, Batch batch, BatchPlan plan, PushPlan push, uint32_t* refused) {
  const int64_t W = view.world_size, T = view.num_tables;
  char* request = push.requests[view.rank];
  RequestHeader* header = reinterpret_cast<RequestHeader*>(request);
  uint32_t* segments = const_cast<uint32_t*>(request_segments(request));
  int64_t* offsets = request_offsets(request, view);
  auto key_of_run = [&](int64_t run) { return push.keys.at(push.run_begin[run]); };
  for (int64_t k = threadIdx.x; k <= T * W; k += 256)
    segments[k] = static_cast<uint32_t>(lower_bound(*push.num_runs, k << 32, key_of_run));
  __syncthreads();
  const int64_t part = push.partial_bytes / W / 16 * 4;  // floats
  bool fits = true;                                      // set by thread 0 only
  for (int64_t owner = 0; owner < W; ++owner)
    block_sums(
        T,
        [&](int64_t t) {
          const int64_t runs =
              static_cast<int64_t>(segments[t * W + owner + 1]) - segments[t * W + owner];
          return (runs * view.tables[t].dim + 3) / 4 * 4;
        },
        [&](int64_t t, int64_t floats) {
          if (t < T) offsets[t * W + owner] = floats;
          fits = fits && floats <= part;
        });
  if (threadIdx.x != 0) return;
  const int64_t runs = segments[T * W];
  const int64_t pairs =
      lower_bound(batch.max_pairs, T * W << 32, [&](int64_t p) { return push.keys.at(p); });
  header->num_runs = runs;
  header->slots_offset = request_header_bytes(view);
  header->run_begin_offset = header->slots_offset + (pairs * 4 + 7) / 8 * 8;
  header->run_bags_offset = header->run_begin_offset + (runs + 1 + 1) / 2 * 8;
  header->weights_offset = batch.weights ? header->run_bags_offset + (runs + 1) / 2 * 8 : 0;
  const int64_t end =
      header->run_bags_offset + (runs + 1) / 2 * 8 + (batch.weights ? pairs * 4 : 0);
  if (end > push.request_bytes || !fits) {
    report(view.error, 3, view.rank, end);
    *plan.refused = *refused = 1;
    for (int64_t k = 0; k <= T * W; ++k) segments[k] = 0;
    header->num_runs = 0;
  }
}

__global__ void __launch_bounds__(256)
    fill_request_kernel(View view, Batch batch, BatchPlan plan, PushPlan push, int64_t* bounds) {
  char* request = push.requests[view.rank];
  const RequestHeader* header = reinterpret_cast<const RequestHeader*>(request);
  uint32_t* slots = reinterpret_cast<uint32_t*>(request + header->slots_offset);
  uint32_t* run_begin = reinterpret_cast<uint32_t*>(request + header->run_begin_offset);
  uint32_t* run_bags = reinterpret_cast<uint32_t*>(request + header->run_bags_offset);
  float* weights = reinterpret_cast<float*>(request + header->weights_offset);
  const int64_t runs = header->num_runs;
  const int64_t none = static_cast<int64_t>(view.num_tables) * view.world_size << 32;
  const int64_t thread = thread_index(), step = num_threads();
  if (*plan.refused)
    for (int64_t k = thread; k < batch.num_bounds; k += step) bounds[k] = kRefusedBound;
  if (runs == 0) return;
  for (int64_t p = thread; p < batch.max_pairs && push.keys.at(p) < none; p += step) {
    slots[p] = push.slots[push.payloads[p]];
    if (batch.weights) weights[p] = plan.pair_weights[push.payloads[p]];
    if (p + 1 == batch.max_pairs || push.keys.at(p + 1) >= none)
      run_begin[runs] = static_cast<uint32_t>(p + 1);
  }
  for (int64_t run = thread; run < runs; run += step) {
    run_begin[run] = push.run_begin[run];
    run_bags[run] = static_cast<uint32_t>(push.keys.at(push.run_begin[run]));
  }
}

struct PushArgs {
  View view;
  PushPlan push;
  int32_t table_begin, table_end;
};

OPER_DEVICE float* partial_sums(const PushPlan& push, const View& view, int32_t owner,
                                int32_t reader) {
  return reinterpret_cast<float*>(push.partials[owner] +
                                  push.partial_bytes / view.world_size / 16 * 16 * reader);
}

template <class Shape>
OPER_DEVICE void pool_request(const PushArgs& a, int32_t reader) {
  using T = typename Shape::T;
  constexpr int kInFlight = Shape::V >= 8 ? 1 : 4 / Shape::V > 0 ? 4 / Shape::V : 1;
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  char* request = a.push.requests[reader];
  const RequestHeader* header = reinterpret_cast<const RequestHeader*>(request);
  const uint32_t* segments = request_segments(request);
  const uint32_t* slots = reinterpret_cast<const uint32_t*>(request + header->slots_offset);
  const uint32_t* run_begin = reinterpret_cast<const uint32_t*>(request + header->run_begin_offset);
  const float* weights = header->weights_offset
                             ? reinterpret_cast<const float*>(request + header->weights_offset)
                             : nullptr;
  float* partials = partial_sums(a.push, a.view, a.view.rank, reader);
  for (int32_t t = a.table_begin; t < a.table_end; ++t) {
    const Table& table = a.view.tables[t];
    if (!table.has_push) continue;
    const int64_t segment = t * W + a.view.rank;
    float* out = partials + request_offsets(request, a.view)[segment];
    const int64_t first_run = segments[segment];
    for (int64_t run = first_run + group.index(); run < segments[segment + 1];
         run += group.count()) {
      const int64_t begin = run_begin[run], end = run_begin[run + 1];
      Row<Shape> sum;
      sum.zero();
      for (int64_t p = begin; p < end; p += kInFlight) {
        RawRow<Shape, T> rows[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u)
          if (p + u < end)
            rows[u].load(reinterpret_cast<const T*>(table.rows) +
                             static_cast<int64_t>(slots[p + u]) * table.dim,
                         table.dim, group.lane, Shape::E > 1);
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (p + u >= end) continue;
          Row<Shape> row;
          rows[u].unpack(row);
          if (weights) row.scale(weights[p + u]);
          if (p + u == begin) {
            sum = row;
          } else {
            sum.add(row);
          }
        }
      }
      sum.store(out + (run - first_run) * table.dim, table.dim, group.lane, Shape::E > 1);
    }
  }
}

// Pools for all readers. Every owner begins with another reader.
template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) pool_requests_kernel(const PushArgs a) {
  const int32_t W = a.view.world_size;
  for (int32_t k = 0; k < W; ++k) pool_request<Shape>(a, (a.view.rank + k) % W);
}

struct AddArgs {
  View view;
  Batch batch;
  PushPlan push;
  Output out;
  int32_t table_begin, table_end, bag_bits;
  bool wide_out;
};

// Adds one owner's partial sums to the output. It has one per bag at most, so that no two groups
// write the same output.
template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>)
    add_partials_kernel(const AddArgs a, int32_t owner) {
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  char* request = a.push.requests[a.view.rank];
  const RequestHeader* header = reinterpret_cast<const RequestHeader*>(request);
  const uint32_t* segments = request_segments(request);
  const uint32_t* run_bags = reinterpret_cast<const uint32_t*>(request + header->run_bags_offset);
  const float* partials = partial_sums(a.push, a.view, owner, a.view.rank);
  for (int32_t t = a.table_begin; t < a.table_end; ++t) {
    const Table& table = a.view.tables[t];
    if (!table.has_push) continue;
    const int64_t segment = t * W + owner;
    const float* from = partials + request_offsets(request, a.view)[segment];
    const int64_t first_run = segments[segment];
    for (int64_t run = first_run + group.index(); run < segments[segment + 1];
         run += group.count()) {
      const uint32_t where = run_bags[run];
      const int64_t bag = where & ((1u << a.bag_bits) - 1u);
      const int64_t column = a.view.features[where >> a.bag_bits].column;
      float* to = a.out.data + bag * a.out.stride + column;
      const bool wide = a.wide_out && column % 4 == 0;
      Row<Shape> sum, part;
      sum.load(to, table.dim, group.lane, wide);
      part.load(from + (run - first_run) * table.dim, table.dim, group.lane, Shape::E > 1);
      sum.add(part);
      sum.store(to, table.dim, group.lane, wide);
    }
  }
}

// Divides the outputs of tables with mean pooling and pushed tiers, for which `pool` writes only
// sums.
template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) divide_kernel(const AddArgs a) {
  const Group<Shape::G> group;
  const int64_t B = a.batch.batch_size;
  for (int64_t w = group.index(); w < B * a.view.num_features; w += group.count()) {
    const int64_t f = w / B, bag = w - f * B;
    const Feature& feature = a.view.features[f];
    if (feature.table < a.table_begin || feature.table >= a.table_end) continue;
    const Table& table = a.view.tables[feature.table];
    if (!table.has_push || !table.mean) continue;
    const int64_t* bound = a.batch.bounds + a.batch.key_of[feature.logical] * B + bag;
    const int64_t length = bound[1] - bound[0];
    if (length < 2) continue;
    float* to = a.out.data + bag * a.out.stride + feature.column;
    const bool wide = a.wide_out && feature.column % 4 == 0;
    Row<Shape> sum;
    sum.load(to, table.dim, group.lane, wide);
    sum.divide(static_cast<float>(length));
    sum.store(to, table.dim, group.lane, wide);
  }
}

template <class Shape>
void launch_add(const AddArgs& args, cudaStream_t stream) {
  const int64_t per_block = 256 / Shape::G;
  for (int32_t owner = 0; owner < args.view.world_size; ++owner)
    OPER_LAUNCH(add_partials_kernel<Shape>, blocks_for(args.batch.max_pairs, per_block), 256,
                stream, args, owner);
  OPER_LAUNCH(divide_kernel<Shape>,
              blocks_for(args.batch.batch_size * args.view.num_features, per_block), 256, stream,
              args);
}

}  // namespace

void publish_requests(const Launch& on, const Batch& batch, const BatchPlan& plan, PushPlan& push,
                      int64_t* bounds, uint32_t* refused) {
  const View& view = on.view;
  lay_out_features(on, batch, plan);
  const int64_t tiles = (batch.batch_size + kTile - 1) / kTile * view.num_features;
  OPER_LAUNCH(request_keys_kernel, blocks_for(tiles, 8), 256, on.stream, view, batch, plan, push);
  // Within a segment feature and bag already ascend; as the sort is stable, it need not look at
  // these bits.
  const uint64_t segments = static_cast<uint64_t>(view.num_tables) * view.world_size;
  sort_into_runs(push, batch.max_pairs, 32, 32 + bits_for(segments + 1), on.stream);
  OPER_LAUNCH(open_request_kernel, 1, 256, on.stream, view, batch, plan, push, refused);
  OPER_LAUNCH(fill_request_kernel, blocks_for(batch.max_pairs, 256), 256, on.stream, view, batch,
              plan, push, bounds);
}

void pool_for_readers(const Launch& on, const PushPlan& push) {
  for (const RowClass& row_class : on.classes) {
    if (!row_class.has_push) continue;
    const PushArgs args{on.view, push, row_class.table_begin, row_class.table_end};
    const int blocks = blocks_for(1 << 16, 256 / row_class.group_lanes());
    with_shape(row_class, [&](auto shape) {
      OPER_LAUNCH(pool_requests_kernel<decltype(shape)>, blocks, 256, on.stream, args);
    });
  }
}

void add_partials(const Launch& on, const Batch& batch, const BatchPlan& plan, const PushPlan& push,
                  const Output& out) {
  for (const RowClass& row_class : on.classes) {
    if (!row_class.has_push) continue;
    const AddArgs args{on.view,
                       batch,
                       push,
                       out,
                       row_class.table_begin,
                       row_class.table_end,
                       plan.bag_bits,
                       is_wide(out.data, out.stride)};
    with_shape(row_class, [&](auto shape) { launch_add<decltype(shape)>(args, on.stream); });
  }
}

}  // namespace oper::device
