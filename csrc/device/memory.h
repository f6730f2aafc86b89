// Device memory shared between processes, some of it backed by host memory. All functions throw
// with the reason.
#pragma once

#include <cstdint>
#include <vector>

namespace oper::device {

// What an arena is made of: `bytes`, of which the ascending ranges [begin, end) in `host_ranges`
// (flat) lie in host memory, which kernels reach over the device's link. All are multiples of
// kPartBytes.
struct ArenaParts {
  int64_t bytes;
  std::vector<int64_t> host_ranges;
};
constexpr int64_t kPartBytes = 2 << 20;

struct SharedMemory {
  int64_t address;           // where it is mapped here
  std::vector<int64_t> fds;  // one per part, in order; the caller closes them
};

// Zeroed memory of `device`, and of the host where the parts say so, that others may attach.
SharedMemory create_shared(const ArenaParts& parts, int device);
// Maps memory of another process for `device`; `parts` as its creator had them.
int64_t attach_shared(const std::vector<int64_t>& fds, const ArenaParts& parts, int device);
void release_shared(int64_t address, const ArenaParts& parts);

}  // namespace oper::device
