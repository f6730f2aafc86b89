// torch operators by which tables in device memory exchange data with other memory domains: they
// exchange headers, and pack and unpack the arrays of a phase. See oper/shmem/exchange/device.py.
#include <algorithm>
#include <tuple>

#include "bindings/device/tables.h"
#include "common/operators.h"

namespace oper::device {
namespace {

constexpr int64_t kAlignment = 16;  // bytes of the largest load of a kernel

Messages& messages_of(const Tables& tables) {
  STD_TORCH_CHECK(tables.messages != nullptr, "internal: there are no other memory domains");
  return *tables.messages;
}

// `bits`: see Messages::Setup, with tables in the order of keys.
void device_context_set_exchange(int64_t handle, std::vector<int64_t> bits, int64_t collection) {
  const auto tables = tables_of(handle);
  const Context& context = *tables->context;
  STD_TORCH_CHECK(bits.size() == 2 * context.message_tables.size(),
                  "internal: bits are not by table");
  tables->messages = std::make_unique<Messages>(
      Messages::Setup{context.view.rank, context.local, context.message_tables, std::move(bits),
                      static_cast<uint32_t>(collection), kAlignment, true});
}

// Begins a phase: exchanges headers with all ranks, with `counts`, int64 [W, T, kCounts], and this
// rank's error `code` (0 = none) and `culprit`. Returns the counts from all ranks, and a Status.
// `transport`: address of a function, see Transport.
std::tuple<Tensor, int64_t, int64_t> device_exchange_headers(int64_t handle, int64_t phase,
                                                             bool weighted, int64_t code,
                                                             int64_t culprit, Tensor counts,
                                                             int64_t transport) {
  const auto tables = tables_of(handle);
  Messages& messages = messages_of(*tables);
  messages.begin(static_cast<CollectivePhase>(phase));
  const int64_t width = counts.size(1) * counts.size(2);  // counts per rank
  Tensor theirs = torch::stable::new_empty(
      counts, {counts.size(0), counts.size(1), counts.size(2)}, ScalarType::Long);
  int64_t* in = static_cast<int64_t*>(theirs.data_ptr());
  std::fill(in, in + theirs.numel(), 0);
  for (int32_t r : messages.remote) {
    const int64_t* out = int64_data(counts) + r * width;
    std::copy(out, out + width, messages.counts_to(r, 0));
  }
  const auto move = reinterpret_cast<Transport>(transport);
  const Status status = messages.exchange_headers(
      weighted, {code, culprit}, [&](auto... arguments) { return move(phase, arguments...); });
  if (status.code == 0)
    for (int32_t r : messages.remote)
      std::copy(messages.counts_from(r, 0), messages.counts_from(r, 0) + width, in + r * width);
  return {theirs, status.code, status.detail};
}

// Collects WireParts, and launches the kernel that packs or unpacks them.
class PartTable {
 public:
  // Adds `n` entries of `part`. `memory`, `rows`, `wire`, `limit`: see WireParts::Column; of slots
  // that are packed, `limit` is ignored.
  void add(const Messages::Part& part, int64_t n, int64_t memory, int64_t rows, int64_t wire,
           int64_t limit, bool packs) {
    using Parts = WireParts;
    const Messages::Shape& shape = part.shape;
    const bool is_runs = shape.content == Messages::kRuns;
    const bool is_slots = shape.content == Messages::kReceiverSlots;
    const int64_t number = shape.unit % 4 == 0 ? 4 : 2;
    const int64_t per_entry = is_slots ? shape.bits : shape.unit / number;
    const Parts::Kind kind = is_slots           ? Parts::kSlots
                             : shape.bits == 16 ? Parts::kRounded
                             : number == 2      ? Parts::kHalves
                                                : Parts::kWords;
    words_.insert(words_.end(), {num_numbers_, memory, rows, wire, per_entry, kind,
                                 is_slots && packs ? n : limit});
    num_numbers_ += is_runs || (is_slots && packs) ? shape.wire_bytes(n) / 4
                    : is_slots                     ? n
                                                   : n * per_entry;
  }
  void move(const Tables& tables, bool packs) const {
    if (words_.empty()) return;
    const int64_t count = static_cast<int64_t>(words_.size());
    const cudaStream_t stream = stream_of(*tables.like);
    const Tensor parts = tables.empty(count, ScalarType::Long);
    copy_to_device(parts.data_ptr(), words_, stream, "cannot copy the parts of a message");
    move_parts(tables.context->view,
               {int64_data(parts), count / WireParts::kWidth, num_numbers_}, packs, stream);
  }

 private:
  std::vector<int64_t> words_;
  int64_t num_numbers_ = 0;
};

// The address of part number `index` of the message to or from `rank` about a table; `addresses` is
// int64 [parts, W, T].
int64_t& at(const Tensor& addresses, int index, int32_t rank, int64_t table) {
  STD_TORCH_CHECK(index < addresses.size(0), "internal: no address for part of a message");
  return static_cast<int64_t*>(
      addresses.data_ptr())[(index * addresses.size(1) + rank) * addresses.size(2) + table];
}
int64_t& at(const Tensor& addresses, const Messages::Part& x) {
  return at(addresses, x.index, x.rank, x.table);
}

// Packs the arrays of the current phase or, if `is_reply`, of its reply. `sources`, `rows` (see
// `at`): addresses of the arrays, and of the indices (uint32) of their entries or 0. Returns the
// message to send, memory for received messages (both uint8), and the bytes to and from each rank,
// int64 [W] each.
std::vector<Tensor> device_exchange_pack(int64_t handle, bool is_reply, Tensor sources,
                                         Tensor rows) {
  const OnTables tables(handle);
  const Messages::List& list = messages_of(*tables).list(is_reply);
  const Tensor message = tables->empty(list.sent, ScalarType::Byte);
  const int64_t begin = reinterpret_cast<int64_t>(message.data_ptr());
  PartTable table;
  for (const Messages::Part& x : list.parts)
    if (x.out > 0) table.add(x, x.out, at(sources, x), at(rows, x), begin + x.out_at, 0, true);
  table.move(*tables, true);
  const auto as_tensor = [&](const std::vector<int64_t>& bytes) {
    Tensor made = torch::stable::new_empty(sources, {static_cast<int64_t>(bytes.size())},
                                           ScalarType::Long);
    std::copy(bytes.begin(), bytes.end(), static_cast<int64_t*>(made.data_ptr()));
    return made;
  };
  return {message, tables->empty(list.received, ScalarType::Byte), as_tensor(list.send_bytes),
          as_tensor(list.recv_bytes)};
}

// Writes the headers by which kernels find the received gradients: for each remote rank, those of
// its send buffer, as if it had gradients for this rank only.
void fill_shadow_headers(const Tables& tables, const Tensor& places) {
  const View& view = tables.context->view;
  const Messages& messages = messages_of(tables);
  const int64_t T = view.num_tables, W = view.world_size, bytes = send_buffer_header_bytes(T, W);
  std::vector<char> shadow_headers(messages.remote.size() * static_cast<size_t>(bytes));
  for (size_t k = 0; k < messages.remote.size(); ++k) {
    const int32_t r = messages.remote[k];
    const int64_t first = static_cast<int64_t>(k) * bytes;
    const int64_t base = reinterpret_cast<int64_t>(tables.context->shadow_headers) + first;
    const int64_t rows = at(places, 1, r, 0);
    char* const buffer = shadow_headers.data() + first;
    uint32_t* const segments = reinterpret_cast<uint32_t*>(buffer + sizeof(SendBufferHeader));
    int64_t* const offsets =
        reinterpret_cast<int64_t*>(buffer + sizeof(SendBufferHeader) + segment_bytes(T, W));
    uint32_t runs = 0;
    for (int64_t t = 0; t < T; ++t) {
      const uint32_t n = messages.counts_from(r, t)[0];
      for (int32_t owner = 0; owner < W; ++owner)
        segments[t * W + owner] = runs + (owner > view.rank ? n : 0);
      offsets[t] = (at(places, 1, r, t) - rows) / 4;
      runs += n;
    }
    segments[T * W] = runs;
    // The settings have been compared when headers were exchanged.
    *reinterpret_cast<SendBufferHeader*>(buffer) = {at(places, 0, r, 0) - base, rows - base, runs,
                                                    int64_t{messages.settings}};
  }
  copy_to_device(tables.context->shadow_headers, shadow_headers, stream_of(*tables.like),
                 "cannot copy the headers of send buffers");
}

// Writes where `refresh` finds the received master copies.
void place_masters(const Tables& tables, const Tensor& places) {
  const int64_t T = tables.context->view.num_tables, W = tables.context->view.world_size;
  const Messages& messages = messages_of(tables);
  std::vector<RemoteMasters> found(static_cast<size_t>(T * W));
  for (int32_t r : messages.remote)
    for (int64_t t = 0; t < T; ++t)
      if (const uint32_t n = messages.counts_from(r, t)[0]; n > 0)  // the slots follow their number
        found[t * W + r] = {
            reinterpret_cast<const uint32_t*>(at(places, 0, r, t)) + 1,
            reinterpret_cast<const char*>(at(places, 1, r, t)), n};
  copy_to_device(tables.context->remote_masters, found, stream_of(*tables.like),
                 "cannot copy where masters are");
}

// Unpacks the arrays that were received for the last `device_exchange_pack`. `targets` (see `at`):
// the addresses where they go. Where these are 0, they go to new memory, in which the slots of
// gradients of all ranks and tables are contiguous. Returns the new memory (uint8), and writes the
// addresses to `targets`; 0 for weights that were not sent.
Tensor device_exchange_place(int64_t handle, Tensor received, Tensor targets) {
  const OnTables tables(handle);
  const Messages& messages = messages_of(*tables);
  const Messages::List& list = messages.last();
  const bool are_gradients = messages.phase() == CollectivePhase::kGradients;
  const auto is_send_buffer_slots = [&](const Messages::Part& x) {
    return are_gradients && x.index == 0;
  };
  int64_t num_slots = 0;
  for (const Messages::Part& x : list.parts) num_slots += is_send_buffer_slots(x) ? x.in : 0;
  const Tensor memory = tables->empty(list.expanded + 4 * num_slots, ScalarType::Byte);
  const int64_t begin = reinterpret_cast<int64_t>(memory.data_ptr());
  int64_t slots = begin + list.expanded;
  const int64_t raw = reinterpret_cast<int64_t>(received.data_ptr());
  PartTable table;
  for (const Messages::Part& x : list.parts) {
    const int64_t wire = raw + x.in_at;
    if (x.in > 0 || x.index < targets.size(0)) {
      int64_t& place = at(targets, x);
      if (place == 0 && is_send_buffer_slots(x)) {
        place = slots;
        slots += 4 * x.in;
      } else if (place == 0) {
        place = begin + x.expanded_at;
      }
      if (x.in == 0 && x.shape.content == Messages::kWeights) place = 0;
      if (x.in > 0) table.add(x, x.in, place, 0, wire, messages.limit(x), false);
    }
  }
  table.move(*tables, false);
  if (are_gradients) fill_shadow_headers(*tables, targets);
  if (messages.phase() == CollectivePhase::kRefreshes) place_masters(*tables, targets);
  return memory;
}

// Stores for each row i the sum of the float32 numbers at the addresses terms[first[i]] to
// terms[first[i + 1] - 1], added in this order, at the address out[i]. `out` [n], `first` [n + 1],
// `terms`: int64, on the device.
void device_add_up(int64_t handle, Tensor out, Tensor first, Tensor terms) {
  const OnTables tables(handle);
  add_up({int64_data(out), int64_data(first), int64_data(terms), out.numel()}, tables.stream());
}

// As context_sent_bytes and context_last_phases of the host back end.
std::vector<int64_t> device_exchange_sent_bytes(int64_t handle, bool reset) {
  const auto tables = tables_of(handle);
  return reset ? messages_of(*tables).take_sent() : messages_of(*tables).sent_bytes;
}
std::vector<int64_t> device_exchange_last_phases(int64_t handle) {
  return messages_of(*tables_of(handle)).last_phases();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(device_context_set_exchange, "(int handle, int[] bits, int collection) -> ()");
  OPER_OPERATOR(device_exchange_headers,
                "(int handle, int phase, bool weighted, int code, int culprit, Tensor counts, "
                "int transport) -> (Tensor, int, int)");
  OPER_OPERATOR(device_exchange_pack,
                "(int handle, bool is_reply, Tensor sources, Tensor rows) -> Tensor[]");
  OPER_OPERATOR(device_exchange_place,
                "(int handle, Tensor received, Tensor(a!) targets) -> Tensor");
  OPER_OPERATOR(device_add_up, "(int handle, Tensor out, Tensor first, Tensor terms) -> ()");
  OPER_OPERATOR(device_exchange_sent_bytes, "(int handle, bool reset) -> int[]");
  OPER_OPERATOR(device_exchange_last_phases, "(int handle) -> int[]");
}

}  // namespace oper::device
