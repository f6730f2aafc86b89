// Fault injection for the tests: a process injects a fault into itself at a point of a batch.
// Without a fault, a point costs the load of a word.
#pragma once

#include <atomic>
#include <cstdint>

namespace oper::host {

enum class FaultPoint : int32_t { kNone, kResolve, kForward, kOutbox, kBarrier, kUpdate, kReplicas };
constexpr int32_t kNumFaultPoints = 7;

struct Fault {
  FaultPoint point;
  int64_t count;     // happens when the point is met for the count-th time from now
  int32_t signal;    // sent to this process; 0 = none
  int64_t sleep_us;  // then the thread sleeps
  int note_fd;       // gets the time of the fault, CLOCK_MONOTONIC in ns as int64
};

void arm(const Fault& fault);
void meet_fault();

extern std::atomic<int32_t> armed_point;

inline void reach(FaultPoint point) {
  if (armed_point.load(std::memory_order_relaxed) == static_cast<int32_t>(point)) [[unlikely]]
    meet_fault();
}

}  // namespace oper::host
