// What the steps of a batch have in common: how their work is cut, and where ranks wait for each other.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "host/context.h"
#include "host/kernels/kernels.h"
#include "host/tasks.h"

namespace oper::host {

// Tables by work, so that no thread starts the longest task last.
std::vector<int32_t> largest_first(const Context& context, const Batch& batch);

// Fewer ids than this take less time than waking a thread.
bool is_small(const Batch& batch);

// Tables with pushed tiers, one task each: those that any rank requests, or only this rank.
std::vector<int32_t> push_tables(const Context& context, bool of_this_rank);

// Number of ids that ranks request from this owner, with their weights and rows.
void count_requests(Context& context, const std::vector<int32_t>& tables, bool is_forward);

// Waits for the ranks of this memory domain. `refuses`: this rank, and therefore all, skip the
// batch. `settings`: see Barrier::arrive.
Status wait_for_domain(Context& context, uint32_t phase, bool refuses = false,
                       uint32_t settings = 0);
// The second half of this, after `Barrier::come`.
Status wait_for_domain(Context& context);

// Waits until all ranks have arrived and, across memory domains, exchanges the data that they have
// left for each other. `mine` is an error of this rank alone, which is thrown: within a memory
// domain all ranks then skip this batch and may continue with the next one; other domains no longer
// wait for this rank.
void synchronize(Context& context, CollectivePhase phase, const Batch& batch, Status mine = {});

// Runs task(feature, range of its bags, scratch) over the whole batch in blocks of about a
// thousand bags.
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
