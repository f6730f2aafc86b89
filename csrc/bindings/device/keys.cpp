// torch operators of dynamic tables in device memory, see device/keys.h. None waits for the device,
// except those that read what updates have done.
#include <algorithm>
#include <tuple>
#include <utility>

#include "bindings/device/tables.h"
#include "common/key_rules.h"
#include "common/operators.h"
#include "device/range.h"

namespace oper::device {

void leave_keys(const Call& call, const KeyUpdate& update) {
  const Range range("oper keys");
  int64_t num_ids = 0;  // at most those of the batch, which are fewer than kMostIds
  for (const ListedIds& lookup : update.lookups) num_ids += lookup.num_ids;
  const Tensor memory =
      call.tables.empty(lay_out_seen(num_ids, nullptr).bytes, ScalarType::Byte);
  SeenKeys seen = lay_out_seen(num_ids, memory.data_ptr());
  int64_t first = 0;
  for (const ListedIds& lookup : update.lookups) {
    add_keys(lookup, first, seen, call.stream);
    first += lookup.num_ids;
  }
  leave_keys(call.context.view, update.keys->view, seen, update.found_varies,
             update.keys->is_mixed, call.work.plan.refused, call.stream);
}

void update_keys(const Call& call, const KeyUpdate& update) {
  const Range range("oper keys");
  const KeyView& keys = update.keys->view;
  const Tensor memory =
      call.tables.empty(lay_out_received_keys(keys, nullptr).bytes, ScalarType::Byte);
  update_keys(call.launch(), keys, lay_out_received_keys(keys, memory.data_ptr()),
              call.context.updates_at_once ? call.work.plan.refused : nullptr);
}

namespace {

Handles<KeyTables>& collections() { return all_handles<KeyTables, int64_t{1} << 33>(); }

// Bytes of a rank's directories; of all that grows with its slots; and of its arena. `seen_bytes`: space
// for the keys of its batch.
std::vector<int64_t> device_keys_num_bytes(int64_t rank, int64_t world_size, int64_t seen_bytes,
                                           Tensor tables, Tensor numbers) {
  return KeyTables::num_bytes(key_rules_of(tables, numbers), world_size, rank, seen_bytes);
}

// `tables`: those whose ids are keys. `arenas`: addresses by rank. `table_of`: by feature of the
// collection, -1 = none of the dynamic tables.
int64_t device_keys_open(int64_t tables, std::vector<int64_t> arenas, int64_t seen_bytes,
                         Tensor rules, Tensor numbers, std::vector<int64_t> table_of) {
  const OnTables of(tables);
  auto made = std::make_shared<KeyTables>(arenas, of->context->view.rank, seen_bytes,
                                          key_rules_of(rules, numbers), table_of, of.stream());
  made->device = of->like->get_device_index();
  return collections().add(std::move(made));
}

void device_keys_close(int64_t handle) {
  auto closed = collections().close(handle);
  if (closed == nullptr) return;
  const OnDevice on(closed->device);  // as in device_context_close
  closed.reset();
}

// Returns the rows of the ids, int64 [N]; with `lists` what the update needs of them, see ListedIds,
// int64 [N] and int32 [N]; and a code: not 0 for a batch that the lookup will refuse, which then has no
// rows.
std::tuple<Tensor, Tensor, Tensor, int64_t> device_keys_find(int64_t handle, int64_t tables,
                                                             Tensor ids, Tensor lengths,
                                                             Tensor key_of, int64_t batch_size,
                                                             bool lists) {
  const OnTables of(tables);
  const int64_t n = ids.numel();
  if (n >= kMostIds || lengths.numel() == 0 ||
      fault_of(of->like->device(), ids, lengths, std::nullopt, key_of, batch_size) != kFit)
    return {*of->like, *of->like, *of->like, kBadBatch};
  const auto keys = collections().share(handle);
  const cudaStream_t stream = of.stream();
  const Tensor bounds = make_bounds_of(*of, lengths, n, stream);
  const Range range("oper keys");
  const int64_t num_keys = lengths.numel() / batch_size;
  const Tensor rows = of->empty(n, ScalarType::Long);
  const Tensor hashes = of->empty(lists ? n : 0, ScalarType::Long);
  const Tensor where = of->empty(lists ? n : 0, ScalarType::Int);
  ListedIds listed{nullptr, nullptr, n};
  if (lists)
    listed = {static_cast<uint64_t*>(hashes.data_ptr()), static_cast<uint32_t*>(where.data_ptr()), n};
  find_keys(keys->view,
            {ids.data_ptr(), ids.scalar_type() == ScalarType::Int, n, int64_data(bounds), num_keys,
             batch_size, keys->table_of_keys(int64_data(key_of), key_of.numel(), num_keys)},
            static_cast<int64_t*>(rows.data_ptr()), listed, stream);
  return {rows, hashes, where, 0};
}

// Makes the next backward pass of `tables` update the directories. `hashes`, `where`: of its lookups, from
// `device_keys_find`. `found_varies`: directories have changed between these.
void device_keys_leave(int64_t handle, int64_t tables, std::vector<Tensor> hashes,
                       std::vector<Tensor> where, bool found_varies) {
  KeyUpdate update{collections().share(handle), {}, {hashes, where}, found_varies};
  for (size_t k = 0; k < hashes.size(); ++k)
    update.lookups.push_back({static_cast<uint64_t*>(hashes[k].data_ptr()),
                              static_cast<uint32_t*>(where[k].data_ptr()), hashes[k].numel()});
  tables_of(tables)->key_update = std::move(update);
}

template <class T>
std::vector<T> copied(const T* from, int64_t count, cudaStream_t stream) {
  std::vector<T> found(static_cast<size_t>(count));
  check(cudaMemcpyAsync(found.data(), from, found.size() * sizeof(T), cudaMemcpyDeviceToHost,
                        stream),
        "cannot read the state of a directory");
  check(cudaStreamSynchronize(stream), "cannot read the state of a directory");
  return found;
}

// By table: its clock, then the numbers of KeyCounter.
std::vector<int64_t> device_keys_state(int64_t handle, int64_t tables) {
  const auto keys = collections().share(handle);
  const OnTables of(tables);
  const cudaStream_t stream = of.stream();
  const int64_t T = keys->view.num_tables;
  const std::vector<uint32_t> clocks = copied(keys->view.clocks, T, stream);
  const std::vector<Counter> counters =
      copied(keys->view.counters, T * kNumKeyCounters, stream);
  std::vector<int64_t> found;
  for (int64_t t = 0; t < T; ++t) {
    found.push_back(clocks[t]);
    for (int64_t k = 0; k < kNumKeyCounters; ++k)
      found.push_back(static_cast<int64_t>(counters[t * kNumKeyCounters + k]));
  }
  return found;
}

// Address, first number and end of this rank's buckets of a table.
std::tuple<int64_t, int64_t, int64_t> device_keys_own(int64_t handle, int64_t table) {
  const auto keys = collections().share(handle);
  const KeyTables::OwnBuckets& own = keys->own.at(static_cast<size_t>(table));
  return {reinterpret_cast<int64_t>(own.memory), own.first, own.end};
}

void device_keys_set_clock(int64_t handle, int64_t tables, int64_t table, int64_t clock) {
  const auto keys = collections().share(handle);
  const OnTables of(tables);
  copy_to_device(keys->view.clocks + table, std::vector{static_cast<uint32_t>(clock)},
                 of.stream(), "cannot set the clock of a directory");
}

// The rows, int64 [n], that the last update of any rank has given to new keys, or -row for a row that a
// key lost without a successor, by table, ascending in a table; and where each table's begin.
std::tuple<Tensor, std::vector<int64_t>> device_keys_new(int64_t handle, int64_t tables) {
  const auto keys = collections().share(handle);
  const OnTables of(tables);
  const cudaStream_t stream = of.stream();
  const int64_t T = keys->view.num_tables, W = keys->view.world_size;
  std::vector<int64_t> rows, begin{0};
  std::vector<std::vector<uint32_t>> counts;
  std::vector<std::vector<ChangedBucket*>> lists;
  for (const KeyLists& of_rank : keys->lists) {
    counts.push_back(copied(of_rank.num_changed, T, stream));
    lists.push_back(copied(of_rank.changed, T, stream));
  }
  for (int64_t t = 0; t < T; ++t) {
    const int64_t num_slots = keys->rules[t].num_slots;
    const Shares slots(num_slots, buckets_for(num_slots));
    for (int64_t r = 0; r < W; ++r)
      for (const ChangedBucket& bucket : copied(lists[r][t], counts[r][t], stream)) {
        const int64_t first = slots.begin(bucket.number) + 1;
        for (uint64_t left = bucket.given; left != 0; left &= left - 1)
          rows.push_back(first + lowest_bit(left));
        for (uint64_t left = bucket.lost; left != 0; left &= left - 1)
          rows.push_back(-(first + lowest_bit(left)));
      }
    std::sort(rows.begin() + begin.back(), rows.end(),
              [](int64_t a, int64_t b) { return std::abs(a) < std::abs(b); });
    begin.push_back(static_cast<int64_t>(rows.size()));
  }
  auto* const held = new std::vector<int64_t>(std::move(rows));
  const Tensor out = tensor_at(held->data(), {static_cast<int64_t>(held->size())}, ScalarType::Long,
                               kHostMemory, [held](void*) { delete held; });
  return {out, begin};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(device_keys_num_bytes,
                "(int rank, int world_size, int seen_bytes, Tensor tables, Tensor numbers) -> int[]");
  OPER_OPERATOR(device_keys_open,
                "(int tables, int[] arenas, int seen_bytes, Tensor rules, Tensor numbers, "
                "int[] table_of) -> int");
  OPER_OPERATOR(device_keys_close, "(int handle) -> ()");
  OPER_OPERATOR(device_keys_find,
                "(int handle, int tables, Tensor ids, Tensor lengths, Tensor key_of, "
                "int batch_size, bool lists) -> (Tensor, Tensor, Tensor, int)");
  OPER_OPERATOR(device_keys_leave,
                "(int handle, int tables, Tensor[] hashes, Tensor[] where, bool found_varies) -> ()");
  OPER_OPERATOR(device_keys_state, "(int handle, int tables) -> int[]");
  OPER_OPERATOR(device_keys_own, "(int handle, int table) -> (int, int, int)");
  OPER_OPERATOR(device_keys_set_clock, "(int handle, int tables, int table, int clock) -> ()");
  OPER_OPERATOR(device_keys_new, "(int handle, int tables) -> (Tensor, int[])");
}

}  // namespace oper::device
