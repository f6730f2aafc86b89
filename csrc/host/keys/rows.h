// The initial values of new keys' rows.
#pragma once

#include "host/context.h"
#include "host/keys/directory.h"

namespace oper::host {

constexpr int64_t kRowsAtOnce = 128;

// Initialises at most kRowsAtOnce new rows and their optimizer states where this rank has them, as
// their owner or as replicas. No rank may look up or update rows at the same time.
void begin_rows(const Context& context, const RowRules& rules, const NewRow* rows, int64_t n);

}  // namespace oper::host
