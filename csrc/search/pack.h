// The arguments of `oper_pack`, the search for owners of pushed rows.
#pragma once

#include <cstdint>

#include "search/argument.h"

// Arrays are row-major. W ranks in the order of their classes; C classes; G loads (`num_groups` per
// phase, then the share of memory); N candidates of all tables; K+1 shares 0, 1/K, ..., 1; H hottest
// rows. T parts of tables: first one part of every table, then, if tables may have two candidates, a
// second part of every table.
struct OperPacking {
  OperArgument argument;
  int64_t num_ranks, num_classes, num_loads, num_groups, num_tables, num_parts, num_shares, num_heads;
  const int64_t* class_of;     // [W], ascending
  const int64_t* rank_of;      // [W], the caller's index of each rank
  const double* base;          // [W, G], load that every state puts on a rank
  const double* partial;       // [N, C, G], load of a byte of partial sums on its owner
  const double* partial_read;  // [N, C, C, G], and on readers, by class of owner and reader
  const double* level;         // [phases], load per phase in the relaxed solution
  const int64_t* first;        // [T], where the candidates of each part's table begin
  const int64_t* num_candidates;  // [T]
  const double* stay;          // [N, C, G], load of a column of rows that are not pushed, without `fill`
  const double* stay_once;     // [N, C, G], the part of it per piece, whatever the width
  const double* fill;          // [N, C, G], load of a column of pulled rows on all owners of a class
  const double* fill_once;     // [N, C, G], the part of it per piece, whatever the width
  const double* column;        // [N, C, G], load of a column of the pushed rows on their owner
  const double* stream;        // [N, C, G], load of an id stream on its owner
  const double* column_read;   // [N, C, C, G], and on readers, by class of owner and reader
  const double* stream_read;   // [N, C, C, G]
  // If ranks share a link, its other ranks of the owner's class (mates) also wait for the owner's bytes.
  // Loads in excess of other readers', for mates on the owner's host (level 0) and in its rack (1):
  const int64_t* mate_first;   // [W + 1], where each rank's mates begin
  const int64_t* mates;
  const int64_t* mate_level;
  const double* partial_mate;  // [N, 2, C, G]
  const double* column_mate;   // [N, 2, C, G]
  const double* stream_mate;   // [N, 2, C, G]
  const double* column_ids;    // [N, C, G], the part of `column` proportional to lookups, not rows
  const int64_t* head_at;      // [N, H], positions of the hottest pushed rows in their tier
  const double* head;          // [N, H], their shares of the candidate's pushed lookups
  const double* asked;         // [N, G], load of all owners' requests to themselves
  const uint8_t* whole;        // [N], all rows are pushed, so that a single owner has no such requests
  const double* sums;          // [N, K + 1], bytes of partial sums per column, by share of an owner
  const uint8_t* pushes;       // [N], whether the candidate pushes rows
  // If a table is cut by columns and its optimizer keeps one state per row, the owners of a row's pieces
  // send each other sums of squares, unless they are in one memory domain:
  const int64_t* host_of;      // [W]
  const int64_t* domain_of;    // [W]
  const double* squares;       // [N], bytes of a sum and a total for each updated row that the candidate
                               // pushes; 0 if none are sent
  const double* all_squares;   // [tables], the same of all rows of a table
  const double* square_link;   // [C, G], load of a byte sent to and one received from the same host
  const double* square_cross;  // [C, G], and from another host
  const uint8_t* may_split;    // [T], whether it may be cut by columns
  const uint8_t* may_stripe;   // [T], whether rows may be striped
  const int64_t* num_may;      // [T], number of ranks that may own it
  const uint8_t* may;          // [T, W], which ranks may own it
  const int64_t* order;        // [T], order of the initial placement
  const int64_t* first_width;  // [T], initial width of pieces
  const int64_t* first_owners; // [T], initial number of owners per piece
  int64_t max_moves;
  double seconds;  // 0 = no limit
  double goal;     // stop at this step time
  uint64_t seed;
  int64_t resumes;  // whether to continue from the result of an earlier call in the arrays below
  // In: the initial state; out: the best state found.
  int64_t* candidate;  // [T]
  int64_t* part_width;  // [T], columns
  int64_t* units;   // [W], units of its class's pulled rows that each rank owns
  int64_t capacity, count;
  int64_t *table, *piece, *width, *rank, *weight;  // [capacity], one entry per piece and owner
  double step;
  int64_t moves;
};

extern "C" int oper_pack(OperPacking* packing);
