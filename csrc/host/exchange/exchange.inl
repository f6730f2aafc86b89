// Which rows of other memory domains a batch needs, each once. Part of kernels.inl.
//
// For a row that this rank cannot address, the read map gives -1 - linear index instead of an
// address (see `context_arguments` in oper/shmem/placement/layout.py).

// Linear index of such a row.
OPER_INLINE uint32_t remote_key(int64_t place) { return static_cast<uint32_t>(-1 - place); }

// Numbers the distinct rows without an address among the `n` places in the order of their keys,
// writes the keys to out.keys and -1 - number to their places. Adds the number of these places to
// `counts` [W] of their owners.
void number_sorted(const Table& table, int64_t n, RemoteRows& out, int64_t* counts,
                   Scratch& scratch) {
  uint64_t* pairs = scratch.get<uint64_t>(2, n);
  uint64_t* spare = scratch.get<uint64_t>(3, n);
  int64_t num_remote = 0;
  for (int64_t i = 0; i < n; ++i) {
    pairs[num_remote] =
        (static_cast<uint64_t>(remote_key(out.places[i])) << 32) | static_cast<uint64_t>(i);
    num_remote += out.places[i] < 0;
  }
  const int bits = bits_for(static_cast<uint64_t>(table.home.num_rows));
  const uint64_t* sorted = radix_sort(pairs, spare, num_remote, 32, bits);
  uint64_t last = ~uint64_t{0};
  int32_t owner = 0;
  for (int64_t i = 0; i < num_remote; ++i) {
    const uint64_t key = sorted[i] >> 32;
    while (static_cast<int64_t>(key) >= table.owner_begin[owner + 1]) ++owner;
    ++counts[owner];
    if (key != last) out.keys[out.num_keys++] = static_cast<uint32_t>(key);
    last = key;
    out.places[sorted[i] & 0xffffffffu] = -out.num_keys;
  }
}

// The same without sorting: counts in an array over all rows of the table. Faster if the table has
// few rows compared with the number of ids.
void number_in_place(const Table& table, int64_t n, RemoteRows& out, int64_t* counts,
                     Scratch& scratch) {
  const int64_t rows = table.home.num_rows;
  uint32_t* number = scratch.get<uint32_t>(2, rows);
  std::memset(number, 0, static_cast<size_t>(rows) * sizeof(uint32_t));
  for (int64_t i = 0; i < n; ++i)
    if (out.places[i] < 0) ++number[remote_key(out.places[i])];
  int32_t owner = 0;
  for (int64_t key = 0; key < rows; ++key) {
    if (number[key] == 0) continue;
    while (key >= table.owner_begin[owner + 1]) ++owner;
    counts[owner] += number[key];
    out.keys[out.num_keys++] = static_cast<uint32_t>(key);
    number[key] = static_cast<uint32_t>(out.num_keys);
  }
  for (int64_t i = 0; i < n; ++i)
    if (out.places[i] < 0) out.places[i] = -static_cast<int64_t>(number[remote_key(out.places[i])]);
}

int64_t remote_rows(const Table& table, const Batch& batch, Moved kind, bool skip_pushed,
                    RemoteRows& out, Scratch& scratch) {
  const int64_t bad = locate_all(table, batch, out.places);
  if (bad >= 0) return bad;
  int64_t at = 0, num_pushed = 0;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    const int64_t n = bags.num_ids();
    if (skip_pushed) {
      uint32_t* keys = scratch.get<uint32_t>(1, n);
      resolve(table.home, batch, bags.bounds[0], n, n, keys);
      for (int64_t i = 0; i < n; ++i) {
        if (!table.is_pushed_key(keys[i])) continue;
        out.places[at + i] = 0;
        ++num_pushed;
      }
    }
    at += n;
  }
  // Counts all places as rows that are read in place. Places that are not addresses are counted for
  // the arena with the lowest addresses; these counts are subtracted below.
  int64_t* counts = scratch.rows_read(kind, table.index);
  count_rows(table, out.places, at, kind, scratch);
  int64_t num_remote = 0;
  for (int64_t i = 0; i < at; ++i) num_remote += out.places[i] < 0;
  counts[table.arenas->rank[0]] -= num_remote + num_pushed;
  out.num_keys = 0;
  if (table.home.num_rows <= 4 * at) {
    number_in_place(table, at, out, counts, scratch);
  } else {
    number_sorted(table, at, out, counts, scratch);
  }
  return -1;
}
