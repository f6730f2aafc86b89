// Fault injection for tests: a process injects a fault into itself at a point of a batch. While no
// fault is armed, reaching a point costs one load.
#pragma once

#include <atomic>
#include <cstdint>

namespace oper::host {

enum class FaultPoint : int32_t {
  kNone,
  kResolve,
  kForward,
  kSendBuffer,
  kBarrier,
  kUpdate,
  kReplicas
};
constexpr int32_t kNumFaultPoints = 7;

struct Fault {
  FaultPoint point;
  int64_t count;     // the fault happens at the count-th time that the point is reached from now on
  int32_t signal;    // signal that the process sends itself; 0 = none
  int64_t sleep_us;  // time that the thread then sleeps
  // Descriptor to which the time of the fault is written before that, CLOCK_MONOTONIC in ns as
  // int64; -1 = none.
  int note_fd;
};

void arm(const Fault& fault);
void meet_fault();

extern std::atomic<int32_t> armed_point;

inline void reach(FaultPoint point) {
  if (armed_point.load(std::memory_order_relaxed) == static_cast<int32_t>(point)) [[unlikely]]
    meet_fault();
}

}  // namespace oper::host
