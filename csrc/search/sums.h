// Bytes of partial sums of a share of a table's lookups.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "search/price.h"

// Linear interpolation on the grid: a lower bound, because the bytes are concave in the share.
inline double sums_at(const OperSums& s, int64_t table, double share) {
  const double* y = s.bytes + table * s.num_points;
  if (share <= 0) return 0.0;
  if (share >= 1) return y[s.num_points - 1];
  if (share <= s.first) return y[0] * (share / s.first);
  const double at = std::log(share / s.first) / std::log(s.ratio);
  const int64_t i = std::min<int64_t>(int64_t(at), s.num_points - 2);
  const double low = s.first * std::pow(s.ratio, double(i)), high = low * s.ratio;
  return y[i] + std::clamp((share - low) / (high - low), 0.0, 1.0) * (y[i + 1] - y[i]);
}
