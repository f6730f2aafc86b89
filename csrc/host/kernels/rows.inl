// Embedding rows in vector registers. Part of kernels.inl.

// ---- rows as vectors ---------------------------------------------------------------------------

#if defined(OPER_KERNELS_AVX512)

// Loads `count` < 16 columns; the other lanes are 0. Uses a masked load, since loading from a copy
// in memory would wait until the copy is stored. Four and eight columns are loaded without a mask,
// since a masked load also accesses the next cache line, which has not been prefetched.
OPER_INLINE Lanes load_part(const float* p, int count) {
  if (count == 4) return reinterpret_cast<Lanes>(_mm512_zextps128_ps512(_mm_loadu_ps(p)));
  if (count == 8) return reinterpret_cast<Lanes>(_mm512_zextps256_ps512(_mm256_loadu_ps(p)));
  return reinterpret_cast<Lanes>(
      _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p));
}

OPER_INLINE void store_part(float* p, const Lanes& v, int count) {
  const __m512 all = reinterpret_cast<__m512>(v);
  if (count == 4) return _mm_storeu_ps(p, _mm512_castps512_ps128(all));
  if (count == 8) return _mm256_storeu_ps(p, _mm512_castps512_ps256(all));
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), all);
}

#else

OPER_INLINE Lanes load_part(const float* p, int count) {
  Lanes v = {};
  // The compiler turns copies of constant size into single moves; small dims are mostly 4 or 8.
  if (count == 8) {
    std::memcpy(&v, p, 32);
  } else if (count == 4) {
    std::memcpy(&v, p, 16);
  } else {
    std::memcpy(&v, p, static_cast<size_t>(count) * 4);
  }
  return v;
}

OPER_INLINE void store_part(float* p, const Lanes& v, int count) {
  if (count == 8) {
    std::memcpy(p, &v, 32);
  } else if (count == 4) {
    std::memcpy(p, &v, 16);
  } else {
    std::memcpy(p, &v, static_cast<size_t>(count) * 4);
  }
}

#endif

// ---- elements of a row as lanes ----------------------------------------------------------------

OPER_INLINE Lanes lanes_of(const float* p) { return *reinterpret_cast<const Loose*>(p); }

OPER_INLINE Lanes lanes_of(const BFloat16* p) {
  Halves bits;
  std::memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<Lanes>(__builtin_convertvector(bits, Words) << 16);
}

OPER_INLINE Lanes lanes_of(const Float16* p) {
#if defined(OPER_KERNELS_AVX512)
  return reinterpret_cast<Lanes>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(OPER_KERNELS_AVX2)
  Lanes v;
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(halves));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128(halves + 1));
  std::memcpy(&v, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&v) + 32, &high, 32);
  return v;
#else
  Lanes v;
  for (int i = 0; i < 16; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

template <class E>
OPER_INLINE Lanes load_part(const E* p, int count) {
  static_assert(sizeof(E) == 2);
  E all[16] = {};
#if defined(OPER_KERNELS_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(all),
                      _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p));
#else
  std::memcpy(all, p, static_cast<size_t>(count) * sizeof(E));
#endif
  return lanes_of(all);
}

OPER_INLINE void stream_lanes(float* p, const Lanes& v) {
#if defined(OPER_KERNELS_AVX512)
  _mm512_stream_ps(p, reinterpret_cast<const __m512&>(v));
#elif defined(OPER_KERNELS_AVX2)
  _mm256_stream_ps(p, reinterpret_cast<const __m256*>(&v)[0]);
  _mm256_stream_ps(p + 8, reinterpret_cast<const __m256*>(&v)[1]);
#else
  *reinterpret_cast<Loose*>(p) = v;
#endif
}

// Makes stores of `stream_lanes` visible to other threads before later stores are.
OPER_INLINE void finish_streaming() {
#if defined(OPER_KERNELS_AVX512) || defined(OPER_KERNELS_AVX2)
  _mm_sfence();
#endif
}

template <class Half, class Whole>
OPER_INLINE Half add_halves(const Whole& v) {
  Half low, high;
  std::memcpy(&low, &v, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
  return low + high;
}

// In a fixed order, so that every instruction set gives the same bits.
OPER_INLINE float sum_of_lanes(Lanes s) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  typedef float Two __attribute__((vector_size(8)));
  const Two two = add_halves<Two>(add_halves<Four>(add_halves<Eight>(s)));
  return two[0] + two[1];
}

// A row of `dim` floats. N > 0: exactly 16 * N columns, in registers. N < 0: fewer than 16 columns,
// in one register. N == 0: any number of columns.
template <int N>
struct Row {
  Lanes v[N > 0 ? N : N < 0 ? 1 : kMaxVectors];

  static OPER_INLINE int full(int dim) { return N > 0 ? N : N < 0 ? 0 : dim / 16; }
  static OPER_INLINE int part(int dim) { return N > 0 ? 0 : N < 0 ? dim : dim % 16; }
  static OPER_INLINE int vectors(int dim) {
    return N < 0 ? 1 : full(dim) + (part(dim) ? 1 : 0);
  }

  template <class E>
  OPER_INLINE void load(const E* p, int dim) {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) v[i] = lanes_of(p + 16 * i);
    if (part(dim)) v[n] = load_part(p + 16 * n, part(dim));
  }
  template <class E>
  OPER_INLINE void add(const E* p, int dim) {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) v[i] += lanes_of(p + 16 * i);
    if (part(dim)) v[n] += load_part(p + 16 * n, part(dim));
  }
  // v += w * p, with the product rounded before the addition.
  template <class E>
  OPER_INLINE void add_scaled(const E* p, float w, int dim) {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) v[i] += lanes_of(p + 16 * i) * w;
    if (part(dim)) v[n] += load_part(p + 16 * n, part(dim)) * w;
  }
  // v += w * p, rounded once.
  template <class E>
  OPER_INLINE void add_fused(const E* p, float w, int dim) {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) v[i] = fused(lanes_of(p + 16 * i), w, v[i]);
    if (part(dim)) v[n] = fused(load_part(p + 16 * n, part(dim)), w, v[n]);
  }
  // v = scale * codes + (v + bias), the product not rounded: the order of FBGEMM's IntNBit lookups,
  // which multiply scale and bias by the sample's weight.
  template <class E>
  OPER_INLINE void add_codes(const E* p, const ScaleBias& of, int dim) {
    const int n = full(dim);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(p) + kScaleBiasBytes;
    constexpr int kBytes = kCodeBytes<E>;
    for (int i = 0; i < n; ++i)
      v[i] = fused(codes_of(E{}, codes + kBytes * i), of.scale, v[i] + of.bias);
    if (part(dim)) {
      uint8_t rest[kBytes] = {};
      std::memcpy(rest, codes + kBytes * n, static_cast<size_t>((part(dim) * kBytes + 15) / 16));
      v[n] = fused(codes_of(E{}, rest), of.scale, v[n] + of.bias);
    }
  }
  OPER_INLINE void scale(float w, int dim) {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) v[i] *= w;
  }
  OPER_INLINE void divide(float w, int dim) {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) v[i] /= w;
  }
  OPER_INLINE void zero(int dim) {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) v[i] = Lanes{};
  }
  // If `start`, sets v to -0.0, so that v + x is bitwise x. Does not branch.
  OPER_INLINE void start_if(bool start, int dim) {
    const uint32_t keep = static_cast<uint32_t>(start) - 1, sign = ~keep & 0x80000000u;
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i)
      v[i] = reinterpret_cast<Lanes>((reinterpret_cast<Words>(v[i]) & keep) | sign);
  }
  // v += another row.
  OPER_INLINE void add(const Row& other, int dim) {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) v[i] += other.v[i];
  }
  // Stores bypassing the caches, to an address aligned to a cache line; dim must be a multiple of
  // 16.
  OPER_INLINE void stream(float* p, int dim) const {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) stream_lanes(p + 16 * i, v[i]);
  }
  OPER_INLINE void store(float* p, int dim) const {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) *reinterpret_cast<Loose*>(p + 16 * i) = v[i];
    if (part(dim)) store_part(p + 16 * n, v[n], part(dim));
  }
  // Stores elements with stochastic rounding; `random` has 16 random bits for every column.
  template <class E>
  OPER_INLINE void store_rounded(E* p, const uint16_t* random, int dim) const {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) {
      E rounded[16];
      for (int k = 0; k < 16; ++k) rounded[k] = round_to(E{}, v[i][k], random[16 * i + k]);
      const int count = i < full(dim) ? 16 : part(dim);
      std::memcpy(p + 16 * i, rounded, static_cast<size_t>(count) * sizeof(E));
    }
  }
  OPER_INLINE float sum_of_squares(int dim) const {
    const int n = vectors(dim);
    Lanes s = v[0] * v[0];
    for (int i = 1; i < n; ++i) s += v[i] * v[i];
    return sum_of_lanes(s);
  }
  template <class E>
  OPER_INLINE float dot(const E* p, int dim) const {
    Row other;
    other.load(p, dim);
    const int n = vectors(dim);
    Lanes s = v[0] * other.v[0];
    for (int i = 1; i < n; ++i) s += v[i] * other.v[i];
    return sum_of_lanes(s);
  }
};

// How many rows before its use a row is prefetched: at most `most`, and few enough to take only a
// small part of the cache.
OPER_INLINE int64_t rows_ahead(int64_t row_bytes, int64_t most = kPrefetch) {
  constexpr int64_t kBytes = 16 << 10;
  return std::clamp<int64_t>(kBytes / row_bytes, 4, most);
}

// Prefetches into the second-level cache, which can fetch more lines at once than the first (the
// first 24 on Zen 4, six rows of 64 floats): rows of a 333 MB table were copied in random order at
// 20 ns a row instead of 31.
OPER_INLINE void prefetch_row(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(p) + at, 0, 2);
}

// The same for rows that may begin within a cache line and so extend into one more.
OPER_INLINE void prefetch_codes(const void* p, int64_t bytes) {
  prefetch_row(p, bytes);
  __builtin_prefetch(static_cast<const char*>(p) + bytes - 1, 0, 2);
}

OPER_INLINE void prefetch_row_for_write(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(p) + at, 1, 2);
}

// Calls body(std::integral_constant<int, N>{}) with the N of `Row` for this dim: dim / 16 if the
// row fits registers, -1 below 16 columns, otherwise 0.
template <class Body>
OPER_INLINE auto with_row_width(int dim, Body body) {
  if (dim % 16 == 0) {
    switch (dim / 16) {
      case 1: return body(std::integral_constant<int, 1>{});
      case 2: return body(std::integral_constant<int, 2>{});
      case 4: return body(std::integral_constant<int, 4>{});
      case 6: return body(std::integral_constant<int, 6>{});
      case 8: return body(std::integral_constant<int, 8>{});
      default: break;
    }
  }
  if (dim < 16) return body(std::integral_constant<int, -1>{});
  return body(std::integral_constant<int, 0>{});
}

// Calls body(std::integral_constant<int, N>{}, E{}), where E is the type of the table's elements.
template <class Body>
OPER_INLINE void with_rows(const Table& table, Body body) {
  with_row_width(table.dim, [&](auto width) {
    switch (table.row_type) {
      case RowType::kFloat16: return body(width, Float16{});
      case RowType::kBFloat16: return body(width, BFloat16{});
      default: return body(width, float{});
    }
  });
}

// ---- from rows of numbers to rows of codes, as in FBGEMM ----------------------------------------

OPER_INLINE bool is_finite(Float16 value) { return (value.bits & 0x7c00u) != 0x7c00u; }

// A row's scale and bias, and the inverse of the scale: code = (number - bias) * inverse, rounded.
struct CodedRange {
  Float16 scale, bias;
  float inverse;

  OPER_INLINE CodedRange(float low, float high, float largest) : bias(nearest(Float16{}, low)) {
    const float span = high - to_float(bias);
    scale = nearest(Float16{}, span == 0 ? 1.0f : span / largest);
    const float found = to_float(scale);
    inverse = 1.0f / found;
    if (found == 0 || std::isinf(inverse)) {
      scale = nearest(Float16{}, 1.0f);
      inverse = 1.0f;
    }
  }
};

template <class E>  // type of the numbers
int64_t quantise_as(const QuantiseJob& job, float* numbers, uint8_t* codes) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  constexpr float kRound = 12582912.0f;  // 3 * 2^22: adding it rounds small numbers to integers
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
