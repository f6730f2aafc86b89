// The messages between ranks of different memory domains: their contents, their sizes, and the
// checks of received data. Shared by host and device, which pack and unpack the arrays themselves.
//
// In every phase all ranks first exchange headers of a fixed size (phase, error, counts). Then each
// pair of ranks exchanges one message with the arrays of all tables, whose lengths are the counts.
// Pulled rows are requested in phase kGather and sent as its reply. If there are pushed tiers, too,
// the host back end requests rows and partial sums in kRequests and gets both in kPartials; devices
// gather the rows before. In kSquares each owner of a row's column piece sends its sum of squares to
// the owner of the row's `summing_piece`, whose reply is the total. Both ranks know which rows have
// gradients, so that no slots are sent: sums and totals are in the order of the slots at the rank
// that sends the sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "common/elements.h"

namespace oper {

// The points of a batch where ranks synchronize. A barrier within a memory domain has further
// phases, which oper/shmem/group/desync.py lists; among them kSharing, after replicas are
// refreshed, and kKeys, in the update of dynamic tables.
enum class CollectivePhase { kGather, kRequests, kPartials, kGradients, kSquares, kRefreshes };
constexpr uint32_t kSharing = 6, kKeys = 9;

struct Status {
  //  0  ok
  //  1  a peer has ended; the detail is the peer, as for 2, 6, 12 and 13
  //  2  a peer is late
  //  3  the send buffer is full
  //  4  an id is out of range; the detail is its index in the batch
  //  6  a peer has aborted
  //  7  the transport has failed
  //  8  ranks are in different phases; the detail is a rank, as for 9, 11 and 15
  //  9  a rank of another memory domain has sent an invalid message
  // 11  there is no memory for a message
  // 12  a peer has closed its tables
  // 13  a peer has refused its batch
  // 15  ranks update with different settings
  // 5, 10 and 14 are in handles.h.
  int64_t code = 0;
  int64_t detail = -1;
};

// Throws `status` unless it is ok.
inline void raise(const Status& status) {
  if (status.code != 0) throw status;
}

// The status that `body` has thrown, or ok.
template <class Body>
Status status_of(Body body) {
  try {
    body();
    return {};
  } catch (const Status& status) {
    return status;
  }
}

// Sends segment r of `send` to rank r and receives segment r of `recv` from it. Segments are
// contiguous and in rank order; `send_bytes` and `recv_bytes` [W] are their sizes. `phase` is a
// CollectivePhase. Returns 0, or another number after an error, which the function keeps for
// Python.
using Transport = int64_t (*)(int64_t phase, const void* send, const int64_t* send_bytes,
                              void* recv, const int64_t* recv_bytes);

// Sent bytes are counted by receiver and by these kinds, in the order of SENT in
// oper/rows/traffic.py.
enum Sent {
  kSentHeaders,
  kSentRowIds,         // forward: slots of the distinct rows that are requested
  kSentRows,           // forward: those rows
  kSentIds,            // forward: ids in pushed tiers, and where their bags begin
  kSentIdWeights,      // forward: their weights
  kSentPartialSums,    // forward: partial sums, in the order of the requested bags
  kSentGradientRows,   // backward: reduced gradients, and their rows' slots
  kSentGradientIds,    // backward: ids in pushed tiers, unless they are those of the last forward pass
  kSentGradientWeights,
  kSentBagGradients,   // backward: gradients of the bags of those ids
  kSentSquares,        // backward: sums of squares of the pieces of a row, and their totals
  kSentRefreshedRows,  // backward: changed master copies, and their slots
  kNumSent
};

// Bits that each float32 number of a row takes in a message, see oper/messages.py: 32 = unchanged;
// 16 = bfloat16; 8, 4 = integer codes, which the row's step and smallest number (float32 each)
// precede. Rows with fewer than kLeastCoded columns stay float32, since codes would take more
// bytes.
constexpr int64_t kCodedRowBytes = 8, kLeastCoded = 3;
constexpr int32_t bits_of_row(int32_t wanted, int64_t columns) {
  return wanted <= 8 && columns < kLeastCoded ? 32 : wanted;
}
// Bytes that a row of `unit` bytes of float32 numbers takes in a message.
constexpr int64_t entry_bytes(int32_t bits, int64_t unit) {
  return bits <= 8 ? kCodedRowBytes + (unit / 4 * bits + 7) / 8 : unit * bits / 32;
}
// Bits of a slot in a message, for a table of `num_rows` rows; the same as `slot_bits` in
// oper/messages.py.
constexpr int32_t slot_bits(int64_t num_rows) {
  int32_t bits = 1;
  while (bits < 32 && num_rows > int64_t{1} << bits) ++bits;
  return bits;
}
// Bytes of n numbers of `bits` bits each, packed into 32-bit words from the lowest bit on.
constexpr int64_t packed_bytes(int64_t n, int32_t bits) { return (n * bits + 31) / 32 * 4; }

// Passed to `round_to` instead of random bits, it rounds to nearest, ties away from zero.
constexpr uint32_t kToNearest = 0x8000;

// One rank's side of the exchange: it determines the contents of each message. Ids are not sent
// again if a backward pass needs those of a forward pass: ranks keep the requests of the last kKept
// forward passes. There may be two without a backward pass, as a pipeline may look up a micro-batch
// before the backward pass of the one before.
class Messages {
 public:
  static constexpr int kCounts = 3;  // per peer and table; `shapes_of` lists what they count
  // Sent instead of a count: the requests equal those of the newest kept forward pass (kAsBefore)
  // or of the one before it (kAsBefore - 1).
  static constexpr uint32_t kAsBefore = UINT32_MAX, kKept = 2;
  static bool is_before(uint32_t count) { return count > kAsBefore - kKept; }

  // A table, or a column piece of one.
  struct Table {
    int64_t dim;
    RowType row_type;
    bool is_pushed;                  // at least one of its tiers is
    bool is_piece;                   // whether its table is split by columns
    std::vector<int64_t> num_slots;  // [W], rows that each rank owns
  };
  struct Setup {
    int32_t rank = 0;
    std::vector<bool> local;  // [W], ranks whose memory this rank can address
    std::vector<Table> tables;
    std::vector<int64_t> bits;  // [T, 2], see `bits_of_row`: of rows and sums; of gradients
    uint32_t collection = 0;    // number of the embedding collection, the same on all ranks
    int64_t alignment = 4;      // alignment of received arrays once they are unpacked
    bool unpacks_all = false;   // even arrays that could be read in the message
  };
  enum Content {
    kNumbers,
    kReceiverSlots,  // slots of rows that the receiver owns, `bits` bits each
    kRuns,           // bags of ids: a bit for each id, set where another bag begins
    kWeights         // present only if the sender's batch has weights
  };
  // One array of a message. In memory it has counts[count] entries of `unit` bytes each.
  struct Shape {
    Sent kind;
    int count;
    int64_t unit;
    int32_t bits = 32;  // bits of each of its numbers in the message
    Content content = kNumbers;
    int64_t extra = 0;  // entries in addition to the count, unless that is 0
    // Bytes that n entries take in the message.
    int64_t wire_bytes(int64_t n) const {
      if (content == kRuns) return packed_bytes(n, 1);
      if (content == kReceiverSlots) return packed_bytes(n, bits);
      return aligned(n * entry_bytes(bits, unit), 4);
    }
    // Whether it has the same form in the message as in memory.
    bool is_plain() const { return bits == 32 && content != kRuns; }
  };
  struct Shapes {
    static constexpr int kMost = 6;
    Shape list[kMost];
    int n = 0;
  };
  // An array that this rank and a peer send each other for one table.
  struct Part {
    Shape shape;
    int32_t rank;  // the peer
    int64_t table;
    int index;        // among the arrays of this peer and table
    bool is_last;     // whether it is the last of these arrays
    int64_t out, in;  // numbers of entries that are sent and received
    // Byte offsets in the sent message, in the received message, and among the unpacked arrays.
    int64_t out_at, in_at, expanded_at;
  };
  // All arrays of a phase, in the order of the messages.
  struct List {
    std::vector<Part> parts;
    std::vector<int64_t> send_bytes, recv_bytes;  // [W]
    int64_t sent, received, expanded;             // total bytes; `expanded`: of unpacked arrays
  };

  explicit Messages(Setup setup)
      : setup_(std::move(setup)), num_tables_(static_cast<int64_t>(setup_.tables.size())) {
    const int32_t W = world_size();
    header_width_ = aligned(kHeaderWidth + num_tables_ * kCounts, kHeaderUnit);
    headers_out_.resize(static_cast<size_t>(W * header_width_));
    headers_in_.resize(headers_out_.size());
    asked_.resize(static_cast<size_t>(W * num_tables_));
    for (std::vector<uint32_t>& kept : asked_by_) kept.resize(asked_.size());
    sent_bytes.resize(static_cast<size_t>(kNumSent * W));
    for (const int64_t bits : setup_.bits) wire_ = (wire_ ^ static_cast<uint32_t>(bits)) * 16777619u;
    for (const Table& x : setup_.tables)
      slot_bits_.push_back(
          slot_bits(std::accumulate(x.num_slots.begin(), x.num_slots.end(), int64_t{0})));
    for (int32_t r = 0; r < W; ++r)
      if (!setup_.local[r]) remote.push_back(r);
  }

  std::vector<int32_t> remote;      // ranks of other memory domains, ascending
  uint32_t settings = 0;            // see `settings_of`; sent in the next headers
  std::vector<int64_t> sent_bytes;  // [kNumSent][W] since the last call of take_sent()
  std::vector<int64_t> take_sent() {
    std::vector<int64_t> taken(sent_bytes.size());
    taken.swap(sent_bytes);
    return taken;
  }
  int64_t total_sent() const {
    return std::accumulate(sent_bytes.begin(), sent_bytes.end(), int64_t{0});
  }
  int32_t world_size() const { return static_cast<int32_t>(setup_.local.size()); }
  bool is_local(int32_t rank) const { return setup_.local[rank]; }
  const Table& table(int64_t t) const { return setup_.tables[t]; }
  CollectivePhase phase() const { return phase_; }  // the current one
  // Exchanges of squares in this backward pass before the current one.
  int32_t round() const { return round_; }

  uint32_t* counts_to(int32_t peer, int64_t table) {
    return headers_out_.data() + peer * header_width_ + kHeaderWidth + table * kCounts;
  }
  const uint32_t* counts_from(int32_t peer, int64_t table) const {
    return headers_in_.data() + peer * header_width_ + kHeaderWidth + table * kCounts;
  }
  // Index, below kKept, of the kept forward pass that `count` (kAsBefore or kAsBefore - 1) denotes.
  uint32_t kept(uint32_t count) const { return (newest_ + kKept - (kAsBefore - count)) % kKept; }
  // [W, 3]: sequence number, phase and collection of each rank's last header.
  std::vector<int64_t> last_phases() const {
    std::vector<int64_t> found;
    for (int32_t r = 0; r < world_size(); ++r) {
      const Header& header = header_from(r);
      found.insert(found.end(), {header.sequence, header.phase, header.collection});
    }
    return found;
  }

  // Begins a phase. The caller then fills in the counts, see `counts_to`.
  void begin(CollectivePhase phase) {
    round_ = phase == CollectivePhase::kSquares && phase_ == phase ? round_ + 1 : 0;
    phase_ = phase;
    if (phase != CollectivePhase::kRequests) return;
    if (!has_passed_back_[newest_]) newest_ = (newest_ + 1) % kKept;
    has_passed_back_[newest_] = false;
  }
  // Marks the oldest kept forward pass that has not had its backward pass as having had it. All
  // ranks call this at the same points.
  void pass_back() {
    for (uint32_t age = kKept; age-- > 0;) {
      bool& has = has_passed_back_[kept(kAsBefore - age)];
      if (has) continue;
      has = true;
      return;
    }
  }
  // Exchanges the headers. `weighted`: whether this rank's batch has per-sample weights. `mine`:
  // this rank's error, if any, which the headers report to all ranks. `transfer`: a Transport
  // without the first argument. Returns `mine`, another rank's error, or an error in what other
  // ranks have sent.
  template <class Transfer>
  Status exchange_headers(bool weighted, Status mine, Transfer transfer) {
    const int32_t W = world_size();
    weighted_ = weighted;
    ++sequence_;
    const Header header{static_cast<uint32_t>(phase_),
                        sequence_,
                        static_cast<uint32_t>(mine.code),
                        static_cast<uint32_t>(mine.detail),
                        weighted,
                        wire_,
                        setup_.collection,
                        settings};
    for (int32_t r = 0; r < W; ++r)
      *reinterpret_cast<Header*>(headers_out_.data() + r * header_width_) = header;
    const std::vector<int64_t> bytes(static_cast<size_t>(W), header_width_ * 4);
    if (transfer(headers_out_.data(), bytes.data(), headers_in_.data(), bytes.data()) != 0)
      return {7, -1};
    for (int32_t r : remote) sent_bytes[kSentHeaders * W + r] += header_width_ * 4;
    return mine.code != 0 ? mine : check_headers();
  }
  // Exclusive upper bound of the slots in a received array; 0 if it has none.
  int64_t limit(const Part& part) const {
    return part.shape.content == kReceiverSlots ? table(part.table).num_slots[setup_.rank] : 0;
  }
  const List& last() const { return list_; }
  // The arrays of the current phase or, if `is_reply`, of its reply. Valid until the next call.
  const List& list(bool is_reply) {
    List& x = list_;
    const int32_t W = world_size();
    x.parts.clear();
    x.send_bytes.assign(static_cast<size_t>(W), 0);
    x.recv_bytes.assign(static_cast<size_t>(W), 0);
    x.sent = x.received = x.expanded = 0;
    for (int32_t r : remote)
      for (int64_t t = 0; t < num_tables_; ++t) {
        // A reply has the counts of the request, in the other direction.
        const uint32_t* to = is_reply ? counts_from(r, t) : counts_to(r, t);
        const uint32_t* from = is_reply ? counts_to(r, t) : counts_from(r, t);
        const Shapes shapes = shapes_of(is_reply, t);
        for (int k = 0; k < shapes.n; ++k) {
          const Shape& shape = shapes.list[k];
          const int64_t out = number(shape, to, weighted_), in = number(shape, from, is_weighted(r));
          x.parts.push_back(
              {shape, r, t, k, k + 1 == shapes.n, out, in, x.sent, x.received, x.expanded});
          const int64_t there = shape.wire_bytes(out), back = shape.wire_bytes(in);
          x.sent += there;
          x.send_bytes[r] += there;
          sent_bytes[shape.kind * W + r] += there;
          x.received += back;
          x.recv_bytes[r] += back;
          if (setup_.unpacks_all || !shape.is_plain())
            x.expanded += aligned(in * shape.unit, setup_.alignment);
        }
      }
    return x;
  }

 private:
  // oper/shmem/exchange/host.py has the same layout. Sizes are rounded up to kHeaderUnit words, so
  // that headers usually have the same size even if ranks have different tables or are in different
  // phases: then the rank that differs can be named. Of a message of an unexpected size, the
  // transport can only report the size.
  struct Header {
    uint32_t phase, sequence, code, culprit, weighted, wire, collection, settings;
  };
  static constexpr int64_t kHeaderWidth = sizeof(Header) / 4;
  static constexpr int64_t kHeaderUnit = 256;
  // Numbers of bags and rows that this rank has requested in the last forward pass.
  struct Asked {
    uint32_t num_bags = 0, num_rows = 0;
  };

  const Header& header_from(int32_t peer) const {
    return *reinterpret_cast<const Header*>(headers_in_.data() + peer * header_width_);
  }
  static int64_t aligned(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
  size_t cell(int32_t peer, int64_t table) const {
    return static_cast<size_t>(peer * num_tables_ + table);
  }
  bool is_weighted(int32_t peer) const { return header_from(peer).weighted != 0; }
  static int64_t number(const Shape& shape, const uint32_t* counts, bool has_weights) {
    const uint32_t n = counts[shape.count];
    if (n == 0 || is_before(n) || (shape.content == kWeights && !has_weights)) return 0;
    return n + shape.extra;
  }

  Shapes shapes_of(bool is_reply, int64_t t) const {
    const Table& table = setup_.tables[t];
    const int32_t slot = slot_bits_[t];
    const int64_t row = bytes_of_row(table.row_type, table.dim);
    const int64_t gradient = table.dim * 4;  // sums and gradients are fp32 whatever the rows are
    const int32_t sums = bits_of_row(static_cast<int32_t>(setup_.bits[2 * t]), table.dim);
    const int32_t rows = table.row_type == RowType::kFloat32 ? sums : 32;
    const int32_t back = bits_of_row(static_cast<int32_t>(setup_.bits[2 * t + 1]), table.dim);
    switch (phase_) {
      case CollectivePhase::kGather:
        if (is_reply) return {{{kSentRows, 0, row, rows}}, 1};
        return {{{kSentRowIds, 0, 4, slot, kReceiverSlots}}, 1};
      case CollectivePhase::kRequests:  // counts[2]: bags
        return {{{kSentIds, 0, 4, slot, kReceiverSlots}, {kSentIds, 0, 4, 32, kRuns},
                 {kSentIdWeights, 0, 4, 32, kWeights}, {kSentRowIds, 1, 4, slot, kReceiverSlots}},
                4};
      case CollectivePhase::kPartials:
        return {{{kSentPartialSums, 0, gradient, sums}, {kSentRows, 1, row, rows}}, 2};
      // Devices also reduce the gradients of pushed rows: counts[1, 2] are 0.
      case CollectivePhase::kGradients:
        return {{{kSentGradientRows, 0, 4, slot, kReceiverSlots},
                 {kSentGradientRows, 0, gradient, back},
                 {kSentGradientIds, 1, 4, slot, kReceiverSlots},
                 {kSentGradientIds, 1, 4, 32, kRuns},
                 {kSentGradientWeights, 1, 4, 32, kWeights},
                 {kSentBagGradients, 2, gradient, back}},
                table.is_pushed ? 6 : 2};
      case CollectivePhase::kSquares:
        return {{{kSentSquares, 0, 4}}, 1};
      case CollectivePhase::kRefreshes:  // slots, preceded by their number
        return {{{kSentRefreshedRows, 0, 4, 32, kNumbers, 1}, {kSentRefreshedRows, 0, row}}, 2};
    }
    return {};
  }

  Status check_headers() {
    const int32_t W = world_size();
    Status found;
    for (int32_t r = W - 1; r >= 0; --r) {
      const Header& header = header_from(r);
      if (header.code == 0) continue;
      const bool by_another = (header.code == 1 || header.code == 2 || header.code == 6) &&
                              header.culprit < static_cast<uint32_t>(W);
      found = {by_another ? static_cast<int64_t>(header.code) : 6,
               by_another ? static_cast<int32_t>(header.culprit) : r};
      if (!by_another) break;  // the rank where the error began; others only pass it on
    }
    if (found.code != 0) return found;
    for (int32_t r = 0; r < W; ++r) {
      const Header& header = header_from(r);
      if (header.phase != static_cast<uint32_t>(phase_) || header.sequence != sequence_ ||
          header.collection != setup_.collection || header.wire != wire_)
        return {8, r};
    }
    for (int32_t r = 1; r < W; ++r)
      if (header_from(r).settings != header_from(0).settings) return {15, r};
    for (int32_t r : remote)
      for (int64_t t = 0; t < num_tables_; ++t) {
        if (!counts_fit(r, t)) return {9, r};
        if (phase_ != CollectivePhase::kRequests) continue;
        asked_[cell(r, t)] = {counts_to(r, t)[2], counts_to(r, t)[1]};
        asked_by_[newest_][cell(r, t)] = counts_from(r, t)[0];
      }
    return {};
  }

  // Whether the counts received from rank r are possible for this table and this rank's requests.
  // Called before counts determine an allocation or an access.
  bool counts_fit(int32_t r, int64_t t) const {
    const Table& x = table(t);
    const uint32_t* counts = counts_from(r, t);
    const int64_t mine = x.num_slots[setup_.rank], theirs = x.num_slots[r];
    switch (phase_) {
      case CollectivePhase::kGather:
        return counts[0] <= mine;
      case CollectivePhase::kRequests:
        return (counts[0] == 0 || (x.is_pushed && !is_before(counts[0]))) && counts[1] <= mine &&
               counts[2] <= counts[0];
      case CollectivePhase::kPartials:  // one per requested bag, and one per requested row
        return counts[0] == asked_[cell(r, t)].num_bags && counts[1] == asked_[cell(r, t)].num_rows;
      case CollectivePhase::kGradients:
        if (counts[0] > mine) return false;
        if (!x.is_pushed) return counts[1] == 0 && counts[2] == 0;
        // With kAsBefore, the stored requests have already passed these checks.
        return counts[2] <=
               (is_before(counts[1]) ? asked_by_[kept(counts[1])][cell(r, t)] : counts[1]);
      case CollectivePhase::kSquares:
        return counts[0] <= (x.is_piece ? theirs : 0);
      case CollectivePhase::kRefreshes:
        return counts[0] <= theirs;
    }
    return false;
  }

  Setup setup_;
  uint32_t wire_ = 2166136261u;     // FNV-1a hash of all tables' bits, for the header
  std::vector<int32_t> slot_bits_;  // [T]
  int64_t num_tables_, header_width_;
  std::vector<uint32_t> headers_out_, headers_in_;
  std::vector<Asked> asked_;  // [W * T]
  // [W * T], ids that peers have requested, by forward pass.
  std::vector<uint32_t> asked_by_[kKept];
  uint32_t newest_ = 0;                         // index of the newest kept forward pass
  bool has_passed_back_[kKept] = {true, true};  // whether its backward pass has been
  uint32_t sequence_ = 0;
  CollectivePhase phase_ = CollectivePhase::kGather;
  bool weighted_ = false;
  int32_t round_ = 0;
  List list_;
};

}  // namespace oper
