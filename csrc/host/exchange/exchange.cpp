// Exchanges one phase with ranks of other memory domains: headers, then the arrays whose lengths
// they contain.
#include "host/exchange/exchange.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "host/kernels/kernels.h"
#include "host/memory.h"
#include "host/tasks.h"

namespace oper::host {

namespace {

Messages::Setup with_tables(Messages::Setup setup, const Context& context) {
  setup.rank = context.rank;
  for (const Table& table : context.tables) {
    std::vector<int64_t> num_slots;
    for (int32_t r = 0; r < context.world_size; ++r)
      num_slots.push_back(table.owner_begin[r + 1] - table.owner_begin[r]);
    setup.tables.push_back({table.dim, table.row_type, table.is_pushed, !table.pieces.empty(),
                            std::move(num_slots)});
  }
  return setup;
}

bool are_below(const char* slots, int64_t n, int64_t end) {
  const auto* slot = reinterpret_cast<const uint32_t*>(slots);
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, slot[i]);
  return n == 0 || largest < end;
}

}  // namespace

Exchange::Exchange(Context& context, ExchangeSetup wanted)
    : setup(std::move(wanted)), messages(with_tables(setup.messages, context)), context_(context) {
  const int32_t W = context.world_size;
  const int64_t T = static_cast<int64_t>(context.tables.size());
  shadow_headers_.resize(static_cast<size_t>(W));
  remote_rows_.resize(static_cast<size_t>(T));
  splits_.resize(static_cast<size_t>(T));
  pairs_.resize(static_cast<size_t>(W * T));
  totals_.resize(static_cast<size_t>(T));
  for (Kept& kept : kept_) {
    kept.asked.resize(static_cast<size_t>(W * T));
    kept.asked_by.resize(static_cast<size_t>(W * T));
  }
  for (int32_t r : messages.remote) {
    shadow_headers_[r].resize(static_cast<size_t>(context.header_bytes()));
    context.send_buffer[r] = shadow_headers_[r].data();
  }
  for (int64_t t = 0; t < T; ++t) {
    Table& table = context.tables[t];
    table.packed_masters.assign(static_cast<size_t>(W), nullptr);
    for (int32_t r : messages.remote) {
      table.touched[r] = const_cast<uint32_t*>(nothing_);
      table.packed_masters[r] = reinterpret_cast<const char*>(nothing_);
      if (table.pieces.empty()) continue;
      // Reserves address space; pages are allocated only where squares of a slot are received.
      const size_t bytes =
          static_cast<size_t>(2 * num_slots(table, r) + 1) * 4;  // two rounds of squares at most
      void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data == MAP_FAILED) throw std::bad_alloc();
      std::unique_ptr<void, Unmap> mapped(data, {bytes});
      mapped_.push_back(std::move(mapped));
      table.squares[r] = static_cast<float*>(data);
    }
    bool is_remote = false, pulls_remote = false;
    for (int32_t k = 0; k < table.read.num_tiers; ++k)
      for (int64_t o = 0; o < table.read.tiers[k].period; ++o) {
        is_remote |= table.read.tiers[k].base[o] < 0;
        pulls_remote |= table.read.tiers[k].base[o] < 0 && !table.pushes[k];
      }
    is_remote_.push_back(is_remote);
    pulls_remote_.push_back(pulls_remote);
    if (is_remote) remote_tables_.push_back(static_cast<int32_t>(t));
  }
}

void Exchange::Unmap::operator()(void* data) const { munmap(data, bytes); }

int64_t Exchange::transfer(CollectivePhase phase, const void* send, const int64_t* send_bytes,
                           void* recv, const int64_t* recv_bytes) {
  const int64_t begin_ns = PhaseTimes::now_ns();
  const int64_t error =
      setup.transport(static_cast<int64_t>(phase), send, send_bytes, recv, recv_bytes);
  int64_t sent = 0;
  for (int32_t r : messages.remote) sent += send_bytes[r];
  context_.times.note(kExchange, begin_ns, PhaseTimes::now_ns(), sent);
  return error;
}

void Exchange::fail(Status status) {
  // A full send buffer, an id or settings are errors of this batch. Later batches fail because this
  // rank has aborted.
  const bool is_of_batch = status.code == 3 || status.code == 4 || status.code == 15;
  failed_ = is_of_batch ? Status{6, context_.rank} : status;
  if (context_.barrier) context_.barrier->abort();
  throw status;
}

void Exchange::exchange_payload(CollectivePhase phase, bool is_reply) {
  const Messages::List& list = messages.list(is_reply);
  const std::vector<Part>& parts = list.parts;
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  char* send = (phase == CollectivePhase::kRequests ? kept(kAsBefore).sent : send_).get(list.sent);
  run_tasks(context_, num_parts, list.sent < kSmallBytes, [&](int64_t k, Scratch&) {
    const Part& x = parts[k];
    if (x.out == 0) return;
    const Source from = source(phase, is_reply, x.rank, x.table, x.index);
    if (x.shape.content == Messages::kRuns) {
      pack_runs(send + x.out_at, static_cast<const uint32_t*>(from.data), x.out);
    } else if (x.shape.content == Messages::kReceiverSlots) {
      pack_slots(send + x.out_at, static_cast<const uint32_t*>(from.data), x.out, x.shape.bits);
    } else {
      const Draws draws = draws_of(x, from.names);
      pack(send + x.out_at, static_cast<const char*>(from.data), from.rows,
           {x.out, x.shape.unit, x.shape.bits, from.names ? &draws : nullptr});
    }
  });
  if (phase == CollectivePhase::kRequests) keep_requests(parts, send);
  char *to, *raw;
  try {
    ReceiveBuffers& buffers = phase == CollectivePhase::kRequests
                                  ? kept(kAsBefore).received
                                  : receive_buffers_[is_reply ? kInRows : static_cast<int>(phase)];
    to = buffers.unpacked.get(list.expanded);
    raw = buffers.message.get(list.received);
  } catch (const std::bad_alloc&) {
    const auto most = std::max_element(list.recv_bytes.begin(), list.recv_bytes.end());
    fail({11, most - list.recv_bytes.begin()});
  }
  if (transfer(phase, send, list.send_bytes.data(), raw, list.recv_bytes.data()) != 0)
    fail({7, -1});
  run_tasks(context_, num_parts, list.expanded < kSmallBytes, [&](int64_t k, Scratch&) {
    const Part& x = parts[k];
    if (x.in == 0 || x.shape.is_plain()) return;
    uint32_t* numbers = reinterpret_cast<uint32_t*>(to + x.expanded_at);
    if (x.shape.content == Messages::kRuns) {
      unpack_runs(numbers, raw + x.in_at, x.in);
    } else if (x.shape.content == Messages::kReceiverSlots) {
      unpack_slots(numbers, raw + x.in_at, x.in, x.shape.bits);
    } else {
      unpack(to + x.expanded_at, raw + x.in_at, {x.in, x.shape.unit, x.shape.bits});
    }
  });
  const char* arrays[Messages::Shapes::kMost];
  for (const Part& x : parts) {
    const bool is_absent = x.in == 0 && x.shape.content == Messages::kWeights;
    arrays[x.index] = is_absent            ? nullptr
                      : x.shape.is_plain() ? raw + x.in_at
                                           : to + x.expanded_at;
    if (x.shape.content == Messages::kReceiverSlots &&
        !are_below(arrays[x.index], x.in, messages.limit(x)))
      fail({9, x.rank});
    if (!x.is_last) continue;
    if (!lists_fit(phase, is_reply, x.rank, x.table, arrays)) fail({9, x.rank});
    deliver(phase, is_reply, x.rank, x.table, arrays);
  }
}

// How a part's gradients are rounded at random: with numbers that differ by sender, receiver, slot
// or bag, column and step.
Draws Exchange::draws_of(const Part& part, const uint32_t* names) const {
  const Table& table = context_.tables[part.table];
  const uint32_t from = static_cast<uint32_t>(context_.rank), to = static_cast<uint32_t>(part.rank);
  // With more than 2^15 ranks, some pairs of ranks get the same numbers.
  const uint32_t pair = (from & 0x7fff) << 15 | (to & 0x7fff);
  const uint32_t is_bag = part.shape.kind == kSentBagGradients;
  return {table.rounding, kRoundingMessages | is_bag << 30 | pair,
          static_cast<uint32_t>(table.first_column), names};
}

// Records where the requests just sent are stored, for `is_as_before`.
void Exchange::keep_requests(const std::vector<Part>& parts, const char* send) {
  for (const Part& x : parts) {
    Requested& asked = kept(kAsBefore).asked[cell(x.rank, x.table)];
    if (x.index == 0) asked = {send + x.out_at, nullptr, nullptr, x.out, x.shape.bits};
    if (x.index == 1) asked.bags = send + x.out_at;
    if (x.index == 2 && x.out > 0) asked.weights = send + x.out_at;
  }
}

void Exchange::synchronize(CollectivePhase phase, const Batch& batch, Status mine) {
  raise(failed_);
  if (phase == CollectivePhase::kRefreshes && !setup.refreshes) {
    if (mine.code != 0) fail(mine);
    return;
  }
  const bool weighted = batch.weights != nullptr;
  messages.begin(phase);
  if (mine.code == 0 && phase == CollectivePhase::kSquares) list_squares();
  if (mine.code == 0) count(phase, weighted);
  const Status status = messages.exchange_headers(
      weighted, mine, [&](auto... arguments) { return transfer(phase, arguments...); });
  if (status.code != 0) fail(status);
  exchange_payload(phase, false);
  if (phase == CollectivePhase::kSquares) {
    add_up_squares();
    exchange_payload(phase, true);
  }
  if (phase == CollectivePhase::kGradients) messages.pass_back();
}

}  // namespace oper::host
