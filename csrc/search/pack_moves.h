// The neighbourhoods of the search (moves between states).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "search/pack_owners.h"

namespace oper::search {

constexpr double kRelevel = 0.02;  // relative range of the random changes of levels
constexpr double kSide = 0.5;     // least share of the initially pushed rows, see is_on_its_side

class PackMoves : protected PackOwners {
 protected:
  explicit PackMoves(OperPacking& p) : PackOwners(p) {
    for (int64_t k = 0; k < whole_; ++k)
      for (int64_t i = 0; i < p.num_candidates[k]; ++i) {
        const int64_t n = p.first[k] + i;
        const double* x = p.column + n * C * G;
        pushed_.resize(std::max<size_t>(pushed_.size(), size_t(n + 1)));
        pushed_[n] = p.pushes[n] ? *std::max_element(x, x + C * G) : 0.0;
      }
  }

  // Makes a random move; returns false if it is not possible.
  bool propose() {
    const double u = random_.unit();
    if (u < 0.10) return change_tiers();
    if (u < 0.13) return change_columns();
    if (u < 0.15) return relevel();
    if (u < 0.22) return transfer();
    const int id = pick_piece();
    if (id < 0) return change_tiers();
    if (u < 0.50) return exchange(id);
    if (u < 0.75) return shift(id);
    if (u < 0.83) return split(id);
    if (u < 0.88) return merge(id);
    if (u < 0.92) return reassign_all(id);
    return reassign(id);
  }

  // Move an owner's part to another rank, or swap it with a part of another table on that rank; of
  // several drawn candidates, the one with the least cost for both ranks.
  bool exchange(int id) {
    const Piece& x = pieces_[id];
    const int i = int(random_.below(x.owners));
    const int64_t from = x.rank[i], home = p_.class_of[from];
    int64_t to = -1;
    int partner = -1;
    double least = 0;
    owned_.resize(4 * G);
    // Loads of the part, and of the part it is swapped with, on a rank of either class.
    const double* mine = owned(x, i, home, &owned_[0]);
    const double before = rank_cost(from, &none_[0], &none_[0]);
    const bool near = stays_near(x.table, 2);
    for (int n = 0; n < kDrawn; ++n) {
      const int64_t r = draw_rank(x.table, i, near), c = p_.class_of[r];
      if (!free_for(x.table, r)) continue;
      int other = -1;
      const double *there = c == home ? mine : owned(x, i, c, &owned_[G]), *his = &none_[0], *here = his;
      if (const auto& list = on_rank_[r]; n % 2 && !list.empty()) {
        other = list[random_.below(int64_t(list.size()))];
        const Piece& y = pieces_[other];
        if (y.table == x.table || !free_for(y.table, from)) continue;
        his = owned(y, owner_of(y, r), c, &owned_[2 * G]);
        here = c == home ? his : owned(y, owner_of(y, r), home, &owned_[3 * G]);
      }
      const double cost = rank_cost(from, here, mine) - before + rank_cost(r, there, his) -
                          rank_cost(r, &none_[0], &none_[0]);
      if (to < 0 || cost < least) to = r, partner = other, least = cost;
    }
    if (to < 0) return false;
    Piece moved = x;
    moved.rank[i] = uint16_t(to);
    if (partner >= 0) {
      Piece y = pieces_[partner];
      y.rank[owner_of(y, to)] = uint16_t(from);
      replace(partner, y);
    }
    replace(id, moved);
    return true;
  }
  static int owner_of(const Piece& x, int64_t r) {
    return int(std::find(x.rank, x.rank + x.owners, uint16_t(r)) - x.rank);
  }

  void widen(int id, int columns) {
    Piece x = pieces_[id];
    x.width += columns;
    replace(id, x);
  }

  int columns(int most) {  // to shift or split off, mostly in small steps
    if (most < kColumnStep) return 0;
    const int steps = most / kColumnStep;
    const int fine = int(random_.below(std::min(steps, 4))) + 1;
    return kColumnStep * (random_.unit() < 0.7 ? fine : int(random_.below(steps)) + 1);
  }

  // Moves columns from a piece to another one of its part.
  bool shift(int id) {
    Piece x = pieces_[id];
    const auto& family = of_table_[x.table];
    if (family.size() < 2 || !p_.may_split[x.table]) return false;
    const int other = family[random_.below(int64_t(family.size()))];
    if (other == id) return false;
    Piece y = pieces_[other];
    const int d = columns(x.width - kMinColumns);
    if (d == 0) return false;
    x.width -= d, y.width += d;
    replace(id, x), replace(other, y);
    return true;
  }

  // Makes some columns of a piece a new piece, on other owners.
  bool split(int id) {
    Piece x = pieces_[id];
    if (!p_.may_split[x.table] || x.width < 2 * kMinColumns) return false;
    const int d = kMinColumns - kColumnStep + columns(x.width - 2 * kMinColumns + kColumnStep);
    if (d < kMinColumns || x.width - d < kMinColumns) return false;
    Piece y = x;
    y.owners = 0, y.total = 0;
    const int wanted = random_.unit() < 0.5 ? x.owners : 1;
    pick_owners(y, wanted);
    if (y.owners < wanted) return false;
    if (wanted == x.owners) std::copy(x.weight, x.weight + wanted, y.weight), y.total = x.total;
    x.width -= d, y.width = d;
    replace(id, x), insert(y);
    return true;
  }

  // Gives all columns of a piece to another one of its part.
  bool merge(int id) {
    const auto& family = of_table_[pieces_[id].table];
    if (family.size() < 2) return false;
    const int other = family[random_.below(int64_t(family.size()))];
    if (other == id) return false;
    widen(other, pieces_[id].width);
    erase(id);
    return true;
  }

  // Changes the owners of a piece or their weights.
  bool reassign(int id) {
    Piece x = pieces_[id];
    const int most = max_owners(x.table);
    if (most == 1) return false;
    const int i = int(random_.below(x.owners));
    switch (random_.below(5)) {
      case 0: {  // one more owner
        const int64_t r = pick_rank(x.table, x.owners);
        if (r < 0 || x.owners == most) return false;
        x.add_owner(r, 1 + int(random_.below(x.weight[i])));
        break;
      }
      case 1:  // one owner less
        if (x.owners == 1) return false;
        x.drop_owner(i);
        break;
      case 2: {  // shift weight
        if (x.owners == 1) return false;
        const int j = int(random_.below(x.owners));
        if (i == j || x.weight[i] == 1) return false;
        --x.weight[i], ++x.weight[j];
        break;
      }
      case 3: {  // swap two owners, which changes who has the hottest rows
        if (x.owners == 1) return false;
        const int j = int(random_.below(x.owners));
        if (i == j) return false;
        std::swap(x.rank[i], x.rank[j]), std::swap(x.weight[i], x.weight[j]);
        break;
      }
      default: {  // finer weights
        const int scale = random_.unit() < 0.5 ? 2 : 3;
        if (x.owners == 1 || x.total * scale > kMaxWeight) return false;
        for (int j = 0; j < x.owners; ++j) x.weight[j] *= scale;
        x.total *= scale;
        const int j = int(random_.below(x.owners));
        if (i == j || x.weight[i] == 1) return false;
        --x.weight[i], ++x.weight[j];
      }
    }
    if (x.total > kMaxWeight) return false;
    replace(id, x);
    return true;
  }

  // Adds an owner to every piece of a table, or removes one. The length of a phase is often
  // determined by the largest shares of several pieces, so that changing only one of them would
  // gain nothing.
  bool reassign_all(int id) {
    const int k = pieces_[id].table, most = max_owners(k);
    if (most == 1) return false;
    const bool more = random_.unit() < 0.5;
    const std::vector<int> family = of_table_[k];
    for (const int one : family) {
      Piece x = pieces_[one];
      if (more) {
        const int64_t r = pick_rank(k, x.owners);
        const int weight = (x.total + x.owners / 2) / x.owners;
        if (r < 0 || x.owners == most || x.total + weight > kMaxWeight) return false;
        x.add_owner(r, weight);
      } else {
        if (x.owners == 1) return false;
        x.drop_owner(int(random_.below(x.owners)));
      }
      replace(one, x);
    }
    return true;
  }

  // Sets the levels near the present times of the phases, at random, and refills all ranks.
  bool relevel() {
    if (!refills()) return false;
    for (int64_t ph = 0; ph < P; ++ph)
      level_[ph] = double(kept_busy_[ph * W + busiest(ph)]) * (1 + kRelevel * (random_.unit() - 0.5));
    refill_all();
    return true;
  }

  // Another candidate of a table, or `now`; in half of the cases an adjacent one.
  int64_t other_candidate(int64_t k, int64_t now) {
    int64_t next = random_.below(p_.num_candidates[k]);
    if (random_.unit() < 0.5)
      next = std::clamp<int64_t>(now + (random_.unit() < 0.5 ? -1 : 1), 0, p_.num_candidates[k] - 1);
    return is_held_ && !is_on_its_side(k, next) ? now : next;
  }

  // Whether a candidate pushes about as many rows as the initial one, or none if the initial one
  // pushes none. At high temperatures a search would decide this for large tables early, and worse
  // than the relaxation.
  bool is_on_its_side(int64_t k, int64_t candidate) const {
    const double its = pushed_[p_.first[k] + initial_[k]], now = pushed_[p_.first[k] + candidate];
    return its > 0 ? now >= kSide * its : now == 0;
  }

  // Gives a part another candidate.
  bool change_tiers() {
    const int64_t k = pick_part();
    const int64_t candidate = other_candidate(k, candidate_[k]);
    if (candidate == candidate_[k]) return false;
    std::vector<Piece> old;
    while (!of_table_[k].empty()) {
      old.push_back(pieces_[of_table_[k].back()]);
      erase(of_table_[k].back());
    }
    set_candidate(k, candidate);
    if (!pushes(k)) return true;
    for (const Piece& x : old) insert(x);
    return !old.empty() || construct(k, int(width_[k]), int(1 + random_.below(max_owners(k))));
  }

  // Moves columns of one part of a table to its other part.
  bool transfer() {
    const int64_t k = pick_part(), to = partner(k);
    if (T == whole_ || !p_.may_split[k]) return false;
    const bool all = random_.unit() < 0.15, gives = pushes(k), is_new = width_[to] == 0;
    if (all && is_new) return false;
    const int id = gives ? of_table_[k][random_.below(int64_t(of_table_[k].size()))] : -1;
    const int room = gives && !all ? pieces_[id].width : int(width_[k]);
    int d = room;
    if (!all && (!gives || random_.unit() < 0.7)) d = columns(room - kMinColumns);
    if (is_new && d < kMinColumns) d = room >= 2 * kMinColumns ? kMinColumns : room;
    if (d <= 0 || (is_new && (d < kMinColumns || d == width_[k])) ||
        (d < room && room - d < kMinColumns) || (d < width_[k] && width_[k] - d < kMinColumns))
      return false;
    if (all) {
      while (!of_table_[k].empty()) erase(of_table_[k].back());
    } else if (gives && pieces_[id].width == d) {
      erase(id);
    } else if (gives) {
      widen(id, -d);
    }
    set_width(k, width_[k] - d);
    if (is_new) {
      const int64_t candidate = other_candidate(to, candidate_[k]);
      if (candidate == candidate_[k]) return false;
      set_candidate(to, candidate);
    }
    set_width(to, width_[to] + d);
    if (!pushes(to)) return true;
    const auto& family = of_table_[to];
    if (!family.empty() && (d < kMinColumns || random_.unit() < 0.6)) {
      widen(family[random_.below(int64_t(family.size()))], d);
      return true;
    }
    Piece y;
    y.table = int(to), y.width = d;
    pick_owners(y, 1 + int(random_.below(random_.unit() < 0.7 ? 1 : max_owners(to))));
    if (y.owners == 0) return false;
    insert(y);
    return true;
  }

  // Divides a part into pieces again, with another width or number of owners.
  bool change_columns() {
    const int id = random_.unit() < 0.5 ? pick_piece() : -1;
    const int64_t k = id < 0 ? pick_part() : pieces_[id].table;
    if (of_table_[k].empty()) return false;
    const Piece first = pieces_[of_table_[k].front()];
    double count = double(of_table_[k].size());
    if (random_.unit() < 0.5)  // one piece more, or one less
      count = std::max(1.0, random_.unit() < 0.5 ? count + 1 : count - 1);
    else
      count *= std::exp(1.2 * (random_.unit() - 0.5));
    const int width = int(std::clamp(std::ceil(double(width_[k]) / count), 8.0, 1e6));
    const int owners = std::clamp(first.owners + int(random_.below(3)) - 1, 1, max_owners(k));
    while (!of_table_[k].empty()) erase(of_table_[k].back());
    return construct(k, width, owners);
  }

  std::vector<double> owned_;  // loads of pieces' parts
  std::vector<double> pushed_;  // by candidate, largest load of a column on its owner
  bool is_held_ = false;  // whether is_on_its_side limits candidates
};

}  // namespace oper::search
