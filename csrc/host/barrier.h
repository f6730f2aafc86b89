// A barrier between processes of one host. Each rank has a word in shared memory that counts its
// arrivals; the others wait for it by futex, and notice if the process has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "common/exchange.h"

namespace oper::host {

// One rank's state in shared memory. 128 bytes, because processors prefetch cache lines in pairs:
// waiting for one rank must not slow down others.
struct alignas(128) BarrierLine {
  std::atomic<uint32_t> epoch;     // number of this rank's arrivals
  std::atomic<uint32_t> sleepers;  // number of ranks that wait for `epoch` by futex
  std::atomic<uint32_t> absent;    // enum Absence
  // Numbers of updates of this rank's rows that have begun and ended. If they differ, some rows
  // have been updated and others not.
  std::atomic<uint32_t> begun, ended;
  // The phases of this rank's last two arrivals, by the arrival's number modulo 2. Two are enough:
  // no rank arrives before all have arrived at the previous barrier, so each word is kept until all
  // ranks have read it.
  std::atomic<uint32_t> phase[2];
  std::atomic<uint32_t> settings[2];  // settings of these arrivals, see come()
  // Why this rank has aborted: the late rank that it has identified, packed by Python's desync.py;
  // 0 = none.
  std::atomic<int64_t> verdict;
};
static_assert(sizeof(BarrierLine) == 128);
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

// Why a rank no longer arrives.
enum Absence : uint32_t { kPresent = 0, kAborted = 1, kClosed = 2 };

class Barrier {
 public:
  enum Result : int64_t {
    kOk = 0,
    kPeerLost = 1,
    kDeadline = 2,
    kPeerAborted = 6,
    kOtherPhase = 8,  // all ranks have arrived, but in different phases
    kPeerClosed = 12,
    kRefused = 13,  // all ranks have arrived, but at least one refuses to take part this time
    kOtherSettings = 15,  // all ranks have arrived, but with different settings
  };

  // `lines` [world_size]: in memory that all ranks map. `pidfds` [world_size]: of the ranks'
  // processes; -1 = not watched (this rank, or a virtual rank of the same process). `deadline_ms`:
  // how long to wait for a rank.
  Barrier(BarrierLine* lines, int32_t rank, int32_t world_size, std::vector<int> pidfds,
          int64_t deadline_ms);
  // Marks this rank as closed: ranks that wait for it from now on get kPeerClosed.
  ~Barrier();
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;

  // Waits until all ranks have arrived. Everything that any rank has written before is then visible
  // to all (release-acquire). Returns a Result and, unless it is kOk, the rank that caused it:
  // - kRefused, if any rank passes `refuses`: the lowest such rank;
  // - kOtherPhase, if `phase` is not the same on all ranks: one with another phase than this rank;
  // - kOtherSettings, if `settings` are not: the lowest rank whose settings are not those of rank 0;
  // - else the rank that is missing.
  // All ranks get the same kRefused or kOtherSettings, and the barrier can be used again; after other
  // failures it always fails.
  Status arrive(uint32_t phase, bool refuses = false, uint32_t settings = 0);
  // The two halves of arrive(). In between, a rank may do work for which its peers need not wait.
  void come(uint32_t phase, bool refuses = false, uint32_t settings = 0);
  Status wait();
  // Arrives for `phase` and refuses, but does not wait before its next arrival: for a rank that
  // knows of an error before the others arrive.
  void refuse(uint32_t phase);

  // Announces that this rank will not arrive again: ranks that wait for it fail immediately, and
  // can read `verdict`.
  void abort(int64_t verdict = 0);

  // Records that an update of this rank's rows begins or has ended.
  void note_update(bool begins);
  // [world_size, 7]: number of arrivals, phase of the last one, Absence, verdict, updates begun and
  // ended, whether the rank refused at its last arrival.
  std::vector<int64_t> positions() const;

 private:
  Result wait_for(int32_t peer, uint32_t target);
  BarrierLine* lines_;
  int32_t rank_;
  int32_t world_size_;
  std::vector<int> pidfds_;
  int64_t deadline_ms_;
  uint32_t epoch_ = 0;
  bool has_refused_ = false;  // whether refuse() was called and the others have not been waited for
  int spins_;                 // how often to look at a peer's word before sleeping
  int process_;               // process that constructed this
  Status failed_;
};

}  // namespace oper::host
