#include "device/context.h"

#include "common/home_tiers.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>

namespace oper::device {
void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

void choose_shape(RowClass& row_class, int32_t dim) {
  const int32_t per_part = row_class.type == RowType::kFloat32 ? 4 : 8;
  if (dim % per_part != 0) {
    row_class.lanes = 0;
    row_class.vectors = dim <= 128 ? 4 : 32;
    return;
  }
  const int32_t parts = dim / per_part;
  int32_t lanes = 1;
  while (lanes < 32 && lanes < parts) lanes *= 2;
  int32_t vectors = 1;
  while (lanes * vectors < parts) vectors *= 2;
  row_class.lanes = lanes;
  row_class.vectors = vectors;
}

// Fills host copies of the device arrays and copies them in one go.
class Context::Builder {
 public:
  Builder(Context& context, const Description& d, const Shared& s) : c_(context), d_(d), s_(s) {}

  void build() {
    order_tables();
    const int64_t bytes = lay_out(nullptr);
    check(cudaMalloc(reinterpret_cast<void**>(&c_.memory_), static_cast<size_t>(bytes)),
          "cannot allocate the directory");
    host_.assign(static_cast<size_t>(filled_), 0);
    lay_out(c_.memory_);
    fill();
    check(cudaMemcpy(c_.memory_, host_.data(), host_.size(), cudaMemcpyHostToDevice),
          "cannot copy the directory");
    check(cudaMemset(c_.memory_ + filled_, 0, static_cast<size_t>(bytes - filled_)),
          "cannot clear device memory");
  }

 private:
  Context& c_;
  const Description& d_;
  const Shared& s_;
  std::vector<char> host_;
  int64_t filled_ = 0;          // bytes of the arrays with host copies, which come first
  std::vector<int32_t> place_;  // in the order of keys, of each table of the plan
  // Device addresses of the arrays.
  Table* tables_;
  Feature* features_;
  int64_t *table_keys_, *own_begin_, *maps_, *owner_begin_;
  Refresh* refreshes_;
  char** outboxes_;
  TierMap* tiers_;  // read and home of every tier
  HomePart* home_parts_;
  int64_t* offsets_;  // of all home parts
  int64_t num_parts_ = 0, num_offsets_ = 0;
  uint8_t* pushes_;
  int32_t *pieces_, *class_features_;
  float** squares_;
  uint32_t** touched_;

  // Host copy of a device array of this builder.
  template <class T>
  T* host(T* device) {
    return reinterpret_cast<T*>(host_.data() + (reinterpret_cast<char*>(device) - c_.memory_));
  }

  void order_tables() {
    std::map<std::tuple<int, int, int>, std::vector<int32_t>> by_shape;
    for (int64_t t = 0; t < d_.num_tables; ++t) {
      RowClass shape{};
      shape.type = static_cast<RowType>(d_.table(t)[kRowType]);
      choose_shape(shape, static_cast<int32_t>(d_.table(t)[kDim]));
      by_shape[{static_cast<int>(shape.type), shape.lanes, shape.vectors}].push_back(
          static_cast<int32_t>(t));
    }
    place_.resize(static_cast<size_t>(d_.num_tables));
    for (const auto& [shape, members] : by_shape) {
      RowClass row_class{};
      row_class.type = static_cast<RowType>(std::get<0>(shape));
      row_class.lanes = std::get<1>(shape);
      row_class.vectors = std::get<2>(shape);
      row_class.index = static_cast<int32_t>(c_.classes_.size());
      row_class.table_begin = static_cast<int32_t>(c_.order_.size());
      for (int32_t t : members) {
        place_[static_cast<size_t>(t)] = static_cast<int32_t>(c_.order_.size());
        c_.order_.push_back(t);
      }
      row_class.table_end = static_cast<int32_t>(c_.order_.size());
      c_.classes_.push_back(row_class);
    }
  }

  int64_t lay_out(void* block) {
    BumpAllocator memory(block);
    const int64_t T = d_.num_tables, W = d_.world_size;
    tables_ = memory.take<Table>(T);
    features_ = memory.take<Feature>(d_.num_features);
    table_keys_ = memory.take<int64_t>(T + 1);
    own_begin_ = memory.take<int64_t>(T + 1);
    maps_ = memory.take<int64_t>(2 * d_.num_maps);
    owner_begin_ = memory.take<int64_t>(T * (W + 1));
    refreshes_ = memory.take<Refresh>(d_.num_refreshes);
    outboxes_ = memory.take<char*>(W);
    c_.pads_ = memory.take<uint32_t*>(W);
    tiers_ = memory.take<TierMap>(2 * d_.num_tiers);
    home_parts_ = memory.take<HomePart>(d_.num_tiers);
    offsets_ = memory.take<int64_t>(d_.num_maps);
    pushes_ = memory.take<uint8_t>(d_.num_tiers);
    pieces_ = memory.take<int32_t>(piece_count());
    class_features_ = memory.take<int32_t>(d_.num_features);
    squares_ = memory.take<float*>(T * W);
    touched_ = memory.take<uint32_t*>(T * W);
    c_.far_masters_ = memory.take<FarMasters>(T * W);
    c_.optimizers_ = memory.take<UpdateArgs>(T);
    c_.epoch_ = memory.take<uint32_t>(1);
    c_.claimed_ = memory.take<int>(1);
    filled_ = memory.used();
    c_.mirrors_ = memory.take<char>(std::count(s_.near.begin(), s_.near.end(), false) *
                                    outbox_header_bytes(T, W));
    c_.far_squares_.assign(static_cast<size_t>(T * W), nullptr);
    for (int64_t k = 0; k < T; ++k) {
      const int64_t t = c_.order_[static_cast<size_t>(k)];
      for (int64_t r = 0; r < W; ++r)
        if (!s_.near[static_cast<size_t>(r)] && is_piece(t))
          c_.far_squares_[static_cast<size_t>(k * W + r)] = memory.take<float>(2 * num_slots(t, r));
    }
    return memory.used();
  }

  // Of a table in the order of the plan.
  bool is_piece(int64_t t) const { return d_.table(t)[kDim] != d_.table(t)[kRowColumns]; }
  int64_t num_slots(int64_t t, int64_t rank) const {
    const int64_t* begin = d_.owner_begin + t * (d_.world_size + 1) + rank;
    return begin[1] - begin[0];
  }

  int64_t piece_count() const {
    int64_t count = 0;
    for (int64_t t = 0; t < d_.num_tables; ++t)
      for (int64_t p = 0; p < d_.num_tables; ++p)
        count += d_.table(p)[kLogical] == d_.table(t)[kLogical];
    return count;
  }

  void fill() {
    const int64_t T = d_.num_tables, W = d_.world_size;
    std::memcpy(host(maps_), d_.maps, static_cast<size_t>(2 * d_.num_maps) * 8);
    std::memcpy(host(owner_begin_), d_.owner_begin, static_cast<size_t>(T * (W + 1)) * 8);
    char* mirror = c_.mirrors_;
    for (int64_t r = 0; r < W; ++r) {
      const bool is_near = s_.near[static_cast<size_t>(r)];
      host(outboxes_)[r] = is_near ? reinterpret_cast<char*>(d_.outboxes[r]) : mirror;
      if (!is_near) mirror += outbox_header_bytes(T, W);
      host(c_.pads_)[r] = reinterpret_cast<uint32_t*>(s_.pads[r]);
    }
    for (int64_t k = 0; k < d_.num_tiers; ++k) {
      host(pushes_)[k] = d_.tiers[k * kTierWidth + kPush] != 0;
    }
    int64_t num_pieces = 0;
    for (int64_t k = 0; k < T; ++k) num_pieces += fill_table(k, num_pieces);
    fill_features();
    for (int64_t k = 0; k < d_.num_refreshes; ++k) {
      Refresh part = d_.refresh(k);
      part.table = place_[static_cast<size_t>(part.table)];
      if (!s_.near[static_cast<size_t>(part.owner)]) part.masters = nullptr;
      host(refreshes_)[k] = part;
      host(tables_)[part.table].has_replicas = true;
    }
    finish();
  }

  // Table number k in the order of keys; returns how many pieces it lists.
  int64_t fill_table(int64_t k, int64_t num_pieces) {
    const int64_t T = d_.num_tables, W = d_.world_size;
    const int64_t t = c_.order_[static_cast<size_t>(k)];
    const int64_t* x = d_.table(t);
    Table& out = host(tables_)[k];
    out.key_begin = c_.num_keys_;
    host(table_keys_)[k] = c_.num_keys_;
    c_.num_keys_ += x[kNumRows];
    const int64_t* owned = d_.owner_begin + t * (W + 1) + d_.rank;
    host(own_begin_)[k] = c_.own_rows_;
    c_.own_rows_ += owned[1] - owned[0];
    c_.are_fp32_.push_back(static_cast<RowType>(x[kRowType]) == RowType::kFloat32);
    out.owner_begin = owner_begin_ + t * (W + 1);
    out.rows = reinterpret_cast<char*>(x[kRowAddress]);
    out.momentum1 = reinterpret_cast<float*>(x[kMomentum1]);
    out.momentum2 = reinterpret_cast<float*>(x[kMomentum2]);
    out.dim = static_cast<int32_t>(x[kDim]);
    out.row_columns = static_cast<int32_t>(x[kRowColumns]);
    out.mean = static_cast<int32_t>(x[kMean]);
    out.type = static_cast<RowType>(x[kRowType]);
    out.piece_start = static_cast<int32_t>(x[kFirstColumn]);
    const HeadMap head = d_.head_map(t);
    out.head_ids = d_.head_ids(t);
    // Of each table all read maps, then all home maps.
    const int64_t first = x[kTierBegin], count = x[kTierEnd] - first;
    std::vector<TierMap> home;  // in host memory
    for (int64_t i = 0; i < count; ++i) {
      const int64_t* tier = d_.tiers + (first + i) * kTierWidth;
      host(tiers_)[2 * first + i] =
          tier_map(maps_, d_.num_maps, tier[kStart], tier[kReadAt], tier[kReadPeriod]);
      host(tiers_)[2 * first + count + i] =
          tier_map(maps_, d_.num_maps, tier[kStart], tier[kHomeAt], tier[kHomePeriod]);
      home.push_back(
          tier_map(d_.maps, d_.num_maps, tier[kStart], tier[kHomeAt], tier[kHomePeriod]));
      out.has_push |= tier[kPush] != 0;
    }
    const int32_t n = static_cast<int32_t>(count);
    fill_home_parts(out, {x[kNumRows], n, home.data(), {}, nullptr}, owned - d_.rank);
    out.pushes = pushes_ + first;
    c_.has_push_ |= out.has_push;
    out.read = {x[kNumRows], n, tiers_ + 2 * first, head, nullptr};
    out.home = {x[kNumRows], n, tiers_ + 2 * first + count, head, nullptr};
    out.touched = touched_ + k * W;
    out.far_masters = c_.far_masters_ + k * W;
    for (int64_t r = 0; r < W; ++r) {
      const bool is_near = s_.near[static_cast<size_t>(r)];
      host(touched_)[k * W + r] =
          is_near ? reinterpret_cast<uint32_t*>(d_.touched[t * W + r]) : nullptr;
      host(squares_)[k * W + r] = is_near ? reinterpret_cast<float*>(d_.squares[t * W + r])
                                          : c_.far_squares_[static_cast<size_t>(k * W + r)];
    }
    c_.message_tables_.push_back({out.dim, out.type, out.has_push, is_piece(t), {}});
    for (int64_t r = 0; r < W; ++r) c_.message_tables_.back().num_slots.push_back(num_slots(t, r));
    c_.max_dim_ = std::max(c_.max_dim_, out.dim);
    c_.max_row_bytes_ = std::max<int64_t>(c_.max_row_bytes_, bytes_of_row(out.type, out.dim));
    c_.min_dim_ = c_.min_dim_ == 0 ? out.dim : std::min(c_.min_dim_, out.dim);
    if (!is_piece(t)) return 0;
    out.squares = squares_ + k * W;
    out.pieces = pieces_ + num_pieces;
    for (int64_t p = 0; p < T; ++p)
      if (d_.table(p)[kLogical] == x[kLogical])
        host(pieces_)[num_pieces + out.num_pieces++] = place_[static_cast<size_t>(p)];
    c_.has_squares_ = true;
    return out.num_pieces;
  }

  void fill_home_parts(Table& out, const TableMap& home, const int64_t* owner_begin) {
    out.home_parts = home_parts_ + num_parts_;
    for (int32_t k = 0; k < home.num_tiers; ++k) {
      const HomeTier part = home_tier(home, owner_begin, k, d_.rank);
      if (part.slot_end == part.slot_begin) continue;
      host(home_parts_)[num_parts_++] = {part.slot_begin,
                                         part.slot_end,
                                         part.start,
                                         part.period,
                                         offsets_ + num_offsets_,
                                         static_cast<uint32_t>(part.offsets.size())};
      std::copy(part.offsets.begin(), part.offsets.end(), host(offsets_) + num_offsets_);
      num_offsets_ += static_cast<int64_t>(part.offsets.size());
      ++out.num_home_parts;
    }
  }

  void fill_features() {
    for (int64_t f = 0; f < d_.num_features; ++f) {
      const int64_t* x = d_.features + f * kFeatureWidth;
      const int32_t t = place_[static_cast<size_t>(x[kFeatureTable])];
      host(features_)[f] = {t, static_cast<int32_t>(x[kFeatureLogical]), x[kColumn]};
      c_.logical_.push_back(static_cast<int32_t>(x[kFeatureLogical]));
      c_.output_columns_ = std::max(c_.output_columns_, x[kColumn] + host(tables_)[t].dim);
      c_.unpooled_columns_ = host(tables_)[t].row_columns;
    }
    int64_t listed = 0;
    for (RowClass& row_class : c_.classes_) {
      row_class.device_features = class_features_ + listed;
      for (int64_t f = 0; f < d_.num_features; ++f) {
        const Feature& feature = host(features_)[f];
        if (feature.table < row_class.table_begin || feature.table >= row_class.table_end) continue;
        row_class.features.push_back(static_cast<int32_t>(f));
        host(class_features_)[listed++] = static_cast<int32_t>(f);
      }
      for (int32_t t = row_class.table_begin; t < row_class.table_end; ++t)
        host(tables_)[t].row_class = row_class.index;
    }
  }

  void finish() {
    const int64_t T = d_.num_tables;
    host(table_keys_)[T] = c_.num_keys_;
    host(own_begin_)[T] = c_.own_rows_;
    bool has_replicas = false;
    for (int64_t t = 0; t < T; ++t) has_replicas |= host(tables_)[t].has_replicas;
    c_.updates_at_once_ = d_.world_size == 1 && !has_replicas && !c_.has_squares_;
    c_.view_.tables = tables_;
    c_.view_.features = features_;
    c_.view_.table_keys = table_keys_;
    c_.view_.own_begin = own_begin_;
    c_.view_.refreshes = refreshes_;
    c_.view_.outboxes = outboxes_;
    c_.view_.outbox_bytes = d_.outbox_bytes;
    c_.view_.num_tables = static_cast<int32_t>(T);
    c_.view_.num_features = static_cast<int32_t>(d_.num_features);
    c_.view_.num_refreshes = static_cast<int32_t>(d_.num_refreshes);
    c_.view_.arena_begin = reinterpret_cast<const char*>(s_.arena_begin);
    c_.view_.arena_end = c_.view_.arena_begin + s_.arena_bytes;
    c_.view_.duplication = c_.shared_->duplication;
    c_.near_ = s_.near;
    c_.view_.rank = d_.rank;
    c_.view_.world_size = d_.world_size;
    c_.view_.error = {&c_.shared_->error, c_.claimed_};
    const int64_t row_bytes = 4 + 4 * static_cast<int64_t>(std::max(1, c_.min_dim_));
    c_.inbox_capacity_ = std::max<int64_t>(
        1, std::min({c_.own_rows_, d_.outbox_bytes / row_bytes,
                     (int64_t{kNoEntry} - 1) / std::max(1, d_.world_size)}));
  }
};

Context::Context(const Description& description, const Shared& shared, int64_t deadline_ms)
    : deadline_ms_(deadline_ms) {
  check(cudaHostAlloc(reinterpret_cast<void**>(&shared_), sizeof(HostWords), cudaHostAllocMapped),
        "cannot allocate words of host memory");
  *shared_ = {};
  try {
    Builder(*this, description, shared).build();
  } catch (...) {
    cudaFreeHost(shared_);
    if (memory_) cudaFree(memory_);
    throw;
  }
}

Context::~Context() {
  cudaFree(memory_);
  cudaFreeHost(shared_);
}

void Context::forget_error(cudaStream_t stream) {
  const int32_t code = shared_->error.code;
  if (code == 0 || code == 2) return;
  check(cudaMemsetAsync(claimed_, 0, sizeof(int), stream), "cannot forget an error");
  // Kernels before this on the stream write nothing any more: they found it claimed.
  shared_->error = {};
}

void Context::barrier(cudaStream_t stream) const {
  if (view_.world_size > 1)
    arrive_and_wait(pads_, epoch_, view_.rank, view_.world_size, deadline_ms_, view_.error, stream);
}

Workspace lay_out(const Context& context, const Batch& batch, void* block) {
  const View& view = context.view();
  const int64_t P = batch.max_pairs, T = view.num_tables, W = view.world_size,
                F = view.num_features;
  const bool wide = static_cast<uint64_t>(context.num_keys()) + 1 >= 1ull << 32;
  BumpAllocator memory(block);
  Workspace w{};
  const auto keys = [&](bool are_wide) {
    return Keys{are_wide ? static_cast<void*>(memory.take<uint64_t>(P))
                         : static_cast<void*>(memory.take<uint32_t>(P)),
                are_wide};
  };
  w.plan.feature_begin = memory.take<int64_t>(F + 1);
  w.plan.output_begin = memory.take<int64_t>(F);
  w.plan.tile_begin = memory.take<int32_t>(F + 1);
  w.plan.keys = keys(wide);
  w.plan.spare_keys = keys(wide);
  w.plan.payloads = memory.take<uint32_t>(P);
  w.plan.spare_payloads = memory.take<uint32_t>(P);
  w.plan.pair_bags = memory.take<uint32_t>(batch.by_pair ? P : 0);
  w.plan.places = memory.take<uint32_t>(batch.by_pair ? P : 0);
  w.plan.staged = memory.take<uint32_t>(1);
  w.plan.pair_weights = memory.take<float>(batch.weights ? P : 0);
  w.plan.run_begin = memory.take<uint32_t>(P + 1);
  w.plan.num_runs = memory.take<int64_t>(1);
  w.plan.segments = memory.take<uint32_t>(T * W + 1);
  w.plan.sort_scratch_bytes = sort_scratch_bytes(std::max<int64_t>(P, 1));
  w.plan.sort_scratch = memory.take<char>(w.plan.sort_scratch_bytes);
  w.plan.bag_bits = bits_for(static_cast<uint64_t>(std::max<int64_t>(batch.batch_size, 1)));
  w.long_runs.capacity = long_run_capacity(P);
  w.long_runs.stride = (context.max_dim() + 3) / 4 * 4;
  w.long_runs.runs = memory.take<uint32_t>(w.long_runs.capacity);
  w.long_runs.first = memory.take<uint32_t>(w.long_runs.capacity);
  w.long_runs.chunk_run = memory.take<uint32_t>(w.long_runs.capacity);
  w.long_runs.counts = memory.take<uint32_t>(2);
  w.long_runs.partials = memory.take<float>(w.long_runs.capacity * w.long_runs.stride);
  if (context.has_push()) {
    w.push.keys = keys(true);
    w.push.spare_keys = keys(true);
    w.push.payloads = memory.take<uint32_t>(P);
    w.push.spare_payloads = memory.take<uint32_t>(P);
    w.push.run_begin = memory.take<uint32_t>(P + 1);
    w.push.num_runs = memory.take<int64_t>(1);
    w.push.slots = memory.take<uint32_t>(P);
    w.push.sort_scratch = w.plan.sort_scratch;
    w.push.sort_scratch_bytes = w.plan.sort_scratch_bytes;
  }
  w.bytes = memory.used();
  return w;
}

Inbox lay_out_inbox(const Context& context, void* block, int64_t* bytes) {
  const int64_t W = context.view().world_size, capacity = context.inbox_capacity();
  BumpAllocator memory(block);
  Inbox inbox{};
  inbox.capacity = capacity;
  inbox.list_begin = memory.take<int64_t>(W * (context.view().num_tables + 1));
  inbox.rows = memory.take<uint32_t>(W * capacity);
  inbox.next = memory.take<uint32_t>(W * capacity);
  inbox.heads = memory.take<uint32_t>(context.own_rows());
  *bytes = memory.used();
  return inbox;
}

}  // namespace oper::device
