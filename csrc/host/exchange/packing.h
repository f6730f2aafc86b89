// Arrays on their way between memory domains: gathered, and rounded to 16 bits where that is wanted.
#pragma once

#include <cstdint>

#include "common/elements.h"

namespace oper::host {

struct WireArray {
  int64_t n, unit;  // unit: bytes of one entry
  RowType wire;     // kFloat32: as it is; else the entries are fp32 numbers, sent as this
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
