// First values of the rows of new keys.
#pragma once

#include "host/context.h"
#include "host/keys/directory.h"

namespace oper::host {

constexpr int64_t kRowsAtOnce = 128;

// Initialises at most kRowsAtOnce new rows and their optimizer states where this rank holds them,
// as owner or in replicas. No rank may look up or update rows meanwhile.
void begin_rows(const Context& context, const RowRules& rules, const NewRow* rows, int64_t n);

}  // namespace oper::host
