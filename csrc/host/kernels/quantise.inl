// Rows of numbers to rows of 8-bit or 4-bit codes, as FBGEMM makes them. Part of kernels.inl.

// The nearest float16; of two equally near ones, the even one. Infinite beyond the largest float16.
OPER_INLINE Float16 nearest_half(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // The sum's last place is the step of subnormal halves, so that adding 1/2 rounds to it.
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude < 0x38800000u ? small : magnitude < 0x47800000u ? normal : special;
  return {static_cast<uint16_t>(sign | half)};
}

OPER_INLINE bool is_finite(Float16 value) { return (value.bits & 0x7c00u) != 0x7c00u; }

// A row's scale and bias, and the factor by which its numbers (less the bias) are multiplied.
struct CodedRange {
  Float16 scale, bias;
  float inverse;

  OPER_INLINE CodedRange(float low, float high, float largest) : bias(nearest_half(low)) {
    const float span = high - to_float(bias);
    scale = nearest_half(span == 0 ? 1.0f : span / largest);
    const float found = to_float(scale);
    inverse = 1.0f / found;
    if (found == 0 || std::isinf(inverse)) {
      scale = nearest_half(1.0f);
      inverse = 1.0f;
    }
  }
};

// `numbers` [dim rounded up to 16] and `codes` [the same number of bytes] are scratch.
template <class E>
int64_t quantise_as(const QuantiseJob& job, float* numbers, uint8_t* codes) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  constexpr float kRound = 12582912.0f;  // 3 * 2^22: numbers below 2^22 become integers
  const int64_t dim = job.dim, whole = dim / 16 * 16, padded = round_up<int64_t>(dim, 16);
  const float largest = job.four_bits ? 15.0f : 255.0f;
  for (int64_t r = 0; r < job.num_rows; ++r) {
    const E* row = static_cast<const E*>(job.rows) + r * dim;
    const float first = to_float(row[0]);
    Lanes low, high, poison = {};
    for (int i = 0; i < 16; ++i) low[i] = high[i] = first;
    for (int64_t c = 0; c < padded; c += 16) {
      Lanes x;
      if (c < whole) {
        x = lanes_of(row + c);
      } else {
        for (int i = 0; i < 16; ++i) x[i] = c + i < dim ? to_float(row[c + i]) : first;
      }
      low = x < low ? x : low;
      high = x > high ? x : high;
      poison += x - x;  // 0, or a NaN where a number is not finite
      std::memcpy(numbers + c, &x, sizeof x);
    }
    float least[16], most[16];
    std::memcpy(least, &low, sizeof low);
    std::memcpy(most, &high, sizeof high);
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        least[i] = least[i + half] < least[i] ? least[i + half] : least[i];
        most[i] = most[i + half] > most[i] ? most[i + half] : most[i];
      }
    }
    const CodedRange range(least[0], most[0], largest);
    if (sum_of_lanes(poison) != 0 || !is_finite(range.bias) || !is_finite(range.scale)) return r;
    uint8_t* out = job.out + r * job.row_bytes;
    std::memcpy(out, &range.scale, 2);
    std::memcpy(out + 2, &range.bias, 2);
    const float bias = to_float(range.bias);
    for (int64_t c = 0; c < padded; c += 16) {
      Lanes x;
      std::memcpy(&x, numbers + c, sizeof x);
      x = (x - bias) * range.inverse;
      x = x > 0.0f ? x : Lanes{};
      const Lanes top = Lanes{} + largest;
      x = x < top ? x : top;
      const Bytes found = __builtin_convertvector(reinterpret_cast<Words>(x + kRound), Bytes);
      std::memcpy(codes + c, &found, sizeof found);
    }
    if (job.four_bits) {
      for (int64_t c = 0; c < dim / 2; ++c)
        out[4 + c] = static_cast<uint8_t>(codes[2 * c] | codes[2 * c + 1] << 4);
    } else {
      std::memcpy(out + 4, codes, static_cast<size_t>(dim));
    }
  }
  return -1;
}

int64_t quantise(const QuantiseJob& job, float* numbers, uint8_t* codes) {
  switch (job.type) {
    case RowType::kFloat16: return quantise_as<Float16>(job, numbers, codes);
    case RowType::kBFloat16: return quantise_as<BFloat16>(job, numbers, codes);
    default: return quantise_as<float>(job, numbers, codes);
  }
}
