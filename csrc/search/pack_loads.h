// Vectorised passes over the loads of all ranks, and over all loads of a rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/clones.h"

namespace oper::search {

constexpr int kMostGroups = 7;    // groups of terms per phase, at most
constexpr int kSquarings = 5;     // the power mean has exponent 2^kSquarings

// Eight ranks at a time, also on processors without such vectors, which the compiler then splits.
// Sums are added in the same order everywhere, so that results are equal on all processors.
constexpr int64_t kLanes = 8;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

static inline __attribute__((always_inline)) Lanes lanes(const float* x) {
  Lanes v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
static inline __attribute__((always_inline)) Lanes larger(Lanes a, Lanes b) { return a < b ? b : a; }

// For the ranks [begin, end): sets busy[r] to the largest load of rank r in a phase, at least 0;
// adds min(busy[r] scale, 8)^32 to `*power`; returns the largest busy[r]. Load g of rank r is
// load[g * stride + r] + every[g] + share[r] fill[g].
static OPER_CLONES float phase_busy(const float* load, int64_t stride, const float* share,
                                    const float* every, const float* fill, int groups,
                                    int64_t begin, int64_t end, float scale, float* busy,
                                    float* power) {
  Lanes most{}, sum{};
  int64_t r = begin;
  for (; r + kLanes <= end; r += kLanes) {
    const Lanes part = lanes(share + r);
    Lanes b{};
    for (int g = 0; g < groups; ++g)
      b = larger(b, lanes(load + g * stride + r) + (every[g] + part * fill[g]));
    std::memcpy(busy + r, &b, sizeof b);
    most = larger(most, b);
    Lanes x = b * scale;
    x = x < 8.0f ? x : Lanes{} + 8.0f;
    for (int i = 0; i < kSquarings; ++i) x *= x;
    sum += x;
  }
  float peak = 0, total = 0;
  for (int64_t i = 0; i < kLanes; ++i) peak = std::max(peak, most[i]), total += sum[i];
  for (; r < end; ++r) {
    float b = 0;
    for (int g = 0; g < groups; ++g)
      b = std::max(b, load[g * stride + r] + (every[g] + share[r] * fill[g]));
    busy[r] = b;
    peak = std::max(peak, b);
    float x = std::min(b * scale, 8.0f);
    for (int i = 0; i < kSquarings; ++i) x *= x;
    total += x;
  }
  *power += total;
  return peak;
}

// to += a x + b y + d z
static OPER_CLONES void accumulate(double* __restrict to, const double* x, const double* y,
                                   const double* z, double a, double b, double d, int64_t n) {
  for (int64_t g = 0; g < n; ++g) to[g] += a * x[g] + b * y[g] + d * z[g];
}
// to += a x + b y + d z + e u + f v
static OPER_CLONES void accumulate(double* __restrict to, const double* x, const double* y,
                                   const double* z, const double* u, const double* v, double a,
                                   double b, double d, double e, double f, int64_t n) {
  for (int64_t g = 0; g < n; ++g)
    to[g] += a * x[g] + b * y[g] + d * z[g] + (e * u[g] + f * v[g]);
}

// to += (x scale)^4 / scale
static OPER_CLONES void add_fourth_powers(const float* __restrict x, float scale, int64_t n,
                                          float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    const float y = x[i] * scale, square = y * y;
    to[i] += square * square / scale;
  }
}

// The largest load[r] + every + share[r] fill of the ranks [begin, end), at least 0.
static OPER_CLONES float largest(const float* load, const float* share, float every, float fill,
                                 int64_t begin, int64_t end) {
  Lanes most{};
  int64_t r = begin;
  for (; r + kLanes <= end; r += kLanes)
    most = larger(most, lanes(load + r) + (every + lanes(share + r) * fill));
  float peak = 0;
  for (int64_t i = 0; i < kLanes; ++i) peak = std::max(peak, most[i]);
  for (; r < end; ++r) peak = std::max(peak, load[r] + (every + share[r] * fill));
  return peak;
}

}  // namespace oper::search
