// The members of Context, and the choice of kernels by instruction set.
#include "host/context.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "host/exchange/exchange.h"
#include "host/kernels/kernels.h"
#include "host/memory.h"

namespace oper::host {

std::unique_ptr<FlatTiers> flatten(const TableMap& map) {
  if (map.num_tiers > FlatTiers::kTiers) return nullptr;
  auto flat = std::make_unique<FlatTiers>();
  for (int k = 0; k < FlatTiers::kTiers; ++k) {
    const bool there = k < map.num_tiers;
    flat->start[k] = there ? map.tiers[k].start : INT64_MAX;
    flat->period[k] = there ? map.tiers[k].period : 1;
    flat->inverse[k] = 1.0 / static_cast<double>(flat->period[k]);
    flat->first[k] = static_cast<int64_t>(flat->base.size());
    if (!there) continue;
    flat->base.insert(flat->base.end(), map.tiers[k].base, map.tiers[k].base + flat->period[k]);
    flat->step.insert(flat->step.end(), map.tiers[k].step, map.tiers[k].step + flat->period[k]);
  }
  flat->num_entries = static_cast<int64_t>(flat->base.size());
  const size_t size = std::max<size_t>(flat->base.size(), FlatTiers::kInRegisters);
  flat->base.resize(size);
  flat->step.resize(size);
  return flat;
}

void Context::start_counting() {
  const int64_t W = world_size, T = static_cast<int64_t>(tables.size());
  moved_.assign(static_cast<size_t>(kNumMoved * T * W), 0);
  for (int32_t r = 0; r < W; ++r) arenas.rank.push_back(r);
  std::sort(arenas.rank.begin(), arenas.rank.end(),
            [&](int32_t a, int32_t b) { return send_buffer[a] < send_buffer[b]; });
  for (int32_t r : arenas.rank)
    arenas.send_buffer.push_back(reinterpret_cast<int64_t>(send_buffer[r]));
  for (int64_t t = 0; t < T; ++t) {
    tables[t].index = static_cast<int32_t>(t);
    tables[t].counters = TableCounters(moved_.data() + t * W, T * W);
    tables[t].arenas = &arenas;
  }
}

int64_t Context::traced_bytes() const {
  return exchange && times.is_traced() ? exchange->messages.total_sent() : 0;
}

std::vector<int64_t> Context::moved() {
  std::vector<int64_t> result = moved_;
  const size_t each = tables.size() * static_cast<size_t>(world_size);
  scratches_.for_all([&](Scratch& scratch) {
    for (Moved kind : {kRows, kWeightRows})
      for (size_t i = 0; i < each; ++i) result[kind * each + i] += scratch.rows_read(kind, 0)[i];
  });
  return result;
}

void Context::mark_changes(bool on) {
  changed_storage.assign(on ? tables.size() : 0, {});
  for (size_t t = 0; t < tables.size(); ++t) {
    tables[t].changed = nullptr;
    if (!on) continue;
    changed_storage[t].assign(static_cast<size_t>(slots_of(static_cast<int64_t>(t)) / 64 + 1), 0);
    tables[t].changed = changed_storage[t].data();
  }
}

int64_t Context::num_changes(int64_t table) const {
  int64_t count = 0;
  if (!changed_storage.empty())
    for (uint64_t word : changed_storage[table]) count += std::popcount(word);
  return count;
}

void Context::take_changes(int64_t table, uint32_t* slots) {
  if (changed_storage.empty()) return;
  std::vector<uint64_t>& words = changed_storage[table];
  for (size_t k = 0; k < words.size(); ++k) {
    for (uint64_t word = words[k]; word; word &= word - 1)
      *slots++ = static_cast<uint32_t>(64 * k + std::countr_zero(word));
    words[k] = 0;
  }
}

void Context::reset_moved() {
  std::fill(moved_.begin(), moved_.end(), 0);
  for (auto& passes : num_passes) passes.store(0);
  const size_t each = tables.size() * static_cast<size_t>(world_size);
  scratches_.for_all([&](Scratch& scratch) {
    for (Moved kind : {kRows, kWeightRows}) std::fill_n(scratch.rows_read(kind, 0), each, 0);
  });
}

void Context::reset_send_buffer() {
  send_buffer_cursor_.store(round_up(header_bytes(), 4096));
  partial_cursor_.store(send_buffer_half());
}

bool Context::take_send_buffer(const Table& table, int64_t count, SendBufferTable* entry) {
  entry->slots_offset = take_bytes(count * 4);
  entry->rows_offset = take_bytes(count * table.gradient_bytes());
  return entry->slots_offset >= 0 && entry->rows_offset >= 0;
}

void Context::collapse_send_buffer(int32_t owner_rank) {
  SendBufferHeader* header = send_buffer_header(owner_rank);
  if (owner_rank == rank) {
    const int64_t used = std::min(send_buffer_cursor_.load(), send_buffer_half());
    if (used > header->used_bytes) header->used_bytes = used;
  }
  send_buffer_collapsed_.resize(static_cast<size_t>(world_size));
  int64_t& done = send_buffer_collapsed_[owner_rank];
  if (header->used_bytes <= done) return;
  // A quarter more than needed, so that slowly growing batches do not request pages in every step.
  const int64_t want = std::min(
      round_up(header->used_bytes + header->used_bytes / 4, static_cast<int64_t>(kHugePage)),
      send_buffer_bytes / static_cast<int64_t>(kHugePage) * static_cast<int64_t>(kHugePage));
  if (want > done) collapse_huge(send_buffer[owner_rank] + done, static_cast<size_t>(want - done));
  done = std::max(want, header->used_bytes);
}

const Kernels& kernels() {
#if defined(__x86_64__)
  static const Kernels& chosen = [&]() -> const Kernels& {
    const char* wanted = std::getenv("OPER_CPU_KERNELS");
    // All that the kernels are compiled for, see their `target`: a virtual machine may hide any.
    const bool has2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
                      __builtin_cpu_supports("lzcnt");
    const bool has512 = has2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw");
    if (wanted != nullptr && std::strcmp(wanted, "generic") == 0) return kKernelsGeneric;
    if (wanted != nullptr && std::strcmp(wanted, "avx2") == 0 && has2) return kKernelsAvx2;
    return has512 ? kKernelsAvx512 : has2 ? kKernelsAvx2 : kKernelsGeneric;
  }();
  return chosen;
#else
  return kKernelsGeneric;
#endif
}

}  // namespace oper::host
