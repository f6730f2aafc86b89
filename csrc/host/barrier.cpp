#include "host/barrier.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <utility>

#include "host/counters/phases.h"
#include "host/faults.h"

namespace oper::host {
namespace {

constexpr uint32_t kRefuses = 1u << 31;  // bit in the word of the phase
constexpr int64_t kSliceMs = 100;  // how often a waiting rank checks that its peer is alive

int64_t now_ms() { return PhaseTimes::now_ns() / 1000000; }

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen, int64_t ms) {
  const timespec timeout{ms / 1000, (ms % 1000) * 1000000};
  // FUTEX_WAIT, not FUTEX_WAIT_PRIVATE: the word is shared between processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool has_exited(int pidfd) {
  if (pidfd < 0) return false;
  pollfd entry{pidfd, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

int num_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Whether `epoch` is `target` or later; also if the counter has overflowed.
bool reached(uint32_t epoch, uint32_t target) {
  return static_cast<int32_t>(epoch - target) >= 0;
}

}  // namespace

Barrier::Barrier(BarrierLine* lines, int32_t rank, int32_t world_size, std::vector<int> pidfds,
                 int64_t deadline_ms)
    : lines_(lines),
      rank_(rank),
      world_size_(world_size),
      pidfds_(std::move(pidfds)),
      deadline_ms_(deadline_ms),
      // With fewer cores than ranks, spinning would take the core that the late rank needs.
      spins_(num_cores() >= world_size ? 50 : 0),
      process_(static_cast<int>(getpid())) {}

Barrier::~Barrier() {
  if (getpid() != process_) return;  // a forked child's copy: the parent still takes part
  BarrierLine& mine = lines_[rank_];
  uint32_t present = kPresent;
  if (mine.absent.compare_exchange_strong(present, kClosed)) futex_wake_all(&mine.epoch);
}

Status Barrier::arrive(uint32_t phase, bool refuses, uint32_t settings) {
  come(phase, refuses, settings);
  return wait();
}

void Barrier::refuse(uint32_t phase) {
  come(phase, true);
  has_refused_ = true;
}

void Barrier::come(uint32_t phase, bool refuses, uint32_t settings) {
  if (std::exchange(has_refused_, false)) wait();
  if (failed_.code != kOk) return;
  reach(FaultPoint::kBarrier);
  const uint32_t target = ++epoch_;
  BarrierLine& mine = lines_[rank_];
  mine.phase[target & 1].store(phase | (refuses ? kRefuses : 0), std::memory_order_relaxed);
  mine.settings[target & 1].store(settings, std::memory_order_relaxed);
  // seq_cst on both sides: either the waker sees the sleeper or the sleeper sees the epoch.
  mine.epoch.store(target, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&mine.epoch);
  reach(FaultPoint::kBarrier);  // before and after arrival
}

Status Barrier::wait() {
  if (failed_.code != kOk) return failed_;
  const uint32_t target = epoch_;
  const uint32_t own = lines_[rank_].phase[target & 1].load(std::memory_order_relaxed);
  // Ranks that arrived for another phase, or that refuse.
  int32_t other = -1, refused = (own & kRefuses) != 0 ? rank_ : -1;
  for (int32_t k = 1; k < world_size_ && failed_.code == kOk; ++k) {
    const int32_t peer = (rank_ + k) % world_size_;
    if (const Result found = wait_for(peer, target); found != kOk) failed_ = {found, peer};
    const uint32_t word = lines_[peer].phase[target & 1].load(std::memory_order_relaxed);
    if (((word ^ own) & ~kRefuses) != 0) other = peer;
    if ((word & kRefuses) != 0 && (refused < 0 || peer < refused)) refused = peer;
  }
  // A peer that has aborted while this rank still waited for another one updates nothing, so this
  // rank must not, either. A rank that aborts then checks which ranks had arrived
  // (oper/shmem/counters/progress.py). At least one of the two sees what the other has written.
  for (int32_t r = 0; r < world_size_ && failed_.code == kOk; ++r) {
    if (r == rank_ || lines_[r].absent.load(std::memory_order_seq_cst) != kAborted) continue;
    failed_ = {kPeerAborted, r};
  }
  // Checked after the wait: all ranks see the same words only when all have arrived.
  if (failed_.code == kOk && refused >= 0) return {kRefused, refused};
  if (failed_.code == kOk && other >= 0) failed_ = {kOtherPhase, other};
  for (int32_t r = 1; r < world_size_ && failed_.code == kOk; ++r) {
    const auto settings = [&](int32_t of) {
      return lines_[of].settings[target & 1].load(std::memory_order_relaxed);
    };
    if (settings(r) != settings(0)) return {kOtherSettings, r};
  }
  return failed_;
}

void Barrier::abort(int64_t verdict) {
  BarrierLine& mine = lines_[rank_];
  if (verdict != 0) mine.verdict.store(verdict, std::memory_order_seq_cst);
  mine.absent.store(kAborted, std::memory_order_seq_cst);
  futex_wake_all(&mine.epoch);
  if (failed_.code == kOk) failed_ = {kPeerAborted, rank_};
}

void Barrier::note_update(bool begins) {
  (begins ? lines_[rank_].begun : lines_[rank_].ended).fetch_add(1, std::memory_order_seq_cst);
}

std::vector<int64_t> Barrier::positions() const {
  std::vector<int64_t> found;
  for (int32_t r = 0; r < world_size_; ++r) {
    const BarrierLine& line = lines_[r];
    const uint32_t epoch = line.epoch.load(std::memory_order_seq_cst);
    // Read in this order, so that an update that ends meanwhile counts as ended.
    const int64_t begun = line.begun.load(), ended = line.ended.load();
    const uint32_t word = line.phase[epoch & 1].load();
    found.insert(found.end(),
                 {int64_t{epoch}, int64_t{word & ~kRefuses}, int64_t{line.absent.load()},
                  line.verdict.load(), begun, ended, int64_t{(word & kRefuses) != 0}});
  }
  return found;
}

Barrier::Result Barrier::wait_for(int32_t peer, uint32_t target) {
  BarrierLine& line = lines_[peer];
  // A peer that has arrived and then aborted, because another rank was late, does not continue.
  // This rank must not, either: it would update rows that the peer does not update.
  const auto here = [&] {
    return line.absent.load(std::memory_order_relaxed) == kAborted ? kPeerAborted : kOk;
  };
  for (int i = 0; i < spins_; ++i) {
    if (reached(line.epoch.load(std::memory_order_acquire), target)) return here();
    pause_core();
  }
  const int64_t start = now_ms();
  for (;;) {
    uint32_t seen = line.epoch.load(std::memory_order_acquire);
    if (reached(seen, target)) return here();
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    seen = line.epoch.load(std::memory_order_seq_cst);
    if (!reached(seen, target)) futex_wait(&line.epoch, seen, kSliceMs);
    line.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (reached(line.epoch.load(std::memory_order_acquire), target)) return here();
    const uint32_t absent = line.absent.load(std::memory_order_seq_cst);
    if (absent == kAborted) return kPeerAborted;
    if (absent == kClosed) {
      // It may have arrived just before it closed.
      if (reached(line.epoch.load(std::memory_order_acquire), target)) return kOk;
      return kPeerClosed;
    }
    if (has_exited(pidfds_[peer])) {
      // It may have arrived just before it ended.
      if (reached(line.epoch.load(std::memory_order_acquire), target)) return kOk;
      return kPeerLost;
    }
    if (now_ms() - start >= deadline_ms_) return kDeadline;
  }
}

}  // namespace oper::host
