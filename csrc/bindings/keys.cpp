// torch operators of the directories of dynamic tables, see host/keys.h.
#include "host/keys.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <tuple>
#include <vector>

#include "bindings/lookup.h"
#include "common/operators.h"

#include <torch/csrc/stable/ops.h>

namespace oper::host {
namespace {

constexpr int64_t kGrain = 4096;  // keys that are worth another thread

Handles<KeyDirectory>& directories() {
  static auto* instance = new Handles<KeyDirectory>;
  return *instance;
}

// int64 [n, 2], of pairs of 64-bit numbers.
template <class Pair>
Tensor pairs(const std::vector<Pair>& values) {
  static_assert(sizeof(Pair) == 16);
  Tensor out = pooled_tensor(ScalarType::Long, 8, {static_cast<int64_t>(values.size()), 2});
  std::copy(values.begin(), values.end(), static_cast<Pair*>(out.mutable_data_ptr()));
  return out;
}

int64_t keys_num_bytes(int64_t num_slots, int64_t world_size, int64_t rank, bool counts) {
  return KeyDirectory::num_bytes(num_slots, world_size, rank, counts);
}

// `rules`: the fields of KeyRules in order.
int64_t keys_create(std::vector<int64_t> arenas, int64_t rank, int64_t num_slots,
                    std::vector<int64_t> rules) {
  STD_TORCH_CHECK(rules.size() == 6 && num_slots > 0 && rank >= 0 &&
                      rank < static_cast<int64_t>(arenas.size()),
                  "internal: not the rules of a directory of keys");
  std::vector<char*> addresses;
  for (int64_t address : arenas) addresses.push_back(reinterpret_cast<char*>(address));
  KeyRules given;
  given.seed = static_cast<uint64_t>(rules[0]);
  given.min_count = static_cast<uint64_t>(rules[1]);
  given.admit_below = static_cast<uint64_t>(rules[2]);
  given.eviction = static_cast<Eviction>(rules[3]);
  given.half_life = static_cast<uint32_t>(rules[4]);
  given.time_to_live = static_cast<uint32_t>(rules[5]);
  return directories().add(
      std::make_shared<KeyDirectory>(std::move(addresses), rank, num_slots, given));
}

int64_t keys_find(int64_t handle, Tensor keys, int64_t clock) {
  const auto directory = directories().share(handle);
  int64_data(keys);
  int64_t* data = static_cast<int64_t*>(keys.mutable_data_ptr());
  std::atomic<int64_t> missed{0};
  torch::stable::parallel_for(0, keys.numel(), kGrain, [&](int64_t begin, int64_t end) {
    missed += directory->find(data + begin, end - begin, static_cast<uint32_t>(clock));
  });
  return missed;
}

Tensor keys_distinct(int64_t handle, Tensor keys) {
  return pairs(directories().share(handle)->distinct(int64_data(keys), keys.numel()));
}

// `lists`: by rank, int64 [n, 2] as from `keys_distinct`. Rows that keys have got, int64 [n, 2] of row and
// key; then admitted, evicted, expired, refused.
std::tuple<Tensor, std::vector<int64_t>> keys_update(int64_t handle, std::vector<Tensor> lists,
                                                     int64_t clock) {
  std::vector<const KeyCount*> data;
  std::vector<int64_t> sizes;
  for (const Tensor& list : lists) {
    data.push_back(reinterpret_cast<const KeyCount*>(int64_data(list)));
    sizes.push_back(list.numel() / 2);
  }
  const KeyChanges changes = directories().share(handle)->update(
      data, sizes, static_cast<uint32_t>(clock), parallel_over_tasks);
  return {pairs(changes.rows),
          {changes.admitted, changes.evicted, changes.expired, changes.refused}};
}

int64_t keys_num_records(int64_t handle, bool candidates) {
  return directories().share(handle)->num_records(candidates);
}

// int64 [end - begin, 3]: key, count and clock, -1 where there is no key.
Tensor keys_read(int64_t handle, bool candidates, int64_t begin, int64_t end) {
  const auto directory = directories().share(handle);
  STD_TORCH_CHECK(0 <= begin && begin <= end && end <= directory->num_records(candidates),
                  "internal: no such records");
  Tensor out = pooled_tensor(ScalarType::Long, 8, {end - begin, 3});
  directory->read(candidates, begin, end - begin,
                  static_cast<KeyRecord*>(out.mutable_data_ptr()));
  return out;
}

int64_t keys_write(int64_t handle, bool candidates, int64_t begin, Tensor records, bool checks) {
  const auto directory = directories().share(handle);
  const int64_t n = records.numel() / 3;
  STD_TORCH_CHECK(begin >= 0 && begin + n <= directory->num_records(candidates),
                  "internal: no such records");
  return directory->write(candidates, begin, n,
                          reinterpret_cast<const KeyRecord*>(int64_data(records)), checks);
}

// `rows`: as from `keys_update`.
Tensor keys_draw(Tensor rows, int64_t seed, int64_t dim, double bound) {
  const int64_t n = rows.numel() / 2;
  Tensor out = pooled_tensor(ScalarType::Float, 4, {n, dim});
  draw_rows(reinterpret_cast<const NewRow*>(int64_data(rows)), n, static_cast<uint64_t>(seed), dim,
            static_cast<float>(bound), static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

void keys_close(int64_t handle) { directories().close(handle); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(keys_num_bytes, "(int slots, int world_size, int rank, bool counts) -> int");
  OPER_OPERATOR(keys_create, "(int[] arenas, int rank, int slots, int[] rules) -> int");
  OPER_OPERATOR(keys_find, "(int handle, Tensor(a!) keys, int clock) -> int");
  OPER_OPERATOR(keys_distinct, "(int handle, Tensor keys) -> Tensor");
  OPER_OPERATOR(keys_update, "(int handle, Tensor[] lists, int clock) -> (Tensor, int[])");
  OPER_OPERATOR(keys_num_records, "(int handle, bool candidates) -> int");
  OPER_OPERATOR(keys_read, "(int handle, bool candidates, int begin, int end) -> Tensor");
  OPER_OPERATOR(keys_write, "(int handle, bool candidates, int begin, Tensor records, bool checks=False) -> int");
  OPER_OPERATOR(keys_draw, "(Tensor rows, int seed, int dim, float bound) -> Tensor");
  OPER_OPERATOR(keys_close, "(int handle) -> ()");
}

}  // namespace oper::host
