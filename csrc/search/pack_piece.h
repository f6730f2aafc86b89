// Column pieces of the search for owners of pushed rows, its random numbers, and its limits.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "search/pack.h"

namespace oper::search {

constexpr int kColumnStep = 4;    // widths of pieces are multiples of this
constexpr int kMinColumns = 8;    // least width of a piece, unless the table is narrower
constexpr int kMaxOwners = 48;    // owners of one piece
constexpr int64_t kLevels = 2;    // levels of mates: 0 on the owner's host, 1 in its rack
constexpr int kMaxWeight = 240;   // sum of the weights of one piece
constexpr int64_t kMaxHeads = 64; // hottest rows of a table that are assigned one by one
constexpr double kOverflow = 1e3; // a memory overflow x multiplies the step time by 1 + 1e3 x
constexpr double kMaxShare = 0.2; // weight of the slowest rank in the energy; the rest is a power mean
constexpr int64_t kUnits = 4096;  // most units of a class's pulled rows, MAX_PATTERN of oper/plan.py
constexpr int kLevelSteps = 3;    // steps of Newton's method for the levels of refilled ranks
constexpr float kLeastShare = 1e-6f;  // least share of pulled rows, before shares are divided by their sum
constexpr double kSquareRounding = 1e-12;  // smaller relative changes of sums of squares are rounding errors
constexpr double kLarge = 0.7;    // share of the moves that prefer large tables

struct Random {  // xorshift64*, Vigna 2016
  uint64_t s;
  uint64_t next() {
    s ^= s >> 12, s ^= s << 25, s ^= s >> 27;
    return s * 0x2545F4914F6CDD1DULL;
  }
  int64_t below(int64_t n) {
    return static_cast<int64_t>((static_cast<unsigned __int128>(next()) * uint64_t(n)) >> 64);
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
};

struct Piece {
  int table = 0, width = 0, owners = 0, total = 0;
  uint16_t rank[kMaxOwners];
  uint8_t weight[kMaxOwners];
  float mass[kMaxOwners],
      sums[kMaxOwners];  // shares of lookups and of partial sums; `assign_rows` sets them

  Piece() = default;
  Piece(const Piece& x) { *this = x; }
  Piece& operator=(const Piece& x) {  // copies only the owners in use, which are few
    table = x.table, width = x.width, owners = x.owners, total = x.total;
    std::memmove(rank, x.rank, size_t(owners) * sizeof *rank);
    std::memmove(weight, x.weight, size_t(owners) * sizeof *weight);
    std::memmove(mass, x.mass, size_t(owners) * sizeof *mass);
    std::memmove(sums, x.sums, size_t(owners) * sizeof *sums);
    return *this;
  }
  void add_owner(int64_t r, int w) {
    rank[owners] = uint16_t(r), weight[owners++] = uint8_t(w), total += w;
  }
  void drop_owner(int i) {
    total -= weight[i], --owners;
    rank[i] = rank[owners], weight[i] = weight[owners];
  }
};

// The owners of the positions 0, ..., `last` of a period, as `Tier.pattern` of oper/plan.py.
inline void spread(const Piece& x, uint32_t last, uint8_t* turn) {
  if (x.total == x.owners) {
    for (uint32_t n = 0; n <= last; ++n) turn[n] = uint8_t(n);
    return;
  }
  double due[kMaxOwners] = {};
  int given[kMaxOwners] = {};
  for (uint32_t n = 0; n <= last; ++n) {
    int next = 0;
    for (int i = 1; i < x.owners; ++i)
      if (due[i] < due[next]) next = i;
    due[next] = double(++given[next]) / x.weight[next], turn[n] = uint8_t(next);
  }
}

}  // namespace oper::search
