// torch operators for read-only tables that many processes share; see host/publication.h.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/handles.h"
#include "common/operators.h"
#include "host/publication.h"

namespace oper::host {
namespace {

Control& control_at(int64_t address) { return *reinterpret_cast<Control*>(address); }

// Bytes [bytes] of mapped memory; the caller keeps the mapping alive.
Tensor segment_bytes(int64_t address, int64_t bytes) {
  return tensor_at(reinterpret_cast<void*>(address), {bytes}, ScalarType::Byte, kHostMemory);
}

int64_t publication_control_bytes() { return static_cast<int64_t>(sizeof(Control)); }

int64_t publication_slots() { return kReaderSlots; }

int64_t publication_epoch(int64_t control) { return control_at(control).epoch.load(); }

void publication_set_epoch(int64_t control, int64_t epoch) {
  control_at(control).epoch.store(epoch);
}

int64_t publication_pin(int64_t control, int64_t slot) { return pin(control_at(control), slot); }

void publication_unpin(int64_t control, int64_t slot, int64_t epoch) {
  unpin(control_at(control), slot, epoch);
}

std::vector<int64_t> publication_busy(int64_t control, int64_t buffer) {
  return busy_slots(control_at(control), buffer);
}

void publication_clear(int64_t control, int64_t slot) { clear_slot(control_at(control), slot); }

// The rows of a matrix that others go to: their places int64 [n], each once.
struct Target {
  const int64_t* at;
  int64_t n, width;  // bytes
  char* rows;
};

Target target_of(const Tensor& to, const Tensor& places) {
  STD_TORCH_CHECK(places.scalar_type() == ScalarType::Long && places.is_contiguous() &&
                      to.dim() == 2 && to.is_contiguous(),
                  "internal: places must be int64, in a matrix of rows");
  const int64_t* at = static_cast<const int64_t*>(places.data_ptr());
  const int64_t n = places.numel(), num_rows = to.size(0);
  STD_TORCH_CHECK(std::all_of(at, at + n, [=](int64_t k) { return k >= 0 && k < num_rows; }),
                  "internal: a place outside of the table");
  return {at, n, to.size(1) * static_cast<int64_t>(to.element_size()),
          static_cast<char*>(to.mutable_data_ptr())};
}

// Brings the rows at these places near, so that `place_rows` need not wait for memory.
void fetch_rows(std::vector<Tensor> to, std::vector<Tensor> places) {
  STD_TORCH_CHECK(to.size() == places.size(), "internal: as many places as matrices");
  for (size_t k = 0; k < to.size(); ++k) {
    const Target target = target_of(to[k], places[k]);
    for (int64_t i = 0; i < target.n; ++i)
      for (int64_t b = 0; b < target.width; b += 64)
        static_cast<void>(*static_cast<const volatile char*>(target.rows + target.at[i] * target.width + b));
  }
}

// Row i of `rows` [n, width] to row places[i] of `to`, of each of the matrices.
void place_rows(std::vector<Tensor> to, std::vector<Tensor> places, std::vector<Tensor> rows) {
  constexpr int64_t kAhead = 16;
  STD_TORCH_CHECK(to.size() == places.size() && to.size() == rows.size(),
                  "internal: as many places and rows as matrices");
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
      while (end < n && at[end] == at[end - 1] + 1) ++end;  // a run is copied as one
      const char* next = first + at[std::min(n - 1, end + kAhead)] * width;
      for (int64_t b = 0; b < width; b += 64) __builtin_prefetch(next + b, 1, 3);
      std::memcpy(first + at[i] * width, from + i * width, static_cast<size_t>((end - i) * width));
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(segment_bytes, "(int address, int bytes) -> Tensor");
  OPER_OPERATOR(publication_control_bytes, "() -> int");
  OPER_OPERATOR(publication_slots, "() -> int");
  OPER_OPERATOR(publication_epoch, "(int control) -> int");
  OPER_OPERATOR(publication_set_epoch, "(int control, int epoch) -> ()");
  OPER_OPERATOR(publication_pin, "(int control, int slot) -> int");
  OPER_OPERATOR(publication_unpin, "(int control, int slot, int epoch) -> ()");
  OPER_OPERATOR(publication_busy, "(int control, int buffer) -> int[]");
  OPER_OPERATOR(publication_clear, "(int control, int slot) -> ()");
  OPER_OPERATOR(fetch_rows, "(Tensor[] to, Tensor[] places) -> ()");
  OPER_OPERATOR(place_rows, "(Tensor(a!)[] to, Tensor[] places, Tensor[] rows) -> ()");
}

}  // namespace oper::host
