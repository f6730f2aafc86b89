// Owners of pushed rows, by simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) over the states of
// pack_state.h. A move changes one or two tables, so that few ranks' loads change, but the whole step
// is looked at again: that is a pass over [loads, ranks] floats.
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

// Temperatures as shares of the energy, times tables and ranks, at which short searches begin: none
// suits all problems. What large pieces become is settled early and never changed again, so that many
// short searches find more than a long one: the best of them go on, and the best of those again
// (successive halving, Jamieson and Talwalkar 2016).
constexpr double kHot[] = {3.2, 1.2, 3.2, 1.2};
constexpr double kHotAgain = 0.005;
constexpr double kShareFirst = 0.5, kShareAgain = 0.25;  // of all moves; the rest is for the best
constexpr double kShareOfFew = 0.67;                     // first, where only one goes on
constexpr double kMovesEach = 1500;  // of a short search, by table, at least
constexpr int64_t kLeastStarts = 4, kMostStarts = 32, kStartsToKeep = 8;  // of so many, one goes on
constexpr double kOtherwise = 0.5;  // of the tables, in two of three
constexpr double kHottest = 0.008, kCold = 2e-5;  // at first at most, and in the end
constexpr double kWorthKeeping = 3e-5;  // of the best step, for which a state is copied

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
    // Where ranks own many pieces each, little is settled early, and much afterwards.
    const double each = kMovesEach * tables * std::max(1.0, tables / double(W));
    const int64_t starts =
        std::clamp(int64_t(kShareFirst * moves / each), kLeastStarts, kMostStarts);
    const int64_t kept = std::max<int64_t>(starts / kStartsToKeep, 1);
    const double share = kept > 1 ? kShareFirst : kShareOfFew;
    std::vector<State> found;
    is_held_ = p_.seed % 2 == 0;  // each suits some problems, and callers try several seeds
    for (int64_t i = 0; i < starts && !over_; ++i) {
      if (i > 0) reset(p_.candidate, p_.part_width, p_.units);
      construct_all(i % 3 == 0 ? 0.0 : kOtherwise);
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
    p_.step = best_.step;
    std::copy(units_.begin(), units_.end(), p_.units);
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
  // What an earlier call wrote.
  State given() const {
    State x;
    x.candidate.assign(p_.candidate, p_.candidate + T), x.width.assign(p_.part_width, p_.part_width + T);
    x.units.assign(p_.units, p_.units + W);
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

  // The best state of one annealing.
  State annealed(double begin, int64_t most) {
    best_.step = std::numeric_limits<double>::infinity();
    anneal(begin, most);
    return best_;
  }

  // Anneal the best `kept` of some states further, and put the best first.
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

  void anneal(double begin, int64_t most) {
    evaluate();
    for (int64_t ph = 0; ph < P; ++ph) scale_[ph] = float(1.0 / std::max(1e-9, peak_[ph]));
    energy_ = evaluate();
    keep_busy();
    if (step_ < best_.step) keep_best();
    over_ |= best_.step <= p_.goal;
    const double hot =
        std::clamp(begin / double(std::max<int64_t>(whole_, 1) * W), 2 * kCold, kHottest);
    double cooled = hot;
    for (int64_t n = 0; n < most && !over_; ++n, ++moves_) {
      if (n % 1024 == 0) {
        const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin_;
        over_ = p_.seconds > 0 && gone.count() > p_.seconds;
        for (int64_t ph = 0; ph < P; ++ph) scale_[ph] = float(1.0 / std::max(1e-9, peak_[ph]));
        energy_ = evaluate();
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
  bool over_ = false;  // the goal is reached, or the time is up
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
