#include "host/exchange/packing.h"

#include <cstring>

namespace oper::host {

namespace {

constexpr uint32_t kToNearest = 0x8000;  // in the place of random bits: ties away from zero

template <class E>
void round_row(char* to, const char* from, int64_t n) {
  E* rounded = reinterpret_cast<E*>(to);
  const float* numbers = reinterpret_cast<const float*>(from);
  for (int64_t i = 0; i < n; ++i) rounded[i] = round_to(E{}, numbers[i], kToNearest);
}

template <class E>
void expand(char* to, const char* from, int64_t n) {
  float* numbers = reinterpret_cast<float*>(to);
  const E* rounded = reinterpret_cast<const E*>(from);
  for (int64_t i = 0; i < n; ++i) numbers[i] = to_float(rounded[i]);
}

// Entries of `kUnit` bytes, or of `unit` where that is 0. A call for every short copy would take
// longer than the copy.
template <int64_t kUnit>
void copy_entries(char* to, const char* from, const uint32_t* rows, int64_t n, int64_t unit) {
  constexpr int64_t kAhead = 16;
  const int64_t size = kUnit ? kUnit : unit;
  for (int64_t i = 0; i < n; ++i, to += size) {
    if (i + kAhead < n)
      for (int64_t b = 0; b < size; b += 64)
        __builtin_prefetch(from + static_cast<int64_t>(rows[i + kAhead]) * size + b);
    std::memcpy(to, from + static_cast<int64_t>(rows[i]) * size, static_cast<size_t>(size));
  }
}

void copy_entries(char* to, const char* from, const uint32_t* rows, int64_t n, int64_t unit) {
  if (unit == 4) return copy_entries<4>(to, from, rows, n, unit);
  if (unit == 64) return copy_entries<64>(to, from, rows, n, unit);
  if (unit == 128) return copy_entries<128>(to, from, rows, n, unit);
  if (unit == 256) return copy_entries<256>(to, from, rows, n, unit);
  copy_entries<0>(to, from, rows, n, unit);
}

}  // namespace

void pack(char* to, const char* from, const uint32_t* rows, const WireArray& array) {
  constexpr int64_t kAhead = 16;
  const int64_t n = array.n, unit = array.unit;
  if (array.wire == RowType::kFloat32) {
    if (rows != nullptr) return copy_entries(to, from, rows, n, unit);
    std::memcpy(to, from, static_cast<size_t>(n * unit));
    return;
  }
  for (int64_t i = 0; i < n; ++i, to += unit / 2) {
    if (rows != nullptr && i + kAhead < n)
      for (int64_t b = 0; b < unit; b += 64)
        __builtin_prefetch(from + static_cast<int64_t>(rows[i + kAhead]) * unit + b);
    const char* row = from + (rows == nullptr ? i : static_cast<int64_t>(rows[i])) * unit;
    if (array.wire == RowType::kFloat16) round_row<Float16>(to, row, unit / 4);
    if (array.wire == RowType::kBFloat16) round_row<BFloat16>(to, row, unit / 4);
  }
}

void unpack(char* to, const char* from, const WireArray& array) {
  const int64_t bytes = array.n * array.unit;
  if (array.wire == RowType::kFloat32) std::memcpy(to, from, static_cast<size_t>(bytes));
  if (array.wire == RowType::kFloat16) expand<Float16>(to, from, bytes / 4);
  if (array.wire == RowType::kBFloat16) expand<BFloat16>(to, from, bytes / 4);
}

void pack_runs(char* to, const uint32_t* bags, int64_t n) {
  uint32_t* words = reinterpret_cast<uint32_t*>(to);
  for (int64_t first = 0; first < n; first += 32) {
    const int64_t end = first + 32 < n ? first + 32 : n;
    uint32_t word = 0;
    for (int64_t i = first; i < end; ++i)
      word |= static_cast<uint32_t>(i == 0 || bags[i] != bags[i - 1]) << (i - first);
    words[first / 32] = word;
  }
}

void unpack_runs(uint32_t* bags, const char* from, int64_t n) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
  uint32_t bag = 0;
  for (int64_t i = 0; i < n; ++i) {
    bag += words[i / 32] >> (i % 32) & 1;
    bags[i] = bag - 1;
  }
}

}  // namespace oper::host
