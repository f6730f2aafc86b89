// The kernels, included by each kernels_*.cpp, which defines OPER_KERNELS (a namespace),
// OPER_KERNELS_TABLE and OPER_KERNELS_NAME. Headers are in kernels.h, which explains why.

namespace oper::host {
namespace OPER_KERNELS {

// 16 lanes, which the compiler splits into the registers that the target has. `Loose` may be
// unaligned.
typedef float Lanes __attribute__((vector_size(64)));
typedef float Loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int kMaxVectors = 64;     // dim <= 1024
// How many ids before its use a row is prefetched, at most; 40 and 48 took the same time, 24 took
// longer.
constexpr int64_t kPrefetch = 48;
constexpr int64_t kBlockIds = 256;  // ids resolved at a time; with 64 and 128 lookups took longer
constexpr int64_t kIdsAhead = 256;  // how many ids before its use an id is prefetched

static_assert(kPrefetch <= kAddressesAhead);

#include "host/kernels/quantised.inl"
#include "host/kernels/rows.inl"
#include "host/kernels/resolve.inl"
#include "host/kernels/bounds.inl"
#include "host/kernels/lookup.inl"
#include "host/kernels/interaction.inl"
#include "host/kernels/order.inl"
#include "host/kernels/reduce.inl"
#include "host/kernels/update.inl"
#include "host/kernels/push.inl"
#include "host/exchange/peer_rows.inl"
#include "host/exchange/exchange.inl"
#include "host/keys/find.inl"
#include "host/keys/admit.inl"

}  // namespace OPER_KERNELS

const Kernels OPER_KERNELS_TABLE = {OPER_KERNELS_NAME, OPER_KERNELS::start_bounds,
                                    OPER_KERNELS::pool, OPER_KERNELS::interact,
                                    OPER_KERNELS::interact_gradient,
                                    OPER_KERNELS::interact_shared, OPER_KERNELS::weight_gradient,
                                    OPER_KERNELS::locate_rows,
                                    OPER_KERNELS::arrange, OPER_KERNELS::reduce,
                                    OPER_KERNELS::squares, OPER_KERNELS::keep, OPER_KERNELS::update,
                                    OPER_KERNELS::request, OPER_KERNELS::pool_for,
                                    OPER_KERNELS::pool_pushed, OPER_KERNELS::stage,
                                    OPER_KERNELS::reduce_pushed, OPER_KERNELS::remote_rows,
                                    OPER_KERNELS::distinct_rows, OPER_KERNELS::count_distinct,
                                    OPER_KERNELS::find_keys, OPER_KERNELS::victim, OPER_KERNELS::draw_row,
                                    OPER_KERNELS::spread, OPER_KERNELS::add_up,
                                    OPER_KERNELS::quantise, OPER_KERNELS::gather};

}  // namespace oper::host
