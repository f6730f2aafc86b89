// Sums of squares of the gradients of rows whose columns are owned by several ranks, see
// Table::squares.
#pragma once

#include <cstdint>

#include "host/context.h"

namespace oper::host {

// The sum of squares over all columns of a row: the one in a slot of this rank in `table`, a column
// piece. In several domains the exchange must have delivered the totals. `round`: see
// Table::rounds_of_squares.
float squares_of_row(const Context& context, const Table& table, int64_t slot, int32_t round);

}  // namespace oper::host
