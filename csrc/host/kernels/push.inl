// Exchange mode push: owners pool their rows of each bag. Part of kernels.inl.
//
// Forward: a reader writes the slots and bags of its ids in pushed tiers to its send buffer, by
// owner (`request`). Each owner pools its rows into one partial sum per bag (`pool_for`). The
// reader adds these sums, in rank order, to the sum of the rows that it reads itself
// (`pool_pushed`). Backward: the reader writes the same requests and the gradients of its bags
// (`stage`). The owners sum them by row (`reduce_pushed`).

// Lists the ids of a batch in pushed tiers. Returns the first bad id's index, or -1.
int64_t list_pushed(const Table& table, const Batch& batch, BagIds& out, Scratch& scratch) {
  const int64_t total = batch.num_ids(table);
  out.keys = scratch.get<uint32_t>(2, total);
  out.bags = scratch.get<uint32_t>(3, total);
  out.positions = batch.weights ? scratch.get<int64_t>(4, total) : nullptr;
  out.n = 0;
  return for_keys(table, batch, [&](const uint32_t* key, int64_t n, int64_t first, uint32_t bag) {
    if (table.all_pushed) return out.add(key, n, first, bag);
    int64_t at = out.n;
    for (int64_t i = 0; i < n; ++i) {
      out.keys[at] = key[i];
      out.bags[at] = bag;
      if (out.positions) out.positions[at] = first + i;
      at += table.is_pushed_key(key[i]);
    }
    out.n = at;
  });
}

int64_t request(Context& context, int32_t index, const Batch& batch, Scratch& scratch) {
  const Table& table = context.tables[index];
  const int32_t W = context.world_size;
  BagIds in;
  const int64_t bad = list_pushed(table, batch, in, scratch);
  if (bad >= 0) return bad;
  RequestTable* entry = context.request_table(context.rank, index);
  int64_t* begin = entry->begin();
  std::vector<int64_t> at(static_cast<size_t>(W) + 1, 0);
  for (int64_t i = 0; i < in.n; ++i) ++at[table.owner_of(in.keys[i]) + 1];
  for (int32_t r = 0; r < W; ++r) at[r + 1] += at[r];
  for (int32_t r = 0; r <= W; ++r) begin[r] = at[r];
  entry->slots_offset = context.take_bytes(in.n * 4);
  entry->bags_offset = context.take_bytes(in.n * 4);
  entry->weights_offset = batch.weights ? context.take_bytes(in.n * 4) : 0;
  if (entry->slots_offset < 0 || entry->bags_offset < 0 || entry->weights_offset < 0)
    return kReduceFull;
  uint32_t* slots = context.in_send_buffer<uint32_t>(context.rank, entry->slots_offset);
  uint32_t* bags = context.in_send_buffer<uint32_t>(context.rank, entry->bags_offset);
  float* weights = context.in_send_buffer<float>(context.rank, entry->weights_offset);
  for (int64_t i = 0; i < in.n; ++i) {
    const int32_t owner = table.owner_of(in.keys[i]);
    const int64_t to = at[owner]++;
    slots[to] = in.keys[i] - static_cast<uint32_t>(table.owner_begin[owner]);
    bags[to] = in.bags[i];
    if (in.positions) weights[to] = batch.weights[in.positions[i]];
  }
  return kReduceOk;
}

// A reader's requests to this rank.
struct Requests {
  const uint32_t* slots;
  const uint32_t* bags;
  const float* weights;    // or null
  const float* gradients;  // [bags, dim], backward only
  int64_t n;
};

Requests requests_of(const Context& context, int32_t index, int32_t reader) {
  RequestTable* entry = context.request_table(reader, index);
  const int64_t* begin = entry->begin();
  const int64_t first = begin[context.rank];
  return {context.in_send_buffer<uint32_t>(reader, entry->slots_offset) + first,
          context.in_send_buffer<uint32_t>(reader, entry->bags_offset) + first,
          entry->weights_offset
              ? context.in_send_buffer<float>(reader, entry->weights_offset) + first
              : nullptr,
          context.in_send_buffer<float>(reader, entry->gradients_offset),
          begin[context.rank + 1] - first};
}

bool pool_for(Context& context, int32_t index, int32_t reader) {
  const Table& table = context.tables[index];
  const int dim = table.dim;
  const Requests in = requests_of(context, index, reader);
  PartialTable* out = context.partial_table(context.rank, index, reader);
  out->count = in.n > 0 ? 1 : 0;
  for (int64_t i = 1; i < in.n; ++i) out->count += in.bags[i] != in.bags[i - 1];
  out->bags_offset = context.take_partial_bytes(out->count * 4);
  out->rows_offset = context.take_partial_bytes(out->count * table.gradient_bytes());
  if (out->bags_offset < 0 || out->rows_offset < 0) return false;
  uint32_t* bags = context.in_send_buffer<uint32_t>(context.rank, out->bags_offset);
  float* rows = context.in_send_buffer<float>(context.rank, out->rows_offset);
  with_rows(table, [&](auto width, auto element) {
    constexpr int N = decltype(width)::value;
    using E = decltype(element);
    const auto fetch = [&](int64_t i) {
      if (i + kPrefetch < in.n)
        prefetch_row(table.row<E>(in.slots[i + kPrefetch]), table.row_bytes());
    };
    for (int64_t i = 0; i < in.n; rows += dim) {
      const uint32_t bag = in.bags[i];
      fetch(i);
      Row<N> sum;
      sum.load(table.row<E>(in.slots[i]), dim);
      if (in.weights) sum.scale(in.weights[i], dim);
      for (++i; i < in.n && in.bags[i] == bag; ++i) {
        fetch(i);
        const E* row = table.row<E>(in.slots[i]);
        if (in.weights) {
          sum.add_scaled(row, in.weights[i], dim);
        } else {
          sum.add(row, dim);
        }
      }
      *bags++ = bag;
      sum.store(rows, dim);
    }
  });
  return true;
}

struct Partial {  // an owner's partial sums for this rank
  const uint32_t* bags;
  const float* rows;
  int64_t at, end;
};

// Addresses of the rows of the ids [first, first + n) of a batch, 0 for those in pushed tiers.
const int64_t* pulled_rows(const Table& table, const FeatureBags& bags, const Batch& batch,
                           int64_t first, int64_t n, Scratch& scratch) {
  if (bags.rows != nullptr) return bags.rows + (first - bags.bounds[0]);  // already resolved
  int64_t* rows = scratch.get<int64_t>(0, 2 * n);
  uint32_t* keys = scratch.get<uint32_t>(1, n);
  resolve(table.home, batch, first, n, n, keys);
  resolve(table.read, batch, first, n, n, rows);
  int64_t* read = rows + n;  // without those in pushed tiers, for `count_rows`
  int64_t num_read = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool pushed = table.is_pushed_key(keys[i]);
    read[num_read] = rows[i];
    num_read += !pushed;
    if (pushed) rows[i] = 0;
  }
  count_rows(table, read, num_read, kRows, scratch);
  return rows;
}

template <int N, class E>
void pool_with_partials(const Context& context, int32_t index, const Batch& batch, float* out,
                        Scratch& scratch) {
  const Table& table = context.tables[index];
  const int dim = table.dim;
  std::vector<Partial> partials;
  for (int32_t r = 0; r < context.world_size; ++r) {
    const PartialTable* p = context.partial_table(r, index, context.rank);
    partials.push_back({context.in_send_buffer<uint32_t>(r, p->bags_offset),
                        context.in_send_buffer<float>(r, p->rows_offset), 0, p->count});
  }
  uint32_t bag = 0;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    for (int64_t b = 0; b < bags.num_bags; ++b, ++bag) {
      const int64_t first = bags.bounds[b], n = bags.bounds[b + 1] - first;
      Row<N> sum;
      sum.zero(dim);
      sum.start_if(n > 0, dim);  // so that the sum begins with the first row, as if it were pulled
      if (!table.all_pushed) {
        const int64_t* rows = pulled_rows(table, bags, batch, first, n, scratch);
        for (int64_t i = 0; i < n; ++i) {
          if (rows[i] == 0) continue;
          const E* row = reinterpret_cast<const E*>(rows[i]);
          if (batch.weights) {
            sum.add_scaled(row, batch.weights[first + i], dim);
          } else {
            sum.add(row, dim);
          }
        }
      }
      for (Partial& p : partials)
        if (p.at < p.end && p.bags[p.at] == bag) sum.add(p.rows + p.at++ * dim, dim);
      if (table.mean && n > 1) sum.divide(static_cast<float>(n), dim);
      sum.store(out + bags.out_begin + b * batch.out_stride, dim);
    }
  }
}

void pool_pushed(const Context& context, int32_t index, const Batch& batch, float* out,
                 Scratch& scratch) {
  with_rows(context.tables[index], [&](auto width, auto element) {
    pool_with_partials<decltype(width)::value, decltype(element)>(context, index, batch, out,
                                                                  scratch);
  });
}

bool stage(Context& context, int32_t index, const Batch& batch) {
  const Table& table = context.tables[index];
  RequestTable* entry = context.request_table(context.rank, index);
  entry->gradients_offset = context.take_bytes(batch.num_bags(table) * table.gradient_bytes());
  if (entry->gradients_offset < 0) return false;
  float* to = context.in_send_buffer<float>(context.rank, entry->gradients_offset);
  with_row_width(table.dim, [&](auto width) {
    stage_gradients<decltype(width)::value>(table, batch, to);
  });
  return true;
}

// Sums the gradients of one rank's requests by row, in the order of the requests. K: type of packed
// pairs (slot, payload); the payload is the bag or, with weights, the index of the request.
template <int N, class K>
void reduce_requests(const Table& table, const Requests& in, int slot_bits, int payload_bits,
                     PushedRows& out, Scratch& scratch) {
  const int dim = table.dim;
  K* pairs = scratch.get<K>(2, in.n);
  K* spare = scratch.get<K>(3, in.n);
  for (int64_t i = 0; i < in.n; ++i)
    pairs[i] = (static_cast<K>(in.slots[i]) << payload_bits) |
               static_cast<K>(in.weights ? static_cast<uint32_t>(i) : in.bags[i]);
  const K* sorted = radix_sort(pairs, spare, in.n, payload_bits, slot_bits);
  const K mask = (K{1} << payload_bits) - 1;
  int64_t num_rows = in.n > 0 ? 1 : 0;
  for (int64_t i = 1; i < in.n; ++i)
    num_rows += (sorted[i] >> payload_bits) != (sorted[i - 1] >> payload_bits);
  out.slots.resize(static_cast<size_t>(num_rows));
  if (static_cast<int64_t>(out.rows.size()) < num_rows * dim)
    out.rows.resize(static_cast<size_t>(num_rows * dim));
  const auto gradient = [&](K pair) {
    const K payload = pair & mask;
    return in.gradients + static_cast<int64_t>(in.weights ? in.bags[payload] : payload) * dim;
  };
  constexpr int64_t kAhead = 12;
  float* to = out.rows.data();
  size_t row = 0;
  for (int64_t i = 0; i < in.n; to += dim) {
    const K slot = sorted[i] >> payload_bits;
    Row<N> sum;
    for (bool first = true; i < in.n && (sorted[i] >> payload_bits) == slot; ++i, first = false) {
      if (i + kAhead < in.n) prefetch_row(gradient(sorted[i + kAhead]), table.gradient_bytes());
      const float* g = gradient(sorted[i]);
      if (first) {
        sum.load(g, dim);
        if (in.weights) sum.scale(in.weights[sorted[i] & mask], dim);
      } else if (in.weights) {
        sum.add_scaled(g, in.weights[sorted[i] & mask], dim);
      } else {
        sum.add(g, dim);
      }
    }
    out.slots[row++] = static_cast<uint32_t>(slot);
    sum.store(to, dim);
  }
}

void reduce_pushed(Context& context, int32_t index, int32_t reader, Scratch& scratch) {
  Table& table = context.tables[index];
  const Requests in = requests_of(context, index, reader);
  PushedRows& out = table.pushed[reader];
  const int64_t slots = table.owner_begin[context.rank + 1] - table.owner_begin[context.rank];
  const int slot_bits = bits_for(static_cast<uint64_t>(slots));
  // Bags ascend, so that the last one is the largest.
  const int payload_bits =
      bits_for(static_cast<uint64_t>(in.weights || in.n == 0 ? in.n : in.bags[in.n - 1] + 1));
  with_row_width(table.dim, [&](auto width) {
    constexpr int N = decltype(width)::value;
    if (slot_bits + payload_bits <= 32) {
      reduce_requests<N, uint32_t>(table, in, slot_bits, payload_bits, out, scratch);
    } else {
      reduce_requests<N, uint64_t>(table, in, slot_bits, payload_bits, out, scratch);
    }
  });
}
