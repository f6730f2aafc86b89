// torch operators of the directories of dynamic tables, see host/keys/tables.h.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/lookup.h"
#include "common/key_rules.h"
#include "common/operators.h"
#include "host/kernels/kernels.h"
#include "host/keys/tables.h"

namespace oper::host {
namespace {

Handles<KeyTables>& collections() { return all_handles<KeyTables>(); }

// See KeyTables::num_bytes and its constructor.
std::vector<int64_t> keys_num_bytes(int64_t rank, int64_t world_size, int64_t seen_bytes,
                                    Tensor tables, Tensor numbers) {
  return KeyTables::num_bytes(key_rules_of(tables, numbers), world_size, rank, seen_bytes);
}

// See the constructor of KeyTables. `arenas`: addresses.
int64_t keys_open(std::vector<int64_t> arenas, int64_t rank, int64_t seen_bytes, Tensor tables,
                  Tensor numbers, std::vector<int64_t> table_of) {
  STD_TORCH_CHECK(rank >= 0 && rank < static_cast<int64_t>(arenas.size()),
                  "internal: no such rank");
  std::vector<char*> addresses;
  for (int64_t address : arenas) addresses.push_back(reinterpret_cast<char*>(address));
  return collections().add(std::make_shared<KeyTables>(
      addresses, rank, seen_bytes, key_rules_of(tables, numbers), std::move(table_of)));
}

// A vector of structures of int64 as a tensor, [n, columns], or [n] for one column.
template <class Value>
Tensor tensor_of(const std::vector<Value>& values, int64_t columns) {
  static_assert(sizeof(Value) % 8 == 0);
  const int64_t n = static_cast<int64_t>(values.size());
  Tensor out = columns == 1 ? pooled_tensor(ScalarType::Long, {n})
                            : pooled_tensor(ScalarType::Long, {n, columns});
  std::copy(values.begin(), values.end(), static_cast<Value*>(out.mutable_data_ptr()));
  return out;
}

// See KeyTables::find. Returns the rows of the ids, int32 or int64 [N]; if `keeps`, what the update
// needs, see SeenBatch: PlaceCounts, int64 [N], missed keys, int64 [M], and KeyParts, int64 [P, 6];
// and a code, not 0 for a batch that the lookup will refuse or that has no samples.
std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t> keys_find(int64_t handle, Tensor ids,
                                                              Tensor lengths, Tensor key_of,
                                                              int64_t batch_size, bool keeps) {
  const auto tables = collections().share(handle);
  const Tensor none = pooled_tensor(ScalarType::Long, {0});
  if (batch_size == 0 || fault_of(kHostMemory, ids, lengths, std::nullopt, key_of, batch_size))
    return {none, none, none, none, kBadBatch};
  KeyBatch batch{ids.data_ptr(), ids.scalar_type() == ScalarType::Int, int64_data(key_of), {}};
  const int64_t num_keys = lengths.numel() / batch_size;
  // Only the bounds at which keys begin are used.
  const Tensor offsets = pooled_tensor(ScalarType::Long, {lengths.numel() + 1});
  int64_t* const bounds = static_cast<int64_t*>(offsets.mutable_data_ptr());
  if (kernels().start_bounds(lengths.data_ptr(), lengths.scalar_type() == ScalarType::Int, num_keys,
                             batch_size, bounds) != ids.numel())
    return {none, none, none, none, kBadLengths};
  for (int64_t key = 0; key <= num_keys; ++key) batch.bounds.push_back(bounds[key * batch_size]);
  const bool is_short = tables->has_short_rows(batch);
  Tensor rows = pooled_tensor(is_short ? ScalarType::Int : ScalarType::Long, {ids.numel()});
  Tensor counts = keeps ? pooled_tensor(ScalarType::Long, {ids.numel()}) : none;
  static_assert(sizeof(PlaceCount) == 8);
  const std::vector<KeyPart> parts =
      tables->find(batch, rows.mutable_data_ptr(), is_short,
                   keeps ? static_cast<PlaceCount*>(counts.mutable_data_ptr()) : nullptr);
  if (!keeps) return {rows, none, none, none, 0};
  return {rows, counts, tensor_of(tables->missed(), 1), tensor_of(parts, 6), 0};
}

std::vector<bool> flags_of(const KeyTables& tables, const std::vector<int64_t>& numbers) {
  std::vector<bool> found(static_cast<size_t>(tables.num_tables()));
  for (int64_t t : numbers) found.at(static_cast<size_t>(t)) = true;
  return found;
}

// See KeyTables::leave. `counts`, `missed`, `parts`: results of `keys_find`, by lookup. Returns a
// KeyTables::Left and its `table`. If `context` is given, its next backward pass does `keys_update`
// and initialises the new rows.
std::tuple<int64_t, int64_t> keys_leave(int64_t handle, std::vector<Tensor> counts,
                                        std::vector<Tensor> missed, std::vector<Tensor> parts,
                                        std::vector<int64_t> frozen,
                                        std::optional<int64_t> context) {
  const auto tables = collections().share(handle);
  std::vector<SeenBatch> seen;
  for (size_t k = 0; k < counts.size(); ++k)
    seen.push_back({reinterpret_cast<const PlaceCount*>(int64_data(counts[k])),
                    {reinterpret_cast<const KeyPart*>(int64_data(parts[k])),
                     static_cast<size_t>(parts[k].numel() / 6)},
                    int64_data(missed[k])});
  int64_t table = -1;
  const auto left = tables->leave(seen, &table);
  if (left == KeyTables::Left::kAll && context) {
    const auto of = context_of(*context);
    // The context itself holds these functions, which therefore must not keep it alive.
    of->beside_update = {[tables, flags = flags_of(*tables, frozen)] { tables->update(flags); },
                         [tables, &of = *of] { tables->begin_rows(of); }};
  }
  return {static_cast<int64_t>(left), table};
}

// See KeyTables::update. `frozen`: numbers of tables.
void keys_update(int64_t handle, std::vector<int64_t> frozen) {
  const auto tables = collections().share(handle);
  tables->update(flags_of(*tables, frozen));
}

// See KeyTables::new_rows. Returns NewRows, int64 [n, 2], and their bounds.
std::tuple<Tensor, std::vector<int64_t>> keys_new(int64_t handle) {
  std::vector<int64_t> bounds;
  const std::vector<NewRow> rows = collections().share(handle)->new_rows(&bounds);
  return {tensor_of(rows, 2), bounds};
}

int64_t keys_clock(int64_t handle, int64_t table) {
  return collections().share(handle)->clock(table);
}

void keys_set_clock(int64_t handle, int64_t table, int64_t clock) {
  collections().share(handle)->clock(table) = static_cast<uint32_t>(clock);
}

// In this rank's buckets: slots with a key, full buckets; keys admitted, evicted, expired, refused;
// then the ids that this rank has looked up, and those without a row.
std::vector<int64_t> keys_counts(int64_t handle, int64_t table) {
  const auto tables = collections().share(handle);
  const KeyOccupancy of = tables->directory(table).occupancy();
  const KeyTables::Counts c = tables->counts(table);
  return {of.slots,  of.full_buckets, c.admitted, c.evicted,
          c.expired, c.refused,       c.lookups,  c.missed};
}

// See KeyDirectory::read. Returns KeyRecords, int64 [end - begin, 3].
Tensor keys_read(int64_t handle, int64_t table, bool candidates, int64_t begin, int64_t end) {
  const auto tables = collections().share(handle);
  const KeyDirectory& directory = tables->directory(table);
  STD_TORCH_CHECK(0 <= begin && begin <= end && end <= directory.num_records(candidates),
                  "internal: no such records");
  Tensor out = pooled_tensor(ScalarType::Long, {end - begin, 3});
  directory.read(candidates, begin, end - begin, static_cast<KeyRecord*>(out.mutable_data_ptr()));
  return out;
}

// See KeyDirectory::write. `numbers`: int64 [n]; `records`: KeyRecords, int64 [n, 3].
int64_t keys_write(int64_t handle, int64_t table, bool candidates, Tensor numbers, Tensor records,
                   bool checks) {
  const auto tables = collections().share(handle);
  KeyDirectory& directory = tables->directory(table);
  const std::span<const int64_t> at{int64_data(numbers), static_cast<size_t>(numbers.numel())};
  const int64_t most = directory.num_records(candidates);
  STD_TORCH_CHECK(records.numel() == 3 * numbers.numel() &&
                      std::ranges::all_of(at, [=](int64_t k) { return 0 <= k && k < most; }),
                  "internal: no such records");
  return directory.write(candidates, at, reinterpret_cast<const KeyRecord*>(int64_data(records)),
                         checks);
}

// See KeyDirectory::changed. Returns the numbers, int64 [n], and the KeyRecords, int64 [n, 3].
std::tuple<Tensor, Tensor> keys_changed(int64_t handle, int64_t table, bool candidates,
                                        int64_t since) {
  const auto tables = collections().share(handle);
  const KeyDirectory& directory = tables->directory(table);
  const std::vector<int64_t> numbers =
      directory.changed(candidates, static_cast<uint32_t>(since));
  const int64_t n = static_cast<int64_t>(numbers.size());
  Tensor records = pooled_tensor(ScalarType::Long, {n, 3});
  auto* const out = static_cast<KeyRecord*>(records.mutable_data_ptr());
  for (int64_t i = 0; i < n; ++i) directory.read(candidates, numbers[i], 1, out + i);
  return {tensor_of(numbers, 1), records};
}

// See KeyDirectory::expired. Returns slots, int64 [n].
Tensor keys_expired(int64_t handle, int64_t table, int64_t since) {
  const auto tables = collections().share(handle);
  return tensor_of(tables->directory(table).expired(since, tables->clock(table)), 1);
}

// The rows, int64 [n], of `keys`, int64 [n], in a directory given by its buckets alone, uint8
// [num_buckets, kBucketBytes]; 0 = no row.
Tensor keys_rows(Tensor buckets, int64_t num_slots, int64_t seed, Tensor keys) {
  static Spares<DistinctKeys> spares;
  STD_TORCH_CHECK(num_slots > 0 && buckets.is_contiguous() &&
                      buckets.scalar_type() == ScalarType::Byte &&
                      buckets.numel() == buckets_for(num_slots) * kBucketBytes,
                  "internal: not the buckets of a directory");
  KeyRules rules;
  rules.seed = static_cast<uint64_t>(seed);
  const KeyDirectory directory({static_cast<char*>(buckets.mutable_data_ptr())}, 0, num_slots,
                               rules);
  const int64_t* from = int64_data(keys);
  Tensor out = pooled_tensor(ScalarType::Long, {keys.numel()});
  auto* const rows = static_cast<int64_t*>(out.mutable_data_ptr());
  const auto distinct = spares.borrow();
  for (int64_t at = 0; at < keys.numel(); at += DistinctKeys::kMost)
    kernels().find_keys(directory,
                        {from + at, false, std::min(DistinctKeys::kMost, keys.numel() - at), 0,
                         rows + at, false, nullptr},
                        *distinct);
  return out;
}

// The initial rows of new `keys`, int64 [n]; float32 [n, dim].
Tensor keys_draw(Tensor keys, int64_t seed, int64_t dim, double bound) {
  const int64_t n = keys.numel();
  Tensor out = pooled_tensor(ScalarType::Float, {n, dim});
  for (int64_t i = 0; i < n; ++i)
    kernels().draw_row(int64_data(keys)[i], static_cast<uint64_t>(seed), 0, dim,
                       static_cast<float>(bound),
                       static_cast<float*>(out.mutable_data_ptr()) + i * dim);
  return out;
}

void keys_close(int64_t handle) { collections().close(handle); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(keys_num_bytes,
                "(int rank, int world_size, int seen_bytes, Tensor tables, Tensor numbers) -> int[]");
  OPER_OPERATOR(keys_open,
                "(int[] arenas, int rank, int seen_bytes, Tensor tables, Tensor numbers, "
                "int[] table_of) -> int");
  OPER_OPERATOR(keys_find,
                "(int handle, Tensor ids, Tensor lengths, Tensor key_of, int batch_size, "
                "bool keeps) -> (Tensor, Tensor, Tensor, Tensor, int)");
  OPER_OPERATOR(keys_leave,
                "(int handle, Tensor[] counts, Tensor[] missed, Tensor[] parts, "
                "int[] frozen=[], int? context=None) -> (int, int)");
  OPER_OPERATOR(keys_update, "(int handle, int[] frozen) -> ()");
  OPER_OPERATOR(keys_new, "(int handle) -> (Tensor, int[])");
  OPER_OPERATOR(keys_clock, "(int handle, int table) -> int");
  OPER_OPERATOR(keys_set_clock, "(int handle, int table, int clock) -> ()");
  OPER_OPERATOR(keys_counts, "(int handle, int table) -> int[]");
  OPER_OPERATOR(keys_read,
                "(int handle, int table, bool candidates, int begin, int end) -> Tensor");
  OPER_OPERATOR(keys_write,
                "(int handle, int table, bool candidates, Tensor numbers, Tensor records, "
                "bool checks=False) -> int");
  OPER_OPERATOR(keys_changed,
                "(int handle, int table, bool candidates, int since) -> (Tensor, Tensor)");
  OPER_OPERATOR(keys_expired, "(int handle, int table, int since) -> Tensor");
  OPER_OPERATOR(keys_rows, "(Tensor buckets, int num_slots, int seed, Tensor keys) -> Tensor");
  OPER_OPERATOR(keys_draw, "(Tensor keys, int seed, int dim, float bound) -> Tensor");
  OPER_OPERATOR(keys_close, "(int handle) -> ()");
}

}  // namespace oper::host
