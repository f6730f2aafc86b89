// DLRM's interaction: the dot products of the rows of a sample with each other. Part of
// kernels.inl.

#if defined(OPER_KERNELS_AVX512)

// 16 x 16 floats: row r, column k -> row k, column r.
OPER_INLINE void transpose(Lanes (&block)[16]) {
  __m512* v = reinterpret_cast<__m512*>(block);
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  const auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  for (int i = 0; i < 16; i += 4) {
    v[i] = low(t[i], t[i + 2]);
    v[i + 1] = high(t[i], t[i + 2]);
    v[i + 2] = low(t[i + 1], t[i + 3]);
    v[i + 3] = high(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_f32x4(v[c], v[4 + c], 0x44);
    t[4 + c] = _mm512_shuffle_f32x4(v[c], v[4 + c], 0xee);
    t[8 + c] = _mm512_shuffle_f32x4(v[8 + c], v[12 + c], 0x44);
    t[12 + c] = _mm512_shuffle_f32x4(v[8 + c], v[12 + c], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    v[c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0x88);
    v[4 + c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0xdd);
    v[8 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0x88);
    v[12 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0xdd);
  }
}

// Stores lanes [first, last) to p[first, last), and writes nothing else.
OPER_INLINE void store_between(float* p, const Lanes& v, int first, int last) {
  const __mmask16 mask = static_cast<__mmask16>((0xffffu << first) & ~(0xffffffffu << last));
  _mm512_mask_storeu_ps(p, mask, reinterpret_cast<const __m512&>(v));
}

constexpr int kBlockRows = 8, kBlockVectors = 2;  // size of a block of products that registers hold

#else

OPER_INLINE void transpose(Lanes (&block)[16]) {
  for (int r = 0; r < 16; ++r)
    for (int k = r + 1; k < 16; ++k) {
      const float other = block[k][r];
      block[k][r] = block[r][k];
      block[r][k] = other;
    }
}

OPER_INLINE void store_between(float* p, const Lanes& v, int first, int last) {
  float all[16];
  std::memcpy(all, &v, sizeof all);
  if (last - first == 16) {
    std::memcpy(p, all, sizeof all);
  } else {
    std::copy(all + first, all + last, p + first);
  }
}

constexpr int kBlockRows = 4, kBlockVectors = 1;

#endif

// Transposes a matrix of num_rows rows that are `from_stride` floats apart: row r, column k goes to
// to[k * to_stride + r]. For r in [num_rows, width) writes zeros.
OPER_INLINE void as_columns(const float* rows, int64_t from_stride, int num_rows, int dim, int width,
                            float* to, int64_t to_stride) {
  for (int r = 0; r < width; r += 16) {
    const int lanes = std::min(16, width - r);
    for (int k = 0; k < dim; k += 16) {
      const int count = std::min(16, dim - k);
      Lanes block[16];
      for (int i = 0; i < 16; ++i) {
        const float* p = rows + (r + i) * from_stride + k;
        block[i] = r + i >= num_rows ? Lanes{} : count == 16 ? lanes_of(p) : load_part(p, count);
      }
      transpose(block);
      for (int i = 0; i < count; ++i) {
        float* p = to + (k + i) * to_stride + r;
        if (lanes == 16) {
          *reinterpret_cast<Loose*>(p) = block[i];
        } else {
          store_part(p, block[i], lanes);
        }
      }
    }
  }
}

// Adds to `sum` the dot products of R rows with 16 * V rows that are stored as columns, see
// `as_columns`. Each is summed in the order of the dims, so that it depends on its two rows only.
template <int R, int V>
OPER_INLINE void multiply(const float* const (&row)[R], const float* columns, int dim, int width,
                          Lanes (&sum)[R][V]) {
  for (int k = 0; k < dim; ++k) {
    Lanes column[V];
    for (int v = 0; v < V; ++v)
      column[v] = lanes_of(columns + static_cast<int64_t>(k) * width + 16 * v);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] += column[v] * row[r][k];
  }
}

// Dot products of the rows [i, i + R) with the rows [j, j + 16 * V). Stores those above the
// diagonal to `out`, in which pairs are in the order (0, 1), (0, 2), ..., (1, 2), ...
template <int R, int V>
OPER_INLINE void multiply_block(const float* rows, const float* columns, int num_rows, int dim,
                                int width, int i, int j, float* out) {
  const float* row[R];
  for (int r = 0; r < R; ++r) row[r] = rows + static_cast<int64_t>(std::min(i + r, num_rows - 1)) * dim;
  Lanes sum[R][V] = {};
  multiply<R, V>(row, columns + j, dim, width, sum);
  for (int r = 0; r < R && i + r < num_rows - 1; ++r) {
    const int64_t line = i + r;
    float* pairs = out + line * (2 * num_rows - line - 1) / 2 - (line + 1);  // pair (line, 0)
    for (int v = 0; v < V; ++v) {
      const int at = j + 16 * v;
      const int first = std::max<int>(0, static_cast<int>(line) + 1 - at);
      const int last = std::min(16, num_rows - at);
      if (first < last) store_between(pairs + at, sum[r][v], first, last);
    }
  }
}

// Calls body(number of rows as an integral_constant, first row) for blocks of the rows below
// `last`. The last block may extend beyond it.
template <class Body>
OPER_INLINE void for_row_blocks(int last, Body body) {
  int i = 0;
  for (; i + 4 < last; i += kBlockRows) body(std::integral_constant<int, kBlockRows>{}, i);
  for (; i < last; i += 4) body(std::integral_constant<int, 4>{}, i);
}

// Likewise body(number of vectors of 16 columns, first column) for the columns [first, width).
template <class Body>
OPER_INLINE void for_vector_blocks(int first, int width, Body body) {
  int j = first;
  for (; j + 16 * kBlockVectors <= width; j += 16 * kBlockVectors)
    body(std::integral_constant<int, kBlockVectors>{}, j);
  for (; j < width; j += 16) body(std::integral_constant<int, 1>{}, j);
}

void interact(const float* rows, int64_t num_samples, int num_rows, int dim, float* out,
              Scratch& scratch) {
  const int width = (num_rows + 15) / 16 * 16;
  const int64_t stride = dim + static_cast<int64_t>(num_rows) * (num_rows - 1) / 2;
  float* columns = scratch.get<float>(0, static_cast<int64_t>(dim) * width);
  for (int64_t s = 0; s < num_samples; ++s, rows += static_cast<int64_t>(num_rows) * dim,
               out += stride) {
    std::memcpy(out, rows, static_cast<size_t>(dim) * sizeof(float));
    as_columns(rows, dim, num_rows, dim, width, columns, width);
    for_row_blocks(num_rows - 1, [&](auto R, int i) __attribute__((always_inline)) {
      for_vector_blocks((i + 1) / 16 * 16, width, [&](auto V, int j) __attribute__((always_inline)) {
        multiply_block<decltype(R)::value, decltype(V)::value>(rows, columns, num_rows, dim, width, i,
                                                               j, out + dim);
      });
    });
  }
}

// The gradient of row i is the sum over j of the gradient of pair (i, j) times row j. That of the
// first row also has the gradient of its copy in the output.
void interact_gradient(const float* first, const float* others, const float* gradient, int num_rows,
                       int dim, float* first_out, float* others_out, Scratch& scratch) {
  const int width = (dim + 15) / 16 * 16;
  float* rows = scratch.get<float>(0, static_cast<int64_t>(num_rows) * (width + num_rows));
  float* pairs = rows + static_cast<int64_t>(num_rows) * width;  // symmetric [num_rows, num_rows]
  const float* pair = gradient + dim;
  for (int i = 0; i < num_rows; ++i) {
    float* row = rows + static_cast<int64_t>(i) * width;
    std::memcpy(row, i ? others + static_cast<int64_t>(i - 1) * dim : first, sizeof(float) * dim);
    std::fill(row + dim, row + width, 0.0f);
    pairs[i * num_rows + i] = 0.0f;
    for (int j = i + 1; j < num_rows; ++j)
      pairs[i * num_rows + j] = pairs[j * num_rows + i] = *pair++;
  }
  for_row_blocks(num_rows, [&](auto R, int i) __attribute__((always_inline)) {
    for_vector_blocks(0, width, [&](auto V, int k) __attribute__((always_inline)) {
      constexpr int num_lines = decltype(R)::value, num_vectors = decltype(V)::value;
      const float* line[num_lines];
      for (int r = 0; r < num_lines; ++r) line[r] = pairs + std::min(i + r, num_rows - 1) * num_rows;
      Lanes sum[num_lines][num_vectors] = {};
      multiply<num_lines, num_vectors>(line, rows + k, num_rows, width, sum);
      for (int r = 0; r < num_lines && i + r < num_rows; ++r) {
        float* to = i + r ? others_out + static_cast<int64_t>(i + r - 1) * dim : first_out;
        for (int v = 0; v < num_vectors; ++v) {
          const int at = k + 16 * v;
          if (at + 16 <= dim) {
            *reinterpret_cast<Loose*>(to + at) = sum[r][v];
          } else {
            store_part(to + at, sum[r][v], dim - at);
          }
        }
      }
    });
  });
  for (int k = 0; k < dim; ++k) first_out[k] += gradient[k];
}

// Dot products of the rows r in [i, i + R) with one row of each sample s, which are stored as
// columns. Written to to[r * width + s].
template <int R, int V>
OPER_INLINE void multiply_samples(const float* rows, int num_rows, const float* samples, int dim,
                                  int width, int i, float* to) {
  const float* row[R];
  for (int r = 0; r < R; ++r) row[r] = rows + static_cast<int64_t>(std::min(i + r, num_rows - 1)) * dim;
  Lanes sum[R][V] = {};
  multiply<R, V>(row, samples, dim, width, sum);
  for (int r = i; r < std::min(i + R, num_rows); ++r)
    for (int v = 0; v < V; ++v)
      *reinterpret_cast<Loose*>(to + static_cast<int64_t>(r) * width + 16 * v) = sum[r - i][v];
}

// Dot products, for each sample s, of one of its rows with R others. Rows are stored as columns,
// `next` floats apart. Written to to[r * width + s].
template <int R>
OPER_INLINE void multiply_own(const float* one, const float* others, int64_t next, int dim, int width,
                              float* to) {
  for (int s = 0; s < width; s += 16) {
    Lanes sum[R] = {};
    for (int k = 0; k < dim; ++k) {
      const int64_t at = static_cast<int64_t>(k) * width + s;
      const Lanes number = lanes_of(one + at);
      for (int r = 0; r < R; ++r) sum[r] += number * lanes_of(others + r * next + at);
    }
    for (int r = 0; r < R; ++r)
      *reinterpret_cast<Loose*>(to + static_cast<int64_t>(r) * width + s) = sum[r];
  }
}

// The samples' own rows are transposed, so that a vector holds one column of 16 samples.
void interact_shared(const float* shared, int num_shared, const float* const* own, int num_own,
                     int num_samples, int dim, float* out, Scratch& scratch) {
  const int width = (num_samples + 15) / 16 * 16;
  const int num_pairs = num_own * num_shared + num_own * (num_own - 1) / 2;
  const int64_t stride = dim + num_pairs, next = static_cast<int64_t>(dim) * width;
  float* columns = scratch.get<float>(0, num_own * next + static_cast<int64_t>(num_pairs) * width);
  float* products = columns + num_own * next;
  float* to = products;
  for (int c = 0; c < num_own; ++c, to += static_cast<int64_t>(num_shared) * width) {
    float* samples = columns + c * next;
    as_columns(own[c], dim, num_samples, dim, width, samples, width);
    for_row_blocks(num_shared, [&](auto R, int i) __attribute__((always_inline)) {
      for_vector_blocks(0, width, [&](auto V, int s) __attribute__((always_inline)) {
        multiply_samples<decltype(R)::value, decltype(V)::value>(
            shared, num_shared, samples + s, dim, width, i, to + s);
      });
    });
  }
  for (int c = 0; c + 1 < num_own; ++c) {
    const float* one = columns + c * next;
    int d = c + 1;
    for (; d + 4 <= num_own; d += 4, to += 4 * width)
      multiply_own<4>(one, columns + d * next, next, dim, width, to);
    for (; d < num_own; ++d, to += width)
      multiply_own<1>(one, columns + d * next, next, dim, width, to);
  }
  for (int s = 0; s < num_samples; ++s)
    std::memcpy(out + s * stride, own[0] + static_cast<int64_t>(s) * dim,
                static_cast<size_t>(dim) * sizeof(float));
  as_columns(products, width, num_pairs, num_samples, num_pairs, out + dim, stride);
}
