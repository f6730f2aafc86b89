// Exchange between memory domains: packs arrays into messages and unpacks received ones (see
// common/exchange.h), and copies received rows to the staging memory.
#include "common/exchange.h"
#include "device/batch.cuh"
#include "device/group.cuh"

namespace oper::device {
namespace {

// `rows` [count, kWidth] has one row per range of items; its column 0 is the number of items in all
// ranges before. Returns the row of the range that item k belongs to.
template <int kWidth>
OPER_DEVICE const int64_t* row_of(const int64_t* rows, int64_t count, int64_t k) {
  return rows + kWidth * last_that(0, count, [&](int64_t r) { return rows[r * kWidth] <= k; });
}

__global__ void __launch_bounds__(256)
    place_rows_kernel(View view, BatchPlan plan, RemoteRows remote, Staging staging) {
  const Group<32> group;
  for (int64_t k = group.index(); k < remote.num_rows; k += group.count()) {
    const int64_t* x = row_of<RemoteRows::kWidth>(remote.ranges, remote.num_ranges, k);
    const int64_t i = k - x[RemoteRows::kBegin];
    const Table& table = view.tables[x[RemoteRows::kTableIndex]];
    const int64_t row_bytes = bytes_of_row(table.type, table.dim);
    const int64_t unit = x[RemoteRows::kUnit] + i * ((row_bytes + kStagingUnit - 1) / kStagingUnit);
    copy_row(group, staging.data + unit * kStagingUnit,
             remote.rows + x[RemoteRows::kBytes] + i * row_bytes, row_bytes);
    const int64_t run = x[RemoteRows::kRun] + i, last = plan.run_begin[run + 1];
    for (int64_t p = plan.run_begin[run] + group.lane; p < last; p += 32)
      plan.places[plan.payloads[p]] = static_cast<uint32_t>(unit);
  }
}

// Copies number `at` in memory to number `i` of the message, or back.
template <class T>
OPER_DEVICE void move_one(int64_t memory, int64_t at, int64_t wire, int64_t i, bool packs) {
  T* there = reinterpret_cast<T*>(memory) + at;
  T* message = reinterpret_cast<T*>(wire) + i;
  if (packs) {
    *message = *there;
  } else {
    *there = *message;
  }
}

// Word k of `n` slots that are packed into `bits` bits each, and slot i of such words.
OPER_DEVICE uint32_t packed_word(const uint32_t* slots, int64_t n, int64_t bits, int64_t k) {
  uint32_t word = 0;
  for (int64_t i = 32 * k / bits; i < n && i * bits < 32 * (k + 1); ++i) {
    const int64_t shift = i * bits - 32 * k;
    word |= shift < 0 ? slots[i] >> -shift : slots[i] << shift;
  }
  return word;
}

OPER_DEVICE uint32_t packed_slot(const uint32_t* words, int64_t bits, int64_t i) {
  const int64_t first = i * bits, at = first / 32, shift = first % 32;
  uint64_t found = words[at];
  if (shift + bits > 32) found |= static_cast<uint64_t>(words[at + 1]) << 32;
  return static_cast<uint32_t>(found >> shift & ((uint64_t{1} << bits) - 1));
}

// One thread per number or, when slots are packed, per word. Slots from a peer are checked before
// they are used as indices.
__global__ void __launch_bounds__(256) move_parts_kernel(View view, WireParts parts, bool packs) {
  for (int64_t k = thread_index(); k < parts.num_numbers; k += num_threads()) {
    const int64_t* x = row_of<WireParts::kWidth>(parts.parts, parts.num_parts, k);
    const int64_t i = k - x[WireParts::kFirst], per_entry = x[WireParts::kPerEntry];
    const int64_t memory = x[WireParts::kMemory], wire = x[WireParts::kWire];
    const auto kind = static_cast<WireParts::Kind>(x[WireParts::kKind]);
    if (kind == WireParts::kSlots) {
      const int64_t limit = x[WireParts::kLimit];
      uint32_t* slots = reinterpret_cast<uint32_t*>(memory);
      uint32_t* words = reinterpret_cast<uint32_t*>(wire);
      if (packs) {
        words[i] = packed_word(slots, limit, per_entry, i);
      } else {
        const uint32_t slot = packed_slot(words, per_entry, i);
        if (slot >= limit) report(view.error, 8, view.rank, slot);
        slots[i] = slot < limit ? slot : 0;
      }
      continue;
    }
    const uint32_t* rows = reinterpret_cast<const uint32_t*>(x[WireParts::kRows]);
    const int64_t entry = i / per_entry, row = rows ? static_cast<int64_t>(rows[entry]) : entry;
    const int64_t at = row * per_entry + (i - entry * per_entry);
    switch (kind) {
      case WireParts::kWords:
        move_one<uint32_t>(memory, at, wire, i, packs);
        break;
      case WireParts::kHalves:
        move_one<uint16_t>(memory, at, wire, i, packs);
        break;
      case WireParts::kRounded: {
        float* number = reinterpret_cast<float*>(memory) + at;
        BFloat16* message = reinterpret_cast<BFloat16*>(wire) + i;
        if (packs) {
          *message = round_to(BFloat16{}, *number, kToNearest);
        } else {
          *number = to_float(*message);
        }
        break;
      }
      case WireParts::kSlots:
        break;
    }
  }
}

__global__ void __launch_bounds__(256) add_up_kernel(Sums sums) {
  for (int64_t i = thread_index(); i < sums.n; i += num_threads()) {
    float sum = 0.0f;
    for (int64_t k = sums.first[i]; k < sums.first[i + 1]; ++k)
      sum += *reinterpret_cast<const float*>(sums.terms[k]);
    *reinterpret_cast<float*>(sums.out[i]) = sum;
  }
}

}  // namespace

void add_up(const Sums& sums, cudaStream_t stream) {
  if (sums.n > 0) OPER_LAUNCH(add_up_kernel, blocks_for(sums.n, 256), 256, stream, sums);
}

void place_remote_rows(const Launch& on, const BatchPlan& plan, const RemoteRows& remote,
                       const Staging& staging) {
  if (remote.num_rows == 0) return;
  OPER_LAUNCH(place_rows_kernel, blocks_for(remote.num_rows, 8), 256, on.stream, on.view, plan,
              remote, staging);
}

void move_parts(const View& view, const WireParts& parts, bool packs, cudaStream_t stream) {
  if (parts.num_numbers == 0) return;
  OPER_LAUNCH(move_parts_kernel, blocks_for(parts.num_numbers, 256), 256, stream, view, parts, packs);
}

}  // namespace oper::device
