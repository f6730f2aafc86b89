// How a rank spends its time: of the last batch by phase, histograms of all batches and, if a trace
// is recorded, when each phase began and ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "common/fork_mutex.h"

namespace oper::host {

// The order is that of SPANS in oper/shmem/counters/phases.py.
enum Phase {
  kForward,
  kReduce,
  kWaitForGradients,
  kUpdate,
  kWaitForUpdates,
  kRefresh,
  kNumPhases,
  // In traces only: resolving ids before the forward pass, possibly on another thread; and parts of
  // the above, waits at the barrier of a memory domain and exchanges of bytes between domains.
  kResolve = kNumPhases,
  kBarrier,
  kExchange
};

class PhaseTimes {
 public:
  // Bucket 0 has times below 1 us, bucket k those from 2^(k-1) us to below 2^k us, the last one
  // also all longer ones.
  static constexpr int kNumBuckets = 24;
  static constexpr int kSpanWidth = 5;

  // Nanoseconds of a clock that all processes of a host share (Python's `time.monotonic_ns`).
  static int64_t now_ns();

  // Records a phase. `sent_bytes`: to other memory domains in that time. Thread-safe.
  void note(Phase what, int64_t begin_ns, int64_t end_ns, int64_t sent_bytes = 0);

  // Nanoseconds of the last batch by phase, [kNumPhases]; if lookups were concurrent, of one of
  // them.
  std::vector<int64_t> last_ns() const;
  // Since the start or the last reset, by phase: nanoseconds, and batches by bucket;
  // [kNumPhases][1 + kNumBuckets].
  std::vector<int64_t> histograms(bool reset);

  // From now on keeps up to `most` spans (recorded phases) until they are taken; 0 ends the trace.
  void trace(int64_t most);
  bool is_traced() const { return most_.load(std::memory_order_relaxed) > 0; }
  // The number of spans lost since the last call because the buffer was full, then the spans kept:
  // kind, begin, end, bytes sent, thread (the system's id); [1 + n * kSpanWidth].
  std::vector<int64_t> take_spans();

 private:
  std::atomic<int64_t> last_ns_[kNumPhases] = {};
  std::atomic<int64_t> total_ns_[kNumPhases] = {};
  std::atomic<int64_t> counts_[kNumPhases][kNumBuckets] = {};
  std::atomic<int64_t> most_{0};
  ForkMutex mutex_;
  std::vector<int64_t> spans_;
  int64_t lost_ = 0;
};

}  // namespace oper::host
