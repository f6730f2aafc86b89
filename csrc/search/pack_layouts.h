// Simulated annealing over the layouts of all tables, without assigning pieces to ranks; its results are
// initial states of the search in pack.cpp.
//
// A good layout of one table depends on the layouts of all others, and the moves of that search, which
// change one table at a time, do not lead from one good combination to another. Here, pieces are assumed
// to be packed evenly: then a phase lasts as long as the mean load of the ranks, or as the load of a
// rank that owns the largest piece and no pulled rows (and reads rows), whichever is longer. Annealing
// minimises the sum of these times over the phases.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "search/pack_state.h"

namespace oper::search {

// How a table is divided: its candidate (which rows are pushed), columns per piece, and owners of
// each piece.
struct Layout {
  int64_t candidate = 0, width = 0, owners = 1;
  int64_t owner_class = 0;  // class of the ranks that own the table's pieces
};

class Layouts {
 public:
  // `layouts`: the initial ones, [tables]; `most_owners`: limits of the owners of a piece, [tables].
  Layouts(const OperPacking& p, const SquaresBetweenPieces& between_pieces, std::vector<Layout> layouts,
          std::vector<int64_t> most_owners, Random& random)
      : p_(p), between_pieces_(between_pieces), layouts_(std::move(layouts)),
        most_owners_(std::move(most_owners)), random_(random) {
    const int64_t n = p.num_classes * p.num_loads;
    size_.assign(p.num_classes, 0.0), base_.assign(n, 0.0), first_rank_.assign(p.num_classes, 0);
    for (int64_t r = p.num_ranks - 1; r >= 0; --r) size_[p.class_of[r]] += 1, first_rank_[p.class_of[r]] = r;
    for (int64_t r = 0; r < p.num_ranks; ++r)
      for (int64_t g = 0; g < p.num_loads; ++g)
        base_[p.class_of[r] * p.num_loads + g] += p.base[r * p.num_loads + g] / size_[p.class_of[r]];
    for (const int64_t r : first_rank_) {
      const auto alike = [&](const int64_t* of) { return double(std::count(of, of + p.num_ranks, of[r])); };
      on_host_.push_back(alike(p.host_of)), in_domain_.push_back(alike(p.domain_of));
    }
    of_table_.assign(size_t(p.num_tables), Loads(n));
    changed_ = trial_ = total_ = Loads(n);
    total_.mean = total_.reader = base_;
    for (int64_t k = 0; k < p.num_tables; ++k) {
      set_loads(k, layouts_[k], changed_);
      total_.exchange(total_, of_table_[k], changed_);
      std::swap(of_table_[k], changed_);
    }
    largest_.resize(n);
    for (int64_t i = 0; i < n; ++i) find_largest(i);
  }

  // Tries `moves` changes, or fewer if `is_over()` becomes true, and returns the layouts reached.
  template <class IsOver>
  const std::vector<Layout>& anneal(int64_t moves, const IsOver& is_over) {
    const double each = 1.0 / double(std::max<int64_t>(p_.num_tables, 1));
    const double hot = kHot * each, cold = std::min(kCold * each, kMostCold);
    double known = step(total_, -1), cooled = hot;
    for (int64_t i = 0; i < moves && p_.num_tables > 0; ++i) {
      if (i % 64 == 0) cooled = hot * std::pow(cold / hot, double(i) / double(moves));
      if (i % 1024 == 0 && is_over()) break;
      const int64_t k = random_.below(p_.num_tables);
      const Layout old = layouts_[k];
      if (!change(k, layouts_[k])) {
        layouts_[k] = old;
        continue;
      }
      set_loads(k, layouts_[k], changed_);
      trial_.exchange(total_, of_table_[k], changed_);
      const double found = step(trial_, k);
      if (found <= known || random_.unit() < std::exp((known - found) / (known * cooled))) {
        std::swap(of_table_[k], changed_);
        std::swap(total_, trial_);
        known = found;
        update_largest(k);
      } else {
        layouts_[k] = old;
      }
    }
    return layouts_;
  }

 private:
  // First and last temperature, as shares of the step time per table; the last is at most kMostCold of the
  // step time. Lower temperatures would improve layouts by less than the error of assuming even packing.
  static constexpr double kHot = 0.3, kCold = 0.01, kMostCold = 1e-4;

  // By class and load: mean over the class's ranks; the part of it that ranks without pieces and pulled rows
  // also have; and, of one table only, a piece on one of its owners.
  struct Loads {
    std::vector<double> mean, reader, piece;
    Loads() = default;
    explicit Loads(int64_t n) : mean(n, 0.0), reader(n, 0.0), piece(n, 0.0) {}
    void exchange(const Loads& total, const Loads& old, const Loads& now) {  // total - old + now
      for (size_t i = 0; i < mean.size(); ++i) {
        mean[i] = total.mean[i] + (now.mean[i] - old.mean[i]);
        reader[i] = total.reader[i] + (now.reader[i] - old.reader[i]);
      }
    }
  };

  // The tables with the largest and second largest pieces by one load; the second may be missing (-1).
  struct Largest {
    int64_t first = -1, second = -1;
  };
  double piece(int64_t k, size_t i) const { return k < 0 ? 0.0 : of_table_[k].piece[i]; }
  void rank(int64_t k, size_t i) {  // among the largest so far
    Largest& x = largest_[i];
    if (x.first < 0 || piece(k, i) > piece(x.first, i))
      x.second = x.first, x.first = k;
    else if (piece(k, i) > piece(x.second, i))
      x.second = k;
  }
  void find_largest(size_t i) {
    largest_[i] = {};
    for (int64_t k = 0; k < p_.num_tables; ++k) rank(k, i);
  }
  void update_largest(int64_t k) {  // after table k has changed
    for (size_t i = 0; i < largest_.size(); ++i)
      if (largest_[i].first == k || largest_[i].second == k)
        find_largest(i);
      else
        rank(k, i);
  }

  // The step time if pieces are packed evenly, with a penalty for memory beyond the capacity; `total` has
  // the loads of all tables, where those of table `changed` are in `changed_`.
  double step(const Loads& total, int64_t changed) const {
    const int64_t G = p_.num_loads;
    const auto load = [&](int64_t at) {
      const Largest& of = largest_[at];
      double most = piece(of.first == changed ? of.second : of.first, at);
      if (changed >= 0) most = std::max(most, changed_.piece[at]);
      return std::max(total.mean[at], total.reader[at] + most);
    };
    double sum = 0, over = 0;
    for (int64_t begin = 0; begin < G - 1; begin += p_.num_groups) {
      double most = 0;
      for (int64_t c = 0; c < p_.num_classes; ++c)
        for (int64_t g = begin; g < begin + p_.num_groups; ++g) most = std::max(most, load(c * G + g));
      sum += most;
    }
    for (int64_t c = 0; c < p_.num_classes; ++c) over = std::max(over, load(c * G + G - 1) - 1.0);
    return sum * (1 + kOverflow * over);
  }

  bool pushes(int64_t k, const Layout& x) const { return p_.pushes[p_.first[k] + x.candidate]; }

  // Changes a table's layout at random; returns false if it is equal or not allowed afterwards.
  bool change(int64_t k, Layout& x) {
    const Layout old = x;
    const int64_t columns = p_.part_width[k];
    do {
      const double u = random_.unit();
      if (u < 0.4 || !pushes(k, x)) {
        x.candidate = random_.unit() < 0.5 ? random_.below(p_.num_candidates[k])
                                           : x.candidate + (random_.unit() < 0.5 ? -1 : 1);
        x.candidate = std::clamp<int64_t>(x.candidate, 0, p_.num_candidates[k] - 1);
      } else if (u < 0.7 && p_.may_split[k]) {
        const int64_t pieces = (columns + x.width - 1) / x.width, most = columns / kMinColumns;
        const int64_t next = random_.unit() < 0.5 ? pieces + (random_.unit() < 0.5 ? -1 : 1)
                                                  : 1 + random_.below(2 * pieces);
        const int64_t wanted = std::clamp<int64_t>(next, 1, most);
        const int64_t steps = (columns + wanted * kColumnStep - 1) / (wanted * kColumnStep);
        x.width = std::min(steps * kColumnStep, columns);
      } else if (u < 0.9) {
        const int64_t next = random_.unit() < 0.5 ? x.owners + (random_.unit() < 0.5 ? -1 : 1)
                                                  : 1 + random_.below(2 * x.owners);
        x.owners = std::clamp<int64_t>(next, 1, most_owners_[k]);
      } else {
        x.owner_class = random_.below(p_.num_classes);
      }
    } while (random_.unit() < 0.25);
    if (pushes(k, x) && !p_.may[k * p_.num_ranks + first_rank_[x.owner_class]]) return false;
    return x.candidate != old.candidate || x.width != old.width || x.owners != old.owners ||
           x.owner_class != old.owner_class;
  }

  // Sets `to` to the loads of table k with layout x.
  void set_loads(int64_t k, const Layout& x, Loads& to) const {
    const int64_t C = p_.num_classes, G = p_.num_loads, n = p_.first[k] + x.candidate, c = x.owner_class;
    const double columns = double(p_.part_width[k]), owners = double(x.owners);
    const bool pushed = p_.pushes[n];
    const double pieces = pushed ? std::ceil(columns / double(x.width)) : 1.0;
    const double* sums = p_.sums + n * (p_.num_shares + 1);
    const double at = double(p_.num_shares) / owners;
    const int64_t low = std::min<int64_t>(int64_t(at), p_.num_shares - 1);
    const double each = sums[low] + (at - double(low)) * (sums[low + 1] - sums[low]);
    const double sent = columns * owners * each, asks = x.owners > 1 || !p_.whole[n] ? 1.0 : 0.0;
    std::fill(to.piece.begin(), to.piece.end(), 0.0);
    for (int64_t d = 0; d < C; ++d)
      for (int64_t g = 0; g < G; ++g) {
        const int64_t i = d * G + g, stay = (n * C + d) * G + g, read = ((n * C + c) * C + d) * G + g;
        to.reader[i] = columns * p_.stay[stay] + pieces * p_.stay_once[stay];
        if (pushed)
          to.reader[i] += columns * p_.column_read[read] + pieces * p_.stream_read[read] +
                          sent * p_.partial_read[read];
        to.mean[i] = to.reader[i] + (columns * p_.fill[stay] + pieces * p_.fill_once[stay]) / size_[d];
      }
    if (!pushed) return;
    const int64_t of = (n * C + c) * G, begin = p_.mate_first[first_rank_[c]],
                  end = p_.mate_first[first_rank_[c] + 1];
    // Sums of squares between column pieces, if as many owners of a row as possible are in one domain, and
    // as many as possible on one host.
    const double squares = pieces * (pieces - 1) * p_.squares[n] * between_pieces_.share_of_pair(pieces);
    const double on_host = std::min(1.0, on_host_[c] / pieces);
    const double in_domain = std::min(1.0, in_domain_[c] / pieces);
    for (int64_t g = 0; g < G; ++g) {
      double all = columns * p_.column[of + g] + pieces * p_.stream[of + g] + sent * p_.partial[of + g] +
                   asks * pieces * p_.asked[n * G + g] +
                   squares * ((on_host - in_domain) * p_.square_link[c * G + g] +
                              (1 - on_host) * p_.square_cross[c * G + g]);
      to.piece[c * G + g] = std::max(0.0, all / (pieces * owners));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t mate = ((n * kLevels + p_.mate_level[i]) * C + c) * G + g;
        all += columns * p_.column_mate[mate] + pieces * p_.stream_mate[mate] + sent * p_.partial_mate[mate];
      }
      to.mean[c * G + g] += all / size_[c];
    }
  }

  const OperPacking& p_;
  const SquaresBetweenPieces& between_pieces_;
  std::vector<Layout> layouts_;
  const std::vector<int64_t> most_owners_;
  Random& random_;
  std::vector<double> size_, base_;
  // By class: number of ranks on the host, and in the domain, of its first rank.
  std::vector<double> on_host_, in_domain_;
  std::vector<Largest> largest_;  // by class and load
  std::vector<int64_t> first_rank_;
  std::vector<Loads> of_table_;
  Loads total_, trial_, changed_;
};

}  // namespace oper::search
