// Loops over the blocks of a table, for `price.cpp`.
#pragma once

#include "common/clones.h"

#include <cstdint>

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

}  // namespace oper::search
