// Named ranges (NVTX) of host code, with which Nsight Systems groups the kernels launched in them.
#pragma once

#if defined(OPER_EMULATED)
#include "emulation.h"
#elif __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define OPER_HAS_RANGES
#endif

namespace oper::device {

// A range from construction to destruction. Without a profiler it costs two tests of a pointer.
class Range {
 public:
  explicit Range([[maybe_unused]] const char* name) {
#if defined(OPER_EMULATED)
    emulation::ranges.emplace_back(name);
#elif defined(OPER_HAS_RANGES)
    nvtxRangePushA(name);
#endif
  }
  ~Range() {
#if defined(OPER_HAS_RANGES)
    nvtxRangePop();
#endif
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace oper::device
