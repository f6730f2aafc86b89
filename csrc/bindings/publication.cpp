// torch operators for the read-only tables that one process publishes for others of its host. The
// tables are double-buffered: these operators keep track of which buffer is current, and of the
// readers of both.
//
// Epoch e is in buffer e % 2. Each reading process has a slot with a count of lookups per buffer. A
// reader counts itself in the buffer of the epoch that it has seen, then looks at the epoch again.
// If it has changed, the reader takes its count back and tries again with the new epoch. A
// publisher writes the buffer of epoch e + 1 only when no slot counts a reader there, then stores e
// + 1. All accesses are sequentially consistent: either the publisher sees the reader's count, or
// the reader sees the publisher's epoch (as with hazard pointers, Michael 2004). A reader never
// waits for the publisher. If a process has died, the publisher clears its slot.
//
// A publisher that changes some rows of epoch e in place stores -e, waits until no slot counts a
// reader in that buffer, writes, and stores e + 2, which is in the same buffer. Readers that arrive
// in between find a negative epoch and must retry.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <vector>

#include "common/handles.h"
#include "common/operators.h"
#include "host/kernels/kernels.h"

namespace oper::host {
namespace {

constexpr int64_t kReaderSlots = 1024;

// The slot of one process, in its own cache lines, which only this process writes while it lives.
struct alignas(128) ReaderSlot {
  std::atomic<int64_t> in_use[2];  // lookups that read buffer 0 and buffer 1
};

// At the beginning of a new segment of shared memory, which is all zeros.
struct Control {
  alignas(128) std::atomic<int64_t> epoch;  // 0: nothing published yet
  ReaderSlot slots[kReaderSlots];
};

static_assert(std::atomic<int64_t>::is_always_lock_free);

Control& control_at(int64_t address) { return *reinterpret_cast<Control*>(address); }

int64_t publication_control_bytes() { return static_cast<int64_t>(sizeof(Control)); }

int64_t publication_slots() { return kReaderSlots; }

int64_t publication_epoch(int64_t control) { return control_at(control).epoch.load(); }

void publication_set_epoch(int64_t control, int64_t epoch) {
  control_at(control).epoch.store(epoch);
}

// Returns the epoch that the caller may read until `publication_unpin`; or a negative number while
// rows are changed in place, in which case nothing is pinned.
int64_t publication_pin(int64_t control, int64_t slot) {
  Control& at = control_at(control);
  for (int64_t epoch = at.epoch.load();;) {
    if (epoch < 0) return epoch;
    auto& count = at.slots[slot].in_use[epoch & 1];
    count.fetch_add(1);
    const int64_t now = at.epoch.load();
    if (now == epoch) return epoch;
    count.fetch_sub(1);
    epoch = now;
  }
}

void publication_unpin(int64_t control, int64_t slot, int64_t epoch) {
  control_at(control).slots[slot].in_use[epoch & 1].fetch_sub(1);
}

// Those of `slots` that count a reader in a buffer.
std::vector<int64_t> publication_busy(int64_t control, int64_t buffer, std::vector<int64_t> slots) {
  const auto is_idle = [&](int64_t k) {
    return control_at(control).slots[k].in_use[buffer & 1].load() == 0;
  };
  slots.erase(std::remove_if(slots.begin(), slots.end(), is_idle), slots.end());
  return slots;
}

void publication_clear(int64_t control, int64_t slot) {
  for (auto& count : control_at(control).slots[slot].in_use) count.store(0);
}

// Rows of a matrix that are to be overwritten.
struct Target {
  const int64_t* at;  // [n], their distinct indices
  int64_t n, width;   // width: bytes of a row
  char* rows;         // the matrix
};

Target target_of(const Tensor& to, const Tensor& places) {
  STD_TORCH_CHECK(to.dim() == 2 && to.is_contiguous(), "internal: expected a matrix of rows");
  const int64_t* at = int64_data(places);
  const int64_t n = places.numel(), num_rows = to.size(0);
  STD_TORCH_CHECK(std::all_of(at, at + n, [=](int64_t k) { return k >= 0 && k < num_rows; }),
                  "internal: expected places within the table");
  return {at, n, to.size(1) * static_cast<int64_t>(to.element_size()),
          static_cast<char*>(to.mutable_data_ptr())};
}

// Reads the rows at these places, so that they are in the cache when `place_rows` overwrites them.
void fetch_rows(std::vector<Tensor> to, std::vector<Tensor> places) {
  STD_TORCH_CHECK(to.size() == places.size(), "internal: expected one array of places per matrix");
  for (size_t k = 0; k < to.size(); ++k) {
    const Target target = target_of(to[k], places[k]);
    for (int64_t i = 0; i < target.n; ++i)
      for (int64_t b = 0; b < target.width; b += 64)
        static_cast<void>(*static_cast<const volatile char*>(target.rows + target.at[i] * target.width + b));
  }
}

// Copies row i of rows[k] [n, width] to row places[k][i] of to[k], for all matrices k.
void place_rows(std::vector<Tensor> to, std::vector<Tensor> places, std::vector<Tensor> rows) {
  constexpr int64_t kAhead = 16;
  STD_TORCH_CHECK(to.size() == places.size() && to.size() == rows.size(),
                  "internal: expected one array of places and one of rows per matrix");
  for (size_t k = 0; k < to.size(); ++k) {
    const Target target = target_of(to[k], places[k]);
    STD_TORCH_CHECK(to[k].scalar_type() == rows[k].scalar_type() && rows[k].dim() == 2 &&
                        rows[k].size(0) == target.n && rows[k].size(1) == to[k].size(1) &&
                        rows[k].is_contiguous(),
                    "internal: rows and their places do not match");
    const auto [at, n, width, first] = target;
    const char* from = static_cast<const char*>(rows[k].data_ptr());
    for (int64_t i = 0, end = 0; i < n; i = end) {
      end = i + 1;
      while (end < n && at[end] == at[end - 1] + 1) ++end;  // adjacent rows are copied together
      const char* next = first + at[std::min(n - 1, end + kAhead)] * width;
      for (int64_t b = 0; b < width; b += 64) __builtin_prefetch(next + b, 1, 3);
      std::memcpy(first + at[i] * width, from + i * width, static_cast<size_t>((end - i) * width));
    }
  }
}

// Quantises rows of numbers [n, dim] to rows of 8-bit or 4-bit codes, uint8 [n, bytes of a row],
// see common/elements.h. Returns the first row that cannot be quantised, or -1.
int64_t quantise_rows(Tensor values, int64_t bits, Tensor out) {
  const std::map<ScalarType, RowType> types{{ScalarType::Float, RowType::kFloat32},
                                            {ScalarType::Half, RowType::kFloat16},
                                            {ScalarType::BFloat16, RowType::kBFloat16}};
  const auto type = types.find(values.scalar_type());
  const RowType to = bits == 4 ? RowType::kInt4 : RowType::kInt8;
  STD_TORCH_CHECK(type != types.end() && values.dim() == 2 && values.is_contiguous() &&
                      values.size(1) > 0 && out.scalar_type() == ScalarType::Byte &&
                      out.dim() == 2 && out.is_contiguous() && out.size(0) == values.size(0) &&
                      out.size(1) == bytes_of_row(to, values.size(1)) &&
                      (bits == 8 || (bits == 4 && values.size(1) % 2 == 0)),
                  "internal: rows that cannot be quantised");
  const size_t padded = static_cast<size_t>(round_up<int64_t>(values.size(1), 16));
  std::vector<float> numbers(padded);
  std::vector<uint8_t> codes(padded);
  return kernels().quantise({values.data_ptr(), type->second, values.size(0), values.size(1), bits == 4,
                             static_cast<uint8_t*>(out.mutable_data_ptr()), out.size(1)},
                            numbers.data(), codes.data());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(publication_control_bytes, "() -> int");
  OPER_OPERATOR(publication_slots, "() -> int");
  OPER_OPERATOR(publication_epoch, "(int control) -> int");
  OPER_OPERATOR(publication_set_epoch, "(int control, int epoch) -> ()");
  OPER_OPERATOR(publication_pin, "(int control, int slot) -> int");
  OPER_OPERATOR(publication_unpin, "(int control, int slot, int epoch) -> ()");
  OPER_OPERATOR(publication_busy, "(int control, int buffer, int[] slots) -> int[]");
  OPER_OPERATOR(publication_clear, "(int control, int slot) -> ()");
  OPER_OPERATOR(quantise_rows, "(Tensor values, int bits, Tensor(a!) out) -> int");
  OPER_OPERATOR(fetch_rows, "(Tensor[] to, Tensor[] places) -> ()");
  OPER_OPERATOR(place_rows, "(Tensor(a!)[] to, Tensor[] places, Tensor[] rows) -> ()");
}

}  // namespace oper::host
