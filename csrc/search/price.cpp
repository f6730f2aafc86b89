#include "search/clones.h"
#include "search/price.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kGroups = 5;
constexpr int kBisections = 20;

// Linear between the points of the grid: from below, because the bytes are concave in the share.
double sums_at(const OperSums& s, int64_t table, double share) {
  const double* y = s.bytes + table * s.num_points;
  if (share <= 0) return 0.0;
  if (share >= 1) return y[s.num_points - 1];
  if (share <= s.first) return y[0] * (share / s.first);
  const double at = std::log(share / s.first) / std::log(s.ratio);
  const int64_t i = std::min<int64_t>(int64_t(at), s.num_points - 2);
  const double low = s.first * std::pow(s.ratio, double(i)), high = low * s.ratio;
  return y[i] + std::clamp((share - low) / (high - low), 0.0, 1.0) * (y[i + 1] - y[i]);
}

class Fit {
 public:
  explicit Fit(OperFit& f) : f_(f) {}

  void run() {
    for (int64_t k = 0; k < f_.num_tables; ++k)
      for (int64_t c = 0; c < f_.num_classes; ++c) table(k, c);
  }

 private:
  void table(int64_t k, int64_t c) {
    const int64_t begin = f_.first[k], end = f_.first[k + 1];
    const double widest = f_.narrow[begin], narrowest = f_.narrow[end - 1];
    for (int64_t j = begin; j < end; ++j) {
      // Loads are linear in the width; `own` holds the whole row's and the narrowest piece's.
      const double along = widest > narrowest ? (widest - f_.narrow[j]) / (widest - narrowest) : 0.0;
      const double part = f_.narrow[j] / widest;
      double low = 0, high = 1;
      if (fits(k, c, along, part, 1.0)) {
        low = 1;
      } else if (!fits(k, c, along, part, 0.0)) {
        high = 0;
      } else {
        for (int n = 0; n < kBisections; ++n) {
          const double middle = (low + high) / 2;
          (fits(k, c, along, part, middle) ? low : high) = middle;
        }
      }
      f_.mass[j * f_.num_classes + c] = low == 1 ? 1.0 : high;
    }
    f_.whole[k * f_.num_classes + c] = f_.mass[begin * f_.num_classes + c] == 1.0;
  }

  bool fits(int64_t k, int64_t c, double along, double part, double mass) const {
    const int64_t G = f_.num_loads;
    const double* own = f_.own + (k * f_.num_classes + c) * 2 * G;
    const double* partial = f_.partial + c * G;
    const double bytes = part * sums_at(f_.sums, k, mass);
    double step = 0;
    for (int64_t phase = 0; phase < G; phase += kGroups) {
      double busy = 0;
      for (int64_t g = phase; g < phase + kGroups; ++g) {
        const double load = mass * (own[g] + along * (own[G + g] - own[g])) + bytes * partial[g];
        if (load > f_.most[g]) return false;
        busy = std::max(busy, load + f_.floor[c * G + g]);
      }
      step += busy;
    }
    return step <= f_.step;
  }

  OperFit& f_;
};

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

  void run() {
    for (int64_t n = 0; n < p_.num_tables; ++n) table(p_.first_table + n);
  }

 private:
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
    of_type_.assign(num_types, kInfinity);
    chosen_.assign(n, 0);
    gain_.resize(n), order_.resize(n), slope_.resize(n);
    if (M > 1) {
      several(begin, n, num_types, mass, must);
      p_.value[k] = rest_ + whole_widths(std::min(best_, least_), must);
      std::copy(chosen_.begin(), chosen_.end(), p_.chosen + begin);
      return;
    }
    for (int64_t j = 0; j < num_types; ++j) {
      if (!admitted(j)) continue;
      for (int64_t b = 0; b < n; ++b) gain_[b] = go(j, begin + b);
      if (must) {  // nothing but push is allowed
        const double total = std::accumulate(gain_.begin(), gain_.end(), 0.0) + cost(j, mass);
        of_type_[j] = total;
        if (total < best_) best_ = total, p_.kind[k] = j, chosen_.assign(n, 1);
        continue;
      }
      // No set costs less than if every id paid the least share of partial sums, that of all ids.
      const double least = mass > 0 ? cost(j, mass) / mass : 0.0;
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

  // Rows of a table may be pushed to several classes of owners. Partial sums f are concave in an
  // owner's mass and f(0) = 0, so that f(q) >= q f(Q) / Q for each class's share q of the pushed
  // mass Q: with this chord blocks choose their class for themselves. It falls with Q, so for all
  // sets with a mass of at most Q its value at Q is a bound; sets are divided by their mass until
  // the bound is close to the cost of a real set.
  void several(int64_t begin, int64_t n, int64_t num_types, double mass, bool must) {
    rest_ = 0.0, least_ = kInfinity;
    fixed_.resize(n);
    for (int64_t b = 0; b < n; ++b) {
      const double stay = p_.stay[begin + b];
      fixed_[b] = std::isfinite(stay) ? stay : 0.0;
      rest_ += fixed_[b];
    }
    class_.assign(n, 0), found_.assign(n, 0);
    types_.clear();
    for (int64_t j = 0; j < num_types; ++j)
      if (admitted(j)) {
        set_type(j, begin, n);
        types_.push_back({gains(j, begin, n, mass, must), j});
      }
    std::sort(types_.begin(), types_.end());  // the most promising first
    for (const auto& [below, j] : types_) {
      if (below >= best_ - close()) {
        least_ = std::min(least_, below);
        of_type_[j] = std::min(of_type_[j], below);
        continue;
      }
      set_type(j, begin, n);
      intervals_.assign(1, {must ? mass : 0.0, mass});
      while (!intervals_.empty()) {
        const auto [low, high] = intervals_.back();
        intervals_.pop_back();
        const double bound = between(j, begin, n, low, high, must);
        if (must || bound >= best_ - close() || high <= low * p_.narrow || high <= mass * 1e-6) {
          least_ = std::min(least_, bound);
          of_type_[j] = std::min(of_type_[j], bound);
          continue;
        }
        const double middle = low > 0 ? std::sqrt(low * high) : high / 2;
        intervals_.push_back({low, middle}), intervals_.push_back({middle, high});
      }
    }
  }

  double close() const {
    return p_.close * (std::abs(rest_) + (std::isfinite(best_) ? std::abs(best_) : 0.0));
  }

  // Least cost, against staying, of pushing a mass between `low` and `high` in pieces of type j; a
  // real set that is cheaper than all before is kept.
  double between(int64_t j, int64_t begin, int64_t n, double low, double high, bool must) {
    const double* ids = p_.ids + begin;
    const double all = gains(j, begin, n, high, must);
    if (!must && all >= best_ - close()) return all;
    classes(begin, n);
    double gained = 0;  // mass of the blocks that would rather be pushed
    for (int64_t b = 0; b < n; ++b) gained += gain_[b] < 0 ? ids[b] : 0.0;
    if (!must && low <= gained && gained <= high) {
      for (int64_t b = 0; b < n; ++b) found_[b] = gain_[b] < 0 ? class_[b] : 0;
      keep_found(j, begin, n, all);
      return all;
    }
    for (int64_t b = 0; b < n; ++b) {
      order_[b] = int(b);
      slope_[b] = ids[b] > 0 ? gain_[b] / ids[b] : gain_[b] < 0 ? -kInfinity : kInfinity;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return slope_[a] < slope_[b]; });
    double mass = 0, total = 0;
    std::fill(found_.begin(), found_.end(), int64_t{0});
    for (int64_t i = 0; i < n; ++i) {
      const int b = order_[i];
      if (!must && mass >= low && gain_[b] >= 0) break;
      double part = 1.0;  // of the block, as much as the mass allows or asks for
      if (!must && ids[b] > 0) {
        part = std::min(1.0, (high - mass) / ids[b]);
        if (gain_[b] >= 0) part = std::min(part, (low - mass) / ids[b]);
      }
      if (part <= 0) break;
      total += part * gain_[b], mass += part * ids[b];
      found_[b] = class_[b];
    }
    keep_found(j, begin, n, total);
    return total;
  }

  // Keep the blocks of `found_`, or them in one class, where their bound `total` leaves hope.
  void keep_found(int64_t j, int64_t begin, int64_t n, double total) {
    if (total >= best_) return;
    for (int64_t m = 0; m <= p_.num_options; ++m) keep(j, begin, n, m);
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

  // What every block costs at least when a mass of at most `high` is pushed, against staying; returns
  // the sum over the blocks that are pushed.
  double gains(int64_t j, int64_t begin, int64_t n, double high, bool must) {
    weight_.clear();
    std::fill(gain_.begin(), gain_.begin() + n, kInfinity);
    for (const int64_t m : of_class_) {
      weight_.push_back(high > 0 ? sums_cost(j, m, high) / high : kInfinity);
      if (high > 0) lower(&gain_[0], &pushed_[m * n], p_.ids + begin, weight_.back(), n);
    }
    return spare(&gain_[0], &fixed_[0], n, must ? kInfinity : 0.0);
  }

  // The classes by which blocks cost what `gains` found.
  void classes(int64_t begin, int64_t n) {
    lowest_.assign(n, kInfinity);
    for (size_t i = 0; i < of_class_.size(); ++i)
      choose(&lowest_[0], &class_[0], &pushed_[of_class_[i] * n], p_.ids + begin, weight_[i],
             of_class_[i] + 1, n);
  }

  // Keep the blocks of `found_` if pushing them (all to one class: `only` > 0) is the cheapest yet; what
  // each costs is what `set_type` found.
  void keep(int64_t j, int64_t begin, int64_t n, int64_t only) {
    if (only > 0 && mass_of(j, only - 1) <= 0) return;
    double total = 0;
    for (int64_t m = only ? only - 1 : 0; m < (only ? only : p_.num_options); ++m) {
      double cost, ids;
      picked(&found_[0], only ? 0 : m + 1, &pushed_[m * n], &fixed_[0], p_.ids + begin, n, &cost, &ids);
      total += cost + (ids > 0 ? sums_cost(j, m, ids) : 0.0);
    }
    if (!(total < best_)) return;
    best_ = total, p_.kind[k_] = j;
    for (int64_t b = 0; b < n; ++b) chosen_[b] = found_[b] ? (only ? only : found_[b]) : 0;
  }

  double go_of(int64_t j, int64_t m, int64_t block) const {
    const int64_t at = m * p_.num_blocks + block;
    return p_.go[at] + (p_.streams[type_of(j, m)] - 1.0) * p_.more[at];
  }
  // Cost of the partial sums of so many ids pushed to class m, from below.
  double sums_cost(int64_t j, int64_t m, double ids) const {
    const double total = p_.total_ids[k_], most = std::min(ids, mass_of(j, m) * total);
    return p_.price[m] * sums_at(p_.sums, k_, most / total) * (ids / most);
  }

  // Blocks by what pushing costs per id: the best set is a prefix, or ends where an owner is full.
  double prefixes(int64_t j, const double* ids, int64_t n) {
    for (int64_t b = 0; b < n; ++b) {
      order_[b] = int(b);
      slope_[b] = ids[b] > 0 ? gain_[b] / ids[b] : gain_[b] < 0 ? -kInfinity : kInfinity;
    }
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return slope_[a] < slope_[b]; });
    kinks_.clear();
    for (int64_t m = 0; m < p_.num_options; ++m) {
      const double full = mass_of(j, m);
      if (full > 0 && full < 1) kinks_.push_back(full * p_.total_ids[k_]);
    }
    double mass = 0, total = 0, least = 0;
    for (int64_t count = 0; count <= n; ++count) {
      const double found = total + cost(j, mass);
      least = std::min(least, found);
      if (found < best_) {
        best_ = found, p_.kind[k_] = j;
        std::fill(chosen_.begin(), chosen_.end(), int64_t{0});
        for (int64_t i = 0; i < count; ++i) chosen_[order_[i]] = 1;
      }
      if (count == n) break;
      const int b = order_[count];
      for (const double at : kinks_) {
        if (at > mass && at < mass + ids[b]) {
          const double inside = total + gain_[b] * (at - mass) / ids[b] + cost(j, at);
          least = std::min(least, inside);
          if (inside < best_) best_ = inside;  // no column; the prefix next to it is one
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
  std::vector<double> gain_, slope_, kinks_, fixed_, pushed_, weight_, lowest_;
  std::vector<double> of_type_, by_width_, path_;  // least costs: see `whole_widths`
  std::vector<std::pair<double, double>> intervals_;
  std::vector<std::pair<double, int64_t>> types_;
  std::vector<int> order_;
  std::vector<int64_t> chosen_, class_, found_, of_class_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void oper_fit(OperFit* fit) { Fit(*fit).run(); }

extern "C" __attribute__((visibility("default"))) void oper_price(OperPricing* pricing) {
  Pricing(*pricing).run();
}
