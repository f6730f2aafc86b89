// Sums of squares of the gradients of rows whose columns are owned by several ranks, see
// Table::squares.
#include <algorithm>
#include <utility>

#include "host/exchange/exchange.h"
#include "host/exchange/squares.h"
#include "host/tasks.h"

namespace oper::host {
namespace {

// The owner of the columns in `piece` of the row at a position, and the row's slot there.
std::pair<int32_t, int64_t> place_in(const Table& piece, int64_t position) {
  const int64_t key = locate_in_tier(piece.home.tiers[tier_of(piece.home, position)], position);
  const int32_t owner = piece.owner_of(key);
  return {owner, key - piece.owner_begin[owner]};
}

// The sum of squares, or the total that has replaced it, in a slot of an owner of `piece`.
float squares_at(const Table& piece, int32_t owner, int64_t slot, int32_t round) {
  const int64_t num_slots = piece.owner_begin[owner + 1] - piece.owner_begin[owner];
  return piece.squares[owner][round * num_slots + slot];
}

// Adds up the sums of all pieces of a row. Column order makes the total the same bit for bit on
// whichever rank computes it.
float sum_of_pieces(const Context& context, const Table& table, int64_t position, int32_t round) {
  float sum = 0.0f;
  for (int32_t p : table.pieces) {
    const auto [owner, slot] = place_in(context.tables[p], position);
    table.counters.add(kSquares, owner, 1);
    sum += squares_at(context.tables[p], owner, slot, round);
  }
  return sum;
}

}  // namespace

float squares_of_row(const Context& context, const Table& table, int64_t slot, int32_t round) {
  const int64_t position = table.position_at(slot);
  if (!context.exchange) return sum_of_pieces(context, table, position, round);
  const int32_t n = static_cast<int32_t>(table.pieces.size());
  const Table& summing = context.tables[table.pieces[summing_piece(position, n)]];
  const auto [owner, owner_slot] = place_in(summing, position);
  table.counters.add(kSquares, owner, 1);
  // If the rank that adds up is in another domain, its reply has replaced this rank's own sum.
  return context.exchange->messages.is_local(owner)
             ? squares_at(summing, owner, owner_slot, round)
             : squares_at(table, context.rank, slot, round);
}

// Slots of this rank for which any rank has a gradient, ascending.
std::vector<uint32_t> Exchange::slots_with_gradients(int64_t t) const {
  const Table& table = context_.tables[t];
  std::vector<uint32_t> slots;
  for (int32_t r = 0; r < context_.world_size; ++r) {
    SendBufferTable* entry = context_.send_buffer_table(r, t);
    const int64_t* begin = entry->begin();
    const uint32_t* in = context_.in_send_buffer<uint32_t>(r, entry->slots_offset);
    slots.insert(slots.end(), in + begin[context_.rank], in + begin[context_.rank + 1]);
    if (table.is_pushed)
      slots.insert(slots.end(), table.pushed[r].slots.begin(), table.pushed[r].slots.end());
  }
  for (const std::vector<PushedRows>& parts : table.left)
    for (size_t k = 0; k < context_.num_left; ++k)
      slots.insert(slots.end(), parts[k].slots.begin(), parts[k].slots.end());
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  return slots;
}

void Exchange::list_squares() {
  run_tasks(context_, static_cast<int64_t>(context_.tables.size()), false,
            [&](int64_t t, Scratch&) {
              const std::vector<int32_t>& pieces = context_.tables[t].pieces;
              // Once for all pieces of a table, since its totals are listed together.
              if (!pieces.empty() && pieces.front() == t) list_squares_of(pieces);
            });
}

// Lists the rows of one table whose sums this rank sends, and those that it adds up.
void Exchange::list_squares_of(const std::vector<int32_t>& pieces) {
  const bool has_round = messages.round() < context_.tables[pieces.front()].rounds_of_squares();
  if (has_round && messages.round() > 0) return;  // the same rows as in the first round
  for (int32_t r : messages.remote)
    for (int32_t p : pieces) {
      SquareLists& lists = pairs_[cell(r, p)].squares;
      lists.sent.clear(), lists.received.clear(), lists.totals.clear();
    }
  Totals& totals = totals_[pieces.front()];
  totals.rows.clear();
  if (!has_round) return;
  const int32_t n = static_cast<int32_t>(pieces.size());
  for (int32_t p : pieces) {
    const Table& table = context_.tables[p];
    for (const uint32_t slot : slots_with_gradients(p)) {
      const int64_t position = table.position_at(slot);
      const int32_t summing = pieces[summing_piece(position, n)];
      if (summing != p) {
        const int32_t owner = place_in(context_.tables[summing], position).first;
        if (!messages.is_local(owner)) pairs_[cell(owner, p)].squares.sent.push_back(slot);
        continue;
      }
      for (int32_t other : pieces) {
        const auto [owner, owner_slot] = place_in(context_.tables[other], position);
        if (messages.is_local(owner)) continue;
        pairs_[cell(owner, other)].squares.received.emplace_back(owner_slot, totals.rows.size());
      }
      totals.rows.emplace_back(p, slot);
    }
  }
  for (int32_t r : messages.remote)
    for (int32_t p : pieces) {
      SquareLists& lists = pairs_[cell(r, p)].squares;
      std::sort(lists.received.begin(), lists.received.end());
      for (const auto& [slot, row] : lists.received) lists.totals.push_back(row);
    }
}

// Replaces this rank's sum of each row that it adds up by the row's total.
void Exchange::add_up_squares() {
  const int32_t round = messages.round();
  run_tasks(context_, static_cast<int64_t>(totals_.size()), false, [&](int64_t t, Scratch&) {
    Totals& totals = totals_[t];
    totals.values.resize(totals.rows.size());
    for (size_t i = 0; i < totals.rows.size(); ++i) {
      const auto [p, slot] = totals.rows[i];
      const Table& table = context_.tables[p];
      totals.values[i] = sum_of_pieces(context_, table, table.position_at(slot), round);
      squares_of(p, context_.rank)[slot] = totals.values[i];
    }
  });
}

}  // namespace oper::host
