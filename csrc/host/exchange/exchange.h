// Exchange with ranks whose memory this rank cannot address, over a transport of bytes.
//
// What such a rank has left for this one is received into private buffers and laid out as a mirror
// of its outbox, so that the kernels read it like that of a neighbour. Per meeting there is one
// exchange of fixed-size headers (phase, error, counts) among all ranks and one of what they count,
// for all tables at once; a gather is followed by one of the rows that were asked for. Where owners
// pool rows, too, rows are asked for together with sums, and come together with them.
#pragma once

#include <memory>
#include <vector>

#include "host/context.h"
#include "host/exchange/packing.h"
#include "host/memory.h"

namespace oper::host {

// Sends segment r of `send` to rank r and receives segment r of `recv` from it; segments lie in rank
// order, sizes in bytes. `what` is the Meeting. Returns 0, or anything else after an error, which the
// caller keeps.
using Transport = int64_t (*)(int64_t what, const void* send, const int64_t* send_bytes, void* recv,
                              const int64_t* recv_bytes);

// What is sent, in bytes by kind and receiver; the order is that of SENT in oper/rows/traffic.py.
enum Sent {
  kSentHeaders,
  kSentRowIds,         // forward: distinct rows asked for
  kSentRows,           // forward: those rows
  kSentIds,            // forward: ids in pushed tiers, and where their bags begin
  kSentIdWeights,      // forward: their weights
  kSentPartialSums,    // forward: partial sums, in the order of the bags that were asked for
  kSentGradientRows,   // backward: reduced gradients, and their rows' slots
  kSentGradientIds,    // backward: ids in pushed tiers, unless they are those of the last forward pass
  kSentGradientWeights,
  kSentBagGradients,   // backward: gradients of the bags of those ids
  kSentSquares,        // backward: sums of squares of the pieces of a row, and their slots
  kSentRefreshedRows,  // backward: masters that have changed, and their slots
  kNumSent
};

// Masters of one tier on this rank, and a rank of another domain that holds replicas of them.
struct ReplicaTarget {
  int32_t table, rank;
  int64_t slot_begin, slot_end;
};

struct ExchangeSetup {
  std::vector<bool> near;              // [W], whose memory can be addressed
  std::vector<ReplicaTarget> targets;
  bool gathers, refreshes;             // whether any rank does
  bool pulls;                          // whether any rank gathers rows of pulled tiers
  bool shares_replicas;                // whether ranks read replicas of their neighbours
  int32_t answer_bits, gradient_bits;  // of fp32 numbers in messages, see packing.h
  uint32_t collection;                 // its number, the same on all ranks
  Transport transport;
};

class Exchange {
 public:
  Exchange(Context& context, ExchangeSetup setup);
  ~Exchange();

  // Whether forward passes need rows of other domains. `pools`: owners pool those of pushed tiers.
  bool gathers(bool pools) const { return pools ? setup_.pulls : setup_.gathers; }
  // Whether ranks read replicas of their neighbours.
  bool shares_replicas() const { return setup_.shares_replicas; }
  // Whether some rows of a table cannot be addressed; `pulled`: some of those that no owner pools.
  bool has_far_rows(const Table& table, bool pulled) const {
    return (pulled ? pulls_far_ : is_far_)[table.index];
  }
  // Fetches the rows of other domains that the batch needs and fills in their addresses, which hold
  // until the next gather. Collective. `collective` is that of `forward`.
  Status gather(Batch& batch, Moved kind, bool collective, ParallelFor parallel);
  // The two halves of a gather whose meetings are kRequests and kPartials: lists the rows, and returns
  // -1 or the position of an id that is out of range; and fills in the addresses.
  int64_t list_far_rows(const Batch& batch, Moved kind, bool collective, ParallelFor parallel);
  void address_rows(Batch& batch, ParallelFor parallel);
  // `mine` is an error of this rank, if any; all ranks learn of it.
  Status meet(Meeting what, const Batch& batch, ParallelFor parallel, Status mine);
  // [kNumSent][W] bytes sent since the last reset, their sum, and the number of exchanges.
  std::vector<int64_t> sent_bytes;
  int64_t total_sent() const;
  int64_t num_exchanges = 0;
  // Per rank: number of its last meeting, what it was for, its collection, as it last told this rank.
  std::vector<int64_t> meetings() const;

 private:
  static constexpr int kCounts = 3;  // per table, see shapes_of
  static constexpr int64_t kSmallBytes = 64 << 10;  // not worth waking other threads
  // In the place of a count: the requests of the last forward pass, or of the one before, hold for this
  // backward pass too.
  static constexpr uint32_t kAsBefore = UINT32_MAX;
  static constexpr uint32_t kKept = 2;
  static bool is_before(uint32_t count) { return count > kAsBefore - kKept; }
  // As oper/shmem/exchange/host.py packs them too. Heads are of whole kHeadUnit words, so that ranks which
  // meet with different tables, or for different things, can tell who is elsewhere: of a message of
  // another size than expected the transport can only say that it is one.
  enum Head { kPhase, kSequence, kCode, kCulprit, kWeighted, kWire, kCollection, kSpare, kHeadWidth };
  static constexpr int64_t kHeadUnit = 256;
  static constexpr int kInRows = static_cast<int>(Meeting::kRefreshes) + 1, kNumInboxes = kInRows + 1;  // one per meeting

  // One array of a message: `unit` bytes for each of counts[count].
  struct Shape {
    Sent kind;
    int count;
    int64_t unit;
    int32_t bits = 32;        // of each of its numbers on the way
    bool is_weight = false;   // only there when the sender's batch has weights
    bool is_runs = false;     // bags of ids, sent as bits
    int64_t extra = 0;        // units beyond the count, unless that is 0
  };
  struct Shapes {
    static constexpr int kMost = 6;
    Shape list[kMost];
    int n = 0;
  };
  // Where an array comes from: contiguous, or the named rows of a matrix. `names`: what gradients are
  // of, see Draws.
  struct Source {
    const char* data = nullptr;
    const uint32_t* rows = nullptr;
    const uint32_t* names = nullptr;
  };
  // The arrays that this rank and another send each other for one table: units and byte offsets.
  struct Part {
    Shape shape;
    int32_t rank;
    int64_t table;
    int index;
    int64_t out, in;
    int64_t out_at, in_at, expanded_at;
  };
  // The arrays of requests of one table between two ranks; `weights` may be null.
  struct Requested {
    const char* slots = nullptr;
    const char* bags = nullptr;  // uint32 [n] where they were received, bits where they were sent
    const char* weights = nullptr;
    int64_t n = 0;
  };
  // The requests of a forward pass. A part of a batch may be looked up before the backward pass of the part
  // before it: two forward passes are kept, but one where forward and backward passes take turns.
  struct Kept {
    Buffer sent, received;
    std::vector<Requested> asked, asked_by;  // [W * T] sent, received
    bool has_passed_back = true;
  };
  struct Listed {  // [0] = count, then slots; and numbers beside them
    std::vector<uint32_t> slots;
    std::vector<float> values;
  };

  static int64_t num_slots(const Table& table, int32_t owner) {
    return table.owner_begin[owner + 1] - table.owner_begin[owner];
  }
  Shapes shapes_of(Meeting what, bool is_reply, const Table& table) const;
  static int64_t wire_bytes(const Shape& shape, int64_t n);
  // Both directions' bits, for the head.
  uint32_t wire() const {
    return static_cast<uint32_t>(setup_.answer_bits << 8 | setup_.gradient_bits);
  }
  template <class Body>
  void each_part(Meeting what, bool is_reply, bool weighted, Body body);
  uint32_t* counts_to(int32_t peer, int64_t table) {
    return heads_out_.data() + peer * head_width_ + kHeadWidth + table * kCounts;
  }
  const uint32_t* counts_from(int32_t peer, int64_t table) const {
    return heads_in_.data() + peer * head_width_ + kHeadWidth + table * kCounts;
  }
  bool weighted_from(int32_t peer) const {
    return heads_in_[static_cast<size_t>(peer * head_width_ + kWeighted)] != 0;
  }
  size_t cell(int32_t peer, int64_t table) const {
    return static_cast<size_t>(peer) * context_.tables.size() + static_cast<size_t>(table);
  }
  // Fills in the counts of what this rank has for the others.
  void count(Meeting what, bool weighted, ParallelFor parallel);
  void count_table(Meeting what, bool weighted, int64_t table);
  void list_squares(int64_t table);
  void list_refreshes(int64_t table);
  Source source(Meeting what, bool is_reply, int32_t peer, int64_t table, int part) const;
  Source source_in_outbox(Meeting what, int32_t peer, int64_t table, int part) const;
  Draws draws_of(const Part& part, const uint32_t* names) const;
  void keep_requests(const char* send);
  void list_bags(int64_t table, int32_t peer);
  // By the count that says so.
  Kept& kept(uint32_t count) {
    return kept_[(newest_ + kKept - (kAsBefore - count)) % kKept];
  }
  const Kept& kept(uint32_t count) const { return const_cast<Exchange*>(this)->kept(count); }
  // Makes room for the requests of a forward pass; notes that the oldest one without a backward pass has
  // had it. Alike on all ranks.
  void rotate();
  void pass_back();
  bool is_as_before(const Requested& before, int64_t table, int32_t peer, bool weighted) const;
  // A count, or that of the forward pass whose requests were the same.
  uint32_t requests_count(int64_t table, int32_t peer, bool weighted) const;
  void deliver(Meeting what, bool is_reply, int32_t peer, int64_t table, const char* const* arrays);
  // Distinct rows of a table that this rank asks a rank for.
  uint32_t num_far_rows(int32_t peer, int64_t table) const {
    const std::vector<int64_t>& split = splits_[table];
    return split.empty() ? 0 : static_cast<uint32_t>(split[peer + 1] - split[peer]);
  }
  // Whether the counts and slots that a rank has sent are such as a rank of this job sends. Nothing
  // is allocated, read or written by them before.
  bool counts_fit(Meeting what, int32_t peer, int64_t table) const;
  bool slots_fit(Meeting what, bool is_reply, int32_t peer, int64_t table,
                 const char* const* arrays) const;
  bool requests_fit(const char* slots, const char* bags, int64_t n, int64_t num_bags,
                    int64_t table) const;
  // Calls the transport; what it returns. `send_bytes`, `recv_bytes`: [W].
  int64_t transfer(Meeting what, const void* send, const std::vector<int64_t>& send_bytes, void* recv,
                   const std::vector<int64_t>& recv_bytes);
  Status exchange_heads(Meeting what, bool weighted, Status mine);
  Status exchange_payload(Meeting what, bool is_reply, bool weighted, ParallelFor parallel);
  Status failed(Status status);

  Context& context_;
  ExchangeSetup setup_;
  std::vector<int32_t> far_;         // ranks of other domains, ascending
  std::vector<int32_t> far_tables_;  // tables with rows that this rank cannot address
  std::vector<bool> is_far_;         // [T] whether it is one of these
  std::vector<bool> pulls_far_;      // [T] whether some of these rows are in pulled tiers
  int64_t head_width_;
  std::vector<uint32_t> heads_out_, heads_in_;
  uint32_t sequence_ = 0;
  int32_t round_ = 0;  // of squares in this backward pass
  Status failed_;
  Buffer send_, received_, inbox_[kNumInboxes], places_, keys_;
  Kept kept_[kKept];
  uint32_t newest_ = 0;
  std::vector<Part> parts_;
  std::vector<FarRows> far_rows_;             // [T]
  std::vector<std::vector<int64_t>> splits_;  // [T][W + 1] of the distinct keys by owner
  std::vector<std::vector<uint32_t>> bags_;   // [W * T] distinct bags of this rank's requests
  std::vector<Listed> listed_;                // [W * T]
  std::vector<const uint32_t*> asked_slots_;  // [W * T] of this rank
  std::vector<uint32_t> num_asked_slots_;     // [W * T]
  std::vector<const char*> gathered_;         // [W * T] rows
  std::vector<std::vector<char>> mirrors_;    // outbox headers of far ranks
  std::vector<std::pair<void*, size_t>> mapped_;
  const uint32_t nothing_[2] = {0, 0};
};

}  // namespace oper::host
