// Parses text and counts values for preprocessing. A separate library with a C interface, so that
// processes that read logs need not load torch. Python calls it by ctypes, which releases the GIL.
#pragma once

#include <cstdint>

#include "common/clones.h"

#define OPER_DATA_API extern "C" __attribute__((visibility("default")))

namespace oper::data {

// Types of values, as numbered in oper/support/native.py.
enum Kind : int32_t { kUint32 = 0, kInt64 = 1, kUint64 = 2 };

// How the text of a field becomes a number; see `read` in field.h.
enum Parse : int32_t {
    kSkip = 0, kBit = 1, kInteger = 2, kDecimal = 3, kHex32 = 4, kWhole = 5, kNumber = 6,
};

// One field of a line; the same struct as `_Field` in oper/data/reading/plain.py.
struct Column {
    int32_t parse;
    int32_t required;     // a missing field makes the line irregular
    int64_t low, high;    // bounds of kInteger and kWhole
    void* out;            // kBit: int8; kInteger, kWhole: int64; kNumber: float; kDecimal: double;
                          // kHex32: uint32
    uint8_t* is_there;    // output, 1 where the field is there, else 0; null = not needed
    const char* missing;  // text that means a missing field, as empty text always does; null = none
    int64_t missing_size;
};

}  // namespace oper::data
