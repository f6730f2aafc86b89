// torch operators by which tables in device memory exchange with other memory domains: heads, and what
// packs and places the arrays of a phase. Python moves the bytes, see oper/shmem/exchange/device.py.
#include <algorithm>
#include <tuple>

#include "bindings/device.h"
#include "common/operators.h"

namespace oper::device {
namespace {

constexpr int64_t kAlignment = 16;  // what kernels load at once

Messages& messages_of(const Tables& tables) {
  STD_TORCH_CHECK(tables.messages != nullptr, "internal: there are no other memory domains");
  return *tables.messages;
}

// `bits`: of answers and of gradients.
void device_context_set_exchange(int64_t handle, std::vector<int64_t> domain,
                                 std::vector<int64_t> bits, int64_t collection) {
  const auto tables = tables_of(handle);
  const View& view = tables->context->view();
  std::vector<bool> near(static_cast<size_t>(view.world_size));
  for (int64_t r : domain) near[static_cast<size_t>(r)] = true;
  tables->messages = std::make_unique<Messages>(Messages::Setup{
      view.rank, std::move(near), tables->context->message_tables(),
      static_cast<int32_t>(bits.at(0)), static_cast<int32_t>(bits.at(1)),
      static_cast<uint32_t>(collection), kAlignment});
}

// Begins a phase: tells all ranks `counts`, int64 [W, T, kCounts], and this rank's error, if any.
// Returns theirs for this rank, and a Status. `transport`: address of a function, see Transport.
std::tuple<Tensor, int64_t, int64_t> device_exchange_heads(int64_t handle, int64_t phase,
                                                           bool weighted, int64_t code,
                                                           int64_t culprit, Tensor counts,
                                                           int64_t transport) {
  const auto tables = tables_of(handle);
  Messages& messages = messages_of(*tables);
  messages.begin(static_cast<CollectivePhase>(phase));
  const int64_t width = counts.size(1) * counts.size(2);  // of one rank
  Tensor theirs = torch::stable::new_empty(
      counts, {counts.size(0), counts.size(1), counts.size(2)}, ScalarType::Long);
  int64_t* in = static_cast<int64_t*>(theirs.data_ptr());
  std::fill(in, in + theirs.numel(), 0);
  for (int32_t r : messages.far) {
    const int64_t* out = int64_data(counts) + r * width;
    std::copy(out, out + width, messages.counts_to(r, 0));
  }
  const auto move = reinterpret_cast<Transport>(transport);
  const Status status = messages.exchange_heads(
      weighted, {code, culprit}, [&](auto... arguments) { return move(phase, arguments...); });
  if (status.code == 0)
    for (int32_t r : messages.far)
      std::copy(messages.counts_from(r, 0), messages.counts_from(r, 0) + width, in + r * width);
  return {theirs, status.code, status.detail};
}

// The table of a kernel that packs arrays, or places them.
class PartTable {
 public:
  // `rows`: address of the numbers of entries, or 0; `limit`: below which these are, or slots that are
  // placed.
  void add(const Messages::Part& part, int64_t n, int64_t memory, int64_t rows, int64_t wire,
           int64_t limit, bool packs) {
    using Parts = WireParts;
    const Messages::Shape& shape = part.shape;
    const bool is_runs = shape.content == Messages::kRuns;
    const bool is_slots = !packs && (shape.content == Messages::kReceiverSlots ||
                                     shape.content == Messages::kSenderSlots);
    const int64_t number = shape.unit % 4 == 0 ? 4 : 2, per_entry = shape.unit / number;
    const Parts::Kind kind = shape.bits == 16 ? Parts::kRounded
                             : is_slots       ? Parts::kSlots
                             : number == 2    ? Parts::kHalves
                                              : Parts::kWords;
    words_.insert(words_.end(), {num_numbers_, memory, rows, wire, per_entry, kind, limit});
    num_numbers_ += is_runs ? runs_bytes(n) / 4 : n * per_entry;
  }
  void move(const Tables& tables, bool packs) const {
    if (words_.empty()) return;
    const int64_t count = static_cast<int64_t>(words_.size());
    const cudaStream_t stream = stream_of(*tables.like);
    const Tensor parts = tables.empty(count, ScalarType::Long);
    // Pageable memory, which the driver has read when the call returns.
    check(cudaMemcpyAsync(parts.data_ptr(), words_.data(), words_.size() * 8,
                          cudaMemcpyHostToDevice, stream),
          "cannot copy what a message is made of");
    move_parts(tables.context->view(),
               {int64_data(parts), count / WireParts::kWidth, num_numbers_}, packs, stream);
  }

 private:
  std::vector<int64_t> words_;
  int64_t num_numbers_ = 0;
};

// An address for a part, of those by array, rank and table, int64 [arrays, W, T].
int64_t& at(const Tensor& addresses, const Messages::Part& x) {
  STD_TORCH_CHECK(x.index < addresses.size(0), "internal: no address for part of a message");
  return static_cast<int64_t*>(addresses.data_ptr())[
      (x.index * addresses.size(1) + x.rank) * addresses.size(2) + x.table];
}

// Packs the arrays of the phase under way, or those that answer it. `sources`, `rows`: addresses of the
// arrays and of the numbers of their entries, uint32, or 0; see `at`. Returns the message, memory for
// those of the others (both uint8), and the bytes to and from each rank, int64 [W] each.
std::vector<Tensor> device_exchange_pack(int64_t handle, bool is_reply, Tensor sources,
                                         Tensor rows) {
  const auto tables = tables_of(handle);
  const OnDevice on(*tables);
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

// Places what has come in return for the last `device_exchange_pack`. `targets`: where arrays go, see
// `at`, or 0: side by side in new memory; sums of squares go by the slots in front of them. Returns that
// memory (uint8); in the place of the targets is where each array is, 0: weights that are not there.
Tensor device_exchange_place(int64_t handle, Tensor received, Tensor targets) {
  const auto tables = tables_of(handle);
  const OnDevice on(*tables);
  const Messages& messages = messages_of(*tables);
  const Messages::List& list = messages.last();
  const Tensor memory = tables->empty(list.expanded, ScalarType::Byte);
  const int64_t begin = reinterpret_cast<int64_t>(memory.data_ptr());
  const int64_t raw = reinterpret_cast<int64_t>(received.data_ptr());
  PartTable table;
  int64_t before = 0;  // where the array in front is in the message
  for (const Messages::Part& x : list.parts) {
    const int64_t wire = raw + x.in_at;
    if (x.in > 0 || x.index < targets.size(0)) {
      int64_t& place = at(targets, x);
      const bool is_put = x.shape.kind == kSentSquares && x.index == 1;
      if (place == 0) place = begin + x.expanded_at;
      if (x.in == 0 && x.shape.content == Messages::kWeights) place = 0;
      if (x.in > 0)
        table.add(x, x.in, place, is_put ? before : 0, wire,
                  messages.limit(x, is_put ? Messages::kSenderSlots : x.shape.content), false);
    }
    before = wire;
  }
  table.move(*tables, false);
  return memory;
}

// As the operators of tables in host memory.
std::vector<int64_t> device_exchange_sent_bytes(int64_t handle, bool reset) {
  const auto tables = tables_of(handle);
  return reset ? messages_of(*tables).take_sent() : messages_of(*tables).sent_bytes;
}
std::vector<int64_t> device_exchange_last_phases(int64_t handle) {
  return messages_of(*tables_of(handle)).last_phases();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(device_context_set_exchange,
                "(int handle, int[] domain, int[] bits, int collection) -> ()");
  OPER_OPERATOR(device_exchange_heads,
                "(int handle, int phase, bool weighted, int code, int culprit, Tensor counts, "
                "int transport) -> (Tensor, int, int)");
  OPER_OPERATOR(device_exchange_pack,
                "(int handle, bool is_reply, Tensor sources, Tensor rows) -> Tensor[]");
  OPER_OPERATOR(device_exchange_place,
                "(int handle, Tensor received, Tensor(a!) targets) -> Tensor");
  OPER_OPERATOR(device_exchange_sent_bytes, "(int handle, bool reset) -> int[]");
  OPER_OPERATOR(device_exchange_last_phases, "(int handle) -> int[]");
}

}  // namespace oper::device
