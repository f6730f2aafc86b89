// Rows of a column in another order, cut into batches: what shuffled batches are made of.
#include <algorithm>

#include "data/data.h"

namespace oper::data {
namespace {

template <class In, class Out>
void take(const In* values, const int64_t* ends, const int32_t* order, int64_t n, Out* out) {
    if (ends == nullptr) {
        for (int64_t k = 0; k < n; ++k) out[k] = static_cast<Out>(values[order[k]]);
        return;
    }
    for (int64_t k = 0; k < n; ++k)
        out = std::copy(values + ends[order[k]], values + ends[order[k] + 1], out);
}

}  // namespace

// The bags of rows `order`, `size` rows to a batch, one after the other where `outs` says for that
// batch; without `ends` every row has one value. `kind`: int32 to int64, int64 to int64, float to
// float.
OPER_DATA_API void oper_data_take(int32_t kind, const void* values, const int64_t* ends,
                                  const int32_t* order, int64_t n, int64_t size,
                                  void* const* outs) {
    for (int64_t at = 0; at < n; at += size, ++outs) {
        const int64_t count = std::min(size, n - at);
        if (kind == 0)
            take(static_cast<const int32_t*>(values), ends, order + at, count,
                 static_cast<int64_t*>(*outs));
        else if (kind == 1)
            take(static_cast<const int64_t*>(values), ends, order + at, count,
                 static_cast<int64_t*>(*outs));
        else
            take(static_cast<const float*>(values), ends, order + at, count,
                 static_cast<float*>(*outs));
    }
}

}  // namespace oper::data
