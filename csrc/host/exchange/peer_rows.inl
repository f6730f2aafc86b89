// The distinct rows of peers in a batch, see peer_rows.h. Part of kernels.inl.

// Writes the places of a table's ids, feature by feature. Returns the first invalid id's index in
// the batch, or -1.
int64_t locate_all(const Table& table, const Batch& batch, int64_t* places) {
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    const int64_t first = bags.bounds[0], n = bags.num_ids();
    if (batch.resolved != nullptr) {
      std::copy_n(batch.resolved->addresses + batch.resolved->first[f], n, places);
    } else {
      const int64_t bad = resolve(table.read, batch, first, n, n, places);
      if (bad >= 0) return first + bad;
    }
    places += n;
  }
  return -1;
}

// Numbers addresses in the order of their first occurrence, by a hash table with open addressing.
class Numbering {
 public:
  Numbering(int64_t most, Scratch& scratch)
      : bits_(bits_for(static_cast<uint64_t>(2 * most + 2))),
        cells_(scratch.get<Cell>(2, int64_t{1} << bits_)) {
    std::memset(cells_, 0, sizeof(Cell) << bits_);
  }
  // The number of an address; a new address gets the number `count`.
  OPER_INLINE int64_t of(int64_t address, int64_t count) {
    const uint64_t mask = (uint64_t{1} << bits_) - 1;
    uint64_t at = (static_cast<uint64_t>(address) * 0x9E3779B97F4A7C15u) >> (64 - bits_);
    while (cells_[at].address != 0 && cells_[at].address != address) at = (at + 1) & mask;
    if (cells_[at].address == 0) cells_[at] = {address, count};
    return cells_[at].number;
  }

 private:
  struct Cell {
    int64_t address, number;  // address 0: free
  };
  int bits_;
  Cell* cells_;
};

int64_t distinct_rows(const Table& table, const Batch& batch, int32_t rank, DistinctRows& out,
                      Scratch& scratch) {
  const int64_t bad = locate_all(table, batch, out.places);
  if (bad >= 0) return bad;
  const int64_t n = batch.num_ids(table);
  // The addresses of this rank's rows lie between the previous arena's send buffer and its own, see
  // Arenas.
  const Arenas& arenas = *table.arenas;
  const size_t mine = static_cast<size_t>(
      std::find(arenas.rank.begin(), arenas.rank.end(), rank) - arenas.rank.begin());
  const int64_t begin = mine > 0 ? arenas.send_buffer[mine - 1] : INT64_MIN,
                end = arenas.send_buffer[mine];
  Numbering numbers(std::min(n, table.home.num_rows), scratch);
  out.num_ids = out.num_rows = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t address = out.places[i];
    if (address >= begin && address < end) continue;
    const int64_t number = numbers.of(address, out.num_rows);
    if (number == out.num_rows) out.sources[out.num_rows++] = address;
    out.places[i] = -1 - number;
    ++out.num_ids;
  }
  return -1;
}

// Counts rows read: own rows once per id, peers' rows once per distinct row.
void count_distinct(const Table& table, const DistinctRows& rows, int64_t num_ids, int32_t rank,
                    Scratch& scratch) {
  count_rows(table, rows.sources, rows.num_rows, kRows, scratch);
  scratch.rows_read(kRows, table.index)[rank] += num_ids - rows.num_ids;
}
