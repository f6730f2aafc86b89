// Blocks of lines of delimited text, parsed column by column.
//
// First, the positions of all separators are found, 64 bytes at a time (as in simdjson: Langdale
// and Lemire, "Parsing gigabytes of JSON per second", VLDB Journal 2019). Then each column is
// decoded: bits, integers of up to 8 digits and hexadecimal digits as 64-bit words, in loops that
// vectorise and do not branch on the text; other columns, and columns with a longer field, field by
// field. A block with an irregular line (see text.cpp) is refused as a whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "data/field.h"

namespace oper::data {
namespace {

constexpr int64_t kBlockLines = 64;
constexpr int64_t kBlockColumns = 64;  // maximum number of columns
constexpr int64_t kStride = 64;        // bytes searched for separators at once
// Bytes after a block that may be read, too: the rest of a stride, and of the last field's word.
constexpr int64_t kMargin = kStride + 8;

// The fields of one column in a block.
struct Words {
    // The eight bytes from the field's first one on, without a minus sign.
    uint64_t text[kBlockLines];
    uint64_t size[kBlockLines];   // bytes of the field without the sign
    uint64_t minus[kBlockLines];  // 1 if there is a minus sign
};

// Decodes `size` decimal digits, 0 to 8 (none = 0); sets bits of `*bad` for other characters.
OPER_INLINE uint32_t decimal_word(uint64_t text, uint64_t size, uint64_t* bad) {
    // Digits as values, shifted such that the last one is in the highest byte.
    uint64_t digits = (text ^ (0x30 * kOnes)) << ((64 - 8 * size) & 63);
    digits &= -static_cast<uint64_t>(size != 0);
    *bad |= (((digits & (0x7f * kOnes)) + 0x76 * kOnes) | digits) & (0x80 * kOnes);
    uint64_t pairs = (digits * 10 + (digits >> 8)) & 0x00ff00ff00ff00ffu;
    uint64_t quads = (pairs * 100 + (pairs >> 16)) & 0x0000ffff0000ffffu;
    return static_cast<uint32_t>(quads) * 10000 + static_cast<uint32_t>(quads >> 32);
}

// Bit k is set if byte k of 64 is the separator (`field`) or a line feed (`line`).
struct Ends {
    uint64_t field = 0, line = 0;
};

OPER_INLINE Ends ends_of(const char* p, char separator) {
    Ends ends;
#if defined(__SSE2__)
    const __m128i one = _mm_set1_epi8(separator), feed = _mm_set1_epi8('\n');
    for (int k = 0; k < 4; ++k) {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + k);
        auto fields = static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, one)));
        auto lines = static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, feed)));
        ends.field |= static_cast<uint64_t>(fields) << (16 * k);
        ends.line |= static_cast<uint64_t>(lines) << (16 * k);
    }
#else
    for (int k = 0; k < 64; ++k) {
        ends.field |= static_cast<uint64_t>(p[k] == separator) << k;
        ends.line |= static_cast<uint64_t>(p[k] == '\n') << k;
    }
#endif
    return ends;
}

// Finds up to `most` lines of `num_columns` fields each from p on, and writes the end of each field
// to `ends`, which must have room for kStride more. Returns the number of lines, 0 if one has
// another number of fields. kMargin bytes after `stop` must be readable; they are not interpreted.
OPER_INLINE int64_t find_lines(const char* p, const char* stop, char separator,
                               int64_t num_columns, int64_t most, uint32_t* ends) {
    int64_t found = 0, feeds = 0;
    uint32_t base = 0;
    for (; found < most * num_columns && p + base < stop; base += kStride) {
        const Ends here = ends_of(p + base, separator);
        uint64_t mask = here.field | here.line;
        const int64_t count = __builtin_popcountll(mask);
        feeds += __builtin_popcountll(here.line);
        for (int64_t k = 0; k < count; k += 8)  // up to 7 too many, to avoid mispredicted branches
            for (int64_t j = 0; j < 8; ++j) {
                auto at = base + static_cast<uint32_t>(__builtin_ctzll(mask | uint64_t{1} << 63));
                asm("" : "+r"(at));  // prevents vectorisation, which is slower here
                ends[found + k + j] = at;
                mask &= mask - 1;
            }
        found += count;
    }
    const int64_t lines = std::min(found / num_columns, most);
    for (int64_t k = lines * num_columns; k < found; ++k) feeds -= p[ends[k]] == '\n';
    // If there are as many line feeds as lines, and each line ends with one, all other ends are
    // separators.
    bool ok = feeds == lines;
    for (int64_t k = 1; k <= lines; ++k) ok &= p[ends[k * num_columns - 1]] == '\n';
    return ok ? lines : 0;
}

// Loads the fields of a column, each between `ends[k * count]` and the next end. Returns false if a
// field is longer than a word, or is a sign without digits.
template <bool kHasSign, bool kIsLast>
OPER_INLINE bool take_words(const char* p, const uint32_t* ends, int64_t count, int64_t lines,
                            Words* words) {
    uint32_t above = 0;  // its highest bit is set if a difference below is negative
    for (int64_t k = 0; k < lines; ++k, ends += count) {
        uint32_t at = ends[0] + 1, end = ends[1];
        uint32_t size = end - at;
        if (kIsLast) size -= size && p[end - 1] == '\r';
        if (kHasSign) {
            const uint32_t minus = p[at] == '-';
            at += minus;
            size -= minus;
            above |= size - minus;
            words->minus[k] = minus;
        }
        above |= 8 - size;
        std::memcpy(&words->text[k], p + at, 8);
        words->size[k] = size;
    }
    return !(above >> 31);
}

// Decodes a column's words and writes them from row `row` on; returns false if one is invalid.
OPER_INLINE bool put_words(const Column& c, const Words& words, int64_t lines, int64_t row) {
    uint64_t bad = 0;
    if (c.is_there) {
        uint8_t* __restrict out = c.is_there + row;
        for (int64_t k = 0; k < lines; ++k) out[k] = words.size[k] != 0;
    }
    if (c.required)
        for (int64_t k = 0; k < lines; ++k) bad |= !words.size[k];
    if (c.parse == kBit) {
        auto* __restrict out = static_cast<int8_t*>(c.out) + row;
        for (int64_t k = 0; k < lines; ++k) {
            uint64_t first = (words.text[k] & 0xff) ^ '0';
            bad |= (words.size[k] ^ 1) | (first & ~uint64_t{1});
            out[k] = static_cast<int8_t>(first);
        }
    } else if (c.parse == kHex32) {
        auto* __restrict out = static_cast<uint32_t*>(c.out) + row;
        for (int64_t k = 0; k < lines; ++k) {
            bad |= words.size[k] & ~uint64_t{8};
            out[k] = hex_word(words.size[k] ? words.text[k] : 0x30 * kOnes, &bad);
        }
    } else if (c.parse == kNumber) {
        auto* __restrict out = static_cast<float*>(c.out) + row;
        for (int64_t k = 0; k < lines; ++k) {
            auto value = static_cast<int32_t>(decimal_word(words.text[k], words.size[k], &bad));
            auto minus = static_cast<int32_t>(words.minus[k]);
            out[k] = static_cast<float>((value ^ -minus) + minus);
        }
    } else {
        auto* __restrict out = static_cast<int64_t*>(c.out) + row;
        for (int64_t k = 0; k < lines; ++k) {
            int64_t value = decimal_word(words.text[k], words.size[k], &bad);
            auto minus = static_cast<int64_t>(words.minus[k]);
            value = (value ^ -minus) + minus;
            bad |= (words.size[k] != 0) & ((value < c.low) | (value > c.high));
            out[k] = value;
        }
    }
    return !bad;
}

inline bool has_words(const Column& c) {
    return !c.missing && (c.parse == kBit || c.parse == kHex32 || c.parse == kNumber
                          || c.parse == kInteger);
}

// Parses up to kBlockLines complete lines to rows from `row` on, all or none. kMargin bytes after
// `stop` must be readable. Returns the number of lines and, in `*taken`, of their bytes.
OPER_CLONES_FOR("arch=x86-64-v4", "arch=x86-64-v3", "default")
int64_t parse_block(const char* p, const char* stop, char separator, const Column* columns,
                    int64_t num_columns, int64_t most, int64_t row, int64_t* taken) {
    uint32_t ends[1 + kBlockLines * kBlockColumns + kStride];
    ends[0] = static_cast<uint32_t>(-1);  // the end before the first field
    int64_t lines = std::min(most, kBlockLines);
    lines = find_lines(p, stop, separator, num_columns, lines, ends + 1);
    Words words;
    for (int64_t k = 0; k < num_columns; ++k) {
        const Column& c = columns[k];
        const bool is_last = k + 1 == num_columns;
        const bool has_sign = c.parse == kNumber || c.parse == kInteger;
        const uint32_t* at = ends + k;
        if (has_words(c)
            && (has_sign ? is_last ? take_words<true, true>(p, at, num_columns, lines, &words)
                                   : take_words<true, false>(p, at, num_columns, lines, &words)
                : is_last ? take_words<false, true>(p, at, num_columns, lines, &words)
                          : take_words<false, false>(p, at, num_columns, lines, &words))
            && put_words(c, words, lines, row))
            continue;
        for (int64_t j = 0; j < lines; ++j, at += num_columns) {
            const char* end = p + at[1];
            if (is_last) end -= at[1] != at[0] + 1 && end[-1] == '\r';
            if (read(c, {p + (at[0] + 1), end, separator}, row + j) != end) return 0;
        }
    }
    *taken = lines ? ends[lines * num_columns] + 1 : 0;
    return lines;
}

}  // namespace
}  // namespace oper::data
