// First values of the rows of new keys.
#pragma once

#include "host/context.h"
#include "host/keys/directory.h"

namespace oper::host {

enum class StateWidth : int64_t { kNone, kPerColumn, kPerRow };

// How the rows of a dynamic table begin.
struct RowRules {
  uint64_t seed = 0;
  float bound = 0.0f;
  float first_state = 0.0f;  // of the first momentum; the second one's is 0
  StateWidth widths[2] = {StateWidth::kNone, StateWidth::kNone};  // of the momenta
  int32_t feature = 0;       // one of the collection that looks up in the table
};

// Columns [begin, end) of a new row, in [-bound, bound), drawn from seed, key and column and nothing else.
void draw_row(int64_t key, uint64_t seed, int64_t begin, int64_t end, float bound, float* out);

constexpr int64_t kRowsAtOnce = 128;

// Gives new rows, at most kRowsAtOnce, and their optimizer states their first values where this rank has
// them, as their owner or in replicas. No rank may be in a lookup, nor update them.
void begin_rows(const Context& context, const RowRules& rules, const NewRow* rows, int64_t n);

}  // namespace oper::host
