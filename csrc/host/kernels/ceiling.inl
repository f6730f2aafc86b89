// The physical limit of a pooled lookup, see GatherJob. Part of kernels.inl.

template <int N, bool kStream>
void gather_rows(const GatherJob& job, int64_t begin, int64_t end) {
  const int dim = static_cast<int>(job.dim);
  const int64_t bytes = N > 0 ? 64 * N : 4 * job.dim;
  const int64_t* at = job.addresses + job.offsets[begin];
  for (int64_t i = 0; i < job.prefetch; ++i)
    prefetch_row(reinterpret_cast<const void*>(at[i]), bytes);
  for (int64_t b = begin; b < end; ++b) {
    Row<N> sum;
    sum.zero(dim);
    for (int64_t n = job.offsets[b + 1] - job.offsets[b]; n > 0; --n, ++at) {
      prefetch_row(reinterpret_cast<const void*>(at[job.prefetch]), bytes);
      sum.add(reinterpret_cast<const float*>(*at), dim);
    }
    if (kStream) {
      sum.stream(job.out + job.destinations[b], dim);
    } else {
      sum.store(job.out + job.destinations[b], dim);
    }
  }
  if (kStream) finish_streaming();
}

void gather(const GatherJob& job, int64_t begin, int64_t end) {
  const auto run = [&](auto width) {
    constexpr int N = decltype(width)::value;
    job.stream ? gather_rows<N, true>(job, begin, end) : gather_rows<N, false>(job, begin, end);
  };
  if (job.dim == 256) return run(std::integral_constant<int, 16>{});
  with_row_width(static_cast<int>(job.dim), run);
}
