// Loops over the blocks of a table, for `price.cpp`.
#pragma once

#include "common/clones.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace oper::search {

constexpr double kNever = 1e30;  // cost of a block that may not be pushed

// to[b] = once[b] + times more[b]
static OPER_CLONES void blend(double* __restrict to, const double* once, const double* more, double times,
                              int64_t n) {
  for (int64_t b = 0; b < n; ++b) to[b] = once[b] + times * more[b];
}

// least[b] = min(least[b], cost[b] + weight ids[b])
static OPER_CLONES void lower(double* __restrict least, const double* cost, const double* ids,
                              double weight, int64_t n) {
  for (int64_t b = 0; b < n; ++b) {
    const double x = cost[b] + weight * ids[b];
    least[b] = x < least[b] ? x : least[b];
  }
}

// gain[b] = min(gain[b] - fixed[b], kNever); returns the sum of min(gain[b], limit).
static OPER_CLONES double spare(double* __restrict gain, const double* fixed, int64_t n, double limit) {
  constexpr int64_t kSums = 8;  // fixes the order of additions on all processors
  double sums[kSums] = {};
  for (int64_t b = 0; b < n; ++b) {
    const double x = gain[b] - fixed[b];
    gain[b] = x < kNever ? x : kNever;
  }
  int64_t b = 0;
  for (; b + kSums <= n; b += kSums)
    for (int64_t i = 0; i < kSums; ++i) sums[i] += gain[b + i] < limit ? gain[b + i] : limit;
  for (int64_t i = 0; b < n; ++b, ++i) sums[i] += gain[b] < limit ? gain[b] : limit;
  double sum = 0;
  for (const double x : sums) sum += x;
  return sum;
}

// Over the blocks found in class `which` (0: in any): sums of cost - fixed, of ids and of least.
static OPER_CLONES void picked(const int64_t* found, int64_t which, const double* cost, const double* fixed,
                               const double* ids, const double* least, int64_t n, double* total, double* mass,
                               double* sums) {
  constexpr int64_t kSums = 8;  // fixes the order of additions on all processors
  double totals[kSums] = {}, masses[kSums] = {}, leasts[kSums] = {};
  const auto add = [&](int64_t b, int64_t i) {
    const bool in = which > 0 ? found[b] == which : found[b] > 0;
    totals[i] += in ? cost[b] - fixed[b] : 0.0;
    masses[i] += in ? ids[b] : 0.0;
    leasts[i] += in ? least[b] : 0.0;
  };
  int64_t b = 0;
  for (; b + kSums <= n; b += kSums)
    for (int64_t i = 0; i < kSums; ++i) add(b + i, i);
  for (int64_t i = 0; b < n; ++b, ++i) add(b, i);
  *total = *mass = *sums = 0;
  for (int64_t i = 0; i < kSums; ++i) *total += totals[i], *mass += masses[i], *sums += leasts[i];
}

// Finds the cheapest set of pushed blocks. The cost of its partial sums is concave in its mass, the
// expected ids of its blocks.
class Prefixes {
 public:
  // Least cost of a set of blocks with the costs `gain` and partial sums `sums(mass)`, which is concave
  // between the masses that `kinks(low, high, visit)` visits. The best set is a prefix of the blocks in the
  // order of their cost of pushing per id, or has one of these masses. The empty prefix stands for an
  // arbitrarily small part of a block, which pays the fixed charge. If `all`, only the set of all blocks
  // counts.
  template <class Sums, class Kinks>
  double least(const double* gain, const double* ids, int64_t n, bool all, Sums sums, Kinks kinks) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    order_.resize(n), slope_.resize(n), has_.assign(n, false);
    for (int64_t b = 0; b < n; ++b) {
      order_[b] = int(b);
      slope_[b] = ids[b] > 0 ? gain[b] / ids[b] : gain[b] < 0 ? -kInfinity : kInfinity;
    }
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return slope_[a] < slope_[b]; });
    double mass = 0, total = 0, cheapest = kInfinity, least = kInfinity;
    int64_t length = n;  // of the cheapest prefix
    for (int64_t count = 0; count <= n; ++count) {
      if (!all || count == n) {
        const double cost = total + sums(mass);
        least = std::min(least, cost);
        if (cost < cheapest) cheapest = cost, length = count;
      }
      if (count == n) break;
      const int b = order_[count];
      kinks(mass, mass + ids[b], [&](double at) {  // inside the block
        if (!all && at > mass && at < mass + ids[b])
          least = std::min(least, total + gain[b] * (at - mass) / ids[b] + sums(at));
      });
      mass += ids[b], total += gain[b];
    }
    for (int64_t i = 0; i < length; ++i) has_[order_[i]] = true;
    return least;
  }

  // Whether the cheapest prefix found has a block.
  bool has(int64_t block) const { return has_[block]; }

 private:
  std::vector<int> order_;
  std::vector<double> slope_;
  std::vector<bool> has_;
};

}  // namespace oper::search
