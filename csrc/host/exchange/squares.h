// Sums of squares of the gradients of rows whose columns are owned by several ranks, see
// Table::squares.
#pragma once

#include <cstdint>

#include "host/context.h"

namespace oper::host {

// The sum of the squared gradients over all columns of a row, whose columns of one piece, `table`,
// are in slot `slot` of this rank. With several domains the exchange must have delivered the totals
// before. `round`: see Table::rounds_of_squares.
float squares_of_row(const Context& context, const Table& table, int64_t slot, int32_t round);

}  // namespace oper::host
