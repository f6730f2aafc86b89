// The physical limit of a pooled lookup on this machine: rows at given addresses are prefetched,
// summed and written, and nothing else is done. Benchmarks set real lookups beside it.
#pragma once

#include <cstdint>

namespace oper::host {

// One batch, in any order of bags. Bag b sums the rows at addresses[offsets[b] .. offsets[b + 1])
// and writes `dim` floats at out + destinations[b].
struct GatherJob {
  const int64_t* addresses;     // [N + prefetch]; the surplus must be readable addresses
  const int64_t* offsets;       // [num_bags + 1]
  const int64_t* destinations;  // [num_bags], in floats
  float* out;
  int64_t dim;
  int64_t prefetch;  // rows ahead
  bool stream;       // write past the caches; needs dim % 16 == 0 and 64-byte aligned bags
};

// Bags [begin, end).
void gather(const GatherJob& job, int64_t begin, int64_t end);

}  // namespace oper::host
