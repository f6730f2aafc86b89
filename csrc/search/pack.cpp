// Owners of pushed rows, by simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) over the states of
// pack_state.h. A move changes one or two tables, so that only few ranks' loads change, but the entire
// step time is evaluated again, by a pass over [loads, ranks] floats.
#include "search/pack.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "search/pack_moves.h"

namespace oper::search {
namespace {

// Initial temperatures of short searches, as shares of energy x tables x ranks; no single one suits all
// problems. The placement of large pieces is decided early in a search and does not change later, so
// that many short searches find more than a long one. The best of them are continued, and the best of
// those again (successive halving, Jamieson and Talwalkar 2016).
constexpr double kHot[] = {3.2, 1.2, 3.2, 1.2};
constexpr double kHotAgain = 0.005;
constexpr double kShareFirst = 0.5, kShareAgain = 0.25;  // shares of the moves; the best search has the rest
constexpr double kShareOfFew = 0.67;                     // first share, if only one search is continued
constexpr double kMovesEach = 1500;  // least moves of a short search, per table
constexpr int64_t kLeastStarts = 4, kMostStarts = 32, kStartsToKeep = 8;  // one of kStartsToKeep continues
constexpr int64_t kRelaxedOf = 4;  // one in this many short searches starts from the relaxation
// Changes of layouts tried for all short searches: per table, and at least. Twice as many gained little.
constexpr int64_t kChangesEach = 600, kLeastChanges = 60'000;
constexpr double kHottest = 0.008, kCold = 2e-5;  // limit of the initial temperature, and final one
constexpr double kWorthKeeping = 3e-5;  // least improvement of step time for which a state is copied

class Packing : private PackMoves {
 public:
  explicit Packing(OperPacking& p) : PackMoves(p) {}

  void run() {
    begin_ = std::chrono::steady_clock::now();
    if (p_.resumes) {
      restore(given());
      return restore(annealed(kHotAgain * double(W), p_.max_moves));
    }
    const double moves = double(p_.max_moves), tables = double(std::max<int64_t>(whole_, 1));
    // If ranks own many pieces each, most of the placement is decided late.
    const double each = kMovesEach * tables * std::max(1.0, tables / double(W));
    const int64_t starts =
        std::clamp(int64_t(kShareFirst * moves / each), kLeastStarts, kMostStarts);
    const int64_t kept = std::max<int64_t>(starts / kStartsToKeep, 1);
    const double share = kept > 1 ? kShareFirst : kShareOfFew;
    std::vector<State> found;
    const std::vector<Layout> relaxed = relaxed_layouts();
    std::vector<Layout> better;
    const int64_t changes = std::min(p_.max_moves, std::max(kChangesEach * whole_, kLeastChanges));
    is_held_ = p_.seed % 2 == 0;  // either is better for some problems, and callers try several seeds
    for (int64_t i = 0; i < starts && !over_; ++i) {
      if (i % kRelaxedOf == 1)
        better = annealed_layouts(kRelaxedOf * changes / starts, [&] { return is_late(); });
      construct_all(i % kRelaxedOf == 0 ? relaxed : better);
      found.push_back(annealed(kHot[i % int64_t(std::size(kHot))],
                               int64_t(share * moves) / starts));
    }
    is_held_ = false;
    if (kept > 1) go_on(found, kept, int64_t(kShareAgain * moves) / kept);
    go_on(found, 1, p_.max_moves - moves_);
    restore(found[0]);
  }

  void write() {
    p_.moves = moves_;
    if (const double equal = step_with_units(false); step_with_units(true) > equal) step_with_units(false);
    p_.step = step_;
    int64_t n = 0, number = 0;
    for (int64_t k = 0; k < T; ++k) {
      p_.candidate[k] = candidate_[k], p_.part_width[k] = width_[k];
      for (const int id : of_table_[k]) {
        const Piece& x = pieces_[id];
        for (int i = 0; i < x.owners && n < p_.capacity; ++i, ++n) {
          p_.table[n] = k, p_.piece[n] = number, p_.width[n] = x.width;
          p_.rank[n] = p_.rank_of[x.rank[i]], p_.weight[n] = x.weight[i];
        }
        ++number;
      }
    }
    p_.count = n;
  }

 private:
  // The state in the arrays that an earlier call wrote.
  State given() const {
    State x;
    x.candidate.assign(p_.candidate, p_.candidate + T), x.width.assign(p_.part_width, p_.part_width + T);
    x.share = shares_of_units();
    std::vector<int64_t> place(W);
    for (int64_t r = 0; r < W; ++r) place[p_.rank_of[r]] = r;
    for (int64_t n = 0; n < p_.count; ++n) {
      if (n == 0 || p_.piece[n] != p_.piece[n - 1]) {
        x.pieces.emplace_back();
        x.pieces.back().table = int(p_.table[n]), x.pieces.back().width = int(p_.width[n]);
      }
      x.pieces.back().add_owner(place[p_.rank[n]], int(p_.weight[n]));
    }
    return x;
  }

  // Gives the best state shares of pulled rows in units, rounded or all equal; returns its step time.
  double step_with_units(bool rounded) {
    const std::vector<double> sum = sums_by_class(best_.share);
    for (int64_t r = 0; r < W; ++r)
      p_.units[r] = rounded && refills()
                        ? std::llround(double(best_.share[r]) / sum[p_.class_of[r]] * double(units_in_all()))
                        : 1;
    set_shares(shares_of_units());
    evaluate();
    return step_;
  }

  // Shares of pulled rows, in proportion to the units in the arrays.
  std::vector<float> shares_of_units() const {
    std::vector<float> share(p_.units, p_.units + W);
    for (float& x : share) x = std::max(x, kLeastShare);
    return share;
  }

  // Anneal the present state; returns the best state found.
  State annealed(double begin, int64_t most) {
    best_.step = std::numeric_limits<double>::infinity();
    anneal(begin, most);
    return best_;
  }

  // Continue annealing the best `kept` of the states, and sort them, the best first.
  void go_on(std::vector<State>& found, int64_t kept, int64_t moves) {
    const auto faster = [](const State& a, const State& b) { return a.step < b.step; };
    std::stable_sort(found.begin(), found.end(), faster);
    if (int64_t(found.size()) > kept) found.resize(kept);
    for (State& x : found) {
      if (over_) break;
      restore(x);
      State next = annealed(kHotAgain * double(W), moves);
      if (faster(next, x)) x = std::move(next);
    }
    std::stable_sort(found.begin(), found.end(), faster);
  }

  bool is_late() const {
    const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin_;
    return p_.seconds > 0 && gone.count() > p_.seconds;
  }

  void anneal(double begin, int64_t most) {
    evaluate();
    for (int64_t ph = 0; ph < P; ++ph) scale_[ph] = float(1.0 / std::max(1e-9, peak_[ph]));
    energy_ = evaluate();
    keep_busy();
    level_ = peak_;
    scale_levels();
    price_fill();
    if (step_ < best_.step) keep_best();
    over_ |= best_.step <= p_.goal;
    const double hot =
        std::clamp(begin / double(std::max<int64_t>(whole_, 1) * W), 2 * kCold, kHottest);
    double cooled = hot;
    for (int64_t n = 0; n < most && !over_; ++n, ++moves_) {
      if (n % 1024 == 0) {
        over_ = is_late();
        for (int64_t ph = 0; ph < P; ++ph) scale_[ph] = float(1.0 / std::max(1e-9, peak_[ph]));
        energy_ = evaluate();
        price_fill();
      }
      if (n % 64 == 0) cooled = hot * std::pow(kCold / hot, double(n) / double(most));
      step(energy_ * cooled);
      over_ |= best_.step <= p_.goal;
    }
  }

  void step(double temperature) {
    begin_move();
    if (!propose()) {
      finish_move();
      undo();
      return;
    }
    finish_move();
    const double found = evaluate();
    if (found <= energy_ || random_.unit() < std::exp((energy_ - found) / temperature)) {
      energy_ = found;
      keep_busy();
      if (step_ < best_.step * (1 - kWorthKeeping)) keep_best();
    } else {
      undo();
    }
  }

  std::chrono::steady_clock::time_point begin_;
  bool over_ = false;  // the goal is reached, or the time limit has passed
};

}  // namespace
}  // namespace oper::search

extern "C" __attribute__((visibility("default"))) int oper_pack(OperPacking* packing) {
  if (!is_known(*packing)) return 1;
  oper::search::Packing run(*packing);
  run.run();
  run.write();
  return 0;
}
