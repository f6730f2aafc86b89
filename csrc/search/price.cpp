#include "search/clones.h"
#include "search/price.h"
#include "search/sums.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-9;   // up to which an owner that has more than full is full
constexpr double kWhole = 1 - 1e-9;  // mass of an owner that holds a whole piece
constexpr int kMostTurns = 8;        // of their lines
constexpr int64_t kMostParts = 8;  // of the masses of several classes: more say less than other boxes

// to[b] = once[b] + times more[b]
OPER_CLONES void blend(double* __restrict to, const double* once, const double* more, double times,
                       int64_t n) {
  for (int64_t b = 0; b < n; ++b) to[b] = once[b] + times * more[b];
}

// least[b] = min(least[b], cost[b] + weight ids[b])
OPER_CLONES void lower(double* __restrict least, const double* cost, const double* ids,
                       double weight, int64_t n) {
  for (int64_t b = 0; b < n; ++b) {
    const double x = cost[b] + weight * ids[b];
    least[b] = x < least[b] ? x : least[b];
  }
}

// gain[b] -= fixed[b], at most 1e30; returns the sum of what is at most `limit`, and `limit` of others.
OPER_CLONES double spare(double* __restrict gain, const double* fixed, int64_t n, double limit) {
  constexpr int64_t kSums = 8;  // in this order whatever the processor
  double sums[kSums] = {};
  for (int64_t b = 0; b < n; ++b) {
    const double x = gain[b] - fixed[b];
    gain[b] = x < 1e30 ? x : 1e30;
  }
  int64_t b = 0;
  for (; b + kSums <= n; b += kSums)
    for (int64_t i = 0; i < kSums; ++i) sums[i] += gain[b + i] < limit ? gain[b + i] : limit;
  for (int64_t i = 0; b < n; ++b, ++i) sums[i] += gain[b] < limit ? gain[b] : limit;
  double sum = 0;
  for (const double x : sums) sum += x;
  return sum;
}

// Where cost[b] + weight ids[b] is below least[b], it becomes that, and `which` the block's class.
OPER_CLONES void choose(double* __restrict least, int64_t* __restrict classes, const double* cost,
                        const double* ids, double weight, int64_t which, int64_t n) {
  for (int64_t b = 0; b < n; ++b) {
    const double x = cost[b] + weight * ids[b];
    classes[b] = x < least[b] ? which : classes[b];
    least[b] = x < least[b] ? x : least[b];
  }
}

// Of the blocks found in class `which` (0: in any): sum of cost - fixed, and of ids.
OPER_CLONES void picked(const int64_t* found, int64_t which, const double* cost, const double* fixed,
                        const double* ids, int64_t n, double* total, double* mass) {
  constexpr int64_t kSums = 8;  // in this order whatever the processor
  double totals[kSums] = {}, masses[kSums] = {};
  const auto add = [&](int64_t b, int64_t i) {
    const bool in = which > 0 ? found[b] == which : found[b] > 0;
    totals[i] += in ? cost[b] - fixed[b] : 0.0;
    masses[i] += in ? ids[b] : 0.0;
  };
  int64_t b = 0;
  for (; b + kSums <= n; b += kSums)
    for (int64_t i = 0; i < kSums; ++i) add(b + i, i);
  for (int64_t i = 0; b < n; ++b, ++i) add(b, i);
  *total = *mass = 0;
  for (int64_t i = 0; i < kSums; ++i) *total += totals[i], *mass += masses[i];
}

enum Mode : int64_t { kOneTier, kTiers, kAllPushed, kTiersPushed };
enum Pushes : uint8_t { kFree, kStill, kPushes, kPartly, kWholly };

class Pricing {
 public:
  explicit Pricing(OperPricing& p) : p_(p) {}

  // Price one table.
  void table(int64_t k) {
    begin_ = p_.starts[k], n_ = p_.starts[k + 1] - begin_, k_ = k;
    const int64_t M = p_.num_options;
    all_still_ = all_more_ = mass_all_ = 0;
    must_ = false;  // some block may be pushed only, and so may all, as a table's blocks may the same
    for (int64_t b = 0; b < n_; ++b) {
      all_still_ += p_.stay[begin_ + b], all_more_ += p_.stay_more[begin_ + b];
      mass_all_ += p_.ids[begin_ + b];
      must_ |= !std::isfinite(p_.stay[begin_ + b]);
    }
    int64_t num_types = 0;
    for (int64_t m = 0; m < M && p_.pushes[k] != kStill; ++m)
      num_types = std::max(num_types, p_.first[k * M + m + 1] - p_.first[k * M + m]);
    kinds_.assign(2 * num_types, Kind{});
    gain_.resize(n_), order_.resize(n_), slope_.resize(n_);
    const double still = p_.pushes[k] > kStill ? kInfinity : still_cost(1.0);
    // Only what is cheaper than what is known is looked for: most prices of most tables find nothing.
    const double known = p_.known[k];
    best_ = std::min(known, still), best_kind_ = -1, least_ = kInfinity;
    if (M == 1) {
      for (int64_t j = 0; j < num_types; ++j)
        if (mass_of(j, 0) > 0 && std::isfinite(p_.go[begin_])) {  // as all blocks of the table
          if (has(kAllPushed)) all_of_one_class(j);
          if (has(kTiersPushed)) part_of_one_class(j, is_cut() ? kinds_[2 * j].cost : best_);
        }
    } else if (num_types > 0) {
      several(num_types);
    }
    double value = std::min(best_, least_);
    int64_t at = 0;
    if (is_cut() && num_types > 0 && std::isfinite(value)) {
      // More than the cheapest type alone, as pieces are whole; less where a table has to push, and does
      // so in some of its pieces. Types on the way that were passed over are looked at after all.
      double whole = whole_widths();
      for (int64_t i; whole < known && (i = passed_over()) >= 0; whole = whole_widths()) look_at(i);
      if (whole < known) at = path_parts();
      value = std::min(known, whole);
    } else if (best_ < known) {
      at = part(0, 1.0, best_kind_, 1.0);
    }
    p_.value[k] = value;
    p_.num_parts[k] = at;
  }

 private:
  // Pieces of a type, all of whose rows are pushed or some; kind 2 j or 2 j + 1 of type j.
  struct Kind {
    double least = kInfinity;     // no less does the table cost in such pieces
    double cost = kInfinity;      // with the cheapest set of pushed blocks that is known
    bool is_exact = false;        // whether that was looked for, whatever others cost
    std::vector<int64_t> chosen;  // the set, by class
  };
  static int64_t kind_of(int64_t j, Mode mode) { return 2 * j + (mode == kTiersPushed); }

  // Whether such pieces have to be looked at: others may lie beside them where a table is cut.
  bool has(Mode mode) const {
    if (mode == kTiersPushed) return !must_ && p_.pushes[k_] != kWholly;
    return is_cut() || p_.pushes[k_] != kPartly;
  }

  // Where a path through the columns comes from.
  struct Step {
    double cost = kInfinity;
    int64_t width = 0, kind = -1, lane = 0;
    void take(double other, int64_t w, int64_t i, int64_t l) {
      if (other < cost) *this = {other, w, i, l};
    }
  };

  // Cost of the table in pieces that push nothing, of which there would be `streams`.
  double still_cost(double streams) const {
    if (must_) return kInfinity;
    return std::min(p_.one[k_], all_still_ + streams * p_.tiers[k_]) + (streams - 1.0) * (p_.piece + all_more_);
  }

  // Write part `at` of the configuration, pieces of kind i (-1: nothing is pushed); returns at + 1.
  int64_t part(int64_t at, double share, int64_t i, double streams) {
    const int64_t to = k_ * p_.max_parts + at;
    int64_t* chosen = p_.chosen + at * p_.num_blocks + begin_;
    p_.share[to] = share, p_.part_streams[to] = streams, p_.kind[to] = i < 0 ? 0 : i / 2;
    if (i < 0) {
      p_.mode[to] = p_.one[k_] <= all_still_ + streams * p_.tiers[k_] ? kOneTier : kTiers;
      std::fill(chosen, chosen + n_, int64_t{0});
    } else {
      p_.mode[to] = i % 2 ? kTiersPushed : kAllPushed;
      std::copy(kinds_[i].chosen.begin(), kinds_[i].chosen.end(), chosen);
    }
    return at + 1;
  }

  // Keep what is in `chosen_` as the cheapest set of kind i; the cheapest of all kinds as well.
  void keep_set(int64_t i, double cost) {
    kinds_[i].cost = cost, kinds_[i].chosen = chosen_;
    if (cost < best_) best_ = cost, best_kind_ = i;
  }

  // Least id streams of a type of pieces over the classes.
  double streams_of(int64_t j) const {
    double least = kInfinity;
    for (int64_t m = 0; m < p_.num_options; ++m) {
      const int64_t at = type_of(j, m);
      if (at >= 0) least = std::min(least, p_.streams[at]);
    }
    return least;
  }

  // Pieces of type j where all owners are alike and everything is pushed.
  void all_of_one_class(int64_t j) {
    const double streams = streams_of(j), own = streams * p_.own[k_ * p_.num_options];
    double all = sums_cost(j, 0, mass_all_) + (mass_of(j, 0) < kWhole ? own * mass_all_ : 0.0) +
                 (streams - 1.0) * p_.piece;
    for (int64_t b = 0; b < n_; ++b) all += go_of(j, 0, begin_ + b);
    chosen_.assign(n_, 1);
    const int64_t i = kind_of(j, kAllPushed);
    keep_set(i, all);
    kinds_[i].least = all, kinds_[i].is_exact = true;
    least_ = std::min(least_, all);
  }

  // The same where some rows are pushed: a prefix of the blocks by what pushing them costs per id, or so
  // much that owners are full. No block at all stands for the least part of one: that is pushed for the
  // charge alone. Sets that cost more than `limit` are not looked for.
  void part_of_one_class(int64_t j, double limit) {
    const double* ids = p_.ids + begin_;
    const double streams = streams_of(j), own = streams * p_.own[k_ * p_.num_options], full = full_of(j, 0);
    // No set costs less than if every id paid the least share of partial sums: that of all ids, or of
    // a full owner's.
    const double fixed = all_still_ + (streams - 1.0) * (all_more_ + p_.piece) + streams * p_.tiers_pushed[k_];
    const double most = std::min(mass_all_, full);
    const double lowest = most > 0 ? sums_cost(j, 0, most) / most : 0.0;
    double least = fixed;
    for (int64_t b = 0; b < n_; ++b) {
      gain_[b] = go_of(j, 0, begin_ + b) + own * ids[b] - stay_of(streams, begin_ + b);
      least += std::min(0.0, gain_[b] + lowest * ids[b]);
    }
    Kind& kind = kinds_[kind_of(j, kTiersPushed)];
    if (least < limit) {
      double cheapest = limit;
      int64_t end = -1;
      least = kInfinity;
      walk(ids, n_, full, p_.price[0], [&](int64_t count, double found) {
        least = std::min(least, found + fixed);
        if (count >= 0 && found + fixed < cheapest) cheapest = found + fixed, end = count;
      });
      if (end >= 0) {
        chosen_.assign(n_, 0);
        for (int64_t i = 0; i < end; ++i) chosen_[order_[i]] = 1;
        keep_set(kind_of(j, kTiersPushed), cheapest);
        kind.is_exact = true;
      }
    }
    kind.least = least, least_ = std::min(least_, least);
  }

  // Rows of a table may be pushed to several classes of owners. Partial sums f are concave in the mass
  // q of a class's owners from where some number of them is full to where one more is: for q between two
  // masses they cost no less than the chord, or than full owners where one of these lies between, so that
  // blocks choose their class for themselves. Where the set that they choose costs more than the bound, the
  // masses of the class that is most to blame are divided at its own, for which both chords are exact
  // (Falk and Soland 1969).
  void several(int64_t num_types) {
    chosen_.assign(n_, 0), class_.assign(n_, 0), found_.assign(n_, 0);
    for (const Mode mode : {kAllPushed, kTiersPushed})
      if (has(mode)) several_of(num_types, mode);
  }

  void several_of(int64_t num_types, Mode mode) {
    mode_ = mode;
    const bool must = mode == kAllPushed;
    types_.clear();
    for (int64_t j = 0; j < num_types; ++j)
      if (admitted(j)) {
        begin_type(j);
        types_.push_back({offset_ + gains(sides_.data(), begin_, n_, must), j});
      }
    std::sort(types_.begin(), types_.end());  // the most promising first
    for (const auto& [below, j] : types_) {
      limit_ = best_;
      Kind& kind = kinds_[kind_of(j, mode)];
      kind.least = below < best_ - close() ? least_of(j) : below;
      kind.is_exact = kind.cost <= kind.least + close();
      least_ = std::min(least_, kind.least);
    }
  }

  // Look at pieces of kind i whatever others cost.
  void look_at(int64_t i) {
    limit_ = kInfinity, mode_ = i % 2 ? kTiersPushed : kAllPushed;
    if (p_.num_options == 1) part_of_one_class(i / 2, kInfinity);
    else kinds_[i].least = least_of(i / 2);
    kinds_[i].is_exact = true;
  }

  // Least cost of a table in pieces of type j; of sets that cost more than `limit_`, and than those that
  // are known, only so much.
  double least_of(int64_t j) {
    const bool must = mode_ == kAllPushed;
    begin_type(j);
    if (must && of_class_.size() == 2) return offset_ + two_classes(j);
    double least = kInfinity;
    bounds_.assign(1, gains(sides_.data(), begin_, n_, must));
    for (int64_t count = 0; !sides_.empty(); ++count)
      least = std::min(least, divided(j, begin_, n_, count >= kMostParts, must));
    if (least < room(j)) least = std::max(least, together(j, begin_, n_, must));
    return least + offset_;
  }

  // Least cost of all blocks in two classes of owners. The first has a prefix of the blocks by what it
  // saves per id: as partial sums are concave wherever no owner gets full, ends of blocks and masses
  // that fill owners are all there is to look at.
  double two_classes(int64_t j) {
    const int64_t first = of_class_[0], second = of_class_[1];
    const double* ids = p_.ids + begin_;
    double total = 0, mass = 0, least = kInfinity, cheapest = known_of(j) - offset_;
    for (int64_t b = 0; b < n_; ++b) {
      total += pushed_[second * n_ + b] - fixed_[b];
      gain_[b] = pushed_[first * n_ + b] - pushed_[second * n_ + b];
    }
    by_slope(ids, n_);
    int64_t end = -1;
    for (int64_t count = 0; count <= n_; ++count) {
      const double found = total + sums_cost(j, first, mass) + sums_cost(j, second, mass_all_ - mass);
      least = std::min(least, found);
      if (found < cheapest) cheapest = found, end = count;
      if (count == n_) break;
      const int b = order_[count];
      const Fills mine = fills(full_of(j, first), mass, mass + ids[b]);
      const Fills other = fills(full_of(j, second), mass_all_ - mass - ids[b], mass_all_ - mass);
      for (const double at : {mine.first, mine.last, mass_all_ - other.first, mass_all_ - other.last})
        if (at > mass && at < mass + ids[b])
          least = std::min(least, total + gain_[b] * (at - mass) / ids[b] + between(j, first, mine, at) +
                                      between(j, second, other, mass_all_ - at));
      mass += ids[b], total += gain_[b];
    }
    if (end >= 0) {
      for (int64_t i = 0; i < n_; ++i) chosen_[order_[i]] = (i < end ? first : second) + 1;
      keep_set(kind_of(j, mode_), cheapest + offset_);
    }
    return least;
  }

  // The least and the largest mass between two that fills all owners of it.
  struct Fills {
    double first, last;
  };
  static Fills fills(double full, double low, double high) {
    return {full * (std::floor(low / full) + 1), full_before(full, high)};
  }

  // Cost of the partial sums of so many ids of class m; between masses that fill owners as if all were
  // full, which is no more.
  double between(int64_t j, int64_t m, const Fills& x, double ids) const {
    if (!(ids >= x.first && ids <= x.last)) return sums_cost(j, m, ids);
    return sums_cost(j, m, full_of(j, m)) * ids / full_of(j, m);
  }

  // What a set of blocks may cost beside `offset_` to be worth a closer look.
  double room(int64_t j) const { return known_of(j) - close() - offset_; }
  double known_of(int64_t j) const { return std::min(limit_, kinds_[kind_of(j, mode_)].cost); }

  // Look at pieces of type j: masses of all sizes, and what they cost whatever is pushed.
  void begin_type(int64_t j) {
    set_type(j, begin_, n_);
    sides_.clear();
    for (const int64_t m : of_class_) sides_.push_back(side(j, m, 0.0, mass_all_));
    const double streams = streams_of(j);
    rest_ = 0.0;
    fixed_.resize(n_);
    for (int64_t b = 0; b < n_; ++b) {
      const double stay = stay_of(streams, begin_ + b);
      fixed_[b] = std::isfinite(stay) ? stay : 0.0;
      rest_ += fixed_[b];
    }
    offset_ = rest_ + (streams - 1.0) * p_.piece +
              (mode_ == kTiersPushed ? streams * p_.tiers_pushed[k_] : 0.0);
  }

  // What no set costs less than, if all owners counted as one class, of those that fill least and pay
  // least: classes that are alike share a table in more ways than can be told apart.
  double together(int64_t j, int64_t begin, int64_t n, bool must) {
    double full = 0, price = kInfinity;
    std::fill(gain_.begin(), gain_.end(), kInfinity);
    for (const int64_t m : of_class_) {
      full = std::max(full, mass_of(j, m)), price = std::min(price, p_.price[m]);
      lower(&gain_[0], &pushed_[m * n], p_.ids + begin, 0.0, n);
    }
    for (int64_t b = 0; b < n; ++b) gain_[b] = std::min(gain_[b] - fixed_[b], 1e30);
    double all = 0;
    const double least = walk(p_.ids + begin, n, full * p_.total_ids[k_], price,
                              [&](int64_t count, double found) {
                                if (count == n) all = found;
                              });
    return must ? all : least;
  }

  double close() const {
    return p_.close * (std::abs(rest_) + (std::isfinite(limit_) ? std::abs(limit_) : 0.0));
  }

  // Masses of a class of owners, and the chord of its partial sums.
  struct Side {
    double low, high, slope, fixed;
  };

  Side side(int64_t j, int64_t m, double low, double high) const {
    if (!(high > low)) return {low, high, 0.0, sums_cost(j, m, low)};
    const double full = full_of(j, m);
    if (full_before(full, high) > low)  // nothing costs less than owners that are all full
      return {low, high, sums_cost(j, m, full) / full, 0.0};
    const double at = low > 0 ? sums_cost(j, m, low) : 0.0;
    const double slope = (sums_cost(j, m, high) - at) / (high - low);
    return {low, high, slope, at - slope * low};
  }

  // Least cost of the last of `sides_`, which is taken away: a bound, or infinity where it is divided in
  // two. Real sets that are cheaper than all before are kept.
  double divided(int64_t j, int64_t begin, int64_t n, bool is_last, bool must) {
    const size_t count = of_class_.size();
    part_.assign(sides_.end() - int64_t(count), sides_.end());
    sides_.resize(sides_.size() - count);
    double bound = bounds_.back();  // of what this is a part of
    bounds_.pop_back();
    for (int turn = 0;; ++turn) {
      bound = std::max(bound, gains(part_.data(), begin, n, must));
      if (bound >= room(j)) return bound;
      classes(begin, n);
      for (int64_t b = 0; b < n; ++b) found_[b] = must || gain_[b] < 0 ? class_[b] : 0;
      keep(j, begin, n, 0);
      for (const int64_t m : of_class_) keep(j, begin, n, m + 1);
      if (bound >= room(j)) return bound;
      if (turn == kMostTurns || !turned(j)) break;
    }
    size_t worst = count;
    double most = 0, at = 0;
    for (size_t i = 0; i < count && !is_last; ++i) {
      const int64_t m = of_class_[i];
      const Side& x = part_[i];
      const double mass = mass_[m], full = full_of(j, m);
      if (mass <= x.low || mass > x.high) continue;
      const double gap = sums_cost(j, m, mass) - (x.fixed + x.slope * mass);
      const double before = full_before(full, mass);  // whence another owner is begun, until it is full
      const double cut = before > x.low ? before : before + full < x.high ? before + full : mass;
      if (gap > most && cut < x.high) worst = i, most = gap, at = cut;
    }
    if (worst == count) return bound;
    const Side x = part_[worst];
    // Lines that were turned for this part serve no other one.
    for (size_t i = 0; i < count; ++i) part_[i] = side(j, of_class_[i], part_[i].low, part_[i].high);
    for (const auto& [low, high] : {std::pair{x.low, at}, std::pair{at, x.high}}) {
      part_[worst] = side(j, of_class_[worst], low, high);
      sides_.insert(sides_.end(), part_.begin(), part_.end());
      bounds_.push_back(bound);
    }
    return kInfinity;
  }

  // A class whose mass lies beyond its side, where the line is below its partial sums: the line is
  // turned about the end of the side, up to them. On the side it was below them before, and then all the
  // more. Whether there was one.
  bool turned(int64_t j) {
    bool any = false;
    for (size_t i = 0; i < part_.size(); ++i) {
      Side& x = part_[i];
      const double mass = mass_[of_class_[i]];
      if (mass >= x.low && mass <= x.high) continue;
      const double sums = mass > 0 ? sums_cost(j, of_class_[i], mass) : 0.0;
      if (sums <= (x.fixed + x.slope * mass) + 1e-9 * std::abs(sums)) continue;
      const double end = mass < x.low ? x.low : x.high, there = x.fixed + x.slope * end;
      x.slope = (there - sums) / (end - mass);
      x.fixed = there - x.slope * end;
      any = true;
    }
    return any;
  }

  // What pushing each block to each class costs in pieces of type j, partial sums apart.
  void set_type(int64_t j, int64_t begin, int64_t n) {
    const int64_t M = p_.num_options;
    of_class_.clear();
    pushed_.resize(M * n);
    for (int64_t m = 0; m < M; ++m) {
      if (mass_of(j, m) <= 0) continue;
      const double more = p_.streams[type_of(j, m)] - 1.0;
      const int64_t at = m * p_.num_blocks + begin;
      blend(&pushed_[m * n], p_.go + at, p_.more + at, more, n);
      // A rank that owns the whole piece does not ask itself.
      const bool asks = mode_ == kTiersPushed || mass_of(j, m) < kWhole;
      for (int64_t b = 0; b < n && asks; ++b)
        pushed_[m * n + b] += (more + 1.0) * p_.own[k_ * M + m] * p_.ids[begin + b];
      of_class_.push_back(m);
    }
  }

  // What every block costs at least, against staying, when partial sums cost what `sides` (by class of
  // the type) say; returns that of the blocks that are then pushed, and of the sides.
  double gains(const Side* sides, int64_t begin, int64_t n, bool must) {
    weight_.clear();
    std::fill(gain_.begin(), gain_.begin() + n, kInfinity);
    double fixed = 0;
    for (size_t i = 0; i < of_class_.size(); ++i) {
      weight_.push_back(sides[i].slope), fixed += sides[i].fixed;
      lower(&gain_[0], &pushed_[of_class_[i] * n], p_.ids + begin, weight_.back(), n);
    }
    return fixed + spare(&gain_[0], &fixed_[0], n, must ? kInfinity : 0.0);
  }

  // The classes by which blocks cost what `gains` found.
  void classes(int64_t begin, int64_t n) {
    lowest_.assign(n, kInfinity);
    for (size_t i = 0; i < of_class_.size(); ++i)
      choose(&lowest_[0], &class_[0], &pushed_[of_class_[i] * n], p_.ids + begin, weight_[i],
             of_class_[i] + 1, n);
  }

  // Keep the blocks of `found_` if pushing them (all to one class: `only` > 0) is the cheapest yet; what
  // each costs is what `set_type` found. Without `only`, their `mass_` by class is looked up, too.
  void keep(int64_t j, int64_t begin, int64_t n, int64_t only) {
    double total = 0;
    if (only == 0) mass_.assign(p_.num_options, 0.0);
    for (const int64_t m : of_class_) {
      if (only > 0 && m != only - 1) continue;
      double cost, ids;
      picked(&found_[0], only ? 0 : m + 1, &pushed_[m * n], &fixed_[0], p_.ids + begin, n, &cost, &ids);
      total += cost + (ids > 0 ? sums_cost(j, m, ids) : 0.0);
      if (only == 0) mass_[m] = ids;
    }
    if (!(total + offset_ < known_of(j))) return;
    for (int64_t b = 0; b < n; ++b) chosen_[b] = found_[b] ? (only ? only : found_[b]) : 0;
    keep_set(kind_of(j, mode_), total + offset_);
  }

  // Cost of a block that is not pushed, in pieces of so many streams.
  double stay_of(double streams, int64_t block) const {
    return p_.stay[block] + (streams - 1.0) * p_.stay_more[block];
  }
  double go_of(int64_t j, int64_t m, int64_t block) const {
    const int64_t at = m * p_.num_blocks + block;
    return p_.go[at] + (p_.streams[type_of(j, m)] - 1.0) * p_.more[at];
  }
  double full_of(int64_t j, int64_t m) const { return mass_of(j, m) * p_.total_ids[k_]; }
  // Cost of the partial sums of so many ids pushed to class m, from below.
  double sums_cost(int64_t j, int64_t m, double ids) const {
    return p_.price[m] * sums_of(full_of(j, m), ids);
  }
  // Bytes of partial sums of owners who hold `full` ids at most: owners are whole, and as sums are
  // concave, all but one of them are full.
  double sums_of(double full, double ids) const {
    const double total = p_.total_ids[k_];
    if (ids <= full) return sums_at(p_.sums, k_, ids / total);
    const double before = full_before(full, ids);
    return sums_at(p_.sums, k_, full / total) * std::round(before / full) +
           sums_at(p_.sums, k_, (ids - before) / total);
  }
  // The most ids below `ids` that fill all their owners.
  static double full_before(double full, double ids) {
    return full * std::floor(ids / full * (1 - kRounding));
  }

  // Order the blocks by gain per id.
  void by_slope(const double* ids, int64_t n) {
    for (int64_t b = 0; b < n; ++b) {
      order_[b] = int(b);
      slope_[b] = ids[b] > 0 ? gain_[b] / ids[b] : gain_[b] < 0 ? -kInfinity : kInfinity;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return slope_[a] < slope_[b]; });
  }

  // Least cost of the prefixes, and of parts of a block that fill owners; `look` sees them all, the
  // latter as of -1 blocks.
  template <class Look>
  double walk(const double* ids, int64_t n, double full, double price, Look look) {
    by_slope(ids, n);
    double mass = 0, total = 0, least = 0;
    for (int64_t count = 0; count <= n; ++count) {
      const double found = total + (mass > 0 ? price * sums_of(full, mass) : 0.0);
      least = std::min(least, found);
      look(count, found);
      if (count == n) break;
      const int b = order_[count];
      // What lies between is concave, and so is what lies between the first and last of these.
      const double last = full_before(full, mass + ids[b]);
      for (const double at : {std::min(last, full * (std::floor(mass / full) + 1)), last}) {
        if (at > mass && at < mass + ids[b]) {
          const double inside = total + gain_[b] * (at - mass) / ids[b] + price * sums_of(full, at);
          least = std::min(least, inside);
          look(-1, inside);
        }
      }
      mass += ids[b], total += gain_[b];
    }
    return least;
  }

  bool is_cut() const { return p_.columns[k_] > 0; }

  // The cheapest way to make up a table's columns of pieces, each of a width and at the cost by column
  // that some type has, or that of pushing nothing: pieces are whole, and what is left of a table beside
  // the widest ones has to be narrower, and pay for an id stream as well. A path through the columns, in
  // three lanes: nothing is pushed so far, everything, or something.
  double whole_widths() {
    const int64_t columns = p_.columns[k_], step = p_.step, count = columns / step;
    for (auto& x : by_width_) x.assign(count + 1, {kInfinity, 0});  // a piece so wide, and its kind
    for (int64_t m = 0; m < p_.num_options; ++m)
      for (int64_t j = 0; 2 * j < int64_t(kinds_.size()); ++j) {
        const int64_t at = type_of(j, m);
        // What fits a class as a whole has no narrower types there, and a part in those of others.
        if (at < 0 || p_.mass[at] <= 0 || (j > 0 && at == type_of(0, m))) continue;
        const int64_t low = std::llround(p_.narrowest[at]) / step,
                      high = std::llround(double(columns) / p_.streams[at]) / step;
        for (int64_t w = low; w <= high; ++w)
          for (int64_t some = 0; some < 2; ++some)
            by_width_[some][w] = std::min(by_width_[some][w], std::pair(kinds_[2 * j + some].least, 2 * j + some));
      }
    enum Lane : int64_t { kNothing, kEverything, kSomething };
    steps_.assign(kLanes * (count + 1), Step{});
    steps_[kNothing].cost = steps_[kEverything].cost = 0;
    for (int64_t to = 1; to <= count; ++to)
      for (int64_t w = 1; w <= to; ++w) {
        const double share = double(w) / double(count);
        const double still = share * still_cost(double(count) / double(w));
        const auto [all, i] = by_width_[0][w];
        const auto [part, l] = by_width_[1][w];
        const Step* from = &steps_[kLanes * (to - w)];
        Step* x = &steps_[kLanes * to];
        x[kNothing].take(from[kNothing].cost + still, w, -1, kNothing);
        x[kEverything].take(from[kEverything].cost + share * all, w, i, kEverything);
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          x[kSomething].take(from[lane].cost + share * part, w, l, lane);
          if (to == w) continue;  // beside what is pushed something stays, or the other way around
          if (lane != kEverything) x[kSomething].take(from[lane].cost + share * all, w, i, lane);
          if (lane != kNothing) x[kSomething].take(from[lane].cost + still, w, -1, lane);
        }
      }
    const uint8_t pushes = p_.pushes[k_];
    const bool may[] = {pushes <= kStill, pushes != kStill && pushes != kPartly,
                        pushes != kStill && pushes != kWholly};
    double least = kInfinity;
    for (int64_t lane = 0; lane < kLanes; ++lane)
      if (const double cost = steps_[kLanes * count + lane].cost; may[lane] && cost < least)
        least = cost, lane_ = lane;
    return least;
  }

  // A kind on the path that only a bound is known of; -1 if there is none.
  int64_t passed_over() const {
    int64_t lane = lane_;
    for (int64_t at = p_.columns[k_] / p_.step; at > 0;) {
      const Step& x = steps_[kLanes * at + lane];
      if (x.kind >= 0 && !kinds_[x.kind].is_exact) return x.kind;
      at -= x.width, lane = x.lane;
    }
    return -1;
  }

  // Write the parts of the path that `whole_widths` found; returns how many.
  int64_t path_parts() {
    const int64_t count = p_.columns[k_] / p_.step;
    std::vector<std::pair<std::pair<int64_t, int64_t>, int64_t>> parts;  // kind and width; how often
    int64_t lane = lane_;
    for (int64_t at = count; at > 0;) {
      const Step& x = steps_[kLanes * at + lane];
      const std::pair<int64_t, int64_t> piece{x.kind, x.width};
      auto same = std::find_if(parts.begin(), parts.end(), [&](const auto& y) { return y.first == piece; });
      if (same == parts.end()) parts.push_back({piece, 1});
      else ++same->second;
      at -= x.width, lane = x.lane;
    }
    int64_t number = 0;
    for (const auto& [piece, times] : parts)
      number = part(number, double(times * piece.second) / double(count), piece.first,
                    double(count) / double(piece.second));
    return number;
  }

  int64_t type_of(int64_t j, int64_t m) const {  // -1: option m has no such type
    const int64_t at = k_ * p_.num_options + m, count = p_.first[at + 1] - p_.first[at];
    if (count == 1) return p_.first[at];  // as one piece, whatever is cut elsewhere
    return j < count ? p_.first[at] + j : -1;
  }
  double mass_of(int64_t j, int64_t m) const {
    const int64_t at = type_of(j, m);
    return at < 0 ? 0.0 : p_.mass[at];
  }
  bool admitted(int64_t j) const {
    for (int64_t m = 0; m < p_.num_options; ++m)
      if (mass_of(j, m) > 0) return true;
    return false;
  }
  OperPricing& p_;
  int64_t k_ = 0;
  int64_t begin_ = 0, n_ = 0;  // its blocks
  double all_still_ = 0, all_more_ = 0, mass_all_ = 0;
  bool must_ = false;
  int64_t best_kind_ = -1;  // -1: nothing is pushed
  double best_ = 0, least_ = 0, rest_ = 0, offset_ = 0;
  double limit_ = kInfinity;  // what sets may cost to be worth a look
  Mode mode_ = kAllPushed;
  static constexpr int64_t kLanes = 3;
  int64_t lane_ = 0;
  std::vector<double> gain_, slope_, fixed_, pushed_, weight_, lowest_, mass_;
  std::vector<Kind> kinds_;
  std::vector<std::pair<double, int64_t>> by_width_[2];
  std::vector<Step> steps_;
  std::vector<Side> sides_, part_;
  std::vector<double> bounds_;  // of what `sides_` are parts of
  std::vector<std::pair<double, int64_t>> types_;
  std::vector<int> order_;
  std::vector<int64_t> chosen_, class_, found_, of_class_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int oper_price(OperPricing* pricing) {
  if (!is_known(*pricing)) return 1;
  OperPricing& p = *pricing;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    Pricing one(p);
    for (int64_t k; (k = next.fetch_add(1, std::memory_order_relaxed)) < p.num_tables;) one.table(k);
  };
  std::thread other;
  if (p.num_options > 1) {
    try {
      other = std::thread(work);
    } catch (const std::system_error&) {  // no thread to be had
    }
  }
  work();
  if (other.joinable()) other.join();
  return 0;
}
