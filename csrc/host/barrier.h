// A barrier between processes of one host: one epoch word per rank, futex waits, peers watched.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace oper::host {

// One cache line pair per rank in the shared control segment, so that waiting ranks do not
// disturb each other (adjacent-line prefetch works on 128 bytes).
struct alignas(128) BarrierLine {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> gave_up;
  // Updates of this rank's rows that have begun and ended: while they differ, the rows are of no step.
  std::atomic<uint32_t> begun, ended;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

class Barrier {
 public:
  enum class Result : int64_t { kOk = 0, kPeerLost = 1, kDeadline = 2, kPeerGaveUp = 6 };

  // `lines` is [world_size] in memory that all ranks map; `pidfds` is [world_size], -1 = not
  // watched (this rank, or a virtual rank of the same process).
  Barrier(BarrierLine* lines, int32_t rank, int32_t world_size, std::vector<int> pidfds,
          int64_t deadline_ms);

  // Everything written by any rank before its arrive() is seen by all ranks after theirs.
  // On failure `culprit` names the rank that is missing. A failed barrier stays failed.
  Result arrive(int32_t* culprit);

  // This rank will not arrive any more: whoever waits for it fails at once.
  void give_up();

  // This rank's rows are being updated from now on, or no longer.
  void note_update(bool begins);
  // Per rank: arrivals, updates begun, updates ended.
  std::vector<int64_t> progress() const;

 private:
  Result wait_for(int32_t peer, uint32_t target);
  BarrierLine* lines_;
  int32_t rank_;
  int32_t world_size_;
  std::vector<int> pidfds_;
  int64_t deadline_ms_;
  uint32_t epoch_ = 0;
  int spins_;
  Result failed_ = Result::kOk;
  int32_t culprit_ = -1;
};

}  // namespace oper::host
