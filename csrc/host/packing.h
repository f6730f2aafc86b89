// Arrays on their way between memory domains: gathered, and rounded to 16 bits where that is wanted.
#pragma once

#include <cstdint>

#include "oper/elements.h"

namespace oper::host {

struct WireArray {
  int64_t n, unit;  // unit: bytes of one entry
  RowType wire;     // kFloat32: as it is; else the entries are fp32 numbers, sent as this
};

// Entries `rows` (or, when null, 0..n) of `from`, side by side.
void pack(char* to, const char* from, const uint32_t* rows, const WireArray& array);
void unpack(char* to, const char* from, const WireArray& array);

}  // namespace oper::host
