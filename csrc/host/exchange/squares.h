// Sums of squares of the gradients of rows whose columns are owned by several ranks.
#pragma once

#include <cstdint>

#include "host/context.h"

namespace oper::host {

// The sum of squares over all columns of the row in a slot of this rank, of `table`, which is a
// column piece. `round`: see Table::rounds_of_squares.
float squares_of_row(const Context& context, const Table& table, int64_t slot, int32_t round);

}  // namespace oper::host
