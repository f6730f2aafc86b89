#include "host/keys/rows.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/philox.h"

namespace oper::host {

namespace {

constexpr uint32_t kRowDraw = 0x696e6974u;

// To the nearest element, as torch converts numbers.
template <class E>
void store_as(const std::vector<float>& values, char* to) {
  for (size_t k = 0; k < values.size(); ++k) reinterpret_cast<E*>(to)[k] = E(values[k]);
}

void store_row(const std::vector<float>& values, RowType type, char* to) {
  if (type == RowType::kFloat16) return store_as<torch::headeronly::Half>(values, to);
  if (type == RowType::kBFloat16) return store_as<torch::headeronly::BFloat16>(values, to);
  std::memcpy(to, values.data(), values.size() * sizeof(float));
}

void begin_state(float* state, StateWidth width, int64_t slot, int64_t dim, float value) {
  if (width == StateWidth::kNone) return;
  const int64_t columns = width == StateWidth::kPerRow ? 1 : dim;
  std::fill_n(state + slot * columns, columns, value);
}

// One column piece of a row.
void begin_piece(const Context& context, const RowRules& rules, const Table& table,
                 const NewRow& row, std::vector<float>& values) {
  const int64_t home = locate(table.home, row.row);
  const int32_t owner = table.owner_of(home);
  const int64_t slot = home - table.owner_begin[owner];
  values.clear();
  const auto put = [&](char* to) {
    if (values.empty()) {
      values.resize(static_cast<size_t>(table.dim));
      draw_row(row.key, rules.seed, table.first_column, table.first_column + table.dim,
               rules.bound, values.data());
    }
    store_row(values, table.row_type, to);
  };
  if (owner == context.rank) {
    put(table.rows + slot * table.row_bytes());
    begin_state(table.momentum1, rules.widths[0], slot, table.dim, rules.first_state);
    begin_state(table.momentum2, rules.widths[1], slot, table.dim, 0.0f);
  }
  for (const Refresh& part : context.refreshes)
    if (part.table == table.index && part.owner == owner && part.replicas != nullptr &&
        part.slot_begin <= slot && slot < part.slot_end)
      put(part.replicas +
          (part.first + (slot - part.slot_begin) * part.stride) * table.row_bytes());
}

}  // namespace

void draw_row(int64_t key, uint64_t seed, int64_t begin, int64_t end, float bound, float* out) {
  Philox4 bits{};
  for (int64_t k = begin; k < end; ++k) {
    if (k == begin || k % 4 == 0)
      bits = draw_bits(seed, static_cast<uint64_t>(key), static_cast<uint32_t>(k / 4), kRowDraw);
    *out++ = (static_cast<float>(bits.word[k % 4] >> 8) * (1.0f / 8388608.0f) - 1.0f) * bound;
  }
}

void begin_rows(const Context& context, const RowRules& rules, const NewRow* rows, int64_t n) {
  std::vector<const Table*> pieces;
  for (const Feature& feature : context.features)
    if (feature.logical == rules.feature) pieces.push_back(&context.tables[feature.table]);
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i)
    if (rows[i].row > 0)
      for (const Table* piece : pieces) begin_piece(context, rules, *piece, rows[i], values);
}

}  // namespace oper::host
