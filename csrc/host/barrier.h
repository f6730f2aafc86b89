// A barrier between processes of one host: one epoch word per rank, futex waits, peers watched.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "common/exchange.h"

namespace oper::host {

// One cache line pair per rank in the shared control segment, so that waiting ranks do not
// disturb each other (adjacent-line prefetch works on 128 bytes).
struct alignas(128) BarrierLine {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> absent;  // enum Absence
  // Numbers of updates of this rank's rows that have begun and ended: while they differ, the rows
  // are not those of any step.
  std::atomic<uint32_t> begun, ended;
  // The phases of this rank's last two arrivals, by the arrival's number modulo 2: no rank arrives
  // at a barrier before all have arrived at the previous one, so a word is kept until all have read
  // it.
  std::atomic<uint32_t> phase[2];
  std::atomic<uint32_t> settings[2];  // of the same arrivals, see come()
  // The rank that this one found to lag before it gave up (0 = none), packed by Python's desync.py.
  std::atomic<int64_t> verdict;
};
static_assert(sizeof(BarrierLine) == 128);
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

// Why a rank no longer arrives.
enum Absence : uint32_t { kPresent = 0, kGaveUp = 1, kClosed = 2 };

class Barrier {
 public:
  enum Result : int64_t {
    kOk = 0,
    kPeerLost = 1,
    kDeadline = 2,
    kPeerGaveUp = 6,
    kOtherPhase = 8,  // all ranks have arrived, but in different phases
    kPeerClosed = 12,
    kRefused = 13,  // all ranks have arrived, but at least one refuses to take part this time
    kOtherSettings = 15,  // all ranks have arrived, but with different settings
  };

  // `lines` is [world_size] in memory that all ranks map; `pidfds` is [world_size], -1 = not
  // watched (this rank, or a virtual rank of the same process).
  Barrier(BarrierLine* lines, int32_t rank, int32_t world_size, std::vector<int> pidfds,
          int64_t deadline_ms);
  // Marks this rank as closed: ranks that wait for it from now on get kPeerClosed.
  ~Barrier();
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;

  // Release-acquire: writes of any rank before arrive() are visible to all ranks after it returns.
  // Returns a Result and, on failure, the rank that is missing or in another phase. A failed barrier
  // stays failed. If any rank passes `refuses`, all ranks get kRefused and the lowest such rank;
  // otherwise `phase` must be equal on all ranks. If `settings` differ, kOtherSettings and the lowest
  // rank whose settings are not those of rank 0. The barrier stays usable after both.
  Status arrive(uint32_t phase, bool refuses = false, uint32_t settings = 0);
  // The two halves of arrive(): in between, a rank may do work for which its peers need not wait.
  void come(uint32_t phase, bool refuses = false, uint32_t settings = 0);
  Status wait();
  // Makes all ranks skip what follows the next barrier, at which the others arrive later for `phase`:
  // this rank does not wait for them before its own next arrival.
  void refuse(uint32_t phase);

  // Announces that this rank will not arrive again: ranks that wait for it fail at once with
  // `verdict`.
  void give_up(int64_t verdict = 0);

  // Records that an update of this rank's rows begins or has ended.
  void note_update(bool begins);
  // Per rank: number of arrivals, phase of the last one, Absence, verdict, updates begun and ended,
  // whether it refused at its last arrival.
  std::vector<int64_t> positions() const;

 private:
  Result wait_for(int32_t peer, uint32_t target);
  BarrierLine* lines_;
  int32_t rank_;
  int32_t world_size_;
  std::vector<int> pidfds_;
  int64_t deadline_ms_;
  uint32_t epoch_ = 0;
  bool has_refused_ = false;  // and has not waited for the others yet
  int spins_;
  int process_;
  Status failed_;
};

}  // namespace oper::host
