// The data that each phase sends to a rank of another memory domain, and where received data is
// stored.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "host/exchange/exchange.h"
#include "host/kernels/kernels.h"
#include "host/tasks.h"

namespace oper::host {

// ---- data to send -------------------------------------------------------------------------------

void Exchange::count(CollectivePhase phase, bool weighted) {
  run_tasks(context_, static_cast<int64_t>(context_.tables.size()),
            phase != CollectivePhase::kGradients,
            [&](int64_t t, Scratch&) { count_table(phase, weighted, t); });
}

void Exchange::count_table(CollectivePhase phase, bool weighted, int64_t t) {
  const Table& table = context_.tables[t];
  if (phase == CollectivePhase::kRefreshes) list_refreshes(t);
  const int64_t* reduced = context_.send_buffer_table(context_.rank, t)->begin();
  const int64_t* asked = context_.request_table(context_.rank, t)->begin();
  for (int32_t r : messages.remote) {
    uint32_t* counts = messages.counts_to(r, t);
    std::fill(counts, counts + Messages::kCounts, 0u);
    if (phase == CollectivePhase::kGather) counts[0] = num_remote_rows(r, t);
    if (phase == CollectivePhase::kRequests && setup.pulls) counts[1] = num_remote_rows(r, t);
    if (phase == CollectivePhase::kRequests && table.is_pushed) {
      counts[0] = static_cast<uint32_t>(asked[r + 1] - asked[r]);
      list_bags(t, r);
      counts[2] = static_cast<uint32_t>(pairs_[cell(r, t)].bags.size());
    }
    if (phase == CollectivePhase::kPartials) counts[1] = pairs_[cell(r, t)].num_asked_slots;
    if (phase == CollectivePhase::kPartials && table.is_pushed)
      counts[0] = static_cast<uint32_t>(context_.partial_table(context_.rank, t, r)->count);
    if (phase == CollectivePhase::kGradients) {
      counts[0] = static_cast<uint32_t>(reduced[r + 1] - reduced[r]);
      if (!table.is_pushed) continue;
      list_bags(t, r);
      counts[1] = requests_count(t, r, weighted);
      // Only the gradients of bags that contain rows of this owner are sent.
      counts[2] = static_cast<uint32_t>(pairs_[cell(r, t)].bags.size());
    }
    if (phase == CollectivePhase::kSquares)
      counts[0] = static_cast<uint32_t>(pairs_[cell(r, t)].squares.sent.size());
    if (phase == CollectivePhase::kRefreshes) counts[0] = pairs_[cell(r, t)].refreshed[0];
  }
}

// Lists the distinct bags in this rank's requests to rank r, in the order in which r pools them.
void Exchange::list_bags(int64_t t, int32_t r) {
  std::vector<uint32_t>& distinct = pairs_[cell(r, t)].bags;
  distinct.clear();
  RequestTable* entry = context_.request_table(context_.rank, t);
  const int64_t* begin = entry->begin();
  const uint32_t* bags = context_.in_send_buffer<uint32_t>(context_.rank, entry->bags_offset);
  for (int64_t i = begin[r]; i < begin[r + 1]; ++i)
    if (distinct.empty() || distinct.back() != bags[i]) distinct.push_back(bags[i]);
}

uint32_t Exchange::requests_count(int64_t t, int32_t r, bool weighted) const {
  for (uint32_t age = 0; age < Messages::kKept; ++age)
    if (is_as_before(kept(kAsBefore - age).asked[cell(r, t)], t, r, weighted))
      return kAsBefore - age;
  const int64_t* begin = context_.request_table(context_.rank, t)->begin();
  return static_cast<uint32_t>(begin[r + 1] - begin[r]);
}

// Whether this rank's requests to rank r equal those of a forward pass, which r still has.
bool Exchange::is_as_before(const Requested& before, int64_t t, int32_t r, bool weighted) const {
  RequestTable* entry = context_.request_table(context_.rank, t);
  const int64_t* begin = entry->begin();
  const int64_t n = begin[r + 1] - begin[r];
  if (n != before.n || (n > 0 && weighted != (before.weights != nullptr))) return false;
  if (n == 0) return true;
  const auto numbers = [&](int64_t offset) {
    return context_.in_send_buffer<uint32_t>(context_.rank, offset) + begin[r];
  };
  const auto equal = [](const void* one, const char* other, int64_t bytes) {
    return std::memcmp(one, other, static_cast<size_t>(bytes)) == 0;
  };
  if (weighted && !equal(numbers(entry->weights_offset), before.weights, n * 4)) return false;
  // Block by block, each of whole words for any number of bits: differences usually show early.
  constexpr int64_t kBlock = 1024;
  uint32_t packed[kBlock];
  char* const to = reinterpret_cast<char*>(packed);
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t m = std::min(kBlock, n - i), slots = packed_bytes(m, before.slot_bits);
    pack_slots(to, numbers(entry->slots_offset) + i, m, before.slot_bits);
    if (!equal(packed, before.slots + packed_bytes(i, before.slot_bits), slots)) return false;
  }
  std::vector<char> runs(static_cast<size_t>(packed_bytes(n, 1)));
  pack_runs(runs.data(), numbers(entry->bags_offset), n);
  return equal(runs.data(), before.bags, static_cast<int64_t>(runs.size()));
}

void Exchange::list_refreshes(int64_t t) {
  for (int32_t r : messages.remote) pairs_[cell(r, t)].refreshed.assign(1, 0);
  const uint32_t* touched = context_.tables[t].touched[context_.rank];
  for (const ReplicaTarget& target : setup.targets) {
    if (target.table != t) continue;
    std::vector<uint32_t>& list = pairs_[cell(target.rank, t)].refreshed;
    const uint32_t* end = touched + 1 + touched[0];
    const uint32_t* first =
        std::lower_bound(touched + 1, end, static_cast<uint32_t>(target.slot_begin));
    const uint32_t* last = std::lower_bound(first, end, static_cast<uint32_t>(target.slot_end));
    list.insert(list.end(), first, last);
    list[0] = static_cast<uint32_t>(list.size() - 1);
  }
}

Exchange::Source Exchange::source(CollectivePhase phase, bool is_reply, int32_t r, int64_t t,
                                  int part) const {
  const Pair& pair = pairs_[cell(r, t)];
  const char* base = context_.send_buffer[context_.rank];
  const Source asked_rows{context_.tables[t].rows, pair.asked_slots};
  switch (phase) {
    case CollectivePhase::kGather:
      if (is_reply) return asked_rows;
      return {remote_rows_[t].keys + splits_[t][r]};
    case CollectivePhase::kPartials:
      if (part == 1) return asked_rows;
      return {base + context_.partial_table(context_.rank, t, r)->rows_offset};
    case CollectivePhase::kSquares:
      if (is_reply)
        return {totals_[context_.tables[t].pieces[0]].values.data(), pair.squares.totals.data()};
      return {squares_of(t, context_.rank), pair.squares.sent.data()};
    case CollectivePhase::kRefreshes:
      if (part == 0) return {pair.refreshed.data()};
      return {context_.tables[t].rows, pair.refreshed.data() + 1};
    case CollectivePhase::kRequests:
      if (part == 3) return {remote_rows_[t].keys + splits_[t][r]};
      break;
    case CollectivePhase::kGradients: {
      SendBufferTable* entry = context_.send_buffer_table(context_.rank, t);
      const int64_t first = entry->begin()[r];
      const uint32_t* slots =
          context_.in_send_buffer<uint32_t>(context_.rank, entry->slots_offset) + first;
      if (part == 0) return {slots};
      if (part == 1)
        return {base + entry->rows_offset + first * context_.tables[t].gradient_bytes(), nullptr,
                slots};
      part -= 2;  // the remaining parts are those of requests
      break;
    }
  }
  RequestTable* entry = context_.request_table(context_.rank, t);
  const uint32_t* bags = pairs_[cell(r, t)].bags.data();
  if (part == 3) return {base + entry->gradients_offset, bags, bags};
  const int64_t places[] = {entry->slots_offset, entry->bags_offset, entry->weights_offset};
  return {base + places[part] + entry->begin()[r] * 4};
}

// ---- checks of received data --------------------------------------------------------------------

namespace {

// Whether n slots ascend and are below `end`.
bool ascend(const uint32_t* slots, int64_t n, int64_t end) {
  bool found = n == 0 || slots[n - 1] < end;
  for (int64_t i = 1; i < n; ++i) found &= slots[i - 1] < slots[i];
  return found;
}

}  // namespace

bool Exchange::lists_fit(CollectivePhase phase, bool is_reply, int32_t r, int64_t t,
                         const char* const* arrays) const {
  const uint32_t* counts = messages.counts_from(r, t);
  // Bags only ever rise by one, see unpack_runs; the first may be missing.
  const auto bags_fit = [&](const char* bags, int64_t n) {
    const auto* bag = reinterpret_cast<const uint32_t*>(bags);
    return n == 0 || (bag[0] == 0 && bag[n - 1] < counts[2]);
  };
  if (phase == CollectivePhase::kRequests) return bags_fit(arrays[1], counts[0]);
  if (phase == CollectivePhase::kGradients) {
    // The update merges the ranks' slots in this order. It would find rows more than once, perhaps
    // more of them than the list of updated rows holds.
    const auto* slots = reinterpret_cast<const uint32_t*>(arrays[0]);
    if (!ascend(slots, counts[0], num_slots(context_.tables[t], context_.rank))) return false;
    if (!context_.tables[t].is_pushed) return true;
    if (!Messages::is_before(counts[1])) return bags_fit(arrays[3], counts[1]);
    const Requested& before = kept(counts[1]).asked_by[cell(r, t)];
    return bags_fit(before.bags, before.n);
  }
  if (phase == CollectivePhase::kSquares)
    return is_reply || counts[0] == pairs_[cell(r, t)].squares.received.size();
  if (phase != CollectivePhase::kRefreshes || counts[0] == 0) return true;
  // The slots follow their number, and must ascend, since `refresh_replicas` searches them.
  const auto* slots = reinterpret_cast<const uint32_t*>(arrays[0]);
  return slots[0] == counts[0] && ascend(slots + 1, counts[0], num_slots(context_.tables[t], r));
}

// ---- headers by which kernels find received data ------------------------------------------------

void Exchange::deliver(CollectivePhase phase, bool is_reply, int32_t r, int64_t t,
                       const char* const* arrays) {
  Table& table = context_.tables[t];
  const uint32_t* counts = messages.counts_from(r, t);
  const char* base = context_.send_buffer[r];
  const uint32_t* slots = reinterpret_cast<const uint32_t*>(arrays[0]);
  const auto lay_out_requests = [&](const Requested& in, const char* gradients) {
    RequestTable* entry = context_.request_table(r, t);
    *entry = {in.slots - base, in.bags - base, in.weights ? in.weights - base : 0,
              gradients ? gradients - base : 0};
    int64_t* begin = entry->begin();
    begin[context_.rank] = 0;
    begin[context_.rank + 1] = in.n;
  };
  switch (phase) {
    case CollectivePhase::kGather:
      if (is_reply) {
        pairs_[cell(r, t)].gathered = arrays[0];
      } else {
        pairs_[cell(r, t)].asked_slots = slots;
      }
      break;
    case CollectivePhase::kRequests:
      kept(kAsBefore).asked_by[cell(r, t)] = {arrays[0], arrays[1], arrays[2], counts[0]};
      lay_out_requests(kept(kAsBefore).asked_by[cell(r, t)], nullptr);
      pairs_[cell(r, t)].asked_slots = reinterpret_cast<const uint32_t*>(arrays[3]);
      pairs_[cell(r, t)].num_asked_slots = counts[1];
      break;
    case CollectivePhase::kPartials:
      pairs_[cell(r, t)].gathered = arrays[1];
      *context_.partial_table(r, t, context_.rank) = {
          counts[0], reinterpret_cast<const char*>(pairs_[cell(r, t)].bags.data()) - base,
          arrays[0] - base};
      break;
    case CollectivePhase::kGradients: {
      SendBufferTable* entry = context_.send_buffer_table(r, t);
      *entry = {arrays[0] - base, arrays[1] - base};
      int64_t* begin = entry->begin();
      begin[context_.rank] = 0;
      begin[context_.rank + 1] = counts[0];
      if (table.is_pushed)
        lay_out_requests(Messages::is_before(counts[1])
                             ? kept(counts[1]).asked_by[cell(r, t)]
                             : Requested{arrays[2], arrays[3], arrays[4], counts[1]},
                         arrays[5]);
      break;
    }
    case CollectivePhase::kSquares: {
      const float* values = reinterpret_cast<const float*>(arrays[0]);
      const SquareLists& lists = pairs_[cell(r, t)].squares;
      float* squares = squares_of(t, is_reply ? context_.rank : r);
      if (is_reply)
        for (size_t i = 0; i < lists.sent.size(); ++i) squares[lists.sent[i]] = values[i];
      else
        for (size_t i = 0; i < lists.received.size(); ++i)
          squares[lists.received[i].first] = values[i];
      break;
    }
    case CollectivePhase::kRefreshes:
      table.touched[r] = const_cast<uint32_t*>(counts[0] > 0 ? slots : nothing_);
      table.packed_masters[r] = arrays[1];
      break;
  }
}

// ---- rows of other domains ----------------------------------------------------------------------

void Exchange::gather(Batch& batch, Moved kind, bool collective) {
  raise(failed_);
  const int64_t bad = list_remote_rows(batch, kind, collective);
  synchronize(CollectivePhase::kGather, batch, bad >= 0 ? Status{4, bad} : Status{});
  exchange_payload(CollectivePhase::kGather, true);
  address_rows(batch);
}

int64_t Exchange::list_remote_rows(const Batch& batch, Moved kind, bool collective) {
  const int32_t W = context_.world_size;
  const int64_t num_remote = static_cast<int64_t>(remote_tables_.size());
  int64_t total = 0;
  std::vector<int64_t> first;
  // Whether owners pool all rows of the table that this rank cannot address.
  const auto is_skipped = [&](const Table& table) {
    return collective && table.has_push && !pulls_remote_[table.index];
  };
  for (int32_t t : remote_tables_) {
    first.push_back(total);
    if (!is_skipped(context_.tables[t])) total += batch.num_ids(context_.tables[t]);
  }
  int64_t* places = reinterpret_cast<int64_t*>(places_.get(total * 8));
  uint32_t* keys = reinterpret_cast<uint32_t*>(keys_.get(total * 4));
  Found found;
  run_tasks(context_, num_remote, total < kSmallBytes / 32, [&](int64_t k, Scratch& scratch) {
    const int32_t t = remote_tables_[k];
    const Table& table = context_.tables[t];
    RemoteRows& rows = remote_rows_[t];
    if (is_skipped(table)) {
      rows = {nullptr, nullptr, 0};
      splits_[t].assign(static_cast<size_t>(W) + 1, 0);
      return;
    }
    rows = {places + first[k], keys + first[k], 0};
    found.note(
        kernels().remote_rows(table, batch, kind, collective && table.has_push, rows, scratch));
    // Linear indices, which are in the order of their owners, become slots.
    std::vector<int64_t>& split = splits_[t];
    split.assign(static_cast<size_t>(W) + 1, 0);
    uint32_t* end = rows.keys + rows.num_keys;
    for (int32_t r = 0; r < W; ++r) {
      uint32_t* from = rows.keys + split[r];
      uint32_t* to = std::partition_point(
          from, end, [&](uint32_t key) { return key < table.owner_begin[r + 1]; });
      split[r + 1] = to - rows.keys;
    }
    for (int32_t r = 0; r < W; ++r)
      for (int64_t i = split[r]; i < split[r + 1]; ++i)
        rows.keys[i] -= static_cast<uint32_t>(table.owner_begin[r]);
  });
  return found.bad.load();
}

void Exchange::address_rows(Batch& batch) {
  run_tasks(context_, static_cast<int64_t>(remote_tables_.size()), false,
            [&](int64_t k, Scratch& scratch) {
              const int32_t t = remote_tables_[k];
              const Table& table = context_.tables[t];
              const RemoteRows& rows = remote_rows_[t];
              if (rows.places == nullptr) return;
              int64_t* address = scratch.get<int64_t>(0, rows.num_keys);
              for (int32_t r : messages.remote)
                for (int64_t i = splits_[t][r]; i < splits_[t][r + 1]; ++i)
                  address[i] = reinterpret_cast<int64_t>(pairs_[cell(r, t)].gathered) +
                               (i - splits_[t][r]) * table.row_bytes();
              int64_t* place = rows.places;
              for (int32_t f : table.features) {
                FeatureBags& bags = batch.features[f];
                bags.rows = place;
                const int64_t n = bags.num_ids();
                for (int64_t i = 0; i < n; ++i)
                  if (place[i] < 0) place[i] = address[-1 - place[i]];
                place += n;
              }
            });
}

}  // namespace oper::host
