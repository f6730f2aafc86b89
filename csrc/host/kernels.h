// The inner loops of the host back end, compiled once per instruction set (kernels_*.cpp) and
// chosen when the library loads. All variants give bitwise the same numbers: 16 lanes whatever
// the register width, no contraction of multiply and add, fixed reduction trees.
#pragma once

#include "host/context.h"

namespace oper::host {

// Bags [bag_begin, bag_end) of one feature; offsets[b] indexes `ids` (and `weights`).
struct BagRange {
  const void* ids;
  const int64_t* offsets;
  const float* weights;
  int64_t bag_begin, bag_end;
  bool ids_are_32_bit;
};

constexpr int64_t kReduceOk = -1, kReduceFull = -2;

struct Kernels {
  const char* name;
  // Pools the bags into out + bag * stride. Returns the first bad id's index in `ids`, or -1.
  int64_t (*pool)(const Table& table, const BagRange& bags, float* out, int64_t stride,
                  Scratch& scratch);
  // Reduces the gradients of one table into the outbox. Returns the first bad id's index, or
  // kReduceOk, or kReduceFull when the outbox has no room.
  int64_t (*reduce)(Context& context, int32_t table, const Batch& batch, const float* grad,
                    int64_t grad_stride, Scratch& scratch);
  // Merges what all ranks left for this rank's rows of one table and applies the optimizer.
  void (*update)(const Context& context, int32_t table, const OptimizerArgs& args);
};

extern const Kernels kKernelsGeneric;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

const Kernels& kernels();

}  // namespace oper::host
