#include "host/keys/rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "host/kernels/kernels.h"

namespace oper::host {

namespace {

template <class E>
void store_as(const std::vector<float>& values, char* to) {
  for (size_t k = 0; k < values.size(); ++k)
    reinterpret_cast<E*>(to)[k] = nearest(E{}, values[k]);
}

void store_row(const std::vector<float>& values, RowType type, char* to) {
  if (type == RowType::kFloat16) return store_as<Float16>(values, to);
  if (type == RowType::kBFloat16) return store_as<BFloat16>(values, to);
  std::memcpy(to, values.data(), values.size() * sizeof(float));
}

void begin_state(float* state, StateWidth width, int64_t slot, int64_t dim, float value) {
  if (width == StateWidth::kNone) return;
  const int64_t columns = width == StateWidth::kPerRow ? 1 : dim;
  std::fill_n(state + slot * columns, columns, value);
}

// Initialises one column piece of the rows; `values`: scratch.
void begin_pieces(const Context& context, const RowRules& rules, const Table& table,
                  const NewRow* rows, int64_t n, std::vector<float>& values) {
  struct Place {
    int64_t slot;
    int32_t owner;
  } places[kRowsAtOnce];
  for (int64_t i = 0; i < n; ++i) {
    const int64_t home = locate(table.home, std::max<int64_t>(rows[i].row, 0));
    const int32_t owner = table.owner_of(home);
    const int64_t slot = home - table.owner_begin[owner];
    places[i] = {slot, owner};
    if (owner != context.rank) continue;
    char* const row = table.rows + slot * table.row_bytes();
    for (int64_t at = 0; at < table.row_bytes(); at += 64) __builtin_prefetch(row + at, 1, 2);
    if (rules.widths[0] == StateWidth::kPerRow) __builtin_prefetch(table.momentum1 + slot, 1, 2);
  }
  std::vector<const Refresh*> replicas;
  for (const Refresh& part : context.refreshes)
    if (part.table == table.index && part.replicas != nullptr) replicas.push_back(&part);
  for (int64_t i = 0; i < n; ++i) {
    const auto [slot, owner] = places[i];
    if (rows[i].row <= 0) continue;
    values.clear();
    const auto put = [&](char* to) {
      if (values.empty()) {
        values.resize(static_cast<size_t>(table.dim));
        kernels().draw_row(rows[i].key, rules.seed, table.first_column,
                           table.first_column + table.dim, rules.bound, values.data());
      }
      store_row(values, table.row_type, to);
    };
    if (owner == context.rank) {
      put(table.rows + slot * table.row_bytes());
      begin_state(table.momentum1, rules.widths[0], slot, table.dim, rules.first_state);
      begin_state(table.momentum2, rules.widths[1], slot, table.dim, 0.0f);
      if (table.changed)  // atomic, since other threads initialise other rows
        __atomic_fetch_or(table.changed + slot / 64, uint64_t{1} << slot % 64, __ATOMIC_RELAXED);
    }
    for (const Refresh* part : replicas)
      if (part->owner == owner && part->slot_begin <= slot && slot < part->slot_end)
        put(part->replicas +
            (part->first + (slot - part->slot_begin) * part->stride) * table.row_bytes());
  }
}

}  // namespace

void begin_rows(const Context& context, const RowRules& rules, const NewRow* rows, int64_t n) {
  std::vector<float> values;
  for (const Feature& feature : context.features)
    if (feature.logical == rules.feature)
      begin_pieces(context, rules, context.tables[feature.table], rows, n, values);
}

}  // namespace oper::host
