#include "host/steps/step.h"

#include "host/exchange/exchange.h"

namespace oper::host {

std::vector<int32_t> largest_first(const Context& context, const Batch& batch) {
  std::vector<int32_t> order(context.tables.size());
  std::vector<int64_t> sizes(context.tables.size());
  for (size_t t = 0; t < order.size(); ++t) {
    order[t] = static_cast<int32_t>(t);
    sizes[t] = batch.num_ids(context.tables[t]) * context.tables[t].dim;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return sizes[a] > sizes[b]; });
  return order;
}

bool is_small(const Batch& batch) {
  constexpr int64_t kSmallIds = 2048;
  int64_t n = 0;
  for (const FeatureBags& bags : batch.features) n += bags.num_ids();
  return n < kSmallIds;
}

std::vector<int32_t> push_tables(const Context& context, bool of_this_rank) {
  std::vector<int32_t> result;
  for (size_t t = 0; t < context.tables.size(); ++t)
    if (of_this_rank ? context.tables[t].has_push : context.tables[t].is_pushed)
      result.push_back(static_cast<int32_t>(t));
  return result;
}

void count_requests(Context& context, const std::vector<int32_t>& tables, bool is_forward) {
  for (int32_t t : tables) {
    const TableCounters& counters = context.tables[t].counters;
    for (int32_t r = 0; r < context.world_size; ++r) {
      RequestTable* entry = context.request_table(r, t);
      const int64_t* begin = entry->begin();
      const int64_t n = begin[context.rank + 1] - begin[context.rank];
      counters.add(is_forward ? kIds : kGradientIds, r, n);
      if (entry->weights_offset) counters.add(is_forward ? kIdWeights : kGradientWeights, r, n);
      counters.add(is_forward ? kPooledRows : kBagGradients, is_forward ? context.rank : r, n);
    }
  }
}

Status wait_for_domain(Context& context, uint32_t phase, bool refuses, uint32_t settings) {
  context.barrier->come(phase, refuses, settings);
  return wait_for_domain(context);
}

Status wait_for_domain(Context& context) {
  const int64_t begin_ns = PhaseTimes::now_ns();
  const Status found = context.barrier->wait();
  context.times.note(kBarrier, begin_ns, PhaseTimes::now_ns());
  return {found.code, found.detail < 0 ? -1 : context.domain[found.detail]};
}

void synchronize(Context& context, CollectivePhase phase, const Batch& batch, Status mine) {
  const bool updates = phase == CollectivePhase::kGradients;
  if (context.exchange) context.exchange->messages.settings = updates ? context.settings : 0;
  if (context.barrier) {
    if (mine.code != 0 && context.exchange) {
      context.barrier->abort();
    } else {
      // Across memory domains, the exchange compares the settings of all ranks.
      const uint32_t settings = updates && !context.exchange ? context.settings : 0;
      const Status found =
          wait_for_domain(context, static_cast<uint32_t>(phase), mine.code != 0, settings);
      if (mine.code == 0) mine = found;
    }
  }
  if (context.exchange) return context.exchange->synchronize(phase, batch, mine);
  raise(mine);
}

}  // namespace oper::host
