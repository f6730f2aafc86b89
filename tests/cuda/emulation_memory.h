// Memory of the emulated devices, and who may access it.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace oper::emulation {

// An address tells the device (a rank) to which the memory belongs, and whether it is in an arena,
// which other devices may be able to address, or in memory that only kernels of this device may use.
constexpr int kMaxDevices = 16;
constexpr uint64_t kRegionBytes = uint64_t{4} << 30, kRegions = 2 * kMaxDevices;
inline char* const memory_begin = static_cast<char*>(
    mmap(nullptr, kRegions * kRegionBytes, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));

struct Device {
  int rank = 0;
  uint64_t near = 1;  // bits of the devices whose arenas it can address
};
inline thread_local Device device;  // on which this thread launches

// The code that runs on this thread: host code may access no device memory, a kernel that of
// `running`, and the driver any.
enum class Side { kHost, kKernel, kDriver };
inline thread_local Side side = Side::kHost;
inline thread_local Device running;
class As {
 public:
  explicit As(Side now, const Device& on = {}) : before_(side), running_before_(running) {
    side = now;
    running = on;
  }
  ~As() {
    side = before_;
    running = running_before_;
  }

 private:
  const Side before_;
  const Device running_before_;
};

inline bool is_device_memory(const void* at) {
  return static_cast<uint64_t>(static_cast<const char*>(at) - memory_begin) <
         kRegions * kRegionBytes;
}

struct Region {
  uint64_t used = 0;
  std::map<size_t, std::vector<char*>> free;  // by size
};
inline std::mutex memory_lock;
// Never destroyed, since tensors may be freed at the end of the process.
inline Region* const regions = new Region[kRegions];
inline auto& sizes = *new std::unordered_map<const void*, size_t>;

inline char* allocate(int rank, bool in_arena, size_t bytes) {
  size_t size = 256;
  while (size < bytes) size *= 2;
  const int index = 2 * rank + (in_arena ? 1 : 0);
  const std::lock_guard<std::mutex> lock(memory_lock);
  Region& region = regions[index];
  std::vector<char*>& free = region.free[size];
  if (free.empty()) {
    if (rank >= kMaxDevices || region.used + size > kRegionBytes) {
      std::fprintf(stderr, "emulation: no memory for %zu bytes on device %d, which has %llu of %llu "
                   "in use or kept for allocations of other sizes\n", bytes, rank,
                   static_cast<unsigned long long>(region.used),
                   static_cast<unsigned long long>(kRegionBytes));
      std::abort();
    }
    free.push_back(memory_begin + index * kRegionBytes + region.used);
    region.used += size;
  }
  char* const found = free.back();
  free.pop_back();
  sizes[found] = size;
  return found;
}

inline void release(void* data) {
  const std::lock_guard<std::mutex> lock(memory_lock);
  const auto found = sizes.find(data);
  if (found->second >= 1 << 20) madvise(data, found->second, MADV_DONTNEED);
  regions[static_cast<uint64_t>(static_cast<char*>(data) - memory_begin) / kRegionBytes]
      .free[found->second]
      .push_back(static_cast<char*>(data));
  sizes.erase(found);
}

}  // namespace oper::emulation
