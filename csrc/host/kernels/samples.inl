// Samples that share bags: from rows of bags to rows of samples, and back. Part of kernels.inl.

void spread(const SampleJob& job, const float* bags, float* samples) {
  with_row_width(static_cast<int>(job.dim), [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int dim = static_cast<int>(job.dim);
    int64_t bag = -1;
    Row<N> row;
    // From the last one on: in place, a bag's row is read before that of the sample in its place is written.
    for (int64_t b = job.count - 1; b >= 0; --b) {
      if (job.bags[b] != bag) {
        bag = job.bags[b];
        row.load(bags + bag * job.stride, dim);
      }
      if (samples != bags || bag != b) row.store(samples + b * job.stride, dim);
    }
  });
}

void add_up(const SampleJob& job, const float* samples, float* bags, int64_t num_bags,
            int64_t bags_stride) {
  with_row_width(static_cast<int>(job.dim), [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int dim = static_cast<int>(job.dim);
    const int64_t row_bytes = 4 * job.dim, ahead = rows_ahead(row_bytes, 12), last = job.count - 1;
    for (int64_t k = 0; k < num_bags; ++k)
      std::memset(bags + k * bags_stride, 0, static_cast<size_t>(row_bytes));
    for (int64_t b = 0; b < job.count;) {
      const int64_t bag = job.bags[b];
      float* at = bags + bag * bags_stride;
      Row<N> sum;
      sum.load(at, dim);
      do {
        prefetch_row(samples + std::min(b + ahead, last) * job.stride, row_bytes);
        sum.add(samples + b * job.stride, dim);
      } while (++b <= last && job.bags[b] == bag);
      sum.store(at, dim);
    }
  });
}
