// Data types of the elements of a row. Shared by host and device.
//
// Rows are float32, float16 (IEEE binary16) or bfloat16, and 8-bit or 4-bit integers in tables that
// are only read. Reading is exact; all arithmetic is fp32.
// An update rounds x stochastically to 16-bit elements: with neighbours a <= x < b, to b with
// probability (x - a) / (b - a), so that the expected value is x (Gupta et al., "Deep learning with
// limited numerical precision", ICML 2015) and small updates are not lost. Representable numbers do
// not change. Finite numbers beyond the largest representable one become that one; infinities and
// NaNs stay.
#pragma once

#include "common/platform.h"

namespace oper {

enum class RowType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kInt4 = 4 };

// Read-only rows in the layout of FBGEMM's IntNBit tables on the CPU: a float16 scale, a float16
// bias, then one code of 8 or 4 bits per column (the lower half of a byte first). A number is
// scale * code + bias.
constexpr int64_t kScaleBiasBytes = 4;

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// One byte of a row's codes.
struct Int8 {
  uint8_t bits;
};
struct Int4 {  // two codes
  uint8_t bits;
};

OPER_HD int64_t bytes_of_row(RowType type, int64_t dim) {
  switch (type) {
    case RowType::kFloat32: return dim * 4;
    case RowType::kInt8: return kScaleBiasBytes + dim;
    case RowType::kInt4: return kScaleBiasBytes + (dim + 1) / 2;
    default: return dim * 2;
  }
}

OPER_HD float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

OPER_HD uint32_t bits_of_float(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

OPER_HD float to_float(float value) { return value; }

OPER_HD float to_float(BFloat16 value) {
  return float_of_bits(static_cast<uint32_t>(value.bits) << 16);
}

OPER_HD float to_float(Float16 value) {
#if defined(__CUDA_ARCH__)
  float exact;  // one instruction instead of a dozen
  asm("cvt.f32.f16 %0, %1;" : "=f"(exact) : "h"(value.bits));
  return exact;
#else
  const uint32_t sign = (value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
  // Subnormals are converted from an integer, which flush-to-zero modes do not affect.
  const uint32_t small =
      bits_of_float(static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = 0x7f800000u | (magnitude << 13) | (magnitude > 0x7c00u ? 0x400000u : 0u);
  return float_of_bits(
      sign | (magnitude < 0x400u ? small : magnitude < 0x7c00u ? normal : special));
#endif
}

// Rounds to the nearest element, ties to even; infinite beyond the largest one.
OPER_HD float nearest(float, float value) { return value; }

OPER_HD BFloat16 nearest(BFloat16, float value) {
  const uint32_t bits = bits_of_float(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

OPER_HD Float16 nearest(Float16, float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // The sum's last place is the step of subnormal halves, so that adding 1/2 rounds to it.
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude < 0x38800000u ? small : magnitude < 0x47800000u ? normal : special;
  return {static_cast<uint16_t>(sign | half)};
}

// Stochastic rounding; `random`: 16 random bits.
OPER_HD BFloat16 round_to(BFloat16, float value, uint32_t random) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
  const uint32_t up = (bits + random) >> 16;
  const uint32_t largest = ((bits >> 16) & 0x8000u) | 0x7f7fu;
  const uint32_t special = (bits >> 16) | (magnitude > 0x7f800000u ? 0x40u : 0u);
  const uint32_t finite = (up & 0x7fffu) > 0x7f7fu ? largest : up;
  return {static_cast<uint16_t>(magnitude >= 0x7f800000u ? special : finite)};
}

OPER_HD Float16 round_to(Float16, float value, uint32_t random) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t up = ((magnitude + (random >> 3)) >> 13) - (112u << 10);
  const uint32_t normal = up > 0x7bffu ? 0x7bffu : up;
  // Below 2^-14 neighbours are 2^-24 apart: fixed point with 16 binary places of that distance.
  const bool is_small = magnitude < 0x38800000u;
  const float fixed = float_of_bits(is_small ? magnitude : 0u) * 1099511627776.0f;  // 2^40
  const uint32_t small = (static_cast<uint32_t>(static_cast<int32_t>(fixed)) + random) >> 16;
  const uint32_t special =
      0x7c00u | (magnitude > 0x7f800000u ? 0x200u | ((magnitude >> 13) & 0x3ffu) : 0u);
  return {static_cast<uint16_t>(
      sign | (magnitude >= 0x7f800000u ? special : is_small ? small : normal))};
}

}  // namespace oper
