// Rows of 8-bit and 4-bit codes in vector registers, see common/elements.h. Part of kernels.inl.

template <class E>
constexpr bool kIsCodes = false;
template <>
constexpr bool kIsCodes<Int8> = true;
template <>
constexpr bool kIsCodes<Int4> = true;

template <class E>
constexpr int kCodeBytes = 16;  // bytes of 16 columns
template <>
constexpr int kCodeBytes<Int4> = 8;

struct ScaleBias {
  float scale, bias;

  explicit OPER_INLINE ScaleBias(const void* row) {
#if defined(OPER_KERNELS_AVX512) || defined(OPER_KERNELS_AVX2)
    const __m128 both = _mm_cvtph_ps(_mm_loadu_si32(row));
    scale = _mm_cvtss_f32(both);
    bias = _mm_cvtss_f32(_mm_movehdup_ps(both));
#else
    Float16 halves[2];
    std::memcpy(halves, row, sizeof halves);
    scale = to_float(halves[0]);
    bias = to_float(halves[1]);
#endif
  }
  OPER_INLINE void multiply(float weight) {
    scale *= weight;
    bias *= weight;
  }
};

#if defined(OPER_KERNELS_AVX512)

OPER_INLINE Lanes numbers_of(__m128i codes) {
  return reinterpret_cast<Lanes>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)));
}

// x * scale + y, rounded once.
OPER_INLINE Lanes fused(const Lanes& x, float scale, const Lanes& y) {
  return reinterpret_cast<Lanes>(_mm512_fmadd_ps(reinterpret_cast<const __m512&>(x),
                                                 _mm512_set1_ps(scale),
                                                 reinterpret_cast<const __m512&>(y)));
}

#elif defined(OPER_KERNELS_AVX2)

OPER_INLINE Lanes numbers_of(__m128i codes) {
  const __m256 halves[2] = {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)),
                            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)))};
  Lanes v;
  std::memcpy(&v, halves, 64);
  return v;
}

OPER_INLINE Lanes fused(const Lanes& x, float scale, const Lanes& y) {
  const __m256* a = reinterpret_cast<const __m256*>(&x);
  const __m256* b = reinterpret_cast<const __m256*>(&y);
  const __m256 s = _mm256_set1_ps(scale);
  const __m256 halves[2] = {_mm256_fmadd_ps(a[0], s, b[0]), _mm256_fmadd_ps(a[1], s, b[1])};
  Lanes v;
  std::memcpy(&v, halves, 64);
  return v;
}

#endif

#if defined(OPER_KERNELS_AVX512) || defined(OPER_KERNELS_AVX2)

OPER_INLINE Lanes codes_of(Int8, const uint8_t* p) {
  return numbers_of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

OPER_INLINE Lanes codes_of(Int4, const uint8_t* p) {
  const __m128i pairs = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i spread = _mm_or_si128(pairs, _mm_slli_epi16(pairs, 4));
  return numbers_of(_mm_and_si128(spread, _mm_set1_epi8(15)));
}

#else

OPER_INLINE Lanes fused(const Lanes& x, float scale, const Lanes& y) {
  Lanes v;
  for (int i = 0; i < 16; ++i) v[i] = std::fma(x[i], scale, y[i]);
  return v;
}

OPER_INLINE Lanes codes_of(Int8, const uint8_t* p) {
  Lanes v;
  for (int i = 0; i < 16; ++i) v[i] = static_cast<float>(p[i]);
  return v;
}

OPER_INLINE Lanes codes_of(Int4, const uint8_t* p) {
  Lanes v;
  for (int i = 0; i < 16; ++i) v[i] = static_cast<float>((p[i / 2] >> (4 * (i % 2))) & 15);
  return v;
}

#endif
