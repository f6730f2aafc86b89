// Device memory shared between processes. All functions throw with the reason.
#pragma once

#include <cstdint>

namespace oper::device {

struct SharedMemory {
  int64_t fd;       // the caller closes it
  int64_t address;  // where it is mapped here
  int64_t bytes;    // rounded up
};

// Zeroed memory of `device` that other processes may attach.
SharedMemory create_shared(int64_t bytes, int device);
// Maps memory of another process for `device`; `bytes` as its creator got them.
int64_t attach_shared(int fd, int64_t bytes, int device);
void release_shared(int64_t address, int64_t bytes);

}  // namespace oper::device
