// Runs the work of a batch as tasks on torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <ranges>

#include "host/context.h"
#include "host/kernels/kernels.h"

namespace oper::host {

// Errors found by the tasks of a rank, on any thread.
struct Found {
  std::atomic<int64_t> bad{-1};   // smallest index of an id out of range; -1 = none
  std::atomic<bool> full{false};  // whether data did not fit the send buffer
  void note(int64_t result) {     // of a kernel: an index, kReduceOk or kReduceFull
    if (result == kReduceFull) full.store(true);
    if (result < 0) return;
    int64_t seen = bad.load();
    while ((seen < 0 || result < seen) && !bad.compare_exchange_weak(seen, result)) {
    }
  }
  Status status() const {
    if (bad.load() >= 0) return {4, bad.load()};
    return full.load() ? Status{3, -1} : Status{};
  }
};

// Runs `task(index, scratch)` for each index in [0, count). Threads take indices in ascending
// order, so large tasks should come first. Results must not depend on which thread runs a task.
// `small`: run all on the calling thread, because waking others would take longer.
template <class Task>
void run_tasks(Context& context, int64_t count, bool small, const Task& task) {
  std::atomic<int64_t> next{0};
  const auto take_turns = [&](int64_t, int64_t) {
    const auto scratch = context.borrow_scratch();
    for (int64_t i; (i = next.fetch_add(1)) < count;) task(i, *scratch);
  };
  if (small) {
    take_turns(0, count);
  } else {
    torch::stable::parallel_for(0, count, 1, take_turns);
  }
}

// Calls body(x) for each x of `all`; each thread gets a contiguous range. `small`: as above.
template <class All, class Body>
void run_all(All&& all, bool small, const Body& body) {
  const int64_t count = std::ranges::ssize(all);
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) body(all[k]);
  };
  if (small || count < 2) {
    run(0, count);
  } else {
    torch::stable::parallel_for(0, count, 1, run);
  }
}

}  // namespace oper::host
