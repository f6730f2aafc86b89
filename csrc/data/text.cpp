// Lines of delimited text to columns of numbers.
//
// Only what is plain is taken: decimal integers of at most 18 digits, decimal fractions without an
// exponent, eight lower-case hexadecimal digits. Every other line is left to the caller, who knows
// all forms and all errors; what is right and what is malformed is decided in one place only.
#include <charconv>
#include <cstring>

#include "data/data.h"

namespace oper::data {
namespace {

constexpr uint64_t kOnes = 0x0101010101010101u;
constexpr int kMaxDigits = 18;  // of a number that certainly fits 64 bits

struct Field {
    const char* at;
    const char* end;  // of the line
    char separator;

    bool is_end(const char* p) const { return p == end || *p == separator; }
};

// -?[0-9]{1,18}, and the place behind it; null when there is anything else.
inline const char* integer(const Field& f, int64_t* value) {
    const char* p = f.at;
    bool negative = p != f.end && *p == '-';
    p += negative;
    const char* first = p;
    uint64_t v = 0;  // one digit too many may overflow
    while (p != f.end && static_cast<unsigned char>(*p - '0') < 10) {
        v = v * 10 + static_cast<uint64_t>(*p++ - '0');
        if (p - first > kMaxDigits) return nullptr;
    }
    if (p == first || !f.is_end(p)) return nullptr;
    *value = negative ? -static_cast<int64_t>(v) : static_cast<int64_t>(v);
    return p;
}

// Eight lower-case hexadecimal digits as a 64-bit word; see `_hexadecimal` in oper/data/columns.py.
inline bool hex32(uint64_t text, uint32_t* value) {
    uint64_t digits = (text & (0x0f * kOnes)) + ((text >> 6) & kOnes) * 9;
    uint64_t letters = ((digits + 6 * kOnes) >> 4) & kOnes;
    uint64_t back = digits + 0x30 * kOnes + letters * 0x27;
    if (back != text || (digits & ~(0x0f * kOnes))) return false;
    uint64_t pairs = ((digits << 4) | (digits >> 8)) & 0x00ff00ff00ff00ffu;
    uint64_t quads = ((pairs << 8) | (pairs >> 16)) & 0x0000ffff0000ffffu;
    *value = static_cast<uint32_t>((quads << 16) | (quads >> 32));
    return true;
}

// -?[0-9]{1,18}(\.[0-9]{0,18})?
inline const char* decimal(const Field& f, double* value) {
    const char* p = f.at;
    p += p != f.end && *p == '-';
    const char* first = p;
    uint64_t digits = 0;
    while (p != f.end && static_cast<unsigned char>(*p - '0') < 10) {
        digits = digits * 10 + static_cast<uint64_t>(*p++ - '0');
        if (p - first > kMaxDigits) return nullptr;
    }
    const auto whole = static_cast<int64_t>(digits);
    if (p == first) return nullptr;
    if (f.is_end(p)) {
        *value = static_cast<double>(*f.at == '-' ? -whole : whole);
        if (whole == 0 && *f.at == '-') *value = -0.0;
        return p;
    }
    if (*p++ != '.') return nullptr;
    const char* point = p;
    while (p != f.end && static_cast<unsigned char>(*p - '0') < 10) ++p;
    if (p - point > kMaxDigits || !f.is_end(p)) return nullptr;
    auto done = std::from_chars(f.at, p, *value);
    return done.ec == std::errc() ? p : nullptr;
}

// A whole number, also written 17850.0.
inline const char* whole(const Field& f, int64_t* value) {
    double number = 0;
    const char* p = integer(f, value);
    if (p) return p;
    p = decimal(f, &number);
    // Above 2^53 the bounds, which the caller sets, refuse it anyway.
    if (!p || number > 9007199254740992.0 || number < -9007199254740992.0) return nullptr;
    *value = static_cast<int64_t>(number);
    return static_cast<double>(*value) == number ? p : nullptr;
}

// The place behind a field that nobody reads; null when it holds what has to be looked at.
inline const char* skip(const Field& f) {
    auto p = static_cast<const char*>(std::memchr(f.at, f.separator, f.end - f.at));
    if (!p) p = f.end;
    for (const char* c = f.at; c != p; ++c)
        if (*c == '\r' || *c == '\0') return nullptr;
    return p;
}

// Reads a field into row `row`; the place behind it, or null.
inline const char* read(const Column& c, const Field& f, int64_t row) {
    const char* behind = nullptr;
    bool is_missing = f.is_end(f.at);
    if (is_missing) {
        behind = f.at;
    } else if (c.missing && f.end - f.at >= c.missing_size && f.is_end(f.at + c.missing_size)
               && !std::memcmp(f.at, c.missing, c.missing_size)) {
        is_missing = true;
        behind = f.at + c.missing_size;
    }
    if (c.is_there) c.is_there[row] = !is_missing;
    if (is_missing && c.required) return nullptr;
    int64_t number = 0;
    double real = 0;
    switch (c.parse) {
        case kSkip:
            return skip(f);
        case kBit:
            if (is_missing || (*f.at | 1) != '1' || !f.is_end(f.at + 1)) return nullptr;
            static_cast<int8_t*>(c.out)[row] = static_cast<int8_t>(*f.at - '0');
            return f.at + 1;
        case kInteger:
        case kWhole:
            if (!is_missing) {
                behind = c.parse == kInteger ? integer(f, &number) : whole(f, &number);
                if (!behind || number < c.low || number > c.high) return nullptr;
            }
            static_cast<int64_t*>(c.out)[row] = number;
            return behind;
        case kNumber:
            if (!is_missing && !(behind = integer(f, &number))) return nullptr;
            static_cast<float*>(c.out)[row] = static_cast<float>(number);
            return behind;
        case kDecimal:
            if (!is_missing && !(behind = decimal(f, &real))) return nullptr;
            static_cast<double*>(c.out)[row] = real;
            return behind;
        case kHex32: {
            uint32_t value = 0;
            if (!is_missing) {
                if (f.end - f.at < 8 || !f.is_end(f.at + 8)) return nullptr;
                uint64_t text;
                std::memcpy(&text, f.at, 8);
                if (!hex32(text, &value)) return nullptr;
                behind = f.at + 8;
            }
            static_cast<uint32_t*>(c.out)[row] = value;
            return behind;
        }
    }
    return nullptr;
}

// The two forms that fill logs, without the detours of `read`; null where these are needed.
inline const char* read_fast(const Column& c, const Field& f, int64_t row) {
    const char* p = f.at;
    if (c.parse == kHex32) {
        uint64_t text;
        if (f.end - p <= 8 || p[8] != f.separator) return nullptr;
        std::memcpy(&text, p, 8);
        if (!hex32(text, static_cast<uint32_t*>(c.out) + row)) return nullptr;
        c.is_there[row] = 1;
        return p + 8;
    }
    if (c.parse == kNumber) {
        unsigned value = 0, digit;
        if (f.end - p <= 9) return nullptr;
        for (int k = 0; k < 9 && (digit = static_cast<unsigned char>(*p) - '0') < 10; ++k, ++p)
            value = value * 10 + digit;
        if (*p != f.separator) return nullptr;
        static_cast<float*>(c.out)[row] = static_cast<float>(value);
        return p;
    }
    return nullptr;
}

inline bool read_line(const Column* columns, int64_t count, Field f, int64_t row) {
    for (int64_t k = 0; k < count; ++k) {
        const char* fast = columns[k].missing ? nullptr : read_fast(columns[k], f, row);
        f.at = fast ? fast : read(columns[k], f, row);
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

// Parses whole lines into columns from row `*rows` on, until `capacity` lines have been met.
//
// data, size: lines, each with its line feed. columns: of a line. numbers: int64 [capacity], gets
// the number of every regular line (counted from `*lines`). irregular: int64 [3, capacity], gets
// number, start and end of each other line. Adds to *rows, *lines and *num_irregular; returns the
// bytes that were taken.
OPER_DATA_API int64_t oper_data_parse(
        const char* data, int64_t size, char separator, const oper::data::Column* columns,
        int64_t num_columns, int64_t capacity, int64_t* numbers, int64_t* irregular, int64_t* rows,
        int64_t* lines, int64_t* num_irregular) {
    using namespace oper::data;
    const char* p = data;
    const char* stop = data + size;
    while (p != stop && *lines < capacity) {
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
