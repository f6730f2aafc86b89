// The loads of a state of the search that come from sums of squares, which the owners of a row's
// columns send each other. Part of pack_state.h.
#pragma once

#include "search/pack_state.h"

namespace oper::search {

inline void PackState::settle_squares(int64_t table) {
  squares_log_.push_back({table, {}});
  std::vector<Squares>& was = squares_log_.back().second;
  std::vector<Squares>& now = squares_[table];
  was.swap(now);
  const int64_t other = T == whole_ ? table : table + whole_;
  const bool both = other != table && width_[table] > 0 && width_[other] > 0;
  const bool are_one = both && candidate_[table] == candidate_[other];
  family_ = of_table_[table];
  if (are_one) family_.insert(family_.end(), of_table_[other].begin(), of_table_[other].end());
  const auto settle_pieces = [&](int64_t k) {  // those in `family_`
    if (family_.size() > 1 && sends_squares(k)) between_pieces_.add(pieces_, family_, square_bytes(k), now);
  };
  // What the owners that part `k` pushes to exchange with the owners of part `with`.
  const auto settle_apart = [&](int64_t k, int64_t with) {
    if (sends_squares(k))
      between_pieces_.add_apart(pieces_, of_table_[k], of_table_[with], pushed_of(with), square_bytes(k), now);
  };
  settle_pieces(table);
  if (other != table) {
    family_ = of_table_[other];
    if (!are_one) settle_pieces(other);
    const bool are_two = both && !are_one;
    settle_parts(table, are_two ? messages_between_parts(table) : 0.0);
    if (are_two) settle_apart(table, other), settle_apart(other, table);
  }
  add_differences(was, now);
}

// Replaces the loads by `was` by those by `now`. A move changes the squares of few of a table's owners; the
// others' loads are left alone, so that they need not be saved, flattened and refilled.
inline void PackState::add_differences(const std::vector<Squares>& was, const std::vector<Squares>& now) {
  double most = 0;
  const auto sum = [&](const std::vector<Squares>& list, double sign) {
    for (const Squares& x : list) {
      Squares& to = difference_[x.rank];
      to.on_host += sign * x.on_host, to.between_hosts += sign * x.between_hosts;
      most = std::max(most, x.on_host + x.between_hosts);
    }
  };
  const auto add = [&](const std::vector<Squares>& list) {
    for (const Squares& x : list) {
      Squares& of = difference_[x.rank];
      if (std::abs(of.on_host) + std::abs(of.between_hosts) > kSquareRounding * most)
        add_squares({x.rank, of.on_host, of.between_hosts});
      of = {};
    }
  };
  sum(was, -1), sum(now, 1);
  add(was), add(now);
}

// What an owner of all of part `k` sends to the owners of another piece.
inline double PackState::square_bytes(int64_t k) const {
  return p_.squares[p_.first[k] + candidate_[k]] * between_pieces_.share_of_pair(pieces_of_table(k));
}

// Number of column pieces of both parts of a part's table.
inline double PackState::pieces_of_table(int64_t k) const {
  const int64_t table = k % whole_, other = table + whole_;
  return pieces_of_part(table) + (T > whole_ && width_[other] > 0 ? pieces_of_part(other) : 0.0);
}

// The share of a table's updated rows that a part with its candidate pushes.
inline double PackState::pushed_of(int64_t k) const {
  const double all = p_.all_squares[k % whole_];
  return all > 0 ? p_.squares[p_.first[k] + candidate_[k]] / all : 0.0;
}

// Sums of squares per row between the owners of the table's two parts, if these have different
// candidates, in multiples of `OperPacking::all_squares`; of those owners that do not push the row.
inline double PackState::messages_between_parts(int64_t table) const {
  const double all = pieces_of_table(table), first = pieces_of_part(table);
  const double pairs = first * (all - first) * between_pieces_.share_of_pair(all);
  return pairs * (2 - pushed_of(table) - pushed_of(table + whole_));
}

// All ranks own equally many of the rows that are not pushed.
inline void PackState::settle_parts(int64_t table, double messages) {
  const double sent = (messages - between_[table]) * p_.all_squares[table] / double(W);
  if (sent == 0) return;
  between_log_.push_back({table, between_[table]});
  between_[table] = messages;
  for (int64_t i = 0; i < C * G; ++i)
    every_[i] += sent * (between_pieces_.on_host * p_.square_link[i] +
                        between_pieces_.between_hosts * p_.square_cross[i]);
}

}  // namespace oper::search
