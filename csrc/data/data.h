// Counts values for preprocessing. A separate library with a C interface, so that
// processes that read logs need not load torch. Python calls it by ctypes, which releases the GIL.
#pragma once

#include <cstdint>

#include "common/clones.h"

#define OPER_DATA_API extern "C" __attribute__((visibility("default")))

namespace oper::data {

// Types of values, as numbered in oper/support/native.py.
enum Kind : int32_t { kUint32 = 0, kInt64 = 1, kUint64 = 2 };

}  // namespace oper::data
