// Packs the arrays of messages between memory domains: gathers their entries, and rounds numbers if
// fewer bits are requested; and unpacks them.
#pragma once

#include <cstdint>

#include "common/exchange.h"
#include "common/philox.h"

namespace oper::host {

// The source of the random numbers for rounding. They depend on which row or bag is rounded, not on
// the order or the threads.
struct Draws {
  RoundingKey key;
  uint32_t purpose;       // see philox.h
  uint32_t first_column;  // place of the rows' first column in the entire table
  const uint32_t* names;  // [n] of each entry the row's slot or the bag's number
};

// An array of n entries of `unit` bytes each, whose numbers have `bits` bits in a message (see
// bits_of_row). With fewer than 32 bits, entries are rows of float32 numbers.
struct WireArray {
  int64_t n, unit;
  int32_t bits = 32;
  const Draws* draws = nullptr;  // null: codes are rounded to nearest, as bfloat16 always is
};

// Packs the entries `rows` [n] of `from`, or all if that is null.
void pack(char* to, const char* from, const uint32_t* rows, const WireArray& array);
void unpack(char* to, const char* from, const WireArray& array);

// Convert slots below 2^bits, uint32 [n], to `bits` (1 to 32) bits each, lowest bits first, and
// back. Write packed_bytes(n, bits), see exchange.h.
void pack_slots(char* to, const uint32_t* slots, int64_t n, int32_t bits);
void unpack_slots(uint32_t* slots, const char* from, int64_t n, int32_t bits);

// Convert the bags of consecutive ids, uint32 [n], to one bit per id, set if the id's bag is not
// that of the id before; and back, but to bags numbered 0, 1, ...
void pack_runs(char* to, const uint32_t* bags, int64_t n);
void unpack_runs(uint32_t* bags, const char* from, int64_t n);

}  // namespace oper::host
