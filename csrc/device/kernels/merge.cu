// At the owner: sums the gradients that all ranks have for its rows, in rank order, and applies the
// optimizer once per row.
//
// The entries of all ranks' send buffers are linked into one list (chain) per row, see
// ReceiveLists. The group with the first entry of a chain sums the gradients of all its entries,
// and updates the row.
#include "device/batch.cuh"
#include "device/optimizer.cuh"

namespace oper::device {
namespace {

struct MergeArgs {
  View view;
  ReceiveLists lists;
  float gradient_scale;
  const UpdateArgs* optimizers;
  int32_t table_begin, table_end;
};

// One block per source rank writes list_begin: prefix sums over the tables of the rows for which
// the rank has gradients.
__global__ void __launch_bounds__(256) list_begin_kernel(View view, ReceiveLists lists) {
  const int64_t W = view.world_size, T = view.num_tables;
  int64_t* begin = lists.list_begin + blockIdx.x * (T + 1);
  const uint32_t* segments = send_buffer_segments(view.send_buffers[blockIdx.x]);
  const bool skips = is_refused(view);
  block_sums(
      T,
      [&](int64_t t) {
        const uint32_t* segment = segments + t * W + view.rank;
        return skips ? 0 : static_cast<int64_t>(segment[1]) - segment[0];
      },
      [&](int64_t t, int64_t before) { begin[t] = before; });
  const int64_t count = begin[T];
  __syncthreads();
  if (count <= lists.capacity) return;
  if (threadIdx.x == 0) report(view.error, 3, static_cast<int>(blockIdx.x), count);
  for (int64_t t = threadIdx.x; t <= T; t += 256) begin[t] = 0;
}

__global__ void __launch_bounds__(256) chain_kernel(View view, ReceiveLists lists) {
  const int64_t W = view.world_size, T = view.num_tables;
  for (int64_t k = 0; k < W; ++k) {
    const int64_t source = (view.rank + k) % W;  // so that no peer serves all ranks at once
    const int64_t* begin = lists.list_begin + source * (T + 1);
    char* buffer = view.send_buffers[source];
    const uint32_t* segments = send_buffer_segments(buffer);
    const uint32_t* slots = reinterpret_cast<const uint32_t*>(
        buffer + reinterpret_cast<const SendBufferHeader*>(buffer)->slots_offset);
    for (int64_t i = thread_index(); i < begin[T]; i += num_threads()) {
      const int64_t t = last_at_most(begin, T, i);
      const uint32_t slot = slots[segments[t * W + view.rank] + (i - begin[t])];
      const uint32_t row = static_cast<uint32_t>(view.own_begin[t] + slot);
      const uint32_t entry = static_cast<uint32_t>(source * lists.capacity + i);
      lists.rows[entry] = row;
      lists.next[entry] = atomicExch(lists.heads + row, entry);
    }
  }
}

// The gradient of an entry, in its rank's send buffer.
OPER_DEVICE const float* entry_row(const MergeArgs& a, int64_t t, uint32_t entry) {
  const int64_t W = a.view.world_size, T = a.view.num_tables;
  const int64_t source = entry / a.lists.capacity, i = entry % a.lists.capacity;
  char* buffer = a.view.send_buffers[source];
  const uint32_t* segments = send_buffer_segments(buffer);
  const int64_t in_table = static_cast<int64_t>(segments[t * W + a.view.rank]) - segments[t * W] +
                           (i - a.lists.list_begin[source * (T + 1) + t]);
  return reinterpret_cast<const float*>(
             buffer + reinterpret_cast<const SendBufferHeader*>(buffer)->rows_offset) +
         send_buffer_offsets(buffer, a.view)[t] + in_table * a.view.tables[t].dim;
}

// The lowest entry of a chain that is at least `least`. Entries of higher ranks are higher.
OPER_DEVICE uint32_t next_in_order(const ReceiveLists& lists, uint32_t head, uint32_t least) {
  uint32_t found = kNoEntry;
  for (uint32_t e = head; e != kNoEntry; e = lists.next[e])
    if (e >= least && e < found) found = e;
  return found;
}

// Calls body(table, slot, gradient) for every row of the class for which any rank has a gradient,
// with the sum of the gradients in rank order, times gradient_scale. `is_last`: chains are not
// needed again, and are cleared.
template <class Shape, class Body>
OPER_DEVICE void for_merged_rows(const MergeArgs& a, const Group<Shape::G>& group, bool is_last,
                                 Body body) {
  const int64_t T = a.view.num_tables;
  for (int32_t source = 0; source < a.view.world_size; ++source) {
    const int64_t* begin = a.lists.list_begin + source * (T + 1);
    const int64_t last = begin[a.table_end];
    for (int64_t i = begin[a.table_begin] + group.index(); i < last; i += group.count()) {
      const uint32_t head = static_cast<uint32_t>(source * a.lists.capacity + i);
      const uint32_t row = a.lists.rows[head];
      // Read by one lane only, since lanes could read different values while another group clears
      // it.
      const uint32_t leads = group.lane == 0 ? a.lists.heads[row] == head : 0;
      if (!group.shuffle(leads, 0)) continue;
      const int32_t t = static_cast<int32_t>(last_at_most(begin, T, i));
      const int dim = a.view.tables[t].dim;
      uint32_t entry = next_in_order(a.lists, head, 0);
      Row<Shape> sum, more;
      sum.load(entry_row(a, t, entry), dim, group.lane, Shape::E > 1);
      while ((entry = next_in_order(a.lists, head, entry + 1)) != kNoEntry) {
        more.load(entry_row(a, t, entry), dim, group.lane, Shape::E > 1);
        sum.add(more);
      }
      if (a.gradient_scale != 1.0f) sum.scale(a.gradient_scale);
      if (is_last && group.lane == 0) a.lists.heads[row] = kNoEntry;
      body(t, row - a.view.own_begin[t], sum);
    }
  }
}

// The address of the sum of squares over one column piece of the row at a position; null if the
// piece's owner is in another domain.
OPER_DEVICE const float* squares_at(const View& view, const Table& piece, int64_t position,
                                    int32_t round) {
  const int64_t key = locate_in_tier(piece.home.tiers[tier_of(piece.home, position)], position);
  const int64_t owner = last_at_most(piece.owner_begin, view.world_size + 1, key);
  if (view.local != nullptr && !view.local[owner]) return nullptr;
  const int64_t first = piece.owner_begin[owner], end = piece.owner_begin[owner + 1];
  return piece.squares[owner] + round * (end - first) + key - first;
}

// The sum of squares over all columns of a row. In a single domain, adds up the sums of all pieces,
// in column order. Otherwise the total has replaced the sum of the rank that added up or, if that
// rank is in another domain, the sum of this rank.
OPER_DEVICE float squares_of_row(const View& view, const Table& table, int64_t slot,
                                 int32_t round) {
  const int64_t position = position_at(table, slot);
  if (view.local != nullptr) {
    const Table& piece = view.tables[table.pieces[summing_piece(position, table.num_pieces)]];
    const float* total = squares_at(view, piece, position, round);
    if (total == nullptr) total = squares_at(view, table, position, round);
    return *total;
  }
  float sum = 0.0f;
  for (int32_t p = 0; p < table.num_pieces; ++p)
    sum += *squares_at(view, view.tables[table.pieces[p]], position, round);
  return sum;
}

template <class Shape>
OPER_DEVICE void clip_and_decay(const View& view, const Table& table, int64_t slot,
                                const RowOptimizer<Shape>& optimizer, Row<Shape>& g) {
  float squares = 0.0f;
  if (optimizer.clips())
    squares = table.squares == nullptr ? optimizer.sum_of_squares(g)
                                       : squares_of_row(view, table, slot, 0);
  optimizer.clip_and_decay(slot, g, squares);
}

template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) squares_kernel(const MergeArgs a,
                                                                      int32_t round) {
  alignas(16) __shared__ float buffers[kBufferFloats<Shape>];
  float* buffer = group_buffer<Shape>(buffers);
  const Group<Shape::G> group;
  for_merged_rows<Shape>(a, group, false, [&](int32_t t, int64_t slot, Row<Shape>& g) {
    const Table& table = a.view.tables[t];
    const RowOptimizer<Shape> optimizer(table, table.dim, a.optimizers[t], group, buffer);
    const int32_t rounds =
        (optimizer.clips() ? 1 : 0) + (is_row_wise(a.optimizers[t].optimizer.kind) ? 1 : 0);
    if (table.squares == nullptr || round >= rounds) return;
    if (!optimizer.clips() || round > 0) clip_and_decay(a.view, table, slot, optimizer, g);
    const float squares = optimizer.sum_of_squares(g);
    const int64_t slots =
        table.owner_begin[a.view.rank + 1] - table.owner_begin[a.view.rank];
    if (group.lane == 0) table.squares[a.view.rank][round * slots + slot] = squares;
  });
}

template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) update_kernel(const MergeArgs a) {
  alignas(16) __shared__ float buffers[kBufferFloats<Shape>];
  float* buffer = group_buffer<Shape>(buffers);
  const Group<Shape::G> group;
  for_merged_rows<Shape>(a, group, true, [&](int32_t t, int64_t slot, Row<Shape>& g) {
    const Table& table = a.view.tables[t];
    const RowOptimizer<Shape> optimizer(table, table.dim, a.optimizers[t], group, buffer);
    clip_and_decay(a.view, table, slot, optimizer, g);
    float squares = 0.0f;
    if (is_row_wise(a.optimizers[t].optimizer.kind))
      squares = table.squares == nullptr
                    ? optimizer.sum_of_squares(g)
                    : squares_of_row(a.view, table, slot, optimizer.clips() ? 1 : 0);
    Row<Shape> row;
    optimizer.load_row(slot, row);
    optimizer.apply(g, squares, row, facts_of<typename Shape::T>(table, optimizer.kind(), slot));
    const bool is_frozen = a.optimizers[t].optimizer.kind == Optimizer::kNone;
    if (table.has_replicas && !is_frozen && group.lane == 0) note_touched(a.view, table, slot);
  });
}

__global__ void __launch_bounds__(256) clear_touched_kernel(View view) {
  const int32_t t = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (t < view.num_tables && view.tables[t].has_replicas)
    view.tables[t].touched[view.rank][0] = 0;
}

__global__ void __launch_bounds__(256) refresh_kernel(View view) {
  const Group<32> group;
  for (int32_t k = 0; k < view.num_refreshes; ++k) {
    const Refresh& part = view.refreshes[k];
    if (part.replicas == nullptr) continue;
    const Table& table = view.tables[part.table];
    const RemoteMasters& remote = table.remote_masters[part.owner];
    const bool is_local = part.masters != nullptr;
    const uint32_t* slots = is_local ? table.touched[part.owner] + 1 : remote.slots;
    const int64_t count = is_local ? slots[-1] : remote.count;
    const int64_t row_bytes = bytes_of_row(table.type, table.dim);
    for (int64_t e = group.index(); e < count; e += group.count()) {
      const int64_t slot = slots[e];
      if (slot < part.slot_begin || slot >= part.slot_end) continue;
      const char* from = is_local ? part.masters + slot * row_bytes : remote.rows + e * row_bytes;
      char* to = part.replicas + (part.first + (slot - part.slot_begin) * part.stride) * row_bytes;
      copy_row(group, to, from, row_bytes);
    }
  }
}

// Marks a row that an update changes, unless its table is frozen.
OPER_DEVICE void mark_updated(const View& view, const UpdateArgs* optimizers, int64_t t, int64_t slot) {
  if (optimizers[t].optimizer.kind != Optimizer::kNone) mark_changed(view, t, slot);
}

__global__ void __launch_bounds__(256)
    mark_merged_kernel(View view, ReceiveLists lists, const UpdateArgs* optimizers) {
  const int64_t T = view.num_tables;
  for (int64_t source = 0; source < view.world_size; ++source) {
    const int64_t* begin = lists.list_begin + source * (T + 1);
    for (int64_t i = thread_index(); i < begin[T]; i += num_threads()) {
      const int64_t t = last_at_most(begin, T, i);
      mark_updated(view, optimizers, t,
                   lists.rows[source * lists.capacity + i] - view.own_begin[t]);
    }
  }
}

__global__ void __launch_bounds__(256)
    mark_runs_kernel(View view, BatchPlan plan, const UpdateArgs* optimizers) {
  if (*plan.refused != 0) return;
  const int64_t num_runs = plan.segments[view.num_tables];
  for (int64_t run = thread_index(); run < num_runs; run += num_threads()) {
    const int64_t key = plan.keys.at(plan.run_begin[run]);
    const int64_t t = last_at_most(view.table_keys, view.num_tables, key);
    mark_updated(view, optimizers, t, key - view.table_keys[t]);
  }
}

template <class Body>
void for_classes(const Launch& on, const ReceiveLists& lists, float gradient_scale,
                 bool only_pieces, Body body) {
  for (const RowClass& row_class : on.classes) {
    if (only_pieces && !row_class.has_pieces) continue;
    const MergeArgs args{
        on.view, lists, gradient_scale, on.optimizers, row_class.table_begin, row_class.table_end};
    const int blocks = blocks_for(lists.capacity, 256 / row_class.group_lanes());
    with_shape(row_class, [&](auto shape) { body(shape, blocks, args); });
  }
}

}  // namespace

void collect(const Launch& on, const ReceiveLists& lists) {
  OPER_LAUNCH(list_begin_kernel, on.view.world_size, 256, on.stream, on.view, lists);
  OPER_LAUNCH(chain_kernel, blocks_for(lists.capacity, 256), 256, on.stream, on.view, lists);
}

void merge_squares(const Launch& on, const ReceiveLists& lists, float gradient_scale,
                   int32_t round) {
  for_classes(on, lists, gradient_scale, true, [&](auto shape, int blocks, const MergeArgs& args) {
    OPER_LAUNCH(squares_kernel<decltype(shape)>, blocks, 256, on.stream, args, round);
  });
}

void merge_and_update(const Launch& on, const ReceiveLists& lists, float gradient_scale) {
  OPER_LAUNCH(clear_touched_kernel, (on.view.num_tables + 255) / 256, 256, on.stream, on.view);
  for_classes(on, lists, gradient_scale, false, [&](auto shape, int blocks, const MergeArgs& args) {
    OPER_LAUNCH(update_kernel<decltype(shape)>, blocks, 256, on.stream, args);
  });
}

void mark_merged(const Launch& on, const ReceiveLists& lists) {
  OPER_LAUNCH(mark_merged_kernel, blocks_for(lists.capacity, 256), 256, on.stream, on.view, lists,
              on.optimizers);
}

void mark_runs(const Launch& on, const Batch& batch, const BatchPlan& plan) {
  OPER_LAUNCH(mark_runs_kernel, blocks_for(batch.max_pairs, 256), 256, on.stream, on.view, plan,
              on.optimizers);
}

void refresh(const Launch& on) {
  if (on.view.num_refreshes > 0)
    OPER_LAUNCH(refresh_kernel, blocks_for(1 << 20, 8), 256, on.stream, on.view);
}

}  // namespace oper::device
