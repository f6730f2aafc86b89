// Packing of arrays that are sent between memory domains: gathered, and rounded if requested.
#pragma once

#include <cstdint>

#include "common/exchange.h"
#include "common/philox.h"

namespace oper::host {

// The source of random numbers for rounding. They depend on which row or bag is rounded, not on
// threads or order.
struct Draws {
  RoundingKey key;
  uint32_t purpose;       // distinguishes draws of the same key
  uint32_t first_column;  // first column of the rows in the whole table
  const uint32_t* names;  // by entry of the source: the row's slot, or the bag's number
};

struct WireArray {
  int64_t n, unit;               // unit: bytes of one entry
  int32_t bits = 32;             // fewer: entries are rows of float32 numbers
  const Draws* draws = nullptr;  // null: rounds to nearest, as bfloat16 always does
};

// Writes the entries `rows` of `from` (null: entries 0 to n - 1) one after the other.
void pack(char* to, const char* from, const uint32_t* rows, const WireArray& array);
void unpack(char* to, const char* from, const WireArray& array);

// Convert slots below 2^bits, uint32 [n], to `bits` (1 to 32) bits each, packed from the lowest bit
// on, and back.
void pack_slots(char* to, const uint32_t* slots, int64_t n, int32_t bits);
void unpack_slots(uint32_t* slots, const char* from, int64_t n, int32_t bits);

// Convert the bags of consecutive ids, uint32 [n], to one bit per id, which is set if the id's bag
// is not that of the id before; and back, to bags numbered 0, 1, ...
void pack_runs(char* to, const uint32_t* bags, int64_t n);
void unpack_runs(uint32_t* bags, const char* from, int64_t n);

}  // namespace oper::host
