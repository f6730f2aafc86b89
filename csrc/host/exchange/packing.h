// Arrays on their way between memory domains: gathered, and rounded where that is wanted.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace oper::host {

// Bits of the float32 numbers of a row in a message, see oper/messages.py: 32, as they are; 16,
// bfloat16; 8, codes behind their step and the least number, float32 each. Rows of so few columns that
// codes would take more bytes stay as they are.
constexpr int64_t kCodedRowBytes = 8, kLeastCoded = 3;
constexpr int32_t bits_of_row(int32_t wanted, int64_t columns) {
  return wanted == 8 && columns < kLeastCoded ? 32 : wanted;
}
// Bytes of an entry of `unit` bytes.
constexpr int64_t entry_bytes(int32_t bits, int64_t unit) {
  return bits == 8 ? kCodedRowBytes + unit / 4 : unit * bits / 32;
}

// What rounding at random draws from: whose numbers they are, so that no thread and no order counts.
struct Draws {
  RoundingKey key;
  uint32_t purpose;       // other draws of the same key have another one
  uint32_t first_column;  // of the rows in those of the whole table
  const uint32_t* names;  // by entry of the source: the row's slot, or the bag's number
};

struct WireArray {
  int64_t n, unit;               // unit: bytes of one entry
  int32_t bits = 32;             // fewer: entries are rows of float32 numbers
  const Draws* draws = nullptr;  // null: to nearest; bfloat16 always is
};

// Entries `rows` (or, when null, 0..n) of `from`, side by side.
void pack(char* to, const char* from, const uint32_t* rows, const WireArray& array);
void unpack(char* to, const char* from, const WireArray& array);

// Bags of ids that follow each other, uint32 [n], as one bit per id: set where another bag begins.
// They come back numbered 0, 1, ...
constexpr int64_t runs_bytes(int64_t n) { return (n + 31) / 32 * 4; }
void pack_runs(char* to, const uint32_t* bags, int64_t n);
void unpack_runs(uint32_t* bags, const char* from, int64_t n);

}  // namespace oper::host
