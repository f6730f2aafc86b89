// Parses one field of delimited text to a number.
//
// Accepts plain forms only: decimal integers of at most 18 digits, decimal fractions without an
// exponent, and eight lower-case hexadecimal digits. A field in another form is irregular, see
// text.cpp.
#pragma once

#include <charconv>
#include <cstring>

#include "data/data.h"

namespace oper::data {
namespace {

constexpr uint64_t kOnes = 0x0101010101010101u;
constexpr int kMaxDigits = 18;  // such a number certainly fits 64 bits

struct Field {
    const char* at;
    const char* end;  // of the line
    char separator;

    bool is_end(const char* p) const { return p == end || *p == separator; }
};

// Parses -?[0-9]{1,18}; returns the position after it, or null for any other text.
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

// Decodes eight lower-case hexadecimal digits, the first in the lowest byte; sets bits of `*bad` if
// there are other characters. See `_hexadecimal` in oper/data/reading/columns.py.
OPER_INLINE uint32_t hex_word(uint64_t text, uint64_t* bad) {
    uint64_t digits = (text & (0x0f * kOnes)) + ((text >> 6) & kOnes) * 9;
    uint64_t letters = ((digits + 6 * kOnes) >> 4) & kOnes;
    uint64_t back = digits + 0x30 * kOnes + letters * 0x27;
    *bad |= (back ^ text) | (digits & ~(0x0f * kOnes));
    uint64_t pairs = ((digits << 4) | (digits >> 8)) & 0x00ff00ff00ff00ffu;
    uint64_t quads = ((pairs << 8) | (pairs >> 16)) & 0x0000ffff0000ffffu;
    return static_cast<uint32_t>((quads << 16) | (quads >> 32));
}

// Parses -?[0-9]{1,18}(\.[0-9]{0,18})?; returns as `integer` does.
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

// Parses an integer that may be written with a fraction of zeros, like 17850.0; returns as
// `integer` does.
inline const char* whole(const Field& f, int64_t* value) {
    double number = 0;
    const char* p = integer(f, value);
    if (p) return p;
    p = decimal(f, &number);
    // Larger numbers are not exact, and the caller's bounds refuse them anyway.
    if (!p || number > 9007199254740992.0 || number < -9007199254740992.0) return nullptr;
    *value = static_cast<int64_t>(number);
    return static_cast<double>(*value) == number ? p : nullptr;
}

// Returns the position after a skipped field; null if it has characters for which the line is
// irregular.
inline const char* skip(const Field& f) {
    auto p = static_cast<const char*>(std::memchr(f.at, f.separator, f.end - f.at));
    if (!p) p = f.end;
    for (const char* c = f.at; c != p; ++c)
        if (*c == '\r' || *c == '\0') return nullptr;
    return p;
}

// Parses a field to row `row`; returns the position after it, or null if it is irregular.
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
                uint64_t text, bad = 0;
                std::memcpy(&text, f.at, 8);
                value = hex_word(text, &bad);
                if (bad) return nullptr;
                behind = f.at + 8;
            }
            static_cast<uint32_t*>(c.out)[row] = value;
            return behind;
        }
    }
    return nullptr;
}

}  // namespace
}  // namespace oper::data
