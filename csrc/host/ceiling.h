// The physical limits of a pooled lookup and of an update on this machine: rows at given addresses are
// prefetched and summed, or read and written in place, and nothing else is done. Benchmarks set real
// lookups and updates beside them.
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

// Places to read and write again as they are, one word of every line: no other thread may write there.
struct RewriteJob {
  const int64_t* addresses;  // [N + prefetch]; the surplus must be writable addresses
  int64_t bytes;             // of each place
  int64_t prefetch;          // places ahead
};

// Places [begin, end).
void rewrite(const RewriteJob& job, int64_t begin, int64_t end);

}  // namespace oper::host
