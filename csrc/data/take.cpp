// Gathers the rows of a column in a given order into batches.
#include <algorithm>
#include <vector>

#include "data/data.h"

namespace oper::data {
namespace {

template <class In, class Out>
void take_rows(const In* values, const int64_t* ends, const int32_t* order, int64_t n, int64_t step,
               Out* out) {
    if (ends != nullptr) {
        for (int64_t k = 0; k < n; ++k)
            out = std::copy(values + ends[order[k]], values + ends[order[k] + 1], out);
    } else if (step == 1) {
        for (int64_t k = 0; k < n; ++k) out[k] = static_cast<Out>(values[order[k]]);
    } else {
        for (int64_t k = 0; k < n; ++k) out[k * step] = static_cast<Out>(values[order[k]]);
    }
}

// Returns the pieces of a column as one array. It is copied to thread-local memory, since new pages
// would take longer than the copy; this also brings it into the cache for the random accesses that
// follow.
template <class In>
const In* joined(const void* const* pieces, const int64_t* sizes, int64_t num_pieces) {
    if (num_pieces == 1) return static_cast<const In*>(pieces[0]);
    static thread_local std::vector<In> memory;
    int64_t total = 0;
    for (int64_t p = 0; p < num_pieces; ++p) total += sizes[p];
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(total);
    In* to = memory.data();
    for (int64_t p = 0; p < num_pieces; ++p)
        to = std::copy_n(static_cast<const In*>(pieces[p]), sizes[p], to);
    return memory.data();
}

template <class In, class Out>
void take(const void* const* pieces, const int64_t* sizes, int64_t num_pieces, const int64_t* ends,
          const int32_t* order, int64_t n, int64_t size, int64_t step, void* const* outs) {
    const In* values = joined<In>(pieces, sizes, num_pieces);
    for (int64_t at = 0; at < n; at += size, ++outs)
        take_rows(values, ends, order + at, std::min(size, n - at), step, static_cast<Out*>(*outs));
}

}  // namespace

// Gathers the rows `order` [n] of a column, `size` rows per batch, and writes batch k to outs[k].
// The column's values are given in `num_pieces` pieces of sizes[p] values. `ends`: bag i of the
// column has the values [ends[i], ends[i + 1]) of all pieces together; null: each row has one
// value, and the values of a batch are written `step` elements apart. `kind`: 0 = int32 to int64, 1
// = int64 to int64, 2 = float to float.
OPER_DATA_API void oper_data_take(int32_t kind, const void* const* pieces, const int64_t* sizes,
                                  int64_t num_pieces, const int64_t* ends, const int32_t* order,
                                  int64_t n, int64_t size, int64_t step, void* const* outs) {
    const auto run = kind == 0   ? take<int32_t, int64_t>
                     : kind == 1 ? take<int64_t, int64_t>
                                 : take<float, float>;
    run(pieces, sizes, num_pieces, ends, order, n, size, step, outs);
}

}  // namespace oper::data
