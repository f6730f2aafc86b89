// One meeting with ranks of other memory domains: headers, then what they announce.
#include "host/exchange/exchange.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <numeric>

#include "host/kernels/kernels.h"
#include "host/memory.h"
#include "host/tasks.h"

namespace oper::host {

Exchange::Exchange(Context& context, ExchangeSetup setup)
    : context_(context), setup_(std::move(setup)) {
  const int32_t W = context.world_size;
  const int64_t T = static_cast<int64_t>(context.tables.size());
  head_width_ = (kHeadWidth + T * kCounts + kHeadUnit - 1) / kHeadUnit * kHeadUnit;
  heads_out_.resize(static_cast<size_t>(W * head_width_));
  heads_in_.resize(heads_out_.size());
  sent_bytes.resize(static_cast<size_t>(kNumSent * W));
  mirrors_.resize(static_cast<size_t>(W));
  far_rows_.resize(static_cast<size_t>(T));
  splits_.resize(static_cast<size_t>(T));
  bags_.resize(static_cast<size_t>(W * T));
  for (Kept& kept : kept_) {
    kept.asked.resize(static_cast<size_t>(W * T));
    kept.asked_by.resize(static_cast<size_t>(W * T));
  }
  listed_.resize(static_cast<size_t>(W * T));
  asked_slots_.resize(static_cast<size_t>(W * T));
  num_asked_slots_.resize(static_cast<size_t>(W * T));
  gathered_.resize(static_cast<size_t>(W * T));
  for (int32_t r = 0; r < W; ++r) {
    if (setup_.near[r]) continue;
    far_.push_back(r);
    mirrors_[r].resize(static_cast<size_t>(context.header_bytes()));
    context.outbox[r] = mirrors_[r].data();
  }
  for (int64_t t = 0; t < T; ++t) {
    Table& table = context.tables[t];
    table.packed_masters.assign(static_cast<size_t>(W), nullptr);
    for (int32_t r : far_) {
      table.touched[r] = const_cast<uint32_t*>(nothing_);
      table.packed_masters[r] = reinterpret_cast<const char*>(nothing_);
      if (table.pieces.empty()) continue;
      // Address space; only pages of slots that are touched are ever taken.
      const size_t bytes =
          static_cast<size_t>(2 * num_slots(table, r) + 1) * 4;  // two rounds of squares at most
      void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data == MAP_FAILED) throw std::bad_alloc();
      mapped_.emplace_back(data, bytes);
      table.squares[r] = static_cast<float*>(data);
    }
    bool is_far = false, pulls_far = false;
    for (int32_t k = 0; k < table.read.num_tiers; ++k)
      for (int64_t o = 0; o < table.read.tiers[k].period; ++o) {
        is_far |= table.read.tiers[k].base[o] < 0;
        pulls_far |= table.read.tiers[k].base[o] < 0 && !table.pushes[k];
      }
    is_far_.push_back(is_far);
    pulls_far_.push_back(pulls_far);
    if (is_far) far_tables_.push_back(static_cast<int32_t>(t));
  }
}

Exchange::~Exchange() {
  for (const auto& [data, bytes] : mapped_) munmap(data, bytes);
}

int64_t Exchange::total_sent() const {
  return std::accumulate(sent_bytes.begin(), sent_bytes.end(), int64_t{0});
}

int64_t Exchange::transfer(Meeting what, const void* send, const std::vector<int64_t>& send_bytes,
                           void* recv, const std::vector<int64_t>& recv_bytes) {
  const int64_t begin_ns = PhaseTimes::now_ns();
  ++num_exchanges;
  const int64_t error = setup_.transport(static_cast<int64_t>(what), send, send_bytes.data(), recv,
                                         recv_bytes.data());
  int64_t sent = 0;
  for (int32_t r : far_) sent += send_bytes[r];
  context_.times.note(kExchange, begin_ns, PhaseTimes::now_ns(), sent);
  return error;
}

Status Exchange::failed(Status status) {
  failed_ = status;
  if (context_.barrier) context_.barrier->give_up();
  return status;
}

namespace {
int64_t aligned(int64_t bytes) { return (bytes + 3) / 4 * 4; }
}  // namespace

int64_t Exchange::wire_bytes(const Shape& shape, int64_t n) {
  return shape.is_runs ? runs_bytes(n) : aligned(n * entry_bytes(shape.bits, shape.unit));
}

Status Exchange::exchange_heads(Meeting what, bool weighted, Status mine) {
  const int32_t W = context_.world_size;
  ++sequence_;
  for (int32_t r = 0; r < W; ++r) {
    uint32_t* head = heads_out_.data() + r * head_width_;
    head[kPhase] = static_cast<uint32_t>(what);
    head[kSequence] = sequence_;
    head[kCode] = static_cast<uint32_t>(mine.code);
    head[kCulprit] = static_cast<uint32_t>(mine.detail);
    head[kWeighted] = weighted;
    head[kWire] = wire();
    head[kCollection] = setup_.collection;
  }
  const std::vector<int64_t> bytes(static_cast<size_t>(W), head_width_ * 4);
  if (transfer(what, heads_out_.data(), bytes, heads_in_.data(), bytes) != 0)
    return failed({7, -1});
  for (int32_t r : far_) sent_bytes[static_cast<size_t>(kSentHeaders * W + r)] += head_width_ * 4;
  if (mine.code != 0) return failed(mine);
  Status found;
  for (int32_t r = W - 1; r >= 0; --r) {
    const uint32_t* head = heads_in_.data() + r * head_width_;
    if (head[kCode] == 0) continue;
    const bool by_another = (head[kCode] == 1 || head[kCode] == 2 || head[kCode] == 6) &&
                            head[kCulprit] < static_cast<uint32_t>(W);
    found = {by_another ? static_cast<int64_t>(head[kCode]) : 6,
             by_another ? static_cast<int32_t>(head[kCulprit]) : r};
    if (!by_another) break;  // the one that all the others speak of
  }
  if (found.code != 0) return failed(found);
  for (int32_t r = 0; r < W; ++r) {
    const uint32_t* head = heads_in_.data() + r * head_width_;
    if (head[kPhase] != static_cast<uint32_t>(what) || head[kSequence] != sequence_ ||
        head[kCollection] != setup_.collection || head[kWire] != wire())
      return failed({8, r});
  }
  for (int32_t r : far_)
    for (int64_t t = 0; t < static_cast<int64_t>(context_.tables.size()); ++t)
      if (!counts_fit(what, r, t)) return failed({9, r});
  return {};
}

std::vector<int64_t> Exchange::meetings() const {
  std::vector<int64_t> found;
  for (int32_t r = 0; r < context_.world_size; ++r) {
    const uint32_t* head = heads_in_.data() + r * head_width_;
    found.insert(found.end(), {head[kSequence], head[kPhase], head[kCollection]});
  }
  return found;
}

template <class Body>
void Exchange::each_part(Meeting what, bool is_reply, bool weighted, Body body) {
  const int64_t T = static_cast<int64_t>(context_.tables.size());
  for (int32_t r : far_)
    for (int64_t t = 0; t < T; ++t) {
      // A reply has the counts of the request, in the other direction.
      const uint32_t* to = is_reply ? counts_from(r, t) : counts_to(r, t);
      const uint32_t* from = is_reply ? counts_to(r, t) : counts_from(r, t);
      const Shapes shapes = shapes_of(what, is_reply, context_.tables[t]);
      for (int k = 0; k < shapes.n; ++k) {
        const Shape& shape = shapes.list[k];
        const auto number = [&](const uint32_t* counts, bool has_weights) -> int64_t {
          const uint32_t n = counts[shape.count];
          return is_before(n) || (shape.is_weight && !has_weights) ? 0 : n;
        };
        const int64_t out = number(to, weighted), in = number(from, weighted_from(r));
        body(r, t, k, shape, out > 0 ? out + shape.extra : 0, in > 0 ? in + shape.extra : 0);
      }
    }
}

Status Exchange::exchange_payload(Meeting what, bool is_reply, bool weighted,
                                  ParallelFor parallel) {
  const int32_t W = context_.world_size;
  std::vector<int64_t> send_bytes(static_cast<size_t>(W)), recv_bytes(send_bytes);
  int64_t sent = 0, received = 0, expanded = 0;
  bool is_raw = true;  // all that comes is used as it is
  parts_.clear();
  each_part(what, is_reply, weighted, [&](int32_t r, int64_t t, int k, const Shape& shape,
                                          int64_t out, int64_t in) {
    const int64_t to = wire_bytes(shape, out), from = wire_bytes(shape, in);
    parts_.push_back({shape, r, t, k, out, in, sent, received, expanded});
    sent += to;
    send_bytes[r] += to;
    sent_bytes[static_cast<size_t>(shape.kind * W + r)] += to;
    received += from;
    recv_bytes[r] += from;
    expanded += aligned(in * shape.unit);
    is_raw &= in == 0 || (shape.bits == 32 && !shape.is_runs);
  });
  const int64_t num_parts = static_cast<int64_t>(parts_.size());
  char* send = (what == Meeting::kRequests ? kept(kAsBefore).sent : send_).get(sent);
  run_tasks(context_, num_parts, sent < kSmallBytes, parallel, [&](int64_t k, Scratch&) {
    const Part& x = parts_[static_cast<size_t>(k)];
    if (x.out == 0) return;
    const Source from = source(what, is_reply, x.rank, x.table, x.index);
    if (x.shape.is_runs) {
      pack_runs(send + x.out_at, reinterpret_cast<const uint32_t*>(from.data), x.out);
    } else {
      const Draws draws = draws_of(x, from.names);
      pack(send + x.out_at, from.data, from.rows,
           {x.out, x.shape.unit, x.shape.bits, from.names ? &draws : nullptr});
    }
  });
  if (what == Meeting::kRequests) keep_requests(send);
  char *to, *raw;
  try {
    Buffer& inbox = what == Meeting::kRequests ? kept(kAsBefore).received
                                               : inbox_[is_reply ? kInRows : static_cast<int>(what)];
    to = inbox.get(expanded);
    raw = is_raw ? to : received_.get(received);
  } catch (const std::bad_alloc&) {
    const auto most = std::max_element(recv_bytes.begin(), recv_bytes.end());
    return failed({11, most - recv_bytes.begin()});
  }
  if (transfer(what, send, send_bytes, raw, recv_bytes) != 0) return failed({7, -1});
  if (raw != to)
    run_tasks(context_, num_parts, expanded < kSmallBytes, parallel, [&](int64_t k, Scratch&) {
      const Part& x = parts_[static_cast<size_t>(k)];
      if (x.shape.is_runs) {
        unpack_runs(reinterpret_cast<uint32_t*>(to + x.expanded_at), raw + x.in_at, x.in);
      } else {
        unpack(to + x.expanded_at, raw + x.in_at, {x.in, x.shape.unit, x.shape.bits});
      }
    });
  const char* arrays[Shapes::kMost];
  for (const Part& x : parts_) {
    arrays[x.index] = to + x.expanded_at;
    const bool present = x.in > 0;
    if (!present && x.shape.is_weight) arrays[x.index] = nullptr;
    const bool is_last =
        x.index + 1 == shapes_of(what, is_reply, context_.tables[x.table]).n;
    if (!is_last) continue;
    if (!slots_fit(what, is_reply, x.rank, x.table, arrays)) return failed({9, x.rank});
    deliver(what, is_reply, x.rank, x.table, arrays);
  }
  return {};
}

// Rounding of gradients: their sender and receiver, slot or bag, columns and step make a draw of its own.
Draws Exchange::draws_of(const Part& part, const uint32_t* names) const {
  const Table& table = context_.tables[part.table];
  const uint32_t from = static_cast<uint32_t>(context_.rank), to = static_cast<uint32_t>(part.rank);
  // Beyond 2^15 ranks some draw alike.
  const uint32_t pair = (from & 0x7fff) << 15 | (to & 0x7fff);
  const uint32_t is_bag = part.shape.kind == kSentBagGradients;
  return {table.rounding, kRoundingMessages | is_bag << 30 | pair,
          static_cast<uint32_t>(table.first_column), names};
}

// What was just sent stays where it is until the next requests.
void Exchange::keep_requests(const char* send) {
  for (const Part& x : parts_) {
    Requested& asked = kept(kAsBefore).asked[cell(x.rank, x.table)];
    if (x.index == 0) asked = {send + x.out_at, nullptr, nullptr, x.out};
    if (x.index == 1) asked.bags = send + x.out_at;
    if (x.index == 2 && x.out > 0) asked.weights = send + x.out_at;
  }
}

void Exchange::rotate() {
  if (!kept(kAsBefore).has_passed_back) newest_ = (newest_ + 1) % kKept;
  kept(kAsBefore).has_passed_back = false;
}

void Exchange::pass_back() {
  for (uint32_t count = kAsBefore - kKept + 1;; ++count) {
    if (!kept(count).has_passed_back) {
      kept(count).has_passed_back = true;
      return;
    }
    if (count == kAsBefore) return;
  }
}

Status Exchange::meet(Meeting what, const Batch& batch, ParallelFor parallel, Status mine) {
  if (failed_.code != 0) return failed_;
  if (what == Meeting::kRefreshes && !setup_.refreshes) return mine.code ? failed(mine) : mine;
  const bool weighted = batch.weights != nullptr;
  if (what == Meeting::kRequests) rotate();
  if (mine.code == 0) count(what, weighted, parallel);
  Status status = exchange_heads(what, weighted, mine);
  if (status.code == 0) status = exchange_payload(what, false, weighted, parallel);
  if (what == Meeting::kGradients) pass_back();
  round_ = what == Meeting::kSquares ? round_ + 1 : 0;
  return status;
}

}  // namespace oper::host
