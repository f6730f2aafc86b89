// The arguments of `oper_price` (pricing of tables) and `oper_fit` (limits of pushed pieces), which
// oper/search/pricing and oper/search/relaxation call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "search/argument.h"

// Bytes of partial sums by share of a table's lookups, for T tables: a geometric grid up to share 1.
struct OperSums {
  int64_t num_points;     // N, shares first, first * ratio, ..., 1
  double first, ratio;
  const double* bytes;    // [T, N]
};

// Largest mass of one owner, by type of piece; see `Pieces.fit`.
struct OperFit {
  OperArgument argument;
  int64_t num_tables, num_classes, num_loads, num_tangents, num_hot;  // T, C, G (phases x 5), L, H
  OperSums sums;
  // Third axis: pieces of all columns, and of the narrowest width; see `Pieces._set_loads`.
  const double* density;  // [T, C, 2, G, 3], load of all lookups: to the lightest block, heaviest, as are
  const double* tangents; // [T, C, 2, G, L, 2], lower bounds of an owner's load: values at mass 0 and 1
  const double* per_unit; // [T, C, 2, G, 3], load of a unit of each feature except rows
  const double* asks;     // [T, C, G], the part of the loads that an owner of all rows does not have
  const double* partial;  // [T, C, G], load of a byte of partial sums
  const int64_t* first;   // [T + 1], first of each table's types, of N in total
  const double* total_ids;  // [T]
  const double* hot;      // [T, H, 3], features except rows of a table's hottest rows, then zeros
  const uint8_t* may;     // [T, C], whether the table may be pushed to the class
  // [N], narrowest width of the pieces of each type. A table's first type has all of its columns.
  const double* narrow;
  const double* floor;    // [C, G], load that every plan puts on the owner
  const double* most;     // [G], upper limit of the load of a piece
  double step;            // upper limit of the sum over phases
  double* mass;           // [N, C], out: 0 if no piece fits
  double* least_sums;     // [N, C, 3], out: least bytes of partial sums per unit of each feature
  uint8_t* whole;         // [T, C], out: whether the table fits as one piece
  int64_t* heavy;         // [N], out: how many of the hottest rows no owner may have in such pieces
};

// The cheapest configuration of every table; see `Node.price`. Many tables are priced by two threads;
// tables are independent, so that results do not depend on the threads.
//
// A configuration cuts the table by columns into pieces of at most P kinds.
struct OperPricing {
  OperArgument argument;
  int64_t num_tables, num_options, num_blocks;   // T; M pushed options; K
  int64_t max_parts;            // P, most parts of a table's columns, each in one kind of pieces
  int64_t step;                 // widths of pieces are multiples of this
  double close;   // relative tolerance of a bound over several options
  double piece;                 // cost of every further piece of a table
  OperSums sums;
  const int64_t* starts;        // [T + 1], first block of each table
  const double* stay;           // [K], cost of a block that is not pushed
  const double* stay_more;      // [K], and of every further stream, least over options
  const double* one;            // [T], cost of the table in one tier that is not pushed
  const double* tiers;          // [T], charge of a piece of several tiers, none of them pushed
  const double* tiers_pushed;   // [T], and of a piece some of whose rows are pushed
  const double* go;             // [M, K], cost of a block that is pushed, as one id stream
  const double* more;           // [M, K], cost of every further stream
  const double* own;            // [T, M], cost of an id that a rank pushes to itself
  const double* features;       // [3, K], all except rows
  const double* ids;            // [K]
  const double* total_ids;      // [T]
  const double* price;          // [T, M], of a byte of partial sums
  const int64_t* first;         // [T * M + 1], types of a table in an option
  const double *streams, *mass; // by type
  const double* least_sums;     // by type, 3 each: least bytes of partial sums per unit of each feature
  const double* narrowest;      // by type, least width of its pieces; the widest is columns / streams
  const int64_t* heavy;         // by type, how many of the table's first blocks may not be pushed
  const int64_t* columns;       // [T], columns that pieces must add up to; 0 for tables not cut so
  const uint8_t* pushes;        // [T], 0: undecided; 1: no row is pushed; 2: some row is
  const double* known;          // [T], cost of the cheapest known configuration, or infinity
  double* value;                // [T], out: lower bound of the least cost
  int64_t* num_parts;           // [T], out: 0 if nothing is cheaper than the known configuration
  int64_t* kind;                // [T, P], out: type of the pieces that push
  int64_t* mode;                // [T, P], out: 0 one tier, 1 several, 2 all pushed, 3 some pushed
  double* share;                // [T, P], out: share of the table's columns
  double* part_streams;         // [T, P], out: the table's columns / those of one piece
  int64_t* chosen;              // [P, K], out: 0, or 1 + the pushed option
};

extern "C" int oper_fit(OperFit* fit);
extern "C" int oper_price(OperPricing* pricing);

// Bytes of partial sums of a share of a table's lookups. Linear interpolation on the grid: a lower bound,
// because the bytes are concave in the share.
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
