// The search over owners of pushed rows, called from oper/search/rounding/annealing.py.
#pragma once

#include <cstdint>

#include "search/argument.h"

// Arrays are row-major. W ranks in the order of their classes, C classes, G loads (`num_groups` per
// phase, then the share of memory), N candidates of all tables, K+1 shares 0, 1/K, ..., 1, H hottest rows. T parts of
// tables: the first part of every table, and then, where tables may have several candidates, the second
// of each.
struct OperPacking {
  OperArgument argument;
  int64_t num_ranks, num_classes, num_loads, num_groups, num_tables, num_parts, num_shares, num_heads;
  const int64_t* class_of;     // [W], ascending
  const int64_t* rank_of;      // [W], number by which the caller knows the rank
  const double* base;          // [W, G], what a rank carries anyway
  const double* partial;       // [C, G], a byte of partial sums at its owner
  const double* partial_read;  // [C, C, G], and on readers of each class
  const double* level;         // [phases], how busy ranks should be
  const int64_t* first;        // [T], where the candidates of each part's table begin
  const int64_t* num_candidates;  // [T]
  const double* stay;          // [N, C, G], a column of rows that are not pushed, without `fill`
  const double* stay_once;     // [N, C, G], what such a part costs whatever its width
  const double* fill;          // [N, C, G], all that owners of pulled rows do, by their class
  const double* fill_once;     // [N, C, G]
  const double* column;        // [N, C, G], a column of the pushed rows at its owner
  const double* stream;        // [N, C, G], an id stream at its owner
  const double* column_read;   // [N, C, C, G]
  const double* stream_read;   // [N, C, C, G]
  // Where ranks share a link, the others of an owner's class on it, its mates, wait for what the owner
  // sends and receives as well; beyond what readers carry, on its host (0) and in its rack (1):
  const int64_t* mate_first;   // [W + 1], where each rank's mates begin
  const int64_t* mates;
  const int64_t* mate_level;
  const double* partial_mate;  // [2, C, G]
  const double* column_mate;   // [N, 2, C, G]
  const double* stream_mate;   // [N, 2, C, G]
  const double* column_ids;    // [N, C, G], of `column`, what goes with lookups rather than rows
  const int64_t* head_at;      // [N, H], the hottest pushed rows: places in the tier
  const double* head;          // [N, H], and shares of its lookups
  const double* asked;         // [N, G], owners who ask themselves for pushed rows, all together
  const uint8_t* whole;        // [N], everything is pushed, so that a single owner does not
  const double* sums;          // [N, K + 1], bytes of partial sums per column of a share's owner
  const uint8_t* pushes;       // [N]
  const uint8_t* may_split;    // [T], by columns
  const uint8_t* may_stripe;   // [T], by rows
  const int64_t* num_may;      // [T], ranks that may own it
  const uint8_t* may;          // [T, W]
  const int64_t* order;        // [T], in which tables are placed first
  const int64_t* first_width;  // [T], of their pieces at first
  const int64_t* first_owners; // [T], of each piece at first
  int64_t max_moves;
  double seconds;  // 0 = no limit
  double goal;     // stop at this step
  uint64_t seed;
  int64_t resumes;  // whether to go on from what an earlier call found, in the arrays below
  // Found:
  int64_t* candidate;  // [T], in: where to begin
  int64_t* part_width;  // [T], columns, in: where to begin
  int64_t* units;   // [W], parts of its class's pulled rows that each rank owns, in: where to begin
  int64_t capacity, count;
  int64_t *table, *piece, *width, *rank, *weight;  // [capacity], one entry per piece and owner
  double step;
  int64_t moves;
};

extern "C" int oper_pack(OperPacking* packing);
