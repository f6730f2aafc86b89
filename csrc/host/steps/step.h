// Common parts of the steps of a batch: how their work is divided into tasks, and how ranks wait
// for each other.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "host/context.h"
#include "host/kernels/kernels.h"
#include "host/tasks.h"

namespace oper::host {

// The tables in descending order of work, so that no thread begins a long task last.
std::vector<int32_t> largest_first(const Context& context, const Batch& batch);

// Whether a batch has so few ids that waking threads would take longer than the work.
bool is_small(const Batch& batch);

// The tables with pushed tiers: all or, if `of_this_rank`, those whose owners this rank requests to
// pool.
std::vector<int32_t> push_tables(const Context& context, bool of_this_rank);

// Counts the ids that all ranks request from this owner, with their weights and rows.
void count_requests(Context& context, const std::vector<int32_t>& tables, bool is_forward);

// Waits for all ranks of this memory domain, see Barrier::arrive.
Status wait_for_domain(Context& context, uint32_t phase, bool refuses = false,
                       uint32_t settings = 0);
// The same for a rank that has already called Barrier::come.
Status wait_for_domain(Context& context);

// Waits until all ranks have arrived; if there are several memory domains, exchanges what ranks
// have for ranks of other domains. Throws an error as a Status, also `mine`, an error that this
// rank has found. Then all ranks skip this batch. They can continue with the next one, unless there
// are several domains.
void synchronize(Context& context, CollectivePhase phase, const Batch& batch, Status mine = {});

// Runs task(feature, range of its bags, scratch) for all bags of a batch, kTaskBags at a time.
template <class Task>
void run_bag_tasks(Context& context, const Batch& batch, bool small, const Task& task) {
  std::vector<int64_t> first;  // first task of each feature
  int64_t count = 0;
  for (const FeatureBags& bags : batch.features) {
    first.push_back(count);
    count += (bags.num_bags + kTaskBags - 1) / kTaskBags;
  }
  run_tasks(context, count, small || is_small(batch), [&](int64_t index, Scratch& scratch) {
    const size_t f =
        static_cast<size_t>(std::ranges::upper_bound(first, index) - first.begin() - 1);
    const FeatureBags& bags = batch.features[f];
    const int64_t begin = (index - first[f]) * kTaskBags;
    task(f, BagRange{batch, bags, begin, std::min(bags.num_bags, begin + kTaskBags), f}, scratch);
  });
}

}  // namespace oper::host
