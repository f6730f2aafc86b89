#include "device/context.h"

#include "common/home_tiers.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <tuple>

namespace oper::device {
namespace {

// The class of rows of `dim` columns (1 to 1,024), without its tables.
RowClass class_of(RowType type, int32_t dim) {
  RowClass made{.type = type};
  const int32_t per_part = type == RowType::kFloat32 ? 4 : 8;
  if (dim % per_part != 0) {
    made.vectors = dim <= 128 ? 4 : 32;
    return made;
  }
  const uint32_t parts = static_cast<uint32_t>(dim / per_part);
  const uint32_t lanes = std::min(32u, std::bit_ceil(parts));
  made.lanes = static_cast<int32_t>(lanes);
  made.vectors = static_cast<int32_t>(std::bit_ceil((parts + lanes - 1) / lanes));
  return made;
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the next launch would report it again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

DeviceMemory::~DeviceMemory() {
  for (char* block : blocks_) cudaFree(block);
}

char* DeviceMemory::take_bytes(size_t bytes) {
  constexpr size_t kUnit = 256, kBlock = 256 << 10;
  bytes = (bytes + kUnit - 1) / kUnit * kUnit;
  if (bytes > left_) {
    const size_t size = std::max(bytes, kBlock);
    char* block = nullptr;
    check(cudaMalloc(reinterpret_cast<void**>(&block), size), "cannot allocate the directory");
    blocks_.push_back(block);
    check(cudaMemset(block, 0, size), "cannot clear device memory");
    wait();
    next_ = block;
    left_ = size;
  }
  char* const taken = next_;
  next_ += bytes;
  left_ -= bytes;
  return taken;
}

// Fills in a context from a description, and copies what kernels need to device memory.
class Context::Builder {
 public:
  Builder(Context& context, const Description& d, const Shared& s)
      : c_(context), memory_(context.memory_), d_(d), s_(s) {}

  void build() {
    order_tables();
    const int64_t T = d_.num_tables, W = d_.world_size;
    maps_ = memory_.copy(d_.maps, 2 * d_.num_maps);
    const int64_t num_remote = std::ranges::count(s_.local, false);
    c_.shadow_headers = memory_.take<char>(num_remote * send_buffer_header_bytes(T, W));
    c_.remote_masters = memory_.take<RemoteMasters>(T * W);
    c_.optimizers = memory_.take<UpdateArgs>(T);
    c_.settings = memory_.take<uint32_t>(1);
    c_.epoch_ = memory_.take<uint32_t>(1);
    int* const flags = memory_.take<int>(2);
    for (RowClass& row_class : c_.classes)
      for (int32_t k = row_class.table_begin; k < row_class.table_end; ++k) {
        tables_.push_back(table(k));
        tables_.back().row_class = row_class.index;
        row_class.has_push |= tables_.back().has_push;
        row_class.has_pieces |= tables_.back().pieces != nullptr;
      }
    c_.num_keys = table_keys_.back();
    c_.own_rows = own_begin_.back();
    list_features();
    list_refreshes();
    list_send_buffers();
    c_.view.tables = memory_.copy(tables_);
    c_.view.table_keys = memory_.copy(table_keys_);
    c_.view.own_begin = memory_.copy(own_begin_);
    c_.view.arena_begin = reinterpret_cast<const char*>(s_.arena_begin);
    c_.view.arena_end = c_.view.arena_begin + s_.arena_bytes;
    c_.view.duplication = c_.words_->duplication;
    c_.view.num_tables = static_cast<int32_t>(T);
    c_.view.rank = d_.rank;
    c_.view.world_size = d_.world_size;
    c_.view.settings = c_.settings;
    c_.view.error = {&c_.words_->error, flags};
    c_.view.peers = {&c_.words_->peers, flags + 1};
    c_.updates_at_once = W == 1 && std::ranges::none_of(tables_, [](const Table& table) {
                           return table.has_replicas || table.pieces != nullptr;
                         });
  }

 private:
  Context& c_;
  DeviceMemory& memory_;
  const Description& d_;
  const Shared& s_;
  std::vector<int32_t> place_;  // position of each of the plan's tables in the order of keys
  std::vector<Table> tables_;
  std::vector<int64_t> table_keys_{0}, own_begin_{0};
  const int64_t* maps_;  // in device memory

  // Lists the classes of rows, and sorts the tables by class.
  void order_tables() {
    std::vector<RowClass> shapes;
    const auto dim_of = [&](int64_t t) { return static_cast<int32_t>(d_.table(t)[kDim]); };
    for (int64_t t = 0; t < d_.num_tables; ++t)
      shapes.push_back(class_of(static_cast<RowType>(d_.table(t)[kRowType]), dim_of(t)));
    const auto shape_of = [&](int32_t t) {
      return std::tuple(shapes[t].type, shapes[t].lanes, shapes[t].vectors);
    };
    c_.order.resize(shapes.size());
    place_.resize(shapes.size());
    std::iota(c_.order.begin(), c_.order.end(), 0);
    std::ranges::stable_sort(c_.order, {}, shape_of);
    for (int32_t k = 0; k < static_cast<int32_t>(c_.order.size()); ++k) {
      if (k == 0 || shape_of(c_.order[k]) != shape_of(c_.order[k - 1])) {
        c_.classes.push_back(shapes[c_.order[k]]);
        c_.classes.back().index = static_cast<int32_t>(c_.classes.size()) - 1;
        c_.classes.back().table_begin = k;
        c_.classes.back().dim = dim_of(c_.order[k]);
      }
      c_.classes.back().table_end = k + 1;
      if (c_.classes.back().dim != dim_of(c_.order[k])) c_.classes.back().dim = 0;
      place_[c_.order[k]] = k;
    }
  }

  // Table number k in the order of keys; called in this order.
  Table table(int32_t k) {
    const int64_t W = d_.world_size, t = c_.order[k];
    const int64_t* x = d_.table(t);
    const HeadMap head = d_.head_map(t);
    const std::vector<TierMap> read = d_.tier_maps(t, kReadAt, maps_);
    const std::vector<uint8_t> pushes = d_.pushes(t);
    std::vector<int32_t> pieces = d_.pieces(t);
    for (int32_t& piece : pieces) piece = place_[piece];
    Table out{};
    out.key_begin = table_keys_.back();
    table_keys_.push_back(out.key_begin + x[kNumRows]);
    own_begin_.push_back(own_begin_.back() + d_.num_slots(t, d_.rank));
    out.owner_begin = memory_.copy(d_.owners(t), W + 1);
    out.rows = reinterpret_cast<char*>(x[kRowAddress]);
    out.momentum1 = reinterpret_cast<float*>(x[kMomentum1]);
    out.momentum2 = reinterpret_cast<float*>(x[kMomentum2]);
    out.dim = static_cast<int32_t>(x[kDim]);
    out.row_columns = static_cast<int32_t>(x[kRowColumns]);
    out.mean = static_cast<int32_t>(x[kMean]);
    out.type = static_cast<RowType>(x[kRowType]);
    out.piece_start = static_cast<int32_t>(x[kFirstColumn]);
    out.head_ids = d_.head_ids(t);
    const int32_t num_tiers = static_cast<int32_t>(read.size());
    out.read = {x[kNumRows], num_tiers, memory_.copy(read), head, nullptr};
    out.home = {x[kNumRows], num_tiers, memory_.copy(d_.tier_maps(t, kHomeAt, maps_)), head,
                nullptr};
    out.pushes = memory_.copy(pushes);
    out.has_push = std::ranges::count(pushes, 1) > 0;
    out.remote_masters = c_.remote_masters + k * W;
    list_home_parts(t, out);
    std::vector<uint32_t*> touched;
    std::vector<float*> squares;
    std::vector<int64_t> num_slots;
    for (int64_t r = 0; r < W; ++r) {
      num_slots.push_back(d_.num_slots(t, r));
      const bool is_local = s_.local[r];
      touched.push_back(is_local ? reinterpret_cast<uint32_t*>(d_.touched[t * W + r]) : nullptr);
      squares.push_back(is_local ? reinterpret_cast<float*>(d_.squares[t * W + r]) : nullptr);
    }
    out.touched = memory_.copy(touched);
    if (!pieces.empty()) {
      out.squares = memory_.copy(squares);
      out.pieces = memory_.copy(pieces);
      out.num_pieces = static_cast<int32_t>(pieces.size());
    }
    c_.message_tables.push_back({out.dim, out.type, out.has_push, !pieces.empty(), num_slots});
    c_.has_push |= out.has_push;
    c_.max_dim = std::max(c_.max_dim, out.dim);
    c_.max_row_bytes = std::max(c_.max_row_bytes, bytes_of_row(out.type, out.dim));
    return out;
  }

  void list_home_parts(int64_t t, Table& out) {
    const std::vector<TierMap> tiers = d_.tier_maps(t, kHomeAt, d_.maps);
    const TableMap home{
        d_.table(t)[kNumRows], static_cast<int32_t>(tiers.size()), tiers.data(), {}, nullptr};
    std::vector<HomePart> parts;
    for (int32_t k = 0; k < home.num_tiers; ++k) {
      const HomeTier part = home_tier(home, d_.owners(t), k, d_.rank);
      if (part.slot_end == part.slot_begin) continue;
      parts.push_back({part.slot_begin, part.slot_end, part.start, part.period,
                       memory_.copy(part.offsets), static_cast<uint32_t>(part.offsets.size())});
    }
    out.home_parts = memory_.copy(parts);
    out.num_home_parts = static_cast<int32_t>(parts.size());
  }

  void list_features() {
    std::vector<Feature> features;
    std::vector<int32_t> first_piece;
    for (int64_t f = 0; f < d_.num_features; ++f) {
      const int64_t* x = d_.features + f * kFeatureWidth;
      const int32_t t = place_[x[kFeatureTable]],
                    logical = static_cast<int32_t>(x[kFeatureLogical]);
      first_piece.resize(std::max(first_piece.size(), static_cast<size_t>(logical) + 1),
                         static_cast<int32_t>(f));
      features.push_back({t, logical, x[kColumn]});
      c_.logical.push_back(logical);
      c_.output_columns = std::max(c_.output_columns, x[kColumn] + tables_[t].dim);
      c_.unpooled_columns = tables_[t].row_columns;
      c_.classes[tables_[t].row_class].features.push_back(static_cast<int32_t>(f));
    }
    for (RowClass& row_class : c_.classes)
      row_class.device_features = memory_.copy(row_class.features);
    first_piece.push_back(static_cast<int32_t>(features.size()));
    c_.view.features = memory_.copy(features);
    c_.view.first_piece = memory_.copy(first_piece);
    c_.view.num_features = static_cast<int32_t>(d_.num_features);
  }

  void list_refreshes() {
    std::vector<Refresh> refreshes;
    for (int64_t k = 0; k < d_.num_refreshes; ++k) {
      Refresh part = d_.refresh(k);
      part.table = place_[part.table];
      if (!s_.local[part.owner]) part.masters = nullptr;
      Table& table = tables_[part.table];
      if (!table.has_replicas) table.refresh_begin = static_cast<int32_t>(k);
      table.refresh_end = static_cast<int32_t>(k) + 1;
      table.has_replicas = true;
      refreshes.push_back(part);
    }
    c_.view.refreshes = memory_.copy(refreshes);
    c_.view.num_refreshes = static_cast<int32_t>(d_.num_refreshes);
  }

  void list_send_buffers() {
    std::vector<char*> send_buffers;
    std::vector<uint32_t*> pads;
    char* shadow_header = c_.shadow_headers;
    for (int64_t r = 0; r < d_.world_size; ++r) {
      send_buffers.push_back(s_.local[r] ? reinterpret_cast<char*>(d_.send_buffers[r])
                                         : shadow_header);
      if (!s_.local[r]) shadow_header += send_buffer_header_bytes(d_.num_tables, d_.world_size);
      pads.push_back(reinterpret_cast<uint32_t*>(s_.pads[r]));
    }
    c_.view.send_buffers = memory_.copy(send_buffers);
    if (std::ranges::count(s_.local, false) > 0)
      c_.view.local = memory_.copy(std::vector<uint8_t>(s_.local.begin(), s_.local.end()));
    c_.view.send_buffer_bytes = d_.send_buffer_bytes;
    c_.pads_ = memory_.copy(pads);
    int32_t least_dim = tables_.empty() ? 1 : c_.max_dim;
    for (const Table& table : tables_) least_dim = std::min(least_dim, table.dim);
    c_.receive_capacity =
        std::max<int64_t>(1, std::min({c_.own_rows, d_.send_buffer_bytes / (4 + 4 * least_dim),
                                       (int64_t{kNoEntry} - 1) / d_.world_size}));
  }
};

Context::Context(const Description& description, const Shared& shared, int64_t deadline_ms)
    : local(shared.local), deadline_ms_(deadline_ms) {
  void* words = nullptr;
  check(cudaHostAlloc(&words, sizeof(HostWords), cudaHostAllocMapped),
        "cannot allocate words of host memory");
  words_.reset(new (words) HostWords{});
  Builder(*this, description, shared).build();
}

ErrorWord Context::error() const {
  for (const ErrorWord* word : {&words_->error, &words_->peers})
    // The code is read first, since kernels write it last.
    if (__atomic_load_n(&word->code, __ATOMIC_ACQUIRE) != 0) return *word;
  return {};
}

void Context::forget_error(cudaStream_t stream) {
  for (const ErrorSink& sink : {view.error, view.peers}) {
    if (sink.word->code == 0 || sink.word->code == 2) continue;
    // Kernels write the word only if they find it unclaimed. It is claimed until it is cleared:
    // otherwise an error that is reported in between, by another stream, would be cleared as well.
    *sink.word = {};
    check(cudaMemsetAsync(sink.claimed, 0, sizeof(int), stream), "cannot forget an error");
  }
}

void Context::barrier(cudaStream_t stream) const {
  if (view.world_size > 1)
    arrive_and_wait(pads_, epoch_, view.rank, view.world_size, deadline_ms_, view.error, stream);
}

void Context::mark_changes(bool on, cudaStream_t stream) {
  const int64_t num_words = own_rows / 32 + view.num_tables + 1;
  if (on && changed_ == nullptr) changed_ = memory_.take<uint32_t>(num_words);
  view.changed = on ? changed_ : nullptr;
  if (on) check(cudaMemsetAsync(changed_, 0, 4 * num_words, stream), "cannot clear marks of rows");
}

std::vector<uint32_t> Context::take_changes(int64_t table, cudaStream_t stream) {
  std::vector<uint32_t> slots;
  if (view.changed == nullptr) return slots;
  int64_t t = 0, own_begin = 0;
  for (; order[t] != table; ++t) own_begin += message_tables[t].num_slots[view.rank];
  std::vector<uint32_t> words((message_tables[t].num_slots[view.rank] + 31) / 32);
  uint32_t* const from = view.changed + own_begin / 32 + t;
  const char* what = "cannot take the marks of rows";
  check(cudaMemcpyAsync(words.data(), from, 4 * words.size(), cudaMemcpyDeviceToHost, stream), what);
  check(cudaMemsetAsync(from, 0, 4 * words.size(), stream), what);
  check(cudaStreamSynchronize(stream), what);
  for (size_t k = 0; k < words.size(); ++k)
    for (uint32_t word = words[k]; word != 0; word &= word - 1)
      slots.push_back(static_cast<uint32_t>(32 * k + std::countr_zero(word)));
  return slots;
}

Workspace lay_out(const Context& context, const Batch& batch, void* block) {
  const View& view = context.view;
  const int64_t P = batch.max_pairs, T = view.num_tables, W = view.world_size,
                F = view.num_features;
  const bool wide = static_cast<uint64_t>(context.num_keys) + 1 >= 1ull << 32;
  BumpAllocator memory(block);
  Workspace w{};
  const auto take_pairs = [&](SortedPairs& pairs, bool are_wide) {
    for (Keys* keys : {&pairs.keys, &pairs.spare_keys})
      *keys = {memory.take<char>(P * (are_wide ? 8 : 4)), are_wide};
    pairs.payloads = memory.take<uint32_t>(P);
    pairs.spare_payloads = memory.take<uint32_t>(P);
    pairs.run_begin = memory.take<uint32_t>(P + 1);
    pairs.num_runs = memory.take<int64_t>(1);
    pairs.sort_scratch = w.plan.sort_scratch;
    pairs.sort_scratch_bytes = w.plan.sort_scratch_bytes;
  };
  w.plan.sort_scratch_bytes = sort_scratch_bytes(std::max<int64_t>(P, 1));
  w.plan.sort_scratch = memory.take<char>(w.plan.sort_scratch_bytes);
  take_pairs(w.plan, wide);
  w.plan.feature_begin = memory.take<int64_t>(F + 1);
  w.plan.output_begin = memory.take<int64_t>(F);
  w.plan.tile_begin = memory.take<int32_t>(F + 1);
  w.plan.pair_bags = memory.take<uint32_t>(batch.by_pair ? P : 0);
  w.plan.places = memory.take<uint32_t>(batch.by_pair ? P : 0);
  w.plan.staged = memory.take<unsigned long long>(1);
  w.plan.pair_weights = memory.take<float>(batch.weights ? P : 0);
  w.plan.segments = memory.take<uint32_t>(T * W + 1);
  w.plan.refused = memory.take<uint32_t>(1);
  w.plan.bag_bits = bits_for(static_cast<uint64_t>(std::max<int64_t>(batch.batch_size, 1)));
  LongRuns& runs = w.long_runs;
  runs.max_chunks = most_chunks(P);
  runs.max_partials = most_partials(P);
  runs.stride = (context.max_dim + 3) / 4 * 4;
  runs.chunks = memory.take<Chunk>(runs.max_chunks);
  runs.runs = memory.take<uint32_t>(runs.max_partials);
  runs.first = memory.take<uint32_t>(runs.max_partials);
  runs.partials = memory.take<float>(runs.max_partials * runs.stride);
  runs.counts = memory.take<uint32_t>(3);
  if (context.has_push) {
    take_pairs(w.push, true);
    w.push.slots = memory.take<uint32_t>(P);
  }
  w.bytes = memory.used();
  return w;
}

ReceiveLists lay_out_receive_lists(const Context& context, void* block) {
  const int64_t W = context.view.world_size, capacity = context.receive_capacity;
  BumpAllocator memory(block);
  ReceiveLists lists{};
  lists.capacity = capacity;
  lists.list_begin = memory.take<int64_t>(W * (context.view.num_tables + 1));
  lists.rows = memory.take<uint32_t>(W * capacity);
  lists.next = memory.take<uint32_t>(W * capacity);
  lists.heads = memory.take<uint32_t>(context.own_rows);
  lists.bytes = memory.used();
  return lists;
}

void clear_receive_lists(const Context& context, const ReceiveLists& lists, cudaStream_t stream) {
  check(cudaMemsetAsync(lists.heads, 0xff, static_cast<size_t>(4 * context.own_rows), stream),
        "cannot clear device memory");
}

}  // namespace oper::device
