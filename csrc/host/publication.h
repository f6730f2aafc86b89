// Which of two buffers readers look at, and who still looks at the other.
//
// Epoch e lies in buffer e % 2. A reader counts itself into its slot for the buffer of the epoch
// that it has seen, then looks at the epoch again: if that has moved on meanwhile, it steps back and
// takes the new one. A publisher writes the buffer of epoch e + 1 only while no slot counts a reader
// there, then stores e + 1. All of these are sequentially consistent: either the publisher sees the
// reader's count, or the reader sees the publisher's epoch (as with hazard pointers, Michael 2004).
// A reader never waits for that. The slots of a process that has died are cleared by the publisher.
//
// A publisher that changes some rows of epoch e in place stores -e, waits until no slot counts a
// reader in that buffer, writes, and stores e + 2: the same buffer. Readers that come meanwhile find
// a negative epoch and come again.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace oper::host {

constexpr int64_t kReaderSlots = 1024;

// One process; a line of its own, which nobody else writes while the process lives.
struct alignas(128) ReaderSlot {
  std::atomic<int64_t> in_use[2];  // lookups that read buffer 0 and buffer 1
};

// Begins as the zeros of a new segment.
struct Control {
  alignas(128) std::atomic<int64_t> epoch;  // 0: nothing published yet
  ReaderSlot slots[kReaderSlots];
};

static_assert(std::atomic<int64_t>::is_always_lock_free);

inline void clear_slot(Control& control, int64_t slot) {
  for (auto& count : control.slots[slot].in_use) count.store(0);
}

// The epoch that the caller may read until `unpin`; negative, and nothing to unpin, while the buffer
// is written in place.
inline int64_t pin(Control& control, int64_t slot) {
  for (int64_t epoch = control.epoch.load();;) {
    if (epoch < 0) return epoch;
    auto& count = control.slots[slot].in_use[epoch & 1];
    count.fetch_add(1);
    const int64_t now = control.epoch.load();
    if (now == epoch) return epoch;
    count.fetch_sub(1);
    epoch = now;
  }
}

inline void unpin(Control& control, int64_t slot, int64_t epoch) {
  control.slots[slot].in_use[epoch & 1].fetch_sub(1);
}

// Slots with readers in a buffer.
inline std::vector<int64_t> busy_slots(const Control& control, int64_t buffer) {
  std::vector<int64_t> busy;
  for (int64_t slot = 0; slot < kReaderSlots; ++slot)
    if (control.slots[slot].in_use[buffer & 1].load() != 0) busy.push_back(slot);
  return busy;
}

}  // namespace oper::host
