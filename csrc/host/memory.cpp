#include "host/memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace oper::host {
namespace {

// Reserves address space of `bytes` at a 2 MiB boundary; null if there is none.
char* reserve_aligned(size_t bytes) {
  const size_t total = bytes + kHugePage;
  void* raw = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(raw);
  char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(begin), kHugePage));
  if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
  char* end = aligned + round_up(bytes, 4096);
  if (begin + total > end) munmap(end, static_cast<size_t>(begin + total - end));
  return aligned;
}

using Blocks = std::map<size_t, std::vector<void*>>;  // by size

struct Pool {
  ForkMutex mutex;
  Blocks free_blocks;
  size_t free_bytes = 0;  // of `free_blocks`
  size_t used_bytes = 0;  // of blocks that were taken and not given back
  size_t most_used_bytes = size_t{64} << 20;  // the most so far, or this if that is less
};

// Free blocks of more than this multiple of `most_used_bytes` are released before another block is
// mapped. Otherwise there is no limit if sizes vary with the batch: each size has its own blocks.
constexpr size_t kMostFree = 4;

// Never destroyed: tensors may outlive static destructors.
Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}

// Blocks are whole huge pages or, up to half a huge page, powers of two. If small tensors took a
// huge page each, a step with more of them than the pool keeps would have to clear that many huge
// pages.
bool is_small(size_t size) { return size < kHugePage; }

size_t pool_size(size_t bytes) {
  constexpr size_t kLeast = 4096;
  if (bytes > kHugePage / 2) return round_up(bytes, kHugePage);
  return std::bit_ceil(std::max(bytes, kLeast));
}

// Maps a block of `pool_size` bytes; null if there is no memory.
void* map_block(size_t size) {
  char* at = nullptr;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (!is_small(size)) {
    at = reserve_aligned(size);
    if (at == nullptr) return nullptr;
    flags |= MAP_FIXED;
  }
  void* data = mmap(at, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (data == MAP_FAILED) {
    if (at != nullptr) munmap(at, size);
    return nullptr;
  }
  if (at != nullptr) want_huge(data, size);
  return data;
}

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer identifies memory by its address. To find races between ranks that are threads,
// they must therefore map a segment at the same address, and all can write to memory that one rank
// may write to.
struct Place {
  void* data;
  size_t bytes;
  int users;
};
std::mutex places_mutex;
std::map<std::pair<dev_t, ino_t>, Place>& places() {
  static auto* instance = new std::map<std::pair<dev_t, ino_t>, Place>;
  return *instance;
}

template <class Map>
void* map_once(int fd, size_t bytes, Map map) {
  struct stat about;
  if (fstat(fd, &about) != 0) return nullptr;
  const std::lock_guard<std::mutex> lock(places_mutex);
  const auto key = std::make_pair(about.st_dev, about.st_ino);
  const auto found = places().find(key);
  if (found != places().end() && found->second.bytes == bytes) {
    ++found->second.users;
    return found->second.data;
  }
  void* data = map(true);
  if (data == nullptr) return map(false);  // sealed
  places()[key] = Place{data, bytes, 1};
  return data;
}

// Ends one rank's use of a place and returns whether others still use it.
bool leave_place(void* data) {
  const std::lock_guard<std::mutex> lock(places_mutex);
  for (auto entry = places().begin(); entry != places().end(); ++entry) {
    if (entry->second.data != data) continue;
    if (--entry->second.users > 0) return true;
    places().erase(entry);
    return false;
  }
  return false;
}
#endif

void* map_new(int fd, size_t bytes, bool writable) {
  char* at = reserve_aligned(bytes);
  if (at == nullptr) return nullptr;
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  void* data = mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    munmap(at, round_up(bytes, 4096));
    return nullptr;
  }
  return data;
}

}  // namespace

void* map_shared(int fd, size_t bytes, bool writable) {
#if defined(__SANITIZE_THREAD__)
  return map_once(fd, bytes, [=](bool write) { return map_new(fd, bytes, write); });
#else
  return map_new(fd, bytes, writable);
#endif
}

bool map_over(void* data, int fd, size_t offset, size_t bytes, bool writable) {
#if defined(__SANITIZE_THREAD__)
  writable = true;  // the owner may write to it, at the same address
#endif
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  if (mmap(data, bytes, protection, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) ==
      MAP_FAILED)
    return false;
  madvise(data, bytes, MADV_NOHUGEPAGE);
  return true;
}

void unmap(void* data, size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  if (leave_place(data)) return;
#endif
  munmap(data, round_up(bytes, 4096));
}

size_t collapse_huge(void* data, size_t bytes) {
  size_t done = 0;
  char* begin = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(data), kHugePage));
  char* end = static_cast<char*>(data) + bytes;
  // One huge page per call: a page that cannot be collapsed does not stop the others.
  for (; begin + kHugePage <= end; begin += kHugePage) {
    if (madvise(begin, kHugePage, MADV_COLLAPSE) == 0) done += kHugePage;
  }
  return done;
}

void want_huge(void* data, size_t bytes) { madvise(data, bytes, MADV_HUGEPAGE); }

int64_t last_level_cache_bytes() {
  static const int64_t bytes = [] {
    constexpr int64_t kUnknown = int64_t{32} << 20, kOfCore = int64_t{4} << 20;
    int64_t found = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    const int64_t cores = std::max<int64_t>(1, sysconf(_SC_NPROCESSORS_ONLN));
    return std::min(found > 0 ? found : kUnknown, kOfCore * cores);
  }();
  return bytes;
}

void* pool_take(size_t bytes) {
  const size_t size = pool_size(bytes);
  Pool& all = pool();
  Blocks surplus;
  {
    const std::lock_guard<ForkMutex> lock(all.mutex);
    auto& blocks = all.free_blocks[size];
    all.used_bytes += size;
    if (!blocks.empty()) {
      all.most_used_bytes = std::max(all.most_used_bytes, all.used_bytes);
      void* data = blocks.back();
      blocks.pop_back();
      all.free_bytes -= size;
      return data;
    }
    if (all.free_bytes > kMostFree * all.most_used_bytes) {
      surplus.swap(all.free_blocks);
      all.free_bytes = 0;
    }
  }
  for (const auto& [each, blocks] : surplus)
    for (void* data : blocks) munmap(data, each);
  void* data = map_block(size);
  const std::lock_guard<ForkMutex> lock(all.mutex);
  if (data == nullptr) {
    all.used_bytes -= size;
    throw std::bad_alloc();
  }
  all.most_used_bytes = std::max(all.most_used_bytes, all.used_bytes);
  return data;
}

void pool_give(void* data, size_t bytes) {
  // A few blocks of each size are kept; if there are more, sizes vary, and blocks of this one may
  // never be needed again. Sizes of small blocks vary less, since they are powers of two.
  const size_t size = pool_size(bytes);
  const size_t keep = is_small(size) ? 32 : 4;
  Pool& all = pool();
  {
    const std::lock_guard<ForkMutex> lock(all.mutex);
    all.used_bytes -= size;
    auto& blocks = all.free_blocks[size];
    if (blocks.size() < keep) {
      blocks.push_back(data);
      all.free_bytes += size;
      return;
    }
  }
  munmap(data, size);
}

Buffer::~Buffer() { std::free(data_); }

void Buffer::grow(int64_t bytes) {
  std::free(std::exchange(data_, nullptr));  // first: there may not be memory for both blocks
  size_ = bytes + bytes / 4 + 64;
  const size_t size = static_cast<size_t>(size_), unit = size >= kHugePage ? kHugePage : 64;
  data_ = static_cast<char*>(std::aligned_alloc(unit, round_up(size, unit)));
  if (data_ == nullptr) throw std::bad_alloc();
  // Large buffers are sorted and gathered from at random: with small pages, the processor's TLB
  // would have too few entries.
  if (unit == kHugePage) want_huge(data_, round_up(size, unit));
}

}  // namespace oper::host
