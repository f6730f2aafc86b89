// Distinct values: codes, sorted counts, merges, and what they stand for.
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "data/data.h"

namespace oper::data {
namespace {

// A value as an unsigned key of the same order, and back.
template <class V>
using Key = std::make_unsigned_t<V>;

template <class V>
constexpr Key<V> kFlip = std::is_signed_v<V> ? Key<V>{1} << (8 * sizeof(V) - 1) : 0;

template <class V>
struct Entry {
    Key<V> key;
    Key<V> with;  // what goes with it
};

// Sorts by key, digit by digit from the last one, leaving out digits that are all alike.
template <class V>
void radix_sort(std::vector<Entry<V>>& entries, std::vector<Entry<V>>& other) {
    size_t size = entries.size();
    if (size < 256) {
        std::sort(entries.begin(), entries.end(),
                  [](const Entry<V>& a, const Entry<V>& b) { return a.key < b.key; });
        return;
    }
    constexpr int kBits = 11;
    constexpr Key<V> kMask = (1 << kBits) - 1;
    Key<V> differ = 0;
    for (const Entry<V>& e : entries) differ |= e.key ^ entries[0].key;
    other.resize(size);
    std::vector<int64_t> places(kMask + 1);
    for (int shift = 0; shift < static_cast<int>(8 * sizeof(V)); shift += kBits) {
        if (!(differ >> shift & kMask)) continue;
        std::fill(places.begin(), places.end(), 0);
        for (const Entry<V>& e : entries) ++places[e.key >> shift & kMask];
        int64_t next = 0;
        for (int64_t& place : places) next += std::exchange(place, next);
        for (const Entry<V>& e : entries) other[places[e.key >> shift & kMask]++] = e;
        entries.swap(other);
    }
}

constexpr size_t kNearBytes = 1 << 18;  // of a table that the nearer caches hold
constexpr int64_t kAhead = 12;          // values between asking for a slot and using it

// Distinct values, numbered from 1 in the order in which they were first met, and how often each
// was: a table with open addressing.
template <class V>
class Codes {
  public:
    Codes() : counts_(1, 0), slots_(1 << 12), shift_(64 - 12) {}

    void prefetch(V value) const { __builtin_prefetch(&slots_[place(value)]); }

    bool is_large() const { return slots_.size() * sizeof(Slot) > kNearBytes; }

    uint32_t code(V value) {
        uint64_t at = place(value);
        for (; slots_[at].code; at = (at + 1) & (slots_.size() - 1)) {
            if (slots_[at].value == value) {
                ++counts_[slots_[at].code];
                return slots_[at].code;
            }
        }
        auto code = static_cast<uint32_t>(counts_.size());
        slots_[at] = {value, code};
        counts_.push_back(1);
        if (2 * counts_.size() > slots_.size()) grow();
        return code;
    }

    // The values with their codes, in no order.
    void list(std::vector<Entry<V>>& found) const {
        found.clear();
        found.reserve(counts_.size() - 1);
        for (const Slot& s : slots_)
            if (s.code) found.push_back({static_cast<Key<V>>(s.value) ^ kFlip<V>, s.code});
    }

    // Forgets everything; the table becomes small again, its memory stays.
    void clear() {
        counts_.assign(1, 0);
        slots_.assign(1 << 12, {});
        shift_ = 64 - 12;
    }

    const std::vector<int64_t>& counts() const { return counts_; }

  private:
    struct Slot {
        V value;
        uint32_t code;  // 0 = free
    };

    // Fibonacci hashing of the folded value (Knuth, TAOCP 3, section 6.4).
    uint64_t place(V value) const {
        auto v = static_cast<uint64_t>(value);
        return ((v ^ (v >> 32)) * 0x9e3779b97f4a7c15u) >> shift_;
    }

    void grow() {
        other_.assign(4 * slots_.size(), {});
        other_.swap(slots_);
        shift_ -= 2;
        for (const Slot& s : other_) {
            if (!s.code) continue;
            uint64_t at = place(s.value);
            while (slots_[at].code) at = (at + 1) & (slots_.size() - 1);
            slots_[at] = s;
        }
    }

    std::vector<int64_t> counts_;  // by code; of 0, nothing
    std::vector<Slot> slots_, other_;
    int shift_;
};

template <class C>
void renumber(const uint32_t* place, const uint32_t* codes, int64_t size, void* to) {
    auto out = static_cast<C*>(to);
    for (int64_t k = 0; k < size; ++k) out[k] = static_cast<C>(place[codes[k]]);
}

// Memory that a thread keeps from call to call: fresh pages would cost more than the work in them.
template <class V>
struct Kept {
    Codes<V> found;
    std::vector<uint32_t> scratch, place;
    std::vector<Entry<V>> entries, other;
    int64_t missing = 0;
};

template <class V>
Kept<V>& kept() {
    static thread_local Kept<V> memory;
    return memory;
}

template <class V>
int64_t encode(const V* values, const uint8_t* valid, int64_t offset, int64_t size) {
    auto& [found, scratch, place, entries, other, missing] = kept<V>();
    found.clear();
    scratch.resize(size);
    missing = 0;
    if (!valid) {
        int64_t k = 0;
        for (; k < size && !found.is_large(); ++k) scratch[k] = found.code(values[k]);
        for (; k < size - kAhead; ++k) {
            found.prefetch(values[k + kAhead]);
            scratch[k] = found.code(values[k]);
        }
        for (; k < size; ++k) scratch[k] = found.code(values[k]);
    } else {
        for (int64_t k = 0; k < size; ++k) {
            bool is_there = valid[(offset + k) >> 3] >> ((offset + k) & 7) & 1;
            scratch[k] = is_there ? found.code(values[k]) : 0;
            missing += !is_there;
        }
    }
    found.list(entries);
    radix_sort(entries, other);
    return static_cast<int64_t>(entries.size());
}

template <class V>
int64_t encoded(void* codes, V* distinct, int64_t* counts) {
    auto& [found, scratch, place, entries, other, missing] = kept<V>();
    auto num = static_cast<int64_t>(entries.size());
    auto size = static_cast<int64_t>(scratch.size());
    place.resize(num + 1);
    place[0] = 0;
    counts[0] = missing;
    for (int64_t k = 0; k < num; ++k) {
        place[entries[k].with] = static_cast<uint32_t>(k + 1);
        distinct[k] = static_cast<V>(entries[k].key ^ kFlip<V>);
        counts[k + 1] = found.counts()[entries[k].with];
    }
    if (num <= 0xff) renumber<uint8_t>(place.data(), scratch.data(), size, codes);
    else if (num <= 0xffff) renumber<uint16_t>(place.data(), scratch.data(), size, codes);
    else renumber<uint32_t>(place.data(), scratch.data(), size, codes);
    return num;
}

template <class V>
int64_t runs(const V* sorted, int64_t size, V* distinct, int64_t* counts) {
    int64_t n = 0, start = 0;
    for (int64_t k = 1; k <= size; ++k) {
        // Written every time, kept when the run ends: no branch to mispredict.
        distinct[n] = sorted[k - 1];
        counts[n] = k - start;
        bool ends = k == size || sorted[k] != sorted[k - 1];
        n += ends;
        start = ends ? k : start;
    }
    return n;
}

template <class V>
int64_t merge(const V* a, const int64_t* counts_a, int64_t size_a, const V* b,
              const int64_t* counts_b, int64_t size_b, V* out, int64_t* counts) {
    int64_t i = 0, j = 0, n = 0;
    while (i < size_a && j < size_b) {
        V x = a[i], y = b[j];
        bool from_a = x <= y, from_b = y <= x;  // both of an equal value: no branch to mispredict
        out[n] = from_a ? x : y;
        counts[n++] = (from_a ? counts_a[i] : 0) + (from_b ? counts_b[j] : 0);
        i += from_a;
        j += from_b;
    }
    for (; i < size_a; ++i, ++n) out[n] = a[i], counts[n] = counts_a[i];
    for (; j < size_b; ++j, ++n) out[n] = b[j], counts[n] = counts_b[j];
    return n;
}

template <class V>
void lookup(const V* known, const int32_t* ids, int64_t num_known, const V* values, int64_t size,
            int32_t* out) {
    int64_t low = 0;
    for (int64_t k = 0; k < size; ++k) {
        // Both ascend: from the last place on, in steps that double, then between the last two.
        int64_t step = 1, high = low;
        while (high < num_known && known[high] < values[k]) {
            low = high + 1;
            high += step;
            step *= 2;
        }
        const V* end = known + std::min(high, num_known);
        low = std::lower_bound(known + low, end, values[k]) - known;
        out[k] = low < num_known && known[low] == values[k] ? ids[low] : 0;
    }
}

template <class C>
void gather(const int32_t* table, const void* codes, int64_t size, int32_t* out) {
    auto in = static_cast<const C*>(codes);
    for (int64_t k = 0; k < size; ++k) out[k] = table[in[k]];
}

}  // namespace
}  // namespace oper::data

#define BY_KIND(kind, call)                                      \
    switch (kind) {                                              \
        case oper::data::kUint32: { using V = uint32_t; call; }  \
        case oper::data::kInt64: { using V = int64_t; call; }    \
        case oper::data::kUint64: { using V = uint64_t; call; }  \
        default: return -1;                                      \
    }

// Finds the distinct values, whose number it returns; what it found stays with the thread until
// `oper_data_encoded` writes it. valid: bitmap as Arrow's, from bit `offset` on, or null.
OPER_DATA_API int64_t oper_data_encode(int32_t kind, const void* values, const uint8_t* valid,
                                       int64_t offset, int64_t size) {
    BY_KIND(kind, return oper::data::encode<V>(static_cast<const V*>(values), valid, offset, size))
}

// The result of the call of `oper_data_encode` before. codes: [size], 0 where missing, k + 1 for
// the k-th distinct value in ascending order, in unsigned integers of 1 byte up to 255 distinct
// values, of 2 up to 65535, else of 4; distinct: [K]; counts: int64 [K + 1], by code.
OPER_DATA_API int64_t oper_data_encoded(int32_t kind, void* codes, void* distinct,
                                        int64_t* counts) {
    BY_KIND(kind, return oper::data::encoded<V>(codes, static_cast<V*>(distinct), counts))
}

// Distinct values of sorted ones and how often each occurs; returns their number. Both results have
// room for one entry more than that.
OPER_DATA_API int64_t oper_data_runs(int32_t kind, const void* sorted, int64_t size, void* distinct,
                                     int64_t* counts) {
    BY_KIND(kind, return oper::data::runs<V>(static_cast<const V*>(sorted), size,
                                             static_cast<V*>(distinct), counts))
}

// Which ids have a 64-bit hash (the finalizer of splitmix64) with at least `level` leading zeros;
// level 1 to 63. Writes their places, of which `places` has room for [size]; returns their number.
OPER_DATA_API int64_t oper_data_sample(const int64_t* ids, int64_t size, int32_t level,
                                       int64_t* places) {
    int64_t n = 0;
    for (int64_t k = 0; k < size; ++k) {
        uint64_t x = static_cast<uint64_t>(ids[k]) + 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        places[n] = k;
        n += (x ^ (x >> 31)) >> (64 - level) == 0;
    }
    return n;
}

// Adds up two lists of ascending distinct values with counts; returns the length of the result.
OPER_DATA_API int64_t oper_data_merge(int32_t kind, const void* a, const int64_t* counts_a,
                                      int64_t size_a, const void* b, const int64_t* counts_b,
                                      int64_t size_b, void* out, int64_t* counts) {
    BY_KIND(kind, return oper::data::merge<V>(
        static_cast<const V*>(a), counts_a, size_a, static_cast<const V*>(b), counts_b, size_b,
        static_cast<V*>(out), counts))
}

// Ids of ascending values by ascending known ones; 0 for a value that is not known.
OPER_DATA_API int64_t oper_data_lookup(int32_t kind, const void* known, const int32_t* ids,
                                       int64_t num_known, const void* values, int64_t size,
                                       int32_t* out) {
    BY_KIND(kind, oper::data::lookup<V>(static_cast<const V*>(known), ids, num_known,
                                        static_cast<const V*>(values), size, out); return 0)
}

// out[k] = table[codes[k]]; codes in `width` bytes each.
OPER_DATA_API void oper_data_gather(const int32_t* table, const void* codes, int64_t size,
                                    int32_t width, int32_t* out) {
    if (width == 1) oper::data::gather<uint8_t>(table, codes, size, out);
    else if (width == 2) oper::data::gather<uint16_t>(table, codes, size, out);
    else oper::data::gather<uint32_t>(table, codes, size, out);
}

// Ids of values by count: see `deal` in oper/native.py. Returns 1 when a count is not a level.
OPER_DATA_API int64_t oper_data_deal(const int64_t* counts, const int64_t* levels,
                                     const int64_t* room, const int64_t* first, int64_t num_levels,
                                     int64_t size, int64_t* given, int32_t* ids) {
    // Most counts are small, and the levels that they are found at too.
    std::vector<int32_t> small(1 << 12, -1);
    for (int64_t k = 0; k < num_levels && levels[k] < static_cast<int64_t>(small.size()); ++k)
        if (levels[k] >= 0) small[levels[k]] = static_cast<int32_t>(k);
    for (int64_t k = 0; k < size; ++k) {
        int64_t level = -1;
        if (counts[k] >= 0 && counts[k] < static_cast<int64_t>(small.size())) {
            level = small[counts[k]];
        } else {
            level = std::lower_bound(levels, levels + num_levels, counts[k]) - levels;
            if (level == num_levels || levels[level] != counts[k]) level = -1;
        }
        if (level < 0) return 1;
        int64_t turn = given[level]++;
        ids[k] = turn < room[level] ? static_cast<int32_t>(first[level] + turn) : 0;
    }
    return 0;
}
