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

class Pricing {
 public:
  explicit Pricing(OperPricing& p) : p_(p) {}

  // Price one table.
  void table(int64_t k) {
    const int64_t begin = p_.starts[k], n = p_.starts[k + 1] - begin, M = p_.num_options;
    k_ = k;
    std::fill(p_.chosen + begin, p_.chosen + begin + n, int64_t{0});
    p_.kind[k] = 0;
    const double* stay = p_.stay + begin;
    const double* ids = p_.ids + begin;
    double rest = 0, mass = 0;
    bool must = false;
    for (int64_t b = 0; b < n; ++b) {
      rest += stay[b], mass += ids[b];
      must |= !std::isfinite(stay[b]);
    }
    int64_t num_types = 0;
    for (int64_t m = 0; m < M; ++m)
      num_types = std::max(num_types, p_.first[k * M + m + 1] - p_.first[k * M + m]);
    best_ = must ? kInfinity : 0.0;
    p_.cheaper[k] = 1;
    of_type_.assign(num_types, kInfinity);
    chosen_.assign(n, 0);
    gain_.resize(n), order_.resize(n), slope_.resize(n);
    if (M > 1) {
      several(begin, n, num_types, mass, must);
      p_.value[k] = rest_ + whole_widths(std::min(best_, least_), must);
      std::copy(chosen_.begin(), chosen_.end(), p_.chosen + begin);
      return;
    }
    if (!must) know(p_.known[k] - rest);
    for (int64_t j = 0; j < num_types; ++j) {
      if (!admitted(j)) continue;
      for (int64_t b = 0; b < n; ++b) gain_[b] = go(j, begin + b);
      if (must) {  // nothing but push is allowed
        const double total = std::accumulate(gain_.begin(), gain_.end(), 0.0) + cost(j, mass);
        of_type_[j] = total;
        if (total < best_) best_ = total, p_.kind[k] = j, chosen_.assign(n, 1);
        continue;
      }
      // No set costs less than if every id paid the least share of partial sums: that of all ids, or of
      // a full owner's.
      const double most = std::min(mass, full_of(j, 0));
      const double least = most > 0 ? cost(j, most) / most : 0.0;
      double below = 0;
      for (int64_t b = 0; b < n; ++b) {
        gain_[b] = std::isfinite(gain_[b]) ? gain_[b] - stay[b] : 1e30;
        below += std::min(0.0, gain_[b] + least * ids[b]);
      }
      of_type_[j] = below < best_ || is_cut() ? prefixes(j, ids, n) : below;
    }
    best_ = whole_widths(best_, must);
    p_.value[k] = must ? best_ : rest + best_;
    std::copy(chosen_.begin(), chosen_.end(), p_.chosen + begin);
  }

 private:
  // Only what is cheaper than what is known is looked for: most prices of most tables find nothing.
  void know(double gain) {
    if (gain < best_) best_ = gain, p_.cheaper[k_] = 0;
  }

  // Rows of a table may be pushed to several classes of owners. Partial sums f are concave in the mass
  // q of a class's owners from where some number of them is full to where one more is: for q between two
  // masses they cost no less than the chord, or than full owners where one of these lies between, so that
  // blocks choose their class for themselves. Where the set that they choose costs more than the bound, the
  // masses of the class that is most to blame are divided at its own, for which both chords are exact
  // (Falk and Soland 1969).
  void several(int64_t begin, int64_t n, int64_t num_types, double mass, bool must) {
    rest_ = 0.0, least_ = kInfinity;
    fixed_.resize(n);
    for (int64_t b = 0; b < n; ++b) {
      const double stay = p_.stay[begin + b];
      fixed_[b] = std::isfinite(stay) ? stay : 0.0;
      rest_ += fixed_[b];
    }
    know(p_.known[k_] - rest_);
    class_.assign(n, 0), found_.assign(n, 0);
    types_.clear();
    for (int64_t j = 0; j < num_types; ++j)
      if (admitted(j)) {
        set_type(j, begin, n);
        sides_.clear();
        for (const int64_t m : of_class_) sides_.push_back(side(j, m, 0.0, mass));
        types_.push_back({gains(sides_.data(), begin, n, must), j});
      }
    std::sort(types_.begin(), types_.end());  // the most promising first
    for (const auto& [below, j] : types_) {
      double least = below;
      if (below < best_ - close()) {
        set_type(j, begin, n);
        sides_.clear();
        for (const int64_t m : of_class_) sides_.push_back(side(j, m, 0.0, mass));
        bounds_.assign(1, below), least = kInfinity;
        for (int64_t count = 0; !sides_.empty(); ++count)
          least = std::min(least, divided(j, begin, n, must || count >= kMostParts, must));
        if (least < best_ - close()) least = std::max(least, together(j, begin, n, must));
      }
      least_ = std::min(least_, least);
      of_type_[j] = std::min(of_type_[j], least);
    }
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
    return p_.close * (std::abs(rest_) + (std::isfinite(best_) ? std::abs(best_) : 0.0));
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
      if (bound >= best_ - close()) return bound;
      classes(begin, n);
      for (int64_t b = 0; b < n; ++b) found_[b] = must || gain_[b] < 0 ? class_[b] : 0;
      keep(j, begin, n, 0);
      for (const int64_t m : of_class_) keep(j, begin, n, m + 1);
      if (bound >= best_ - close()) return bound;
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
    if (!(total < best_)) return;
    best_ = total, p_.kind[k_] = j, p_.cheaper[k_] = 1;
    for (int64_t b = 0; b < n; ++b) chosen_[b] = found_[b] ? (only ? only : found_[b]) : 0;
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

  // Blocks by what pushing costs per id: the best set is a prefix, or ends where owners are full.
  double prefixes(int64_t j, const double* ids, int64_t n) {
    return walk(ids, n, full_of(j, 0), p_.price[0], [&](int64_t count, double found) {
      if (!(found < best_)) return;
      best_ = found;
      if (count < 0) return;  // no column; the prefix next to it is one
      p_.kind[k_] = j, p_.cheaper[k_] = 1;
      std::fill(chosen_.begin(), chosen_.end(), int64_t{0});
      for (int64_t i = 0; i < count; ++i) chosen_[order_[i]] = 1;
    });
  }

  // Least cost of the prefixes, and of parts of a block that fill owners; `look` sees them all, the
  // latter as of -1 blocks.
  template <class Look>
  double walk(const double* ids, int64_t n, double full, double price, Look look) {
    for (int64_t b = 0; b < n; ++b) {
      order_[b] = int(b);
      slope_[b] = ids[b] > 0 ? gain_[b] / ids[b] : gain_[b] < 0 ? -kInfinity : kInfinity;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return slope_[a] < slope_[b]; });
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
  // that some type has, where `least` is the cheapest type's: pieces are whole, and what is left of a
  // table beside the widest ones has to be narrower, and pay for an id stream as well. A path through
  // the columns.
  double whole_widths(double least, bool must) {
    if (!is_cut() || !std::isfinite(least) || (!must && least >= 0)) return least;
    const int64_t columns = p_.columns[k_], step = p_.step, count = columns / step;
    const int64_t num_types = int64_t(of_type_.size());
    by_width_.assign(count + 1, kInfinity);  // cost by column of a piece so wide
    if (!must) std::fill(by_width_.begin() + 1, by_width_.end(), 0.0);  // of which nothing is pushed
    for (int64_t m = 0; m < p_.num_options; ++m)
      for (int64_t j = 0; j < num_types; ++j) {
        const int64_t at = type_of(j, m);
        // What fits a class as a whole has no narrower types there, and a part in those of others.
        if (at < 0 || p_.mass[at] <= 0 || (j > 0 && at == type_of(0, m))) continue;
        const int64_t low = std::llround(p_.narrowest[at]) / step,
                      high = std::llround(double(columns) / p_.streams[at]) / step;
        for (int64_t w = low; w <= high; ++w) by_width_[w] = std::min(by_width_[w], of_type_[j]);
      }
    path_.assign(count + 1, kInfinity);
    path_[0] = 0;
    for (int64_t to = 1; to <= count; ++to)
      for (int64_t w = 1; w <= to; ++w)
        path_[to] = std::min(path_[to], path_[to - w] + by_width_[w] * double(w) / double(count));
    return std::max(least, path_[count]);
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
  double go(int64_t j, int64_t block) const {
    return mass_of(j, 0) > 0 ? go_of(j, 0, block) : kInfinity;
  }
  double cost(int64_t j, double ids) const { return ids <= 0 ? 0.0 : sums_cost(j, 0, ids); }

  OperPricing& p_;
  int64_t k_ = 0;
  double best_ = 0, least_ = 0, rest_ = 0;
  std::vector<double> gain_, slope_, fixed_, pushed_, weight_, lowest_, mass_;
  std::vector<double> of_type_, by_width_, path_;  // least costs: see `whole_widths`
  std::vector<Side> sides_, part_;
  std::vector<double> bounds_;  // of what `sides_` are parts of
  std::vector<std::pair<double, int64_t>> types_;
  std::vector<int> order_;
  std::vector<int64_t> chosen_, class_, found_, of_class_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void oper_price(OperPricing* pricing) {
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
}
