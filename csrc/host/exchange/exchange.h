// Exchange with far ranks, whose memory this rank cannot address, over a transport of bytes.
//
// Data from a far rank is received into private buffers, with headers laid out like its outbox, so
// that kernels read it like a neighbour's. See common/exchange.h for the contents of each phase.
#pragma once

#include <memory>
#include <vector>

#include "common/exchange.h"
#include "host/context.h"
#include "host/exchange/packing.h"
#include "host/memory.h"

namespace oper::host {

// Masters of one tier on this rank, and a rank of another domain that holds replicas of them.
struct ReplicaTarget {
  int32_t table, rank;
  int64_t slot_begin, slot_end;
};

struct ExchangeSetup {
  Messages::Setup messages;            // except the rank and the tables
  std::vector<ReplicaTarget> targets;
  bool gathers, refreshes;             // whether any rank does
  bool pulls;                          // whether any rank gathers rows of pulled tiers
  bool shares_replicas;                // whether ranks read replicas of their neighbours
  Transport transport;
};

class Exchange {
 public:
  Exchange(Context& context, ExchangeSetup setup);
  ~Exchange();

  // Whether a table has rows on far ranks; `pulled`: in tiers that owners do not pool.
  bool has_far_rows(const Table& table, bool pulled) const {
    return (pulled ? pulls_far_ : is_far_)[table.index];
  }
  // Fetches the rows of other domains that the batch needs and fills in their addresses, which hold
  // until the next gather. Collective. `collective` is that of `forward`.
  void gather(Batch& batch, Moved kind, bool collective);
  // The two halves of a gather whose phases are kRequests and kPartials: lists the rows, and returns
  // -1 or the position of an id that is out of range; and fills in the addresses.
  int64_t list_far_rows(const Batch& batch, Moved kind, bool collective);
  void address_rows(Batch& batch);
  // `mine`: this rank's error, if any, which is sent to all ranks.
  void synchronize(CollectivePhase phase, const Batch& batch, Status mine);
  const ExchangeSetup setup;
  Messages messages;

 private:
  using Part = Messages::Part;
  static constexpr uint32_t kAsBefore = Messages::kAsBefore;
  static constexpr int64_t kSmallBytes = 64 << 10;  // messages below this are handled on one thread
  // Received arrays have an inbox for each phase, and one for the rows of a gather.
  static constexpr int kInRows = static_cast<int>(CollectivePhase::kRefreshes) + 1;

  // Source of an array: contiguous data, or the rows `rows` of a matrix. `names`: to which rows or
  // bags gradients belong, see Draws.
  struct Source {
    const void* data = nullptr;
    const uint32_t* rows = nullptr;
    const uint32_t* names = nullptr;
  };
  // The arrays of one table's requests between two ranks: on the receiver as kernels read them, on
  // the sender as they were packed. `weights` may be null.
  struct Requested {
    const char* slots = nullptr;
    const char* bags = nullptr;
    const char* weights = nullptr;
    int64_t n = 0;
    int32_t slot_bits = 32;
  };
  // A received message, and those of its arrays that had to be unpacked.
  struct Inbox {
    Buffer message, unpacked;
  };
  // The requests of a forward pass, see Messages::kept.
  struct Kept {
    Buffer sent;
    Inbox received;
    std::vector<Requested> asked, asked_by;  // [W * T] sent, received
  };
  struct Listed {  // slots: the count, then slots; values: one per slot
    std::vector<uint32_t> slots;
    std::vector<float> values;
  };

  static int64_t num_slots(const Table& table, int32_t owner) {
    return table.owner_begin[owner + 1] - table.owner_begin[owner];
  }
  size_t cell(int32_t peer, int64_t table) const {
    return static_cast<size_t>(peer) * context_.tables.size() + static_cast<size_t>(table);
  }
  // Fills in the counts of this rank's arrays for each peer.
  void count(CollectivePhase phase, bool weighted);
  void count_table(CollectivePhase phase, bool weighted, int64_t table);
  void list_squares(int64_t table);
  void list_refreshes(int64_t table);
  Source source(CollectivePhase phase, bool is_reply, int32_t peer, int64_t table, int part) const;
  Draws draws_of(const Part& part, const uint32_t* names) const;
  void keep_requests(const std::vector<Part>& parts, const char* send);
  void list_bags(int64_t table, int32_t peer);
  // The requests that a count refers to.
  Kept& kept(uint32_t count) { return kept_[messages.kept(count)]; }
  const Kept& kept(uint32_t count) const { return kept_[messages.kept(count)]; }
  bool is_as_before(const Requested& before, int64_t table, int32_t peer, bool weighted) const;
  // A count, or kAsBefore or kAsBefore - 1 if requests equal those of a forward pass.
  uint32_t requests_count(int64_t table, int32_t peer, bool weighted) const;
  void deliver(CollectivePhase phase, bool is_reply, int32_t peer, int64_t table,
               const char* const* arrays);
  // Number of distinct rows of a table that this rank requests from a rank.
  uint32_t num_far_rows(int32_t peer, int64_t table) const {
    const std::vector<int64_t>& split = splits_[table];
    return split.empty() ? 0 : static_cast<uint32_t>(split[peer + 1] - split[peer]);
  }
  // Whether received bags, and lists that contain their own length, are within the limits of a
  // batch.
  bool lists_fit(CollectivePhase phase, int32_t peer, int64_t table,
                 const char* const* arrays) const;
  // Calls the transport and returns its result. `send_bytes`, `recv_bytes`: [W].
  int64_t transfer(CollectivePhase phase, const void* send, const int64_t* send_bytes, void* recv,
                   const int64_t* recv_bytes);
  void exchange_payload(CollectivePhase phase, bool is_reply);
  [[noreturn]] void fail(Status status);

  Context& context_;
  std::vector<int32_t> far_tables_;  // tables with rows that this rank cannot address
  std::vector<bool> is_far_;         // [T] whether it is one of these
  std::vector<bool> pulls_far_;      // [T] whether some of these rows are in pulled tiers
  Status failed_;
  Buffer send_, places_, keys_;
  Inbox inbox_[kInRows + 1];
  Kept kept_[Messages::kKept];
  std::vector<FarRows> far_rows_;             // [T]
  std::vector<std::vector<int64_t>> splits_;  // [T][W + 1] of the distinct keys by owner
  // Data of one table and another rank.
  struct Pair {
    std::vector<uint32_t> bags;             // the distinct ones in this rank's requests
    Listed listed;
    const uint32_t* asked_slots = nullptr;  // of this rank
    uint32_t num_asked_slots = 0;
    const char* gathered = nullptr;         // rows
  };
  std::vector<Pair> pairs_;  // [W * T]
  std::vector<std::vector<char>> mirrors_;    // outbox headers of far ranks
  std::vector<std::pair<void*, size_t>> mapped_;
  const uint32_t nothing_[2] = {0, 0};
};

}  // namespace oper::host
