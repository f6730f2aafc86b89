// Work of one batch, cut into tasks that threads take in turn.
#pragma once

#include <atomic>

#include "host/context.h"
#include "host/kernels/kernels.h"

namespace oper::host {

// Keeps the smallest index that is not negative.
inline void note_bad(std::atomic<int64_t>& bad, int64_t found) {
  if (found < 0) return;
  int64_t seen = bad.load();
  while ((seen < 0 || found < seen) && !bad.compare_exchange_weak(seen, found)) {
  }
}

// What tasks of this rank have found: an id out of range, by its index, or -1; an outbox that is full.
struct Found {
  std::atomic<int64_t> bad{-1};
  std::atomic<bool> full{false};
  void note(int64_t result) {
    if (result == kReduceFull) full.store(true);
    note_bad(bad, result);
  }
  Status status() const {
    if (bad.load() >= 0) return {4, bad.load()};
    return full.load() ? Status{3, -1} : Status{};
  }
};

// Runs `task(index, scratch)` for index in [0, count), largest tasks first when the caller orders
// them so; each thread takes the next one. Results do not depend on who takes what. `small`: not
// worth waking other threads.
template <class Task>
void run_tasks(Context& context, int64_t count, bool small, ParallelFor parallel,
               const Task& task) {
  struct Shared {
    Context& context;
    const Task& task;
    std::atomic<int64_t> next{0};
    int64_t count;
  } shared{context, task, {}, count};
  shared.count = count;
  const auto body = [](int64_t, int64_t, void* argument) {
    Shared& s = *static_cast<Shared*>(argument);
    Scratch* scratch = s.context.take_scratch();
    for (int64_t i; (i = s.next.fetch_add(1)) < s.count;) s.task(i, *scratch);
    s.context.give_scratch(scratch);
  };
  if (small) {
    body(0, count, &shared);
  } else {
    parallel(count, body, &shared);
  }
}

}  // namespace oper::host
