// Parses lines of delimited text to columns of numbers.
//
// A line is irregular if it has another number of fields, or a field that field.h does not accept.
// It is left to the caller, in Python, which accepts more forms and decides which lines are
// malformed.
#include <algorithm>
#include <cstring>

#include "data/blocks.h"
#include "data/data.h"
#include "data/field.h"

namespace oper::data {
namespace {

constexpr int64_t kBlockBytes = 1 << 20;  // maximum size of a block

inline bool read_line(const Column* columns, int64_t count, Field f, int64_t row) {
    for (int64_t k = 0; k < count; ++k) {
        f.at = read(columns[k], f, row);
        if (!f.at) return false;
        if (k + 1 < count) {
            if (f.at == f.end) return false;
            ++f.at;
        }
    }
    return f.at == f.end;
}

}  // namespace
}  // namespace oper::data

// Parses complete lines to columns from row `*rows` on, until `*lines` reaches `capacity`.
//
// data, size: lines, each with its line feed. columns: the fields of a line. numbers: int64
// [capacity], output: line number of each row (regular line). irregular: int64 [capacity, 3],
// output: line number, start and end (byte offsets in `data`) of each irregular line. Increases
// *rows, *lines and *num_irregular; returns the number of bytes parsed.
OPER_DATA_API int64_t oper_data_parse(
        const char* data, int64_t size, char separator, const oper::data::Column* columns,
        int64_t num_columns, int64_t capacity, int64_t* numbers, int64_t* irregular, int64_t* rows,
        int64_t* lines, int64_t* num_irregular) {
    using namespace oper::data;
    const char* p = data;
    int64_t one_by_one = 0;  // lines before this one are parsed singly, since a block was refused
    const char* stop = data + size;
    const bool has_blocks = num_columns <= kBlockColumns;
    while (p != stop && *lines < capacity) {
        const int64_t left = std::min(stop - p, kBlockBytes) - kMargin;
        if (has_blocks && left > 0 && *lines >= one_by_one) {
            int64_t taken = 0;
            const int64_t count = parse_block(p, p + left, separator, columns, num_columns,
                                              capacity - *lines, *rows, &taken);
            for (int64_t k = 0; k < count; ++k) numbers[(*rows)++] = (*lines)++;
            p += taken;
            if (count) continue;
            one_by_one = *lines + kBlockLines;
        }
        auto feed = static_cast<const char*>(std::memchr(p, '\n', stop - p));
        if (!feed) break;
        const char* end = feed - (feed != p && feed[-1] == '\r');
        if (read_line(columns, num_columns, {p, end, separator}, *rows)) {
            numbers[(*rows)++] = *lines;
        } else {
            int64_t* entry = irregular + 3 * (*num_irregular)++;
            entry[0] = *lines;
            entry[1] = p - data;
            entry[2] = feed + 1 - data;
        }
        ++*lines;
        p = feed + 1;
    }
    return p - data;
}
