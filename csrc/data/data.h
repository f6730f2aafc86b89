// Counting and text for preprocessing: a library of its own with a plain C interface, so that
// workers that read logs need not load torch. Python's lock is not held meanwhile.
#pragma once

#include <cstdint>

#define OPER_DATA_API extern "C" __attribute__((visibility("default")))
#define OPER_DATA_INLINE __attribute__((always_inline)) inline
// Of a function with loops that newer processors run in wider vectors; chosen at run time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) \
    && !defined(__SANITIZE_ADDRESS__)
#define OPER_DATA_CLONES \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OPER_DATA_CLONES
#endif

namespace oper::data {

// Types of values by number, as oper/support/native.py passes them.
enum Kind : int32_t { kUint32 = 0, kInt64 = 1, kUint64 = 2 };

// How the text of a field becomes a number; `text.cpp` says what each accepts.
enum Parse : int32_t {
    kSkip = 0, kBit = 1, kInteger = 2, kDecimal = 3, kHex32 = 4, kWhole = 5, kNumber = 6,
};

// One field of a line, as oper/support/native.py lays it out.
struct Column {
    int32_t parse;
    int32_t required;     // a missing field makes the line irregular
    int64_t low, high;    // bounds of kInteger and kWhole
    void* out;            // int8, int64, float, uint32, int64, double by `parse`
    uint8_t* is_there;    // 0 where missing; null = not asked for
    const char* missing;  // a text that stands for a missing field besides the empty one, or null
    int64_t missing_size;
};

}  // namespace oper::data
