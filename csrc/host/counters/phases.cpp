#include "host/counters/phases.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>

namespace oper::host {

int64_t PhaseTimes::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void PhaseTimes::note(Phase what, int64_t begin_ns, int64_t end_ns, int64_t sent_bytes) {
  if (what < kNumPhases) {
    const int64_t took = end_ns - begin_ns;
    const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(took / 1000)));
    last_ns_[what].store(took, std::memory_order_relaxed);
    total_ns_[what].fetch_add(took, std::memory_order_relaxed);
    counts_[what][std::min(bits, kNumBuckets - 1)].fetch_add(1, std::memory_order_relaxed);
  }
  if (!is_traced()) return;
  static thread_local const int64_t thread = syscall(SYS_gettid);
  std::lock_guard<ForkMutex> lock(mutex_);
  if (static_cast<int64_t>(spans_.size()) < most_.load() * kSpanWidth) {
    spans_.insert(spans_.end(), {what, begin_ns, end_ns, sent_bytes, thread});
  } else {
    ++lost_;
  }
}

std::vector<int64_t> PhaseTimes::last_ns() const {
  return {std::begin(last_ns_), std::end(last_ns_)};
}

std::vector<int64_t> PhaseTimes::histograms(bool reset) {
  std::vector<int64_t> result;
  const auto read = [&](std::atomic<int64_t>& number) {
    result.push_back(reset ? number.exchange(0) : number.load());
  };
  for (int phase = 0; phase < kNumPhases; ++phase) {
    read(total_ns_[phase]);
    for (auto& count : counts_[phase]) read(count);
  }
  return result;
}

void PhaseTimes::trace(int64_t most) {
  std::lock_guard<ForkMutex> lock(mutex_);
  most_.store(most);
  spans_.clear();
  lost_ = 0;
}

std::vector<int64_t> PhaseTimes::take_spans() {
  std::lock_guard<ForkMutex> lock(mutex_);
  std::vector<int64_t> result{lost_};
  result.insert(result.end(), spans_.begin(), spans_.end());
  spans_.clear();
  lost_ = 0;
  return result;
}

}  // namespace oper::host
