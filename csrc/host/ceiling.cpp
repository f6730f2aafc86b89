// The gather loop, with the widest vectors of the processor; see ceiling.h.
#include "host/ceiling.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace oper::host {
namespace {

// One loop for all instruction sets. A macro, since the target attribute of a function does not
// reach the helpers that it inlines. N > 0: rows of 16 * N floats in registers; kStream: see
// GatherJob. LANES is a vector of WIDTH floats.
#define OPER_GATHER_LOOP(LANES, WIDTH, LOAD, ADD, ZERO, STORE, STREAM)                    \
  constexpr int kVectors = 16 * N / (WIDTH);                                              \
  const int64_t* at = job.addresses + job.offsets[begin];                                 \
  const int64_t ahead = job.prefetch;                                                     \
  for (int64_t i = 0; i < ahead; ++i)                                                     \
    for (int line = 0; line < N; ++line)                                                  \
      __builtin_prefetch(reinterpret_cast<const char*>(at[i]) + 64 * line, 0, 3);         \
  for (int64_t b = begin; b < end; ++b) {                                                 \
    LANES sum[kVectors];                                                                  \
    for (int v = 0; v < kVectors; ++v) sum[v] = ZERO;                                     \
    for (int64_t n = job.offsets[b + 1] - job.offsets[b]; n > 0; --n, ++at) {             \
      for (int line = 0; line < N; ++line)                                                \
        __builtin_prefetch(reinterpret_cast<const char*>(at[ahead]) + 64 * line, 0, 3);   \
      const float* row = reinterpret_cast<const float*>(*at);                             \
      for (int v = 0; v < kVectors; ++v) sum[v] = ADD(sum[v], LOAD(row + (WIDTH) * v));   \
    }                                                                                     \
    float* out = job.out + job.destinations[b];                                           \
    for (int v = 0; v < kVectors; ++v) {                                                  \
      if (kStream) {                                                                      \
        STREAM(out + (WIDTH) * v, sum[v]);                                                \
      } else {                                                                            \
        STORE(out + (WIDTH) * v, sum[v]);                                                 \
      }                                                                                   \
    }                                                                                     \
  }

#if defined(__x86_64__)

template <int N, bool kStream>
__attribute__((target("avx512f"))) void gather_avx512(const GatherJob& job, int64_t begin,
                                                      int64_t end) {
  OPER_GATHER_LOOP(__m512, 16, _mm512_loadu_ps, _mm512_add_ps, _mm512_setzero_ps(),
                   _mm512_storeu_ps, _mm512_stream_ps)
  if (kStream) _mm_sfence();
}

template <int N, bool kStream>
__attribute__((target("avx2"))) void gather_avx2(const GatherJob& job, int64_t begin,
                                                 int64_t end) {
  OPER_GATHER_LOOP(__m256, 8, _mm256_loadu_ps, _mm256_add_ps, _mm256_setzero_ps(),
                   _mm256_storeu_ps, _mm256_stream_ps)
  if (kStream) _mm_sfence();
}

#endif

// Any processor and any dim.
void gather_plain(const GatherJob& job, int64_t begin, int64_t end) {
  const int64_t* at = job.addresses + job.offsets[begin];
  const int64_t bytes = job.dim * 4;
  for (int64_t b = begin; b < end; ++b) {
    float* out = job.out + job.destinations[b];
    const int64_t n = job.offsets[b + 1] - job.offsets[b];
    if (n == 0) std::memset(out, 0, static_cast<size_t>(bytes));
    for (int64_t i = 0; i < n; ++i, ++at) {
      const char* next = reinterpret_cast<const char*>(at[job.prefetch]);
      for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line, 0, 3);
      const float* row = reinterpret_cast<const float*>(*at);
      if (i == 0) {
        std::memcpy(out, row, static_cast<size_t>(bytes));
      } else {
        for (int64_t d = 0; d < job.dim; ++d) out[d] += row[d];
      }
    }
  }
}

template <int N>
void gather_rows(const GatherJob& job, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512f");
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx512) {
    return job.stream ? gather_avx512<N, true>(job, begin, end)
                      : gather_avx512<N, false>(job, begin, end);
  }
  if (avx2 && N <= 4) {  // more rows than that leave the registers
    return job.stream ? gather_avx2<N, true>(job, begin, end)
                      : gather_avx2<N, false>(job, begin, end);
  }
#endif
  gather_plain(job, begin, end);
}

constexpr int64_t kLine = 64;

}  // namespace

void rewrite(const RewriteJob& job, int64_t begin, int64_t end) {
  const int64_t* at = job.addresses;
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t line = 0; line < job.bytes; line += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(at[i + job.prefetch]) + line, 1, 3);
    for (int64_t line = 0; line < job.bytes; line += kLine) {
      volatile int32_t* word = reinterpret_cast<volatile int32_t*>(at[i] + line);
      *word = *word;
    }
  }
}

void gather(const GatherJob& job, int64_t begin, int64_t end) {
  switch (job.dim) {
    case 16: return gather_rows<1>(job, begin, end);
    case 32: return gather_rows<2>(job, begin, end);
    case 64: return gather_rows<4>(job, begin, end);
    case 128: return gather_rows<8>(job, begin, end);
    case 256: return gather_rows<16>(job, begin, end);
    default: return gather_plain(job, begin, end);
  }
}

}  // namespace oper::host
