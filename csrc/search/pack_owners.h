// The choice of ranks as owners of pieces, and the initial placement of pieces.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "search/pack_layouts.h"
#include "search/pack_state.h"

namespace oper::search {

constexpr int kDrawn = 12;        // ranks drawn; the best is used: 4 were too few, 32 no better
constexpr double kNear = 0.75;    // share of moves to hosts that own other column pieces, see `near_`

class PackOwners : protected PackState {
 protected:
  using PackState::PackState;

  // `kept_busy_` has the ranks' times of the accepted state, `busy_` those of the evaluated one.
  void keep_busy() {
    std::swap(busy_, kept_busy_);
    std::fill(busiest_.begin(), busiest_.end(), -1);
  }
  int64_t busiest(int64_t ph) {
    if (busiest_[ph] < 0) {
      const float* busy = &kept_busy_[ph * W];
      busiest_[ph] = std::max_element(busy, busy + W) - busy;
    }
    return busiest_[ph];
  }

  // The cost of a small additional load on a rank: the sum over the phases of the fourth power of
  // its time without pulled rows, which can be moved elsewhere, as a share of the phase.
  double marginal_cost(int64_t r) const {
    double sum = 0;
    for (int64_t ph = 0; ph < P; ++ph) {
      double b = 0;
      const int64_t c = p_.class_of[r];
      for (int64_t g = ph * groups_; g < (ph + 1) * groups_; ++g)
        b = std::max(b, load_[r * G + g] + every_[c * G + g]);
      const double x = b * scale_[ph];
      sum += x * x * x * x / scale_[ph];
    }
    return sum;
  }

  // Cost of a rank if the loads `more` were added to and `less` removed from it and it was refilled.
  double rank_cost(int64_t r, const double* more, const double* less) const {
    double slope;
    const int64_t c = p_.class_of[r];
    const double share = refills() ? share_up_to_levels(r, more, less, &slope) : double(share_[r]);
    double sum = -share / share_sum_[c] * fill_price_[c];
    for (int64_t ph = 0; ph < P; ++ph) {
      double b = 0;
      for (int64_t g = ph * groups_; g < (ph + 1) * groups_; ++g)
        b = std::max(b, load_[r * G + g] + every_[c * G + g] + share / share_sum_[c] * fill_[c * G + g] +
                            (more[g] - less[g]));
      sum += phase_cost(b, ph);
    }
    return sum;
  }
  // Sets, for each class, the derivative of the cost by a common factor of all shares of pulled rows.
  void price_fill() {
    fill_price_.assign(C, 0.0);
    for (int64_t r = 0; r < W && refills(); ++r) {
      const int64_t c = p_.class_of[r];
      const double share = double(share_[r]) / share_sum_[c];
      for (int64_t ph = 0; ph < P; ++ph) {
        double b = 0, of = 0;
        for (int64_t g = ph * groups_; g < (ph + 1) * groups_; ++g) {
          const double x = load_[r * G + g] + every_[c * G + g] + share * fill_[c * G + g];
          if (x > b) b = x, of = fill_[c * G + g];
        }
        if (b > 0) fill_price_[c] += kPower * phase_cost(b, ph) / b * share * of;
      }
    }
  }
  static constexpr int kPower = 8;  // power in phase_cost: the busiest phase dominates
  double phase_cost(double busy, int64_t ph) const {
    double x = busy * scale_[ph];
    x *= x, x *= x;
    return x * x / scale_[ph];
  }

  // Marginal costs of all ranks, into `marginal_`.
  void price_ranks() {
    marginal_.assign(W, 0.0f), looked_at_.resize(W);
    for (int64_t ph = 0; ph < P; ++ph) {
      look_at_phase(ph, looked_at_.data(), false);
      add_fourth_powers(looked_at_.data(), scale_[ph], W, marginal_.data());
    }
    for (const int64_t r : saved_rank_) marginal_[r] = float(marginal_cost(r));  // changed by this move
  }

  // Whether a move looks for ranks on hosts that own pieces of part `k`: often, if the owners of its column
  // pieces send each other sums of squares and it has at least `least` pieces.
  bool stays_near(int64_t k, size_t least) {
    return sends_squares(k) && of_table_[k].size() >= least && random_.unit() < near_;
  }
  // A random rank for the i-th owner of a piece of part `k`. If `near`, it is on the host of the i-th
  // owner of one of the pieces: i-th owners of pieces with equal weights have the same rows.
  int64_t draw_rank(int64_t k, int i, bool near) {
    if (!near) return random_.below(W);
    const auto& family = of_table_[k];
    const Piece& x = pieces_[family[random_.below(int64_t(family.size()))]];
    const auto& ranks = ranks_on_[p_.host_of[x.rank[i < x.owners ? i : random_.below(x.owners)]]];
    return ranks[random_.below(int64_t(ranks.size()))];
  }

  // The cheapest of several drawn ranks that may own table `k` and do not, for the i-th owner of a piece;
  // -1 if there is none.
  int64_t pick_rank(int64_t k, int i) {
    int64_t best = -1;
    double least = 0;
    const bool near = stays_near(k, 1);
    for (int n = 0; n < kDrawn; ++n) {
      const int64_t r = draw_rank(k, i, near);
      if (!free_for(k, r) || r == best) continue;
      const double h = marginal_cost(r);
      if (best < 0 || h < least) best = r, least = h;
    }
    return best;
  }

  // Add owners of weight 1 to a piece until it has `wanted` or none is found.
  void pick_owners(Piece& x, int wanted) {
    while (x.owners < wanted) {
      const int64_t r = pick_rank(x.table, x.owners);
      if (r < 0 || std::find(x.rank, x.rank + x.owners, int(r)) != x.rank + x.owners) return;
      x.add_owner(r, 1);
    }
  }

  // A random piece, often of the busiest rank of a phase and of a large table; -1 if the rank drawn has
  // none.
  int pick_piece() {
    if (pieces_.size() == free_.size()) return -1;
    const int64_t r = random_.unit() < 0.5 ? busiest(random_.below(P)) : random_.below(W);
    const auto& list = on_rank_[r];
    if (list.empty()) return -1;
    const auto any = [&] { return list[random_.below(int64_t(list.size()))]; };
    const auto place = [&](int id) { return place_[pieces_[id].table % whole_]; };
    const int id = any(), other = random_.unit() < kLarge ? any() : id;
    return place(other) < place(id) ? other : id;
  }

  // Divides part `k` into pieces of `width` columns with `owners` owners each, on the cheapest ranks;
  // where the owners send each other sums of squares, see `prefer_hosts`. Returns false if there are more
  // pieces than ranks that may own them.
  bool construct(int64_t k, int width, int owners) {
    int left = int(width_[k]);
    if (!p_.may_split[k]) width = left;
    width = std::clamp((width + kColumnStep - 1) / kColumnStep * kColumnStep, kMinColumns, 1 << 20);
    const auto unsure = [&] { return float(1 + 0.02 * random_.unit()); };
    price_ranks();
    for (float& x : marginal_) x *= unsure();
    auto& order = order_;
    while (left > 0) {
      Piece x;
      x.table = int(k);
      x.width = left - width < kMinColumns ? left : width;
      order.clear();
      for (int64_t r = 0; r < W; ++r)
        if (free_for(k, r)) order.push_back({marginal_[r], int32_t(r)});
      if (order.empty()) return false;
      std::sort(order.begin(), order.end());
      if (near_ > 0 && sends_squares(k) && width < width_[k]) prefer_hosts(k, owners);
      for (int i = 0; i < owners && i < int(order.size()); ++i) x.add_owner(order[i].second, 1);
      insert(x);
      const auto price = [&](int64_t r) { marginal_[r] = float(marginal_cost(r)) * unsure(); };
      for (int i = 0; i < x.owners; ++i) {
        price(x.rank[i]);
        for (int64_t n = p_.mate_first[x.rank[i]]; n < p_.mate_first[x.rank[i] + 1]; ++n) price(p_.mates[n]);
      }
      left -= x.width;
    }
    return true;
  }

  // Moves the ranks for the `owners` owners of the next piece of part `k` to the front of `order_`, which
  // is sorted by cost. The i-th owners of all pieces, which have the same rows, are on one host where
  // possible: the i-th owner of the first piece is the cheapest rank on a host without an owner, which
  // leaves the host's other ranks for the next pieces.
  void prefer_hosts(int64_t k, int owners) {
    const Piece* last = of_table_[k].empty() ? nullptr : &pieces_[of_table_[k].back()];
    const auto host_of = [&](const auto& entry) { return p_.host_of[entry.second]; };
    for (int i = 0; i < owners && i < int(order_.size()); ++i) {
      const auto begin = order_.begin() + i;
      const auto fits = [&](const auto& entry) {
        if (last != nullptr) return i < last->owners && host_of(entry) == p_.host_of[last->rank[i]];
        return std::none_of(order_.begin(), begin,
                            [&](const auto& taken) { return host_of(taken) == host_of(entry); });
      };
      const auto at = std::find_if(begin, order_.end(), fits);
      if (at != order_.end()) std::rotate(begin, at, at + 1);
    }
  }

  // Layouts of the tables in the relaxed solution.
  std::vector<Layout> relaxed_layouts() const {
    std::vector<Layout> out;
    for (int64_t k = 0; k < whole_; ++k) {
      const int64_t columns = p_.part_width[k];
      const uint8_t* may = p_.may + k * W;
      const int64_t owner = std::min<int64_t>(std::find(may, may + W, 1) - may, W - 1);
      out.push_back({p_.candidate[k], p_.may_split[k] ? std::min(p_.first_width[k], columns) : columns,
                     std::clamp<int64_t>(p_.first_owners[k], 1, max_owners(k)), p_.class_of[owner]});
    }
    return out;
  }
  // Layouts annealed from the relaxed solution, see pack_layouts.h.
  template <class IsOver>
  std::vector<Layout> annealed_layouts(int64_t moves, const IsOver& is_over) {
    std::vector<int64_t> most;
    for (int64_t k = 0; k < whole_; ++k) most.push_back(max_owners(k));
    return Layouts(p_, between_pieces_, relaxed_layouts(), std::move(most), random_).anneal(moves, is_over);
  }

  // Starts a new state with the pieces of `layouts`, [tables].
  void construct_all(const std::vector<Layout>& layouts) {
    initial_.resize(T);
    for (int64_t k = 0; k < T; ++k) initial_[k] = layouts[k % whole_].candidate;
    reset(initial_.data(), p_.part_width, std::vector<float>(W, 1.0f));
    begin_move();
    for (int64_t ph = 0; ph < P; ++ph) scale_[ph] = float(1.0 / std::max(1e-9, p_.level[ph]));
    for (int64_t i = 0; i < whole_; ++i) {  // second parts are empty
      const int64_t k = p_.order[i];
      if (!pushes(k)) continue;
      int width = int(layouts[k].width);
      while (!construct(k, width, int(layouts[k].owners))) {  // more pieces than ranks: make them wider
        while (!of_table_[k].empty()) erase(of_table_[k].back());
        width *= 2;
      }
    }
    finish_move();
    refill_all();
  }

  int max_owners(int64_t k) const {
    // A table that may not be pushed has no rank that may own pieces, and is not pushed.
    return p_.may_stripe[k] ? int(std::clamp<int64_t>(p_.num_may[k], 1, kMaxOwners)) : 1;
  }

  std::vector<double> fill_price_;  // by class, see price_fill
  std::vector<float> marginal_, looked_at_;  // by rank
  // Half of the searches keep the owners of a table's column pieces near each other. For some problems
  // sums of squares cost less than the moves that this leaves out.
  const double near_ = random_.unit() < 0.5 ? kNear : 0.0;
  std::vector<std::pair<float, int32_t>> order_;
  std::vector<int64_t> initial_;  // candidates at the start of the search
};

}  // namespace oper::search
