// Exchange with remote ranks, those of other memory domains, over a transport of bytes.
//
// Received data is put into private buffers with the same headers as a send buffer, so that kernels
// read it like the send buffer of a rank of this domain. common/exchange.h defines what each phase
// contains.
#pragma once

#include <memory>
#include <vector>

#include "common/exchange.h"
#include "host/context.h"
#include "host/exchange/packing.h"
#include "host/memory.h"

namespace oper::host {

// Slots of one tier whose rows this rank owns and a remote rank has replicas of.
struct ReplicaTarget {
  int32_t table, rank;
  int64_t slot_begin, slot_end;
};

struct ExchangeSetup {
  Messages::Setup messages;  // without the rank and the tables
  std::vector<ReplicaTarget> targets;
  // Whether any rank pulls rows in lookups without pushed tiers.
  bool gathers;
  bool refreshes;        // whether any rank has replicas of rows of another domain
  bool pulls;            // whether any rank pulls rows in lookups with pushed tiers
  bool shares_replicas;  // whether ranks read replicas of other ranks of their domain
  Transport transport;
};

class Exchange {
 public:
  Exchange(Context& context, ExchangeSetup setup);

  // Whether a table has rows on remote ranks or, if `pulled`, such rows in pulled tiers.
  bool has_remote_rows(const Table& table, bool pulled) const {
    return (pulled ? pulls_remote_ : is_remote_)[table.index];
  }
  // Fetches the rows of other domains that the batch needs, and sets FeatureBags::rows to their
  // addresses, which are valid until the next gather. All ranks must call it. `kind`: as which they
  // are counted; `collective`: see `forward`.
  void gather(Batch& batch, Moved kind, bool collective);
  // The two halves of a gather, for lookups that exchange the rows in kRequests and kPartials. The
  // first lists the rows and returns -1 or the index of an id that is out of range; the second sets
  // the addresses.
  int64_t list_remote_rows(const Batch& batch, Moved kind, bool collective);
  void address_rows(Batch& batch);
  // Exchanges a phase. `mine`: this rank's error, if any, which is sent to all ranks. Throws an
  // error as a Status.
  void synchronize(CollectivePhase phase, const Batch& batch, Status mine);
  const ExchangeSetup setup;
  Messages messages;

 private:
  using Part = Messages::Part;
  static constexpr uint32_t kAsBefore = Messages::kAsBefore;
  static constexpr int64_t kSmallBytes = 64 << 10;  // messages below this are handled on one thread
  // Each phase has its own receive buffers; these are for the rows that a gather receives.
  static constexpr int kInRows = static_cast<int>(CollectivePhase::kRefreshes) + 1;

  // Source of an array: contiguous data or, unless `rows` is null, those rows of a matrix. `names`:
  // the rows or bags to which gradients belong, see Draws; null: other data.
  struct Source {
    const void* data = nullptr;
    const uint32_t* rows = nullptr;
    const uint32_t* names = nullptr;
  };
  // One table's requests from one rank to another: on the receiver as kernels read them, on the
  // sender as they were packed. `weights` may be null.
  struct Requested {
    const char* slots = nullptr;
    const char* bags = nullptr;
    const char* weights = nullptr;
    int64_t n = 0;
    int32_t slot_bits = 32;
  };
  // A received message, and those of its arrays that must be unpacked.
  struct ReceiveBuffers {
    Buffer message, unpacked;
  };
  // The requests of a kept forward pass, see Messages.
  struct Kept {
    Buffer sent;
    ReceiveBuffers received;
    std::vector<Requested> asked, asked_by;  // [W * T] sent, received
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
  void list_squares();
  void list_squares_of(const std::vector<int32_t>& pieces);
  std::vector<uint32_t> slots_with_gradients(int64_t table) const;
  // The sums of squares of a rank's rows in the current round, by slot.
  float* squares_of(int64_t table, int32_t rank) const {
    const Table& x = context_.tables[table];
    return x.squares[rank] + messages.round() * num_slots(x, rank);
  }
  void add_up_squares();
  void list_refreshes(int64_t table);
  Source source(CollectivePhase phase, bool is_reply, int32_t peer, int64_t table, int part) const;
  Draws draws_of(const Part& part, const uint32_t* names) const;
  void keep_requests(const std::vector<Part>& parts, const char* send);
  void list_bags(int64_t table, int32_t peer);
  // The requests that a count refers to.
  Kept& kept(uint32_t count) { return kept_[messages.kept(count)]; }
  const Kept& kept(uint32_t count) const { return kept_[messages.kept(count)]; }
  bool is_as_before(const Requested& before, int64_t table, int32_t peer, bool weighted) const;
  // The number of ids that this rank requests from a peer; or kAsBefore or kAsBefore - 1 if the
  // requests equal those of a kept forward pass.
  uint32_t requests_count(int64_t table, int32_t peer, bool weighted) const;
  void deliver(CollectivePhase phase, bool is_reply, int32_t peer, int64_t table,
               const char* const* arrays);
  // Number of distinct rows of a table that this rank pulls from a peer.
  uint32_t num_remote_rows(int32_t peer, int64_t table) const {
    const std::vector<int64_t>& split = splits_[table];
    return split.empty() ? 0 : static_cast<uint32_t>(split[peer + 1] - split[peer]);
  }
  // Whether received bags are valid, sums of squares are as many as this rank has listed, and lists
  // of refreshed slots are complete and ascending.
  bool lists_fit(CollectivePhase phase, bool is_reply, int32_t peer, int64_t table,
                 const char* const* arrays) const;
  // Calls the transport and returns its result. `send_bytes`, `recv_bytes`: [W].
  int64_t transfer(CollectivePhase phase, const void* send, const int64_t* send_bytes, void* recv,
                   const int64_t* recv_bytes);
  void exchange_payload(CollectivePhase phase, bool is_reply);
  [[noreturn]] void fail(Status status);

  Context& context_;
  std::vector<int32_t> remote_tables_;  // tables with rows that this rank cannot address
  std::vector<bool> is_remote_;         // [T] whether it is one of these
  std::vector<bool> pulls_remote_;      // [T] whether some of these rows are in pulled tiers
  Status failed_;
  Buffer send_, places_, keys_;
  ReceiveBuffers receive_buffers_[kInRows + 1];
  Kept kept_[Messages::kKept];
  std::vector<RemoteRows> remote_rows_;       // [T]
  std::vector<std::vector<int64_t>> splits_;  // [T][W + 1] of the distinct keys by owner
  // Rows of one column piece whose sums of squares a rank sends to a rank of another domain, which
  // returns the rows' totals. Lists ascend by the slot at the sender of the sums: both ranks derive
  // them from the gradients, so that no slots are sent.
  struct SquareLists {
    std::vector<uint32_t> sent;  // slots of this rank whose sums the peer adds up
    // Slots of the peer whose sums this rank adds up, and their rows' indices in Totals.
    std::vector<std::pair<uint32_t, uint32_t>> received;
    std::vector<uint32_t> totals;  // those indices alone, from which the reply is gathered
  };
  // The rows of a table that is split by columns whose sums of squares this rank adds up.
  struct Totals {
    std::vector<std::pair<int32_t, uint32_t>> rows;  // piece and slot of this rank
    std::vector<float> values;
  };
  std::vector<Totals> totals_;  // [T], at the first piece of a table
  // Data of one table that concern a peer.
  struct Pair {
    std::vector<uint32_t> bags;  // the distinct ones in this rank's requests to it
    std::vector<uint32_t> refreshed;  // number of changed rows that are sent, then their slots
    SquareLists squares;
    const uint32_t* asked_slots = nullptr;  // rows of this rank that it pulls
    uint32_t num_asked_slots = 0;
    const char* gathered = nullptr;  // the peer's rows that this rank has pulled
  };
  std::vector<Pair> pairs_;  // [W * T]
  std::vector<std::vector<char>> shadow_headers_;  // send buffer headers of remote ranks
  struct Unmap {
    size_t bytes;
    void operator()(void* data) const;
  };
  std::vector<std::unique_ptr<void, Unmap>> mapped_;  // for squares received from remote ranks
  const uint32_t nothing_[2] = {0, 0};                // an empty list of slots
};

}  // namespace oper::host
