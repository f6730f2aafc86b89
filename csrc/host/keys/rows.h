// First values of the rows of new keys.
#pragma once

#include "host/context.h"
#include "host/keys/directory.h"

namespace oper::host {

enum class StateWidth : int64_t { kNone, kPerColumn, kPerRow };

// How the rows of a dynamic table are initialised.
struct RowRules {
  uint64_t seed = 0;
  float bound = 0.0f;
  float first_state = 0.0f;  // of the first momentum; the second one's is 0
  StateWidth widths[2] = {StateWidth::kNone, StateWidth::kNone};  // of the momenta
  int32_t feature = 0;       // one of the collection that looks up in the table
};

constexpr int64_t kRowsAtOnce = 128;

// Initialises at most kRowsAtOnce new rows and their optimizer states where this rank holds them,
// as owner or in replicas. No rank may look up or update rows meanwhile.
void begin_rows(const Context& context, const RowRules& rules, const NewRow* rows, int64_t n);

}  // namespace oper::host
