// Pushed pieces in the lower bound, called from oper/search/relaxation/pieces.py and oper/search/pricing/node.py.
#pragma once

#include <cstdint>

#include "search/argument.h"

// Bytes of partial sums by share of a table's mass, T tables: 0, then a geometric grid up to 1.
struct OperSums {
  int64_t num_points;     // N, shares first, first * ratio, ..., 1
  double first, ratio;
  const double* bytes;    // [T, N]
};

// Largest mass of one owner, by type of piece; see `Pieces`.
struct OperFit {
  OperArgument argument;
  int64_t num_tables, num_classes, num_loads;  // T, C, G (phases x 5)
  OperSums sums;
  // Of pieces as wide, and as narrow, as they get; see `Pieces._set_loads`.
  const double* density;  // [T, C, 2, G, 3], what all ids of a table ask by block, least, most; of all blocks
  const double* per_unit; // [T, C, 2, G, 3], what a unit of each feature asks, but rows
  const double* asks;     // [T, C, G], of these what an owner of all rows does not ask
  const double* partial;  // [C, G], a byte of partial sums
  const int64_t* first;   // [T + 1], where each table's types begin, N of them
  const double* total_ids;  // [T]
  const double* narrow;   // [N], narrowest width of each type, the whole row first
  const double* floor;    // [C, G], what the owner does anyway
  const double* most;     // [G], largest load of a piece
  double step;            // largest sum over phases
  double* mass;           // [N, C], out: 0 where no piece fits
  double* least_sums;     // [N, C, 3], out: bytes of partial sums of a unit of each feature, at least
  uint8_t* whole;         // [T, C], out: whether the table fits as one piece
};

// The cheapest configuration of every table; see `Node.price`. Of many tables by two threads; they are
// priced apart, so that nothing depends on them.
//
// A configuration cuts the table by columns into pieces. P kinds of pieces are told apart at most.
struct OperPricing {
  OperArgument argument;
  int64_t num_tables, num_options, num_blocks;   // T; M pushed options; K
  int64_t max_parts;            // P
  int64_t step;                 // widths of pieces are multiples of this
  double close;   // share of the cost by which a bound of several options may miss it
  double piece;                 // cost of every further piece of a table
  OperSums sums;
  const int64_t* starts;        // [T + 1], blocks
  const double* stay;           // [K], cost when not pushed
  const double* stay_more;      // [K], least cost of every further stream then
  const double* one;            // [T], cost of the table in one tier that is not pushed
  const double* tiers;          // [T], charge of a piece of several tiers, none of them pushed
  const double* tiers_pushed;   // [T], and of one that is pushed in part
  const double* go;             // [M, K], cost when pushed as one id stream
  const double* more;           // [M, K], cost of every further stream
  const double* own;            // [T, M], cost of an id that a rank pushes to itself
  const double* features;       // [3, K], but rows
  const double* ids;            // [K]
  const double* total_ids;      // [T]
  const double* price;          // [M], of a byte of partial sums
  const int64_t* first;         // [T * M + 1], types of a table in an option
  const double *streams, *mass; // by type
  const double* least_sums;     // by type, 3 each, bytes of partial sums of a unit of each feature, at least
  const double* narrowest;      // by type, least width of its pieces; the widest is columns / streams
  const int64_t* columns;       // [T], width of the tables that are cut by columns, 0 for others
  const uint8_t* pushes;        // [T], 0: as is cheapest; 1: no row is pushed; 2: some row is
  const double* known;          // [T], cost of the cheapest configuration that is known, or infinity
  double* value;                // [T], out: lower bound of the least cost
  int64_t* num_parts;           // [T], out: 0 where nothing is cheaper than what is known
  int64_t* kind;                // [T, P], out: type of the pieces that push
  int64_t* mode;                // [T, P], out: one tier, several, all pushed, some pushed
  double* share;                // [T, P], out: of the table's columns
  double* part_streams;         // [T, P], out: the table's columns over those of one piece
  int64_t* chosen;              // [P, K], out: 0, or 1 + the pushed option
};

extern "C" int oper_fit(OperFit* fit);
extern "C" int oper_price(OperPricing* pricing);
