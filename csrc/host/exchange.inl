// Rows that other memory domains hold: which of them a batch needs, each once. Part of kernels.inl.
//
// The read map of a row that cannot be addressed gives -1 - its home key, see KernelMaps.

template <class Id>
int64_t far_rows_ids(const Table& table, const Batch& batch, Moved kind, bool skip_pushed, FarRows& out,
                     Scratch& scratch) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  int64_t at = 0, num_pushed = 0;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    const int64_t first = bags.bounds[0], n = bags.bounds[bags.num_bags] - first;
    if (batch.resolved != nullptr) {
      std::copy_n(batch.resolved->addresses + batch.resolved->first[f], n, out.places + at);
    } else {
      const int64_t bad = resolve(table.read, ids + first, n, n, out.places + at);
      if (bad >= 0) return first + bad;
    }
    if (skip_pushed)
      for (int64_t i = 0; i < n; ++i)
        if (is_pushed(table, static_cast<int64_t>(ids[first + i]))) {
          out.places[at + i] = 0;
          ++num_pushed;
        }
    at += n;
  }
  uint64_t* pairs = scratch.get<uint64_t>(2, at);
  uint64_t* spare = scratch.get<uint64_t>(3, at);
  int64_t n = 0;
  for (int64_t i = 0; i < at; ++i) {
    pairs[n] = (static_cast<uint64_t>(-1 - out.places[i]) << 32) | static_cast<uint64_t>(i);
    n += out.places[i] < 0;
  }
  // Rows by owner, as if all were read in place; what is no address counts as the first arena's.
  int64_t* counts = scratch.rows_read(kind, table.index);
  count_rows(table, out.places, at, kind, scratch);
  counts[table.arenas->rank[0]] -= n + num_pushed;
  const uint64_t* sorted =
      radix_sort(pairs, spare, n, 32, bits_for(static_cast<uint64_t>(table.home.num_rows)));
  out.num_keys = 0;
  uint64_t last = ~uint64_t{0};
  int32_t owner = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = sorted[i] >> 32;
    while (static_cast<int64_t>(key) >= table.owner_begin[owner + 1]) ++owner;
    ++counts[owner];
    if (key != last) out.keys[out.num_keys++] = static_cast<uint32_t>(key);
    last = key;
    out.places[sorted[i] & 0xffffffffu] = -out.num_keys;
  }
  return -1;
}

int64_t far_rows(const Table& table, const Batch& batch, Moved kind, bool skip_pushed, FarRows& out,
                 Scratch& scratch) {
  return batch.ids_are_32_bit ? far_rows_ids<int32_t>(table, batch, kind, skip_pushed, out, scratch)
                              : far_rows_ids<int64_t>(table, batch, kind, skip_pushed, out, scratch);
}
