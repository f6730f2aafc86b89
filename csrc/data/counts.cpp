// Dictionary encoding of values, and hash tables of ids and their counts.
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "data/data.h"

namespace oper::data {
namespace {

// Unsigned keys with the order of values: key = value ^ kFlip.
template <class V>
using Key = std::make_unsigned_t<V>;

template <class V>
constexpr Key<V> kFlip = std::is_signed_v<V> ? Key<V>{1} << (8 * sizeof(V) - 1) : 0;

template <class V>
struct Entry {
    Key<V> key;
    Key<V> with;  // sorted along with the key: a code or a count
};

// LSD radix sort by key, which skips digits that are equal in all keys.
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

constexpr int64_t kBlock = 64;  // values whose slots are prefetched together

// Gives distinct values the codes 1, 2, ... in the order of their first occurrence: a hash table
// with open addressing.
template <class V>
class Codes {
  public:
    Codes() : slots_(1 << 12), shift_(64 - 12) {}

    uint32_t size() const { return size_; }

    // Reserves slots for `more` values; results of `place` stay valid while these are inserted.
    void reserve(int64_t more) {
        while (2 * (size_ + static_cast<uint64_t>(more)) > slots_.size()) grow();
    }

    // First slot to probe: Fibonacci hashing of the folded value (Knuth, TAOCP 3, section 6.4).
    uint64_t place(V value) const {
        auto v = static_cast<uint64_t>(value);
        return ((v ^ (v >> 32)) * 0x9e3779b97f4a7c15u) >> shift_;
    }

    void prefetch(uint64_t at) const { __builtin_prefetch(&slots_[at]); }

    uint32_t code(V value, uint64_t at) {
        for (;; at = (at + 1) & (slots_.size() - 1)) {
            Slot& s = slots_[at];
            if (__builtin_expect(s.value == value && s.code, 1)) return s.code;
            if (!s.code) {
                s = {value, ++size_};
                return s.code;
            }
        }
    }

    // Lists the keys of values with their codes, unordered.
    void list(std::vector<Entry<V>>& found) const {
        found.clear();
        found.reserve(size_);
        for (const Slot& s : slots_)
            if (s.code) found.push_back({static_cast<Key<V>>(s.value) ^ kFlip<V>, s.code});
    }

    // Removes all values and resizes for `expected` values, without releasing memory.
    void clear(int64_t expected) {
        int bits = 12;
        while (int64_t{1} << bits < 2 * expected) ++bits;
        size_ = 0;
        slots_.assign(size_t{1} << bits, {});
        shift_ = 64 - bits;
    }

  private:
    struct Slot {
        V value;
        uint32_t code;  // 0 = free
    };

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

    std::vector<Slot> slots_, other_;
    uint32_t size_ = 0;
    int shift_;
};

// The final code of a value, by ascending values instead of first occurrence, and the value's
// count.
struct Final {
    uint32_t place, count;
};

template <class C>
void renumber(Final* finals, const uint32_t* codes, int64_t size, void* to) {
    auto out = static_cast<C*>(to);
    for (int64_t k = 0; k < size; ++k) {
        Final& f = finals[codes[k]];
        out[k] = static_cast<C>(f.place);
        ++f.count;
    }
}

// Thread-local memory reused between calls, since new pages would cost more than the work itself.
template <class V>
struct Kept {
    Codes<V> found;
    std::vector<uint32_t> scratch;
    std::vector<Final> finals;
    std::vector<Entry<V>> entries, other;
};

template <class V>
Kept<V>& kept() {
    static thread_local Kept<V> memory;
    return memory;
}

template <class V>
int64_t encode(const V* values, const uint8_t* valid, int64_t offset, int64_t size,
               int64_t expected) {
    auto& [found, scratch, finals, entries, other] = kept<V>();
    auto is_there = [&](int64_t k) { return valid[(offset + k) >> 3] >> ((offset + k) & 7) & 1; };
    found.clear(std::min(expected, size));
    scratch.resize(size);
    int64_t start = 0;
    for (; valid && start < size && !is_there(start); ++start) scratch[start] = 0;
    V last = start < size ? values[start] : V{};
    V block[kBlock];
    uint64_t at[kBlock];
    uint32_t mask[kBlock];
    for (; start < size; start += kBlock) {
        int64_t count = std::min(kBlock, size - start);
        const V* from = values + start;
        if (valid) {
            // A missing value is replaced by the last valid one, and its code masked to 0: this
            // avoids mispredicted branches and adds no value to the table.
            for (int64_t k = 0; k < count; ++k) {
                mask[k] = -static_cast<uint32_t>(is_there(start + k));
                block[k] = last = mask[k] ? values[start + k] : last;
            }
            from = block;
        }
        found.reserve(count);
        for (int64_t k = 0; k < count; ++k) found.prefetch(at[k] = found.place(from[k]));
        uint32_t* out = scratch.data() + start;
        for (int64_t k = 0; k < count; ++k) out[k] = found.code(from[k], at[k]);
        for (int64_t k = 0; valid && k < count; ++k) out[k] &= mask[k];
    }
    found.list(entries);
    radix_sort(entries, other);
    return static_cast<int64_t>(entries.size());
}

template <class V>
int64_t encoded(void* codes, V* distinct, int64_t* counts) {
    auto& [found, scratch, finals, entries, other] = kept<V>();
    auto num = static_cast<int64_t>(entries.size());
    auto size = static_cast<int64_t>(scratch.size());
    finals.resize(num + 1);
    finals[0] = {0, 0};
    for (int64_t k = 0; k < num; ++k) {
        finals[entries[k].with] = {static_cast<uint32_t>(k + 1), 0};
        distinct[k] = static_cast<V>(entries[k].key ^ kFlip<V>);
    }
    if (num <= 0xff) renumber<uint8_t>(finals.data(), scratch.data(), size, codes);
    else if (num <= 0xffff) renumber<uint16_t>(finals.data(), scratch.data(), size, codes);
    else renumber<uint32_t>(finals.data(), scratch.data(), size, codes);
    for (int64_t k = 0; k <= num; ++k) counts[finals[k].place] = finals[k].count;
    return num;
}

// Whether the 64-bit hash of an id (the finalizer of splitmix64) has `level` leading zeros.
inline bool is_sampled(uint64_t id, int32_t level) {
    uint64_t x = id + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return !level || (x ^ (x >> 31)) >> (64 - level) == 0;
}

// An id and its count; a count of 0 marks a free slot.
template <class V>
struct Tallied {
    V id, count;
};

inline uint64_t tally_place(uint64_t id, int32_t bits) {
    return (id * 0x9e3779b97f4a7c15u) >> (64 - bits);
}

// Returns the slot of an id, or the free slot to insert it, in a table of 2^bits slots that is not
// full.
template <class V>
Tallied<V>& tallied(Tallied<V>* slots, int32_t bits, V id, uint64_t at) {
    for (uint64_t mask = (uint64_t{1} << bits) - 1;; at = (at + 1) & mask)
        if (!slots[at].count || slots[at].id == id) return slots[at];
}

template <class V>
int64_t tally(Tallied<V>* slots, int32_t bits, const int64_t* ids, const int64_t* counts,
              int64_t size, int64_t limit, int64_t* used) {
    uint64_t at[kBlock];
    int64_t start = 0;
    for (; start < size; start += kBlock) {
        int64_t count = std::min(kBlock, size - start);
        if (*used + count > limit) break;
        for (int64_t k = 0; k < count; ++k)
            __builtin_prefetch(&slots[at[k] = tally_place(ids[start + k], bits)], 1);
        for (int64_t k = 0; k < count; ++k) {
            auto id = static_cast<V>(ids[start + k]);
            Tallied<V>& t = tallied(slots, bits, id, at[k]);
            *used += !t.count;
            t.id = id;
            t.count += counts ? static_cast<V>(counts[start + k]) : 1;
        }
    }
    return std::min(start, size);
}

template <class V, class W>
void tally_move(const Tallied<V>* from, int32_t from_bits, Tallied<W>* to, int32_t bits) {
    for (int64_t k = 0; k < int64_t{1} << from_bits; ++k) {
        if (!from[k].count) continue;
        auto id = static_cast<W>(from[k].id);
        tallied(to, bits, id, tally_place(from[k].id, bits)) = {id, static_cast<W>(from[k].count)};
    }
}

// Subtracts `level` from all counts and removes ids whose count is <= `level`.
template <class V>
int64_t tally_purge(Tallied<V>* slots, int32_t bits, V level) {
    const int64_t size = int64_t{1} << bits;
    int64_t first = 0, left = 0;
    while (slots[first].count) ++first;  // no probe sequence crosses a free slot
    for (int64_t k = 1; k <= size; ++k) {
        Tallied<V>& slot = slots[(first + k) & (size - 1)];
        Tallied<V> t = slot;
        slot.count = 0;
        if (t.count <= level) continue;
        tallied(slots, bits, t.id, tally_place(t.id, bits)) = {t.id, static_cast<V>(t.count - level)};
        ++left;
    }
    return left;
}

template <class V>
void tally_levels(const Tallied<V>* slots, int32_t bits, int64_t* few, int64_t size) {
    for (int64_t k = 0; k < int64_t{1} << bits; ++k)
        ++few[std::min<uint64_t>(slots[k].count, static_cast<uint64_t>(size - 1))];
}

template <class V>
int64_t tally_list(const Tallied<V>* slots, int32_t bits, V above, int32_t level, int64_t room,
                   int64_t* ids, int64_t* counts) {
    std::vector<Entry<int64_t>> entries, other;
    entries.reserve(room);
    for (int64_t k = 0; k < int64_t{1} << bits; ++k)
        if (slots[k].count > above && is_sampled(slots[k].id, level))
            entries.push_back({slots[k].id, slots[k].count});
    auto found = static_cast<int64_t>(entries.size());
    if (found > room) return found;
    radix_sort(entries, other);
    for (int64_t k = 0; k < found; ++k) {
        ids[k] = static_cast<int64_t>(entries[k].key);
        counts[k] = static_cast<int64_t>(entries[k].with);
    }
    return found;
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

// Finds the distinct values of `values`, [size] of a Kind, and returns their number K, or -1 for an
// unknown kind. The thread keeps the result for `oper_data_encoded`. valid: Arrow validity bitmap,
// from bit `offset` on; null = all valid. expected: approximate number of distinct values, 0 =
// unknown.
OPER_DATA_API int64_t oper_data_encode(int32_t kind, const void* values, const uint8_t* valid,
                                       int64_t offset, int64_t size, int64_t expected) {
    BY_KIND(kind, return oper::data::encode<V>(static_cast<const V*>(values), valid, offset, size,
                                               expected))
}

// Writes the result of this thread's last `oper_data_encode`. codes: [size], 0 = missing, k + 1 =
// the k-th distinct value in ascending order; uint8 for K <= 255, uint16 for K <= 65535, else
// uint32. distinct: [K]; counts: int64 [K + 1], by code.
OPER_DATA_API int64_t oper_data_encoded(int32_t kind, void* codes, void* distinct,
                                        int64_t* counts) {
    BY_KIND(kind, return oper::data::encoded<V>(codes, static_cast<V*>(distinct), counts))
}

// Finds the ids whose 64-bit hash (the finalizer of splitmix64) has at least `level` (1 to 63)
// leading zeros. Writes their indices to `places`, which must have space for `size`; returns their
// number.
OPER_DATA_API int64_t oper_data_sample(const int64_t* ids, int64_t size, int32_t level,
                                       int64_t* places) {
    int64_t n = 0;
    for (int64_t k = 0; k < size; ++k) {
        places[n] = k;
        n += oper::data::is_sampled(static_cast<uint64_t>(ids[k]), level);
    }
    return n;
}

// The following functions work on tables of ids and counts: hash tables with open addressing and
// 2^bits slots (id, count), both uint32 or, if `wide`, uint64. A count of 0 marks a free slot.
#define BY_WIDTH(wide, call)                    \
    if (wide) { using V = uint64_t; call; }     \
    else { using V = uint32_t; call; }

// Counts ids in such a table. counts: what to add for each id, int64 [size], >= 1; null = 1. Adds
// the number of new ids to `*used`, and stops before that could exceed `limit`. Returns the number
// of ids that were counted.
OPER_DATA_API int64_t oper_data_tally(int32_t wide, void* table, int32_t bits, const int64_t* ids,
                                      const int64_t* counts, int64_t size, int64_t limit,
                                      int64_t* used) {
    using namespace oper::data;
    BY_WIDTH(wide, return tally(static_cast<Tallied<V>*>(table), bits, ids, counts, size, limit,
                                used))
}

// Moves the ids of one such table to a larger or wider one, which is empty.
OPER_DATA_API int64_t oper_data_tally_move(int32_t from_wide, const void* from, int32_t from_bits,
                                           int32_t wide, void* to, int32_t bits) {
    using namespace oper::data;
    if (from_wide)
        tally_move(static_cast<const Tallied<uint64_t>*>(from), from_bits,
                   static_cast<Tallied<uint64_t>*>(to), bits);
    else
        BY_WIDTH(wide, tally_move(static_cast<const Tallied<uint32_t>*>(from), from_bits,
                                  static_cast<Tallied<V>*>(to), bits))
    return 0;
}

// Subtracts `level` from all counts of such a table, which must have a free slot, and removes ids
// whose count is <= `level`. Returns the number of remaining ids.
OPER_DATA_API int64_t oper_data_tally_purge(int32_t wide, void* table, int32_t bits,
                                            int64_t level) {
    using namespace oper::data;
    BY_WIDTH(wide, return tally_purge(static_cast<Tallied<V>*>(table), bits, static_cast<V>(level)))
}

// Adds the number of slots with count c to few[c], int64 [size]; the last element includes larger
// counts.
OPER_DATA_API int64_t oper_data_tally_levels(int32_t wide, const void* table, int32_t bits,
                                             int64_t* few, int64_t size) {
    using namespace oper::data;
    BY_WIDTH(wide, tally_levels(static_cast<const Tallied<V>*>(table), bits, few, size); return 0)
}

// Lists the ids of such a table with counts > `above` and at least `level` leading zeros in the
// hash, ascending, with counts. Returns their number; if it exceeds `room`, nothing is written.
OPER_DATA_API int64_t oper_data_tally_list(int32_t wide, const void* table, int32_t bits,
                                           int64_t above, int32_t level, int64_t room, int64_t* ids,
                                           int64_t* counts) {
    using namespace oper::data;
    BY_WIDTH(wide, return tally_list(static_cast<const Tallied<V>*>(table), bits,
                                     static_cast<V>(above), level, room, ids, counts))
}
