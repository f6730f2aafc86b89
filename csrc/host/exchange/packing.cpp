#include "host/exchange/packing.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/clones.h"
#include "common/elements.h"

namespace oper::host {

namespace {

// If a row's step is larger, differences of its numbers may exceed the range of float32. Then a
// quarter of each number is coded and decoded instead.
constexpr float kWideStep = FLT_MAX / 512, kQuarter = 0.25f;

OPER_INLINE void round_row(char* to, const float* numbers, int64_t n) {
  BFloat16* rounded = reinterpret_cast<BFloat16*>(to);
  for (int64_t i = 0; i < n; ++i) rounded[i] = round_to(BFloat16{}, numbers[i], kToNearest);
}

OPER_INLINE void expand(char* to, const char* from, int64_t n) {
  float* numbers = reinterpret_cast<float*>(to);
  const BFloat16* rounded = reinterpret_cast<const BFloat16*>(from);
  for (int64_t i = 0; i < n; ++i) numbers[i] = to_float(rounded[i]);
}

// In a row with numbers that are not finite, the kNotFinite largest codes stand for these, in
// descending order of the codes.
constexpr int kNotFinite = 3;
constexpr float kStandsFor[kNotFinite] = {NAN, INFINITY, -INFINITY};

// A row's numbers are coded as least + step * code. The step is 0 if all numbers are equal, or nearly
// so; its sign is set if `kNotFinite` codes stand for `kStandsFor`.
struct Code {
  float step, least;
  bool is_finite;

  OPER_INLINE Code(const float* numbers, int64_t n, float largest_code) {
    using Lanes = float __attribute__((vector_size(32)));
    constexpr int64_t kLanes = 8;
    Lanes low = Lanes{} + numbers[0], high = low;
    uint32_t is_special = 0;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      Lanes x;
      std::memcpy(&x, numbers + i, sizeof x);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    for (; i < n; ++i) {
      low[0] = std::min(low[0], numbers[i]);
      high[0] = std::max(high[0], numbers[i]);
    }
    for (i = 0; i < n; ++i)
      is_special |= (bits_of_float(numbers[i]) & 0x7f800000u) == 0x7f800000u;
    least = low[0];
    float most = high[0];
    for (int64_t k = 1; k < kLanes; ++k) {
      least = std::min(least, low[k]);
      most = std::max(most, high[k]);
    }
    step = (most - least) / largest_code;
    if (step > FLT_MAX) step = (kQuarter * most - kQuarter * least) / (kQuarter * largest_code);
    if (step < FLT_MIN) step = 0.0f;
    is_finite = !is_special;
  }
};

template <int kBits>
void code_others(char* to, const float* numbers, int64_t n, const Draws* draws, uint32_t name);

// Writes a row's step, least number and codes: of 8 bits, or of 4 bits, two in a byte, the first in
// its lower half. `name`: identifies the row to `draws`, the random numbers; unused without them.
template <int kBits>
OPER_INLINE void code_row(char* to, const float* numbers, int64_t n, const Draws* draws,
                          uint32_t name, float largest_code = (1 << kBits) - 1) {
  constexpr int64_t kPerDraw = 8, kDraws = 8, kBlock = kDraws * kPerDraw;
  const Code code(numbers, n, largest_code);
  if (!code.is_finite) return code_others<kBits>(to, numbers, n, draws, name);
  std::memcpy(to, &code, kCodedRowBytes);
  uint8_t* codes = reinterpret_cast<uint8_t*>(to) + kCodedRowBytes;
  if (!(code.step > 0.0f)) {
    std::memset(codes, 0, static_cast<size_t>(entry_bytes(kBits, 4 * n) - kCodedRowBytes));
    return;
  }
  const float scale = code.step > kWideStep ? kQuarter : 1.0f;
  const float inverse = 1.0f / (scale * code.step), least = scale * code.least;
  uint32_t bits[kBlock / 2];  // two numbers each, the first in the lower half
  std::fill_n(bits, kBlock / 2, kToNearest << 16 | kToNearest);
  for (int64_t first = 0; first < n; first += kBlock) {
    // Random numbers are drawn for whole blocks, also for the last one, so that the loops
    // vectorise.
    if (draws != nullptr)
      for (uint32_t k = 0; k < kDraws; ++k) {
        const Philox4 drawn = rounding_bits(
            draws->key, name, draws->first_column + static_cast<uint32_t>(first / kPerDraw) + k,
            draws->purpose);
        for (int64_t w = 0; w < 4; ++w) bits[4 * k + w] = drawn.word[w];
      }
    const int64_t size = std::min(kBlock, n - first);
    float up[kBlock];
    for (int64_t i = 0; i < kBlock / 2; ++i) {
      up[2 * i] = static_cast<float>(static_cast<int32_t>(bits[i] & 0xffff)) * 0x1p-16f;
      up[2 * i + 1] = static_cast<float>(static_cast<int32_t>(bits[i] >> 16)) * 0x1p-16f;
    }
    uint8_t found[kBlock];
    for (int64_t i = 0; i < size; ++i)
      found[i] = static_cast<uint8_t>(static_cast<int32_t>(
          std::min((scale * numbers[first + i] - least) * inverse + up[i], largest_code)));
    if (kBits == 8) {
      std::memcpy(codes + first, found, static_cast<size_t>(size));
      continue;
    }
    if (size % 2) found[size] = 0;
    for (int64_t i = 0; i < (size + 1) / 2; ++i)
      codes[first / 2 + i] = static_cast<uint8_t>(found[2 * i] | found[2 * i + 1] << 4);
  }
}

// Writes a row that contains numbers that are not finite: these get separate codes, and the finite
// numbers are coded as a row of their own, with fewer codes.
template <int kBits>
void code_others(char* to, const float* numbers, int64_t n, const Draws* draws, uint32_t name) {
  constexpr int kLargest = (1 << kBits) - 1;
  const auto* some = std::find_if(numbers, numbers + n, [](float x) { return std::isfinite(x); });
  const float finite = some == numbers + n ? 0.0f : *some;
  std::vector<float> row(numbers, numbers + n);
  for (float& x : row) x = std::isfinite(x) ? x : finite;
  code_row<kBits>(to, row.data(), n, draws, name, kLargest - kNotFinite);
  to[3] = static_cast<char>(to[3] | 0x80);  // the sign of the step
  uint8_t* codes = reinterpret_cast<uint8_t*>(to) + kCodedRowBytes;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isfinite(numbers[i])) continue;
    const int code = kLargest - (std::isnan(numbers[i]) ? 0 : numbers[i] > 0 ? 1 : 2);
    uint8_t& at = codes[i * kBits / 8];
    const int shift = static_cast<int>(i * kBits % 8);
    at = static_cast<uint8_t>((at & ~(kLargest << shift)) | code << shift);
  }
}

template <int kBits>
void decode_others(float* to, const uint8_t* codes, int64_t n) {
  constexpr int kLargest = (1 << kBits) - 1;
  for (int64_t i = 0; i < n; ++i) {
    const int code = codes[i * kBits / 8] >> (i * kBits % 8) & kLargest;
    if (kLargest - code < kNotFinite) to[i] = kStandsFor[kLargest - code];
  }
}

template <int kBits>
OPER_INLINE void decode_row(float* to, const char* from, int64_t n) {
  float code[2];  // step, least
  std::memcpy(code, from, sizeof code);
  const bool is_finite = !std::signbit(code[0]);
  code[0] = std::fabs(code[0]);
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(from) + kCodedRowBytes;
  if (kBits == 8)
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(codes[i]);
  else
    for (int64_t i = 0; i < n; i += 2) {
      to[i] = static_cast<float>(codes[i / 2] & 15);
      if (i + 1 < n) to[i + 1] = static_cast<float>(codes[i / 2] >> 4);
    }
  if (code[0] > kWideStep) {
    constexpr float most = kQuarter * FLT_MAX;
    const float step = kQuarter * code[0], least = kQuarter * code[1];
    for (int64_t i = 0; i < n; ++i)
      to[i] = std::clamp(least + step * to[i], -most, most) / kQuarter;
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = code[1] + code[0] * to[i];
  }
  if (!is_finite) decode_others<kBits>(to, codes, n);
}

// Copies entries of kUnit bytes or, if that is 0, of `unit` bytes. With a constant size the
// compiler inlines memcpy, whose call would take longer than a short copy.
template <int64_t kUnit>
void copy_entries(char* to, const char* from, const uint32_t* rows, int64_t n, int64_t unit) {
  constexpr int64_t kAhead = 16;
  const int64_t size = kUnit ? kUnit : unit;
  for (int64_t i = 0; i < n; ++i, to += size) {
    if (i + kAhead < n)
      for (int64_t b = 0; b < size; b += 64)
        __builtin_prefetch(from + static_cast<int64_t>(rows[i + kAhead]) * size + b);
    std::memcpy(to, from + static_cast<int64_t>(rows[i]) * size, static_cast<size_t>(size));
  }
}

void copy_entries(char* to, const char* from, const uint32_t* rows, int64_t n, int64_t unit) {
  if (unit == 4) return copy_entries<4>(to, from, rows, n, unit);
  if (unit == 64) return copy_entries<64>(to, from, rows, n, unit);
  if (unit == 128) return copy_entries<128>(to, from, rows, n, unit);
  if (unit == 256) return copy_entries<256>(to, from, rows, n, unit);
  copy_entries<0>(to, from, rows, n, unit);
}

template <int kBits>
OPER_INLINE void code_rows(char* to, const char* from, const uint32_t* rows, const WireArray& array) {
  constexpr int64_t kAhead = 16;
  const int64_t n = array.n, unit = array.unit, size = entry_bytes(kBits, unit);
  for (int64_t i = 0; i < n; ++i, to += size) {
    if (rows != nullptr && i + kAhead < n)
      for (int64_t b = 0; b < unit; b += 64)
        __builtin_prefetch(from + static_cast<int64_t>(rows[i + kAhead]) * unit + b);
    const int64_t at = rows == nullptr ? i : static_cast<int64_t>(rows[i]);
    const float* row = reinterpret_cast<const float*>(from + at * unit);
    if (kBits == 16)
      round_row(to, row, unit / 4);
    else
      code_row<kBits>(to, row, unit / 4, array.draws, array.draws ? array.draws->names[i] : 0);
  }
}

template <int kBits>
OPER_INLINE void decode_rows(char* to, const char* from, const WireArray& array) {
  const int64_t size = entry_bytes(kBits, array.unit);
  for (int64_t i = 0; i < array.n; ++i)
    decode_row<kBits>(reinterpret_cast<float*>(to + i * array.unit), from + i * size,
                      array.unit / 4);
}

}  // namespace

OPER_CLONES void pack(char* to, const char* from, const uint32_t* rows, const WireArray& array) {
  if (array.bits == 4) return code_rows<4>(to, from, rows, array);
  if (array.bits == 8) return code_rows<8>(to, from, rows, array);
  if (array.bits == 16) return code_rows<16>(to, from, rows, array);
  if (rows != nullptr) return copy_entries(to, from, rows, array.n, array.unit);
  std::memcpy(to, from, static_cast<size_t>(array.n * array.unit));
}

OPER_CLONES void unpack(char* to, const char* from, const WireArray& array) {
  const int64_t bytes = array.n * array.unit;
  if (array.bits == 32) std::memcpy(to, from, static_cast<size_t>(bytes));
  if (array.bits == 16) expand(to, from, bytes / 4);
  if (array.bits == 8) decode_rows<8>(to, from, array);
  if (array.bits == 4) decode_rows<4>(to, from, array);
}

void pack_slots(char* to, const uint32_t* slots, int64_t n, int32_t bits) {
  if (bits == 32) {
    std::memcpy(to, slots, static_cast<size_t>(n * 4));
    return;
  }
  // Every slot writes its word again, since a branch on whether the word is full would take longer.
  uint32_t* word = reinterpret_cast<uint32_t*>(to);
  uint64_t pending = 0;
  int32_t filled = 0;
  for (int64_t i = 0; i < n; ++i) {
    pending |= static_cast<uint64_t>(slots[i]) << filled;
    *word = static_cast<uint32_t>(pending);
    filled += bits;
    word += filled >> 5;
    pending >>= filled & 32;
    filled &= 31;
  }
  if (filled > 0) *word = static_cast<uint32_t>(pending);
}

void unpack_slots(uint32_t* slots, const char* from, int64_t n, int32_t bits) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  const int64_t size = packed_bytes(n, bits);
  int64_t i = 0;
  // Reads eight bytes at once while there are eight.
  for (; i < n && (i * bits >> 3) + 8 <= size; ++i) {
    uint64_t bytes;
    std::memcpy(&bytes, from + (i * bits >> 3), sizeof bytes);
    slots[i] = static_cast<uint32_t>(bytes >> (i * bits & 7) & mask);
  }
  for (; i < n; ++i) {
    const int64_t first = i * bits >> 3;
    uint64_t bytes = 0;
    std::memcpy(&bytes, from + first, static_cast<size_t>(size - first));
    slots[i] = static_cast<uint32_t>(bytes >> (i * bits & 7) & mask);
  }
}

void pack_runs(char* to, const uint32_t* bags, int64_t n) {
  uint32_t* words = reinterpret_cast<uint32_t*>(to);
  for (int64_t first = 0; first < n; first += 32) {
    const int64_t end = first + 32 < n ? first + 32 : n;
    uint32_t word = 0;
    for (int64_t i = first; i < end; ++i)
      word |= static_cast<uint32_t>(i == 0 || bags[i] != bags[i - 1]) << (i - first);
    words[first / 32] = word;
  }
}

void unpack_runs(uint32_t* bags, const char* from, int64_t n) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
  uint32_t bag = 0;
  for (int64_t i = 0; i < n; ++i) {
    bag += words[i / 32] >> (i % 32) & 1;
    bags[i] = bag - 1;
  }
}

}  // namespace oper::host
